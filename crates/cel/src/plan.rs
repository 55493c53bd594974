//! The checked tree made ready to run: variables have slots, functions are looked up, constants are folded and
//! regular expressions read. Made once; evaluated often, by `eval.rs`.

use std::collections::HashSet;
use std::sync::Arc;

use crate::ast::{Comprehension, Expr, Kind, Literal};
use crate::checker::{Checked, Reference};
use crate::cost::runtime;
use crate::error::EvalError;
use crate::library::regex::Pattern;
use crate::library::{Native, native};
use crate::value::{Identity, List, Map, Str, Value, identity};

#[derive(Debug)]
pub(crate) enum Node {
    Const(Value<'static>),
    Attribute(Box<Attribute>),
    And(Box<[Node; 2]>),
    Or(Box<[Node; 2]>),
    NotStrictlyFalse(Box<Node>),
    /// `a.or(b)` and `a.orValue(b)`, which evaluate `b` only when needed.
    OptionalOr {
        sides: Box<[Node; 2]>,
        unwrap: bool,
    },
    Call(Box<Call>),
    /// `x in [constants]`
    InSet {
        wanted: Box<Node>,
        set: HashSet<Identity>,
    },
    List(Vec<(Node, bool)>),
    Map(Vec<(Node, Node, bool)>),
    Fold(Box<Fold>),
}

/// A value and the way into it. One step of evaluation, and costed as one.
#[derive(Debug)]
pub(crate) struct Attribute {
    pub root: Root,
    pub qualifiers: Vec<Qualifier>,
    pub test_only: bool,
}

#[derive(Debug)]
pub(crate) enum Root {
    Variable(Arc<str>),
    Slot(usize),
    Expr(Node),
    Conditional(Box<[Node; 3]>),
}

#[derive(Debug)]
pub(crate) struct Qualifier {
    pub index: Node,
    pub optional: bool,
}

pub(crate) struct Call {
    pub function: &'static str,
    /// Known when the types left only one.
    pub overload: Option<&'static str>,
    pub native: Native,
    pub args: Vec<Node>,
    /// The pattern, where it is a constant.
    pub pattern: Option<Pattern>,
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}({:?})", self.function, self.args)
    }
}

#[derive(Debug)]
pub(crate) struct Fold {
    pub range: Node,
    pub var: usize,
    pub var2: Option<usize>,
    pub accu: usize,
    pub init: Node,
    pub condition: Node,
    pub step: Step,
    pub result: Node,
}

/// How the accumulator grows. Lists and maps are added to in place: copying them for each element would cost the
/// square of their size.
#[derive(Debug)]
pub(crate) enum Step {
    Plain(Node),
    /// `filter ? accu + [element] : accu`
    Append {
        filter: Option<Node>,
        element: Node,
    },
    /// `filter ? cel.@mapInsert(accu, …) : accu`, with a key and a value or with a map.
    Insert {
        filter: Option<Node>,
        entry: Vec<Node>,
    },
}

/// The most slots that an expression can need is the depth of its tree.
pub(crate) struct Plan {
    pub node: Node,
    pub slots: usize,
}

pub(crate) fn plan(checked: &Checked) -> Result<Plan, String> {
    let mut planner = Planner {
        checked,
        scope: Vec::new(),
        slots: 0,
    };
    let node = planner.plan(&checked.root)?;
    Ok(Plan {
        node,
        slots: planner.slots,
    })
}

struct Planner<'c> {
    checked: &'c Checked,
    /// The names of slots, innermost last.
    scope: Vec<Arc<str>>,
    slots: usize,
}

type Planned = Result<Node, String>;

