//! The type checker: names are resolved, overloads chosen, every node gets a type. It evaluates nothing.

use std::sync::Arc;

use crate::ast::{Comprehension, Expr, Id, Kind, Literal};
use crate::decl::DeclType;
use crate::env::Env;
use crate::escape::RESERVED;
use crate::functions::{FUNCTIONS, Function, type_named};
use crate::parser::Parsed;
use crate::source::Mistake;
use crate::types::Type;
use crate::unify::{Bindings, instantiate, less_specific};

/// What a node refers to.
#[derive(Debug, Clone, Default)]
pub(crate) enum Reference {
    #[default]
    None,
    Variable,
    /// The name of a type, used as a value.
    TypeName,
    /// The overloads that fit.
    Overloads(Vec<&'static str>),
}

/// A tree whose types agree.
#[derive(Debug)]
pub(crate) struct Checked {
    pub root: Expr,
    pub positions: Vec<u32>,
    pub types: Vec<Type>,
    pub references: Vec<Reference>,
}

impl Checked {
    pub fn kind_of(&self, expr: &Expr) -> &Type {
        &self.types[expr.id as usize]
    }

    pub fn overloads(&self, id: Id) -> &[&'static str] {
        match &self.references[id as usize] {
            Reference::Overloads(ids) => ids,
            _ => &[],
        }
    }
}

pub(crate) fn check(parsed: Parsed, env: &Env) -> Result<Checked, Vec<Mistake>> {
    let Parsed { mut root, positions } = parsed;
    let mut checker = Checker {
        env,
        types: vec![Type::Error; positions.len()],
        references: vec![Reference::None; positions.len()],
        positions: &positions,
        bindings: Bindings::default(),
        scopes: Vec::new(),
        mistakes: Vec::new(),
    };
    checker.check(&mut root);
    if !checker.mistakes.is_empty() {
        return Err(checker.mistakes);
    }
    let Checker {
        types,
        references,
        bindings,
        ..
    } = checker;
    let types = types.iter().map(|kind| bindings.resolve(kind, true)).collect();
    Ok(Checked {
        root,
        positions,
        types,
        references,
    })
}

struct Checker<'e> {
    env: &'e Env,
    positions: &'e [u32],
    types: Vec<Type>,
    references: Vec<Reference>,
    bindings: Bindings,
    /// Variables of comprehensions, innermost last.
    scopes: Vec<(Arc<str>, Type)>,
    mistakes: Vec<Mistake>,
}