impl Planner<'_> {
    fn plan(&mut self, expr: &Expr) -> Planned {
        match &expr.kind {
            Kind::Literal(literal) => Ok(Node::Const(constant(literal))),
            Kind::Ident(name) => Ok(self.ident(expr, name)),
            Kind::Select {
                operand,
                field,
                test_only,
            } => {
                let operand = self.plan(operand)?;
                let index = Node::Const(Value::String(Str::Shared(field.clone())));
                Ok(qualify(operand, index, false, *test_only))
            }
            Kind::Call {
                function,
                target,
                args,
            } => self.call(expr, function, target.as_deref(), args),
            Kind::List { elements, optional } => self.list(elements, optional),
            Kind::Map(entries) => {
                let mut planned = Vec::with_capacity(entries.len());
                for entry in entries {
                    planned.push((self.plan(&entry.key)?, self.plan(&entry.value)?, entry.optional));
                }
                Ok(fold_map(planned))
            }
            Kind::Comprehension(fold) => self.fold(fold),
            // What is made is the map of its fields: only patches are made so, and they are JSON in the end.
            Kind::Struct { fields, .. } => {
                let mut planned = Vec::with_capacity(fields.len());
                for field in fields {
                    planned.push((self.plan(&field.key)?, self.plan(&field.value)?, field.optional));
                }
                Ok(fold_map(planned))
            }
            Kind::Broken => Err("unsupported expression".to_owned()),
        }
    }

    fn ident(&mut self, expr: &Expr, name: &Arc<str>) -> Node {
        if let Reference::TypeName = self.checked.references[expr.id as usize] {
            let known = crate::functions::TYPE_NAMES
                .iter()
                .find(|known| **known == &**name);
            return Node::Const(Value::Type(known.copied().unwrap_or("type")));
        }
        let root = match self.scope.iter().rposition(|scoped| scoped == name) {
            Some(slot) => Root::Slot(slot),
            None => Root::Variable(name.clone()),
        };
        Node::Attribute(Box::new(Attribute {
            root,
            qualifiers: Vec::new(),
            test_only: false,
        }))
    }

    fn pair(&mut self, args: &[Expr]) -> Result<Box<[Node; 2]>, String> {
        Ok(Box::new([self.plan(&args[0])?, self.plan(&args[1])?]))
    }

    fn call(&mut self, expr: &Expr, function: &str, target: Option<&Expr>, args: &[Expr]) -> Planned {
        match function {
            "_&&_" => return Ok(Node::And(self.pair(args)?)),
            "_||_" => return Ok(Node::Or(self.pair(args)?)),
            "@not_strictly_false" => return Ok(Node::NotStrictlyFalse(Box::new(self.plan(&args[0])?))),
            "_?_:_" => {
                let parts = [self.plan(&args[0])?, self.plan(&args[1])?, self.plan(&args[2])?];
                return Ok(Node::Attribute(Box::new(Attribute {
                    root: Root::Conditional(Box::new(parts)),
                    qualifiers: Vec::new(),
                    test_only: false,
                })));
            }
            "_[_]" | "_[?_]" | "_?._" => {
                let operand = self.plan(&args[0])?;
                let index = self.plan(&args[1])?;
                return Ok(qualify(operand, index, function != "_[_]", false));
            }
            "or" | "orValue" if target.is_some() && args.len() == 1 => {
                let target = target.ok_or("missing target")?;
                let sides = Box::new([self.plan(target)?, self.plan(&args[0])?]);
                return Ok(Node::OptionalOr {
                    sides,
                    unwrap: function == "orValue",
                });
            }
            _ => {}
        }
        let mut planned = Vec::with_capacity(args.len() + 1);
        for part in target.into_iter().chain(args) {
            planned.push(self.plan(part)?);
        }
        let overload = match self.checked.overloads(expr.id) {
            [only] => Some(*only),
            _ => None,
        };
        if overload == Some("in_list")
            && let [_, Node::Const(Value::List(list))] = &planned[..]
            && let Some(set) = primitive_set(list)
        {
            if set.is_empty() {
                return Ok(Node::Const(Value::Bool(false)));
            }
            let wanted = Box::new(planned.swap_remove(0));
            return Ok(Node::InSet { wanted, set });
        }
        let Some((function, native)) = native(function) else {
            return Err(format!("no such overload: {function}"));
        };
        if is_conversion(function)
            && let [Node::Const(argument)] = &planned[..]
        {
            let folded = native(None, std::slice::from_ref(argument)).map_err(|error| {
                if error == EvalError::no_such_overload() {
                    return format!("no such overload: {function}({})", argument.type_name());
                }
                error.to_string()
            })?;
            return Ok(Node::Const(folded));
        }
        let pattern = match (function, planned.get(1)) {
            ("matches" | "find" | "findAll", Some(Node::Const(Value::String(pattern)))) => {
                Some(Pattern::new(pattern)?)
            }
            _ => None,
        };
        Ok(Node::Call(Box::new(Call {
            function,
            overload,
            native,
            args: planned,
            pattern,
        })))
    }

    fn list(&mut self, elements: &[Expr], optional: &[usize]) -> Planned {
        let mut planned = Vec::with_capacity(elements.len());
        for (position, element) in elements.iter().enumerate() {
            planned.push((self.plan(element)?, optional.binary_search(&position).is_ok()));
        }
        let constant = planned
            .iter()
            .map(|(node, optional)| match node {
                Node::Const(value) if !optional => Some(value.clone()),
                _ => None,
            })
            .collect::<Option<Vec<_>>>();
        Ok(match constant {
            Some(items) => Node::Const(Value::List(List::owned(items))),
            None => Node::List(planned),
        })
    }

    fn enter(&mut self, name: &Arc<str>) -> usize {
        self.scope.push(name.clone());
        self.slots = self.slots.max(self.scope.len());
        self.scope.len() - 1
    }

    fn fold(&mut self, fold: &Comprehension) -> Planned {
        let range = self.plan(&fold.range)?;
        let init = self.plan(&fold.init)?;
        let outside = self.scope.len();
        let accu = self.enter(&fold.accu);
        let var = self.enter(&fold.var);
        let var2 = fold.var2.as_ref().map(|var2| self.enter(var2));
        let condition = self.plan(&fold.condition)?;
        let step = self.step(fold)?;
        self.scope.truncate(accu + 1);
        let result = self.plan(&fold.result)?;
        self.scope.truncate(outside);
        Ok(Node::Fold(Box::new(Fold {
            range,
            var,
            var2,
            accu,
            init,
            condition,
            step,
            result,
        })))
    }

    fn step(&mut self, fold: &Comprehension) -> Result<Step, String> {
        // Only the macros' own accumulator is invisible to the expressions inside.
        if &*fold.accu != crate::ast::ACCUMULATOR {
            return Ok(Step::Plain(self.plan(&fold.step)?));
        }
        let is_accu = |expr: &Expr| matches!(&expr.kind, Kind::Ident(name) if *name == fold.accu);
        let (filter, body) = match call_of(&fold.step, "_?_:_") {
            Some([filter, body, otherwise]) if is_accu(otherwise) => (Some(filter), body),
            _ => (None, &fold.step),
        };
        if let Some([accu, added]) = call_of(body, "_+_")
            && is_accu(accu)
            && let Kind::List { elements, optional } = &added.kind
            && let ([element], []) = (&elements[..], &optional[..])
        {
            return Ok(Step::Append {
                filter: filter.map(|filter| self.plan(filter)).transpose()?,
                element: self.plan(element)?,
            });
        }
        if let Some([accu, parts @ ..]) = call_of(body, "cel.@mapInsert")
            && is_accu(accu)
        {
            let filter = filter.map(|filter| self.plan(filter)).transpose()?;
            let entry = parts
                .iter()
                .map(|part| self.plan(part))
                .collect::<Result<_, _>>()?;
            return Ok(Step::Insert { filter, entry });
        }
        Ok(Step::Plain(self.plan(&fold.step)?))
    }
}