impl Checker<'_> {
    fn report(&mut self, id: Id, message: String) {
        self.mistakes.push(Mistake {
            offset: Some(self.positions[id as usize]),
            message,
        });
    }

    fn set(&mut self, id: Id, kind: Type) {
        self.types[id as usize] = kind;
    }

    fn get(&self, expr: &Expr) -> Type {
        self.types[expr.id as usize].clone()
    }

    fn undeclared(&mut self, id: Id, name: &str) {
        self.set(id, Type::Error);
        self.report(id, format!("undeclared reference to '{name}' (in container '')"));
    }

    fn mismatch(&mut self, id: Id, expected: &Type, found: &Type) {
        self.report(id, format!("expected type '{expected}' but found '{found}'"));
    }

    /// The type of a name, and what it refers to. A leading dot looks past the variables of comprehensions.
    fn lookup(&self, name: &str) -> Option<(Type, Reference)> {
        let (name, local) = match name.strip_prefix('.') {
            Some(name) => (name, false),
            None => (name, true),
        };
        if local && let Some((_, kind)) = self.scopes.iter().rev().find(|(scoped, _)| &**scoped == name) {
            return Some((kind.clone(), Reference::Variable));
        }
        if let Some(kind) = self.env.find(name) {
            return Some((kind.clone(), Reference::Variable));
        }
        let named = type_named(name).or_else(|| self.env.patch_type(name))?;
        Some((Type::type_of(named), Reference::TypeName))
    }

    fn function(&self, name: &str) -> Option<(&'static str, &'static Function)> {
        let name = name.strip_prefix('.').unwrap_or(name);
        if name.starts_with("jsonpatch.") && !self.env.patches() {
            return None;
        }
        FUNCTIONS
            .get_key_value(name)
            .map(|(name, function)| (*name, function))
    }

    fn check(&mut self, expr: &mut Expr) {
        let id = expr.id;
        match &mut expr.kind {
            Kind::Literal(literal) => {
                let kind = match literal {
                    Literal::Null => Type::Null,
                    Literal::Bool(_) => Type::Bool,
                    Literal::Int(_) => Type::Int,
                    Literal::Uint(_) => Type::Uint,
                    Literal::Double(_) => Type::Double,
                    Literal::String(_) => Type::String,
                    Literal::Bytes(_) => Type::Bytes,
                };
                self.set(id, kind);
            }
            Kind::Ident(name) => match self.lookup(name) {
                Some((kind, reference)) => {
                    if let Some(global) = name.strip_prefix('.') {
                        *name = global.into();
                    }
                    self.set(id, kind);
                    self.references[id as usize] = reference;
                }
                None => {
                    let name = name.clone();
                    self.undeclared(id, &name);
                }
            },
            Kind::Select { .. } => self.select(expr),
            Kind::Call { .. } => self.call(expr),
            Kind::List { .. } => self.list(expr),
            Kind::Map(_) => self.map(expr),
            Kind::Struct { .. } => self.structure(expr),
            Kind::Comprehension(fold) => self.comprehension(id, fold),
            Kind::Broken => {}
        }
    }

    fn select(&mut self, expr: &mut Expr) {
        let id = expr.id;
        if let Some(name) = expr.qualified_name()
            && let Some((kind, reference)) = self.lookup(&name)
        {
            self.set(id, kind);
            self.references[id as usize] = reference;
            expr.kind = Kind::Ident(name.trim_start_matches('.').into());
            return;
        }
        let Kind::Select {
            operand,
            field,
            test_only,
        } = &mut expr.kind
        else {
            return;
        };
        let (field, test_only) = (field.clone(), *test_only);
        let selected = self.field(id, operand, &field, false);
        let selected = if test_only {
            Type::Bool
        } else {
            self.bindings.resolve(&selected, false)
        };
        self.set(id, selected);
    }

    fn field(&mut self, id: Id, operand: &mut Expr, field: &str, optional: bool) -> Type {
        self.check(operand);
        let operand = self.bindings.resolve(&self.get(operand), false);
        let (target, was_optional) = match operand.as_optional() {
            Some(of) => (of.clone(), true),
            None => (operand, false),
        };
        let found = match &target {
            Type::Map(_, value) => (**value).clone(),
            Type::Struct(name) if self.env.patch_type(name).is_some() => {
                self.env.patch_field(name, field).unwrap_or(Type::Dyn)
            }
            Type::Struct(name) => match self.env.object(name).cloned() {
                None => {
                    self.report(id, format!("unexpected failed resolution of '{name}'"));
                    Type::Error
                }
                Some(decl) => match decl.field(field).or_else(|| reserved(&decl, field)) {
                    Some(field) => field.cel.clone(),
                    None => {
                        self.report(id, format!("undefined field '{field}'"));
                        Type::Error
                    }
                },
            },
            Type::Var(_) => {
                self.bindings.assignable(&Type::Dyn, &target);
                Type::Dyn
            }
            other => {
                if !other.is_dyn_or_error() {
                    self.report(id, format!("type '{other}' does not support field selection"));
                }
                Type::Dyn
            }
        };
        if was_optional || optional {
            Type::optional(found)
        } else {
            found
        }
    }

    fn call(&mut self, expr: &mut Expr) {
        let id = expr.id;
        let Kind::Call {
            function,
            target,
            args,
        } = &mut expr.kind
        else {
            return;
        };
        if &**function == "_?._" {
            let field = match &args[1].kind {
                Kind::Literal(Literal::String(field)) => field.clone(),
                _ => "".into(),
            };
            self.set(args[1].id, Type::String);
            let selected = self.field(id, &mut args[0], &field, true);
            let selected = self.bindings.resolve(&selected, false);
            self.set(id, selected);
            self.references[id as usize] = Reference::Overloads(vec!["select_optional_field"]);
            return;
        }
        args.iter_mut().for_each(|arg| self.check(arg));
        let Some(receiver) = target else {
            match self.function(function) {
                Some((name, declared)) => {
                    *function = name.into();
                    self.overload(id, name, declared, None, args);
                }
                None => {
                    let name = function.clone();
                    self.undeclared(id, &name);
                }
            }
            return;
        };
        // `a.b.c()` may be the function `a.b.c`, or the method `c` of `a.b`.
        let namespaced = receiver
            .qualified_name()
            .map(|prefix| format!("{prefix}.{function}"));
        if let Some((name, declared)) = namespaced.as_deref().and_then(|name| self.function(name)) {
            *function = name.into();
            *target = None;
            self.overload(id, name, declared, None, args);
            return;
        }
        self.check(receiver);
        match self.function(function) {
            Some((name, declared)) => self.overload(id, name, declared, Some(receiver), args),
            None => {
                let name = function.clone();
                self.undeclared(id, &name);
            }
        }
    }

    fn overload(
        &mut self,
        id: Id,
        name: &str,
        function: &'static Function,
        target: Option<&Expr>,
        args: &[Expr],
    ) {
        let mut given: Vec<Type> = Vec::with_capacity(args.len() + 1);
        given.extend(target.map(|target| self.get(target)));
        given.extend(args.iter().map(|arg| self.get(arg)));
        if matches!(name, "_&&_" | "_||_") {
            return self.logic(id, function, args, &given);
        }
        let mut result: Option<Type> = None;
        let mut fitting = Vec::new();
        for overload in &function.overloads {
            if overload.member != target.is_some() {
                continue;
            }
            let fresh: Vec<(Arc<str>, Type)> = overload
                .type_parameters
                .iter()
                .map(|name| (name.clone(), self.bindings.fresh()))
                .collect();
            let wanted: Vec<Type> = overload
                .parameters
                .iter()
                .map(|parameter| instantiate(parameter, &fresh))
                .collect();
            if !self.bindings.all_assignable(&given, &wanted) {
                continue;
            }
            fitting.push(overload.id);
            let returned = self
                .bindings
                .resolve(&instantiate(&overload.result, &fresh), false);
            result = Some(match result {
                None => returned,
                Some(Type::Dyn) => Type::Dyn,
                Some(first) if first == returned => first,
                Some(_) => Type::Dyn,
            });
        }
        match result {
            Some(kind) => {
                self.set(id, kind);
                self.references[id as usize] = Reference::Overloads(fitting);
            }
            None => {
                let given: Vec<String> = given
                    .iter()
                    .map(|kind| self.bindings.resolve(kind, true).to_string())
                    .collect();
                let signature = match target {
                    Some(_) => format!("{}.({})", given[0], given[1..].join(", ")),
                    None => format!("({})", given.join(", ")),
                };
                self.set(id, Type::Error);
                self.report(
                    id,
                    format!("found no matching overload for '{name}' applied to '{signature}'"),
                );
            }
        }
    }

    fn logic(&mut self, id: Id, function: &'static Function, args: &[Expr], given: &[Type]) {
        let mut agreed = true;
        for (arg, kind) in args.iter().zip(given) {
            if !self.bindings.assignable(kind, &Type::Bool) {
                self.mismatch(arg.id, &Type::Bool, kind);
                agreed = false;
            }
        }
        self.set(id, if agreed { Type::Bool } else { Type::Error });
        let ids = function.overloads.iter().map(|overload| overload.id).collect();
        self.references[id as usize] = Reference::Overloads(ids);
    }

    /// The type that covers both.
    fn join(&mut self, before: Option<Type>, next: Type) -> Type {
        let Some(before) = before else {
            return next;
        };
        if self.bindings.assignable(&before, &next) {
            return if less_specific(&before, &next) {
                before
            } else {
                next
            };
        }
        // What does not agree is `dyn` here; literals of mixed types are refused later, except for `format`.
        Type::Dyn
    }

    /// The type inside an optional element or entry.
    fn unwrapped(&mut self, expr: &Expr) -> Type {
        let kind = self.get(expr);
        match kind.as_optional() {
            Some(of) => of.clone(),
            None => {
                if !kind.is_dyn() {
                    self.mismatch(expr.id, &Type::optional(kind.clone()), &kind);
                }
                kind
            }
        }
    }

    fn list(&mut self, expr: &mut Expr) {
        let id = expr.id;
        let Kind::List { elements, optional } = &mut expr.kind else {
            return;
        };
        let mut joined = None;
        for (position, element) in elements.iter_mut().enumerate() {
            self.check(element);
            let kind = if optional.binary_search(&position).is_ok() {
                self.unwrapped(element)
            } else {
                self.get(element)
            };
            joined = Some(self.join(joined, kind));
        }
        let element = joined.unwrap_or_else(|| self.bindings.fresh());
        self.set(id, Type::list(element));
    }

    fn map(&mut self, expr: &mut Expr) {
        let id = expr.id;
        let Kind::Map(entries) = &mut expr.kind else {
            return;
        };
        let (mut keys, mut values) = (None, None);
        for entry in entries {
            self.check(&mut entry.key);
            let key = self.get(&entry.key);
            keys = Some(self.join(keys, key));
            self.check(&mut entry.value);
            let value = if entry.optional {
                self.unwrapped(&entry.value)
            } else {
                self.get(&entry.value)
            };
            values = Some(self.join(values, value));
        }
        let key = keys.unwrap_or_else(|| self.bindings.fresh());
        let value = values.unwrap_or_else(|| self.bindings.fresh());
        self.set(id, Type::map(key, value));
    }

    fn structure(&mut self, expr: &mut Expr) {
        let id = expr.id;
        let Kind::Struct { name, fields } = &mut expr.kind else {
            return;
        };
        let name = name.clone();
        let made = match self.lookup(&name) {
            None => return self.undeclared(id, &name),
            Some((Type::Type(Some(of)), _)) => match &*of {
                Type::Struct(name) => Some(name.clone()),
                other => {
                    self.report(id, format!("'{}' is not a message type", other.runtime_name()));
                    None
                }
            },
            Some((kind, _)) => {
                self.report(id, format!("'{}' is not a type", kind.runtime_name()));
                None
            }
        };
        self.set(id, made.clone().map_or(Type::Error, Type::Struct));
        for field in fields {
            self.check(&mut field.value);
            let (Some(made), Kind::Literal(Literal::String(field_name))) = (&made, &field.key.kind) else {
                continue;
            };
            let Some(wanted) = self.env.patch_field(made, field_name) else {
                self.report(field.key.id, format!("undefined field '{field_name}'"));
                continue;
            };
            let given = if field.optional {
                self.unwrapped(&field.value)
            } else {
                self.get(&field.value)
            };
            if !self.bindings.assignable(&wanted, &given) {
                let given = self.bindings.resolve(&given, false);
                self.report(
                    field.key.id,
                    format!(
                        "expected type of field '{field_name}' is '{wanted}' but provided type is '{given}'"
                    ),
                );
            }
        }
    }

    fn comprehension(&mut self, id: Id, fold: &mut Comprehension) {
        self.check(&mut fold.range);
        self.check(&mut fold.init);
        let range = self.bindings.resolve(&self.get(&fold.range), false);
        let accu = self.get(&fold.init);
        let outside = self.scopes.len();
        self.scopes.push((fold.accu.clone(), accu.clone()));
        let two = fold.var2.is_some();
        let (first, second) = match &range {
            Type::List(element) if two => (Type::Int, (**element).clone()),
            Type::List(element) => ((**element).clone(), Type::Dyn),
            Type::Map(key, value) => ((**key).clone(), (**value).clone()),
            Type::Dyn | Type::Error | Type::Var(_) => {
                self.bindings.assignable(&Type::Dyn, &range);
                (Type::Dyn, Type::Dyn)
            }
            other => {
                let message = format!(
                    "expression of type '{other}' cannot be range of a comprehension (must be list, map, or dynamic)"
                );
                self.report(fold.range.id, message);
                (Type::Error, Type::Error)
            }
        };
        let inside = self.scopes.len();
        self.scopes.push((fold.var.clone(), first));
        if let Some(var2) = &fold.var2 {
            self.scopes.push((var2.clone(), second));
        }
        self.check(&mut fold.condition);
        self.assert(&fold.condition, &Type::Bool);
        self.check(&mut fold.step);
        self.assert(&fold.step, &accu);
        self.scopes.truncate(inside);
        self.check(&mut fold.result);
        self.scopes.truncate(outside);
        let result = self.bindings.resolve(&self.get(&fold.result), false);
        self.set(id, result);
    }

    fn assert(&mut self, expr: &Expr, expected: &Type) {
        let found = self.get(expr);
        if !self.bindings.assignable(expected, &found) {
            self.mismatch(expr.id, expected, &found);
        }
    }
}

/// Fields whose names are reserved words may also be written without escapes.
fn reserved<'d>(decl: &'d DeclType, field: &str) -> Option<&'d Arc<DeclType>> {
    if !RESERVED.contains(&field) {
        return None;
    }
    decl.field(&format!("__{field}__"))
}