/// The arguments of a call of a function, if the expression is one.
fn call_of<'e>(expr: &'e Expr, wanted: &str) -> Option<&'e [Expr]> {
    match &expr.kind {
        Kind::Call {
            function,
            target: None,
            args,
        } if &**function == wanted => Some(args),
        _ => None,
    }
}

/// One more step into a value; what is no attribute yet becomes one.
fn qualify(operand: Node, index: Node, optional: bool, test_only: bool) -> Node {
    let mut attribute = match operand {
        Node::Attribute(attribute) if !attribute.test_only => attribute,
        other => Box::new(Attribute {
            root: Root::Expr(other),
            qualifiers: Vec::new(),
            test_only: false,
        }),
    };
    attribute.qualifiers.push(Qualifier { index, optional });
    attribute.test_only = test_only;
    Node::Attribute(attribute)
}

fn constant(literal: &Literal) -> Value<'static> {
    match literal {
        Literal::Null => Value::Null,
        Literal::Bool(value) => Value::Bool(*value),
        Literal::Int(value) => Value::Int(*value),
        Literal::Uint(value) => Value::Uint(*value),
        Literal::Double(value) => Value::Double(*value),
        Literal::String(text) => Value::String(Str::Shared(text.clone())),
        Literal::Bytes(bytes) => Value::Bytes(bytes.clone()),
    }
}

fn fold_map(entries: Vec<(Node, Node, bool)>) -> Node {
    let mut map = Map::empty();
    for (key, value, optional) in &entries {
        let (Node::Const(key), Node::Const(value), false) = (key, value, optional) else {
            return Node::Map(entries);
        };
        if map.insert(key.clone(), value.clone()).is_err() {
            return Node::Map(entries);
        }
    }
    Node::Const(Value::Map(map))
}

/// The elements of a constant list, if all are primitive.
fn primitive_set(list: &List<'static>) -> Option<HashSet<Identity>> {
    list.iter()
        .map(|item| match item.ok()? {
            item
            @ (Value::Bool(_) | Value::Int(_) | Value::Uint(_) | Value::Double(_) | Value::String(_)) => {
                Some(identity(&item))
            }
            _ => None,
        })
        .collect()
}

fn is_conversion(function: &str) -> bool {
    matches!(
        function,
        "bool" | "bytes" | "double" | "duration" | "dyn" | "int" | "string" | "timestamp" | "type" | "uint"
    )
}

impl Call {
    /// `failed` tells that an argument is not there; then there is no result whose size could count.
    pub fn cost(&self, args: &[Value<'_>], failed: bool) -> u64 {
        if failed && let Some(cost) = runtime::cost_of_failure(self.function, self.overload) {
            return cost;
        }
        runtime::call_cost(self.function, self.overload, args)
    }
}
