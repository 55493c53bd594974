//! Macros: `has`, `all`, `exists`, `map` and the others become comprehensions while the parser reads them.

use std::sync::Arc;

use crate::ast::{ACCUMULATOR, Comprehension, Expr, Id, Kind, Literal, UNUSED};
use crate::parser::{Parser, Stop};

/// The traditional accumulator, which no iteration variable may be called.
const OLD_ACCUMULATOR: &str = "__result__";
const SORT_INPUT: &str = "@__sortBy_input__";

/// The most nodes that macros may blow an expression up to.
const MAX_NODES: usize = 200_000;

fn size(expr: &Expr) -> usize {
    let mut count = 1;
    expr.children(&mut |child| count += size(child));
    count
}

/// Either the expansion, or target and arguments back: it was no macro.
type Expanded = Result<Expr, (Expr, Vec<Expr>)>;
type Parse<T> = Result<T, Stop>;

/// Makes nodes at the place of the macro call.
struct Maker<'p, 's> {
    parser: &'p mut Parser<'s>,
    position: u32,
}

impl Parser<'_> {
    pub(crate) fn expand_has(&mut self, id: Id, mut args: Vec<Expr>) -> Parse<Expr> {
        let argument = args.remove(0);
        let position = self.position(id);
        match argument.kind {
            Kind::Select { operand, field, .. } => {
                let kind = Kind::Select {
                    operand,
                    field,
                    test_only: true,
                };
                self.node(position, kind)
            }
            _ => self.refuse(argument.id, "invalid argument to has() macro"),
        }
    }

    /// Reports what is wrong with a macro's argument and goes on, so that other mistakes are found too.
    fn refuse(&mut self, id: Id, message: impl Into<String>) -> Parse<Expr> {
        let position = self.position(id);
        self.mistakes.push(crate::source::Mistake {
            offset: Some(position),
            message: message.into(),
        });
        self.node(position, Kind::Broken)
    }

    pub(crate) fn expand_member(
        &mut self,
        id: Id,
        function: &str,
        target: Expr,
        args: Vec<Expr>,
    ) -> Parse<Expanded> {
        let position = self.position(id);
        let mut maker = Maker {
            parser: self,
            position,
        };
        let expanded = match (function, args.len()) {
            ("all" | "exists" | "exists_one", 2) => maker.quantifier(function, target, args, 1),
            ("all" | "exists" | "exists_one" | "existsOne", 3) => maker.quantifier(function, target, args, 2),
            ("map", 2 | 3) => maker.map(target, args),
            ("filter", 2) => maker.filter(target, args),
            ("transformList", 3 | 4) => maker.transform(Transform::List, target, args),
            ("transformMap", 3 | 4) => maker.transform(Transform::Map, target, args),
            ("transformMapEntry", 3 | 4) => maker.transform(Transform::Entry, target, args),
            ("optMap" | "optFlatMap", 2) => maker.opt_map(function, target, args),
            ("sortBy", 2) => maker.sort_by(target, args),
            ("bind", 3)
                if maker.parser.bindings && matches!(&target.kind, Kind::Ident(name) if &**name == "cel") =>
            {
                maker.bound(args)
            }
            _ => return Ok(Err((target, args))),
        };
        expanded.map(Ok)
    }
}

#[derive(Clone, Copy)]
enum Transform {
    List,
    Map,
    Entry,
}

/// The parts that differ between the comprehensions of macros.
struct Fold {
    init: Expr,
    condition: Expr,
    step: Expr,
    result: Expr,
}

impl Maker<'_, '_> {
    fn node(&mut self, kind: Kind) -> Parse<Expr> {
        self.parser.node(self.position, kind)
    }

    fn literal(&mut self, literal: Literal) -> Parse<Expr> {
        self.node(Kind::Literal(literal))
    }

    fn ident(&mut self, name: &str) -> Parse<Expr> {
        self.node(Kind::Ident(name.into()))
    }

    fn accu(&mut self) -> Parse<Expr> {
        self.ident(ACCUMULATOR)
    }

    fn call(&mut self, function: &str, args: Vec<Expr>) -> Parse<Expr> {
        let id = self.parser.next_id(self.position);
        self.parser.call(id, function, args, 0)
    }

    fn list(&mut self, elements: Vec<Expr>) -> Parse<Expr> {
        self.node(Kind::List {
            elements,
            optional: Vec::new(),
        })
    }

    fn comprehension(
        &mut self,
        range: Expr,
        vars: (Arc<str>, Option<Arc<str>>),
        accu: &str,
        fold: Fold,
    ) -> Parse<Expr> {
        self.node(Kind::Comprehension(Box::new(Comprehension {
            range,
            var: vars.0,
            var2: vars.1,
            accu: accu.into(),
            init: fold.init,
            condition: fold.condition,
            step: fold.step,
            result: fold.result,
        })))
    }

    /// The names of the iteration variables, or what is wrong with them.
    fn variables(&self, args: &[Expr], complaint: &str) -> Result<Vec<Arc<str>>, (Id, String)> {
        let mut names: Vec<Arc<str>> = Vec::new();
        for arg in args {
            match &arg.kind {
                Kind::Ident(name) => names.push(name.clone()),
                _ => return Err((arg.id, complaint.to_owned())),
            }
        }
        if let [first, second] = &names[..]
            && first == second
        {
            return Err((args[1].id, format!("duplicate variable name: {first}")));
        }
        match names.iter().position(|name| &**name == OLD_ACCUMULATOR) {
            Some(at) => Err((
                args[at].id,
                "iteration variable overwrites accumulator variable".to_owned(),
            )),
            None => Ok(names),
        }
    }

    fn pair(mut names: Vec<Arc<str>>) -> (Arc<str>, Option<Arc<str>>) {
        let first = names.remove(0);
        (first, names.pop())
    }

    fn quantifier(&mut self, function: &str, target: Expr, mut args: Vec<Expr>, vars: usize) -> Parse<Expr> {
        let names = match self.variables(&args[..vars], "argument must be a simple name") {
            Ok(names) => names,
            Err((id, message)) => return self.parser.refuse(id, message),
        };
        let predicate = args.remove(vars);
        let fold = match function {
            "all" => {
                let (init, accu) = (self.literal(Literal::Bool(true))?, self.accu()?);
                let condition = self.call("@not_strictly_false", vec![accu])?;
                let accu = self.accu()?;
                let step = self.call("_&&_", vec![accu, predicate])?;
                (init, condition, step, self.accu()?)
            }
            "exists" => {
                let (init, accu) = (self.literal(Literal::Bool(false))?, self.accu()?);
                let not = self.call("!_", vec![accu])?;
                let condition = self.call("@not_strictly_false", vec![not])?;
                let accu = self.accu()?;
                let step = self.call("_||_", vec![accu, predicate])?;
                (init, condition, step, self.accu()?)
            }
            _ => {
                let (init, condition) = (self.literal(Literal::Int(0))?, self.literal(Literal::Bool(true))?);
                let (accu, one) = (self.accu()?, self.literal(Literal::Int(1))?);
                let plus = self.call("_+_", vec![accu, one])?;
                let accu = self.accu()?;
                let step = self.call("_?_:_", vec![predicate, plus, accu])?;
                let (accu, one) = (self.accu()?, self.literal(Literal::Int(1))?);
                (init, condition, step, self.call("_==_", vec![accu, one])?)
            }
        };
        let (init, condition, step, result) = fold;
        let fold = Fold {
            init,
            condition,
            step,
            result,
        };
        self.comprehension(target, Self::pair(names), ACCUMULATOR, fold)
    }

    /// A fold from an empty container, with every element that passes the filter.
    fn collect(
        &mut self,
        range: Expr,
        vars: (Arc<str>, Option<Arc<str>>),
        init: Expr,
        filter: Option<Expr>,
        step: Expr,
    ) -> Parse<Expr> {
        let condition = self.literal(Literal::Bool(true))?;
        let step = match filter {
            None => step,
            Some(filter) => {
                let accu = self.accu()?;
                self.call("_?_:_", vec![filter, step, accu])?
            }
        };
        let result = self.accu()?;
        let fold = Fold {
            init,
            condition,
            step,
            result,
        };
        self.comprehension(range, vars, ACCUMULATOR, fold)
    }

    fn append(&mut self, element: Expr) -> Parse<Expr> {
        let accu = self.accu()?;
        let element = self.list(vec![element])?;
        self.call("_+_", vec![accu, element])
    }

    fn map(&mut self, target: Expr, mut args: Vec<Expr>) -> Parse<Expr> {
        let names = match self.variables(&args[..1], "argument is not an identifier") {
            Ok(names) => names,
            Err((id, message)) => return self.parser.refuse(id, message),
        };
        let filter = (args.len() == 3).then(|| args.remove(1));
        let init = self.list(Vec::new())?;
        let step = self.append(args.remove(1))?;
        self.collect(target, Self::pair(names), init, filter, step)
    }

    fn filter(&mut self, target: Expr, mut args: Vec<Expr>) -> Parse<Expr> {
        let names = match self.variables(&args[..1], "argument is not an identifier") {
            Ok(names) => names,
            Err((id, message)) => return self.parser.refuse(id, message),
        };
        let filter = args.remove(1);
        let init = self.list(Vec::new())?;
        let step = self.append(args.remove(0))?;
        self.collect(target, Self::pair(names), init, Some(filter), step)
    }

    fn transform(&mut self, what: Transform, target: Expr, mut args: Vec<Expr>) -> Parse<Expr> {
        let names = match self.variables(&args[..2], "argument must be a simple name") {
            Ok(names) => names,
            Err((id, message)) => return self.parser.refuse(id, message),
        };
        let filter = (args.len() == 4).then(|| args.remove(2));
        let transform = args.remove(2);
        let (init, step) = match what {
            Transform::List => (self.list(Vec::new())?, self.append(transform)?),
            Transform::Map => {
                let init = self.node(Kind::Map(Vec::new()))?;
                let (accu, key) = (self.accu()?, self.ident(&names[0])?);
                (init, self.call("cel.@mapInsert", vec![accu, key, transform])?)
            }
            Transform::Entry => {
                let init = self.node(Kind::Map(Vec::new()))?;
                let accu = self.accu()?;
                (init, self.call("cel.@mapInsert", vec![accu, transform])?)
            }
        };
        self.collect(target, Self::pair(names), init, filter, step)
    }

    /// Names a value for the length of one expression.
    fn bind(&mut self, name: &str, value: Expr, result: Expr) -> Parse<Expr> {
        let range = self.list(Vec::new())?;
        let fold = Fold {
            init: value,
            condition: self.literal(Literal::Bool(false))?,
            step: self.ident(name)?,
            result,
        };
        self.comprehension(range, (UNUSED.into(), None), name, fold)
    }

    fn opt_map(&mut self, function: &str, target: Expr, mut args: Vec<Expr>) -> Parse<Expr> {
        let Kind::Ident(name) = &args[0].kind else {
            let message = format!("{function}() variable name must be a simple identifier");
            return self.parser.refuse(args[0].id, message);
        };
        let name = name.clone();
        let transform = args.remove(1);
        // Each of a chain of these copies all before it: what was written briefly can become very long.
        if self.parser.count() + size(&target) > MAX_NODES {
            return self
                .parser
                .refuse(target.id, "expression is too large after macros are expanded");
        }
        let copy = self.copy(&target);
        let present = self.member("hasValue", target)?;
        let value = self.member("value", copy)?;
        let mapped = self.bind(&name, value, transform)?;
        let mapped = if function == "optMap" {
            self.call("optional.of", vec![mapped])?
        } else {
            mapped
        };
        let none = self.call("optional.none", Vec::new())?;
        self.call("_?_:_", vec![present, mapped, none])
    }

    /// `cel.bind(name, value, expression)`
    fn bound(&mut self, args: Vec<Expr>) -> Parse<Expr> {
        let mut args = args.into_iter();
        let (Some(name), Some(value), Some(result)) = (args.next(), args.next(), args.next()) else {
            return self.node(Kind::Broken);
        };
        let Kind::Ident(name) = &name.kind else {
            return self
                .parser
                .refuse(name.id, "cel.bind() variable names must be simple identifiers");
        };
        let name = name.clone();
        self.bind(&name, value, result)
    }

    fn member(&mut self, function: &str, target: Expr) -> Parse<Expr> {
        self.node(Kind::Call {
            function: function.into(),
            target: Some(Box::new(target)),
            args: Vec::new(),
        })
    }

    fn sort_by(&mut self, target: Expr, args: Vec<Expr>) -> Parse<Expr> {
        let sortable = matches!(
            target.kind,
            Kind::List { .. }
                | Kind::Select { .. }
                | Kind::Ident(_)
                | Kind::Comprehension(_)
                | Kind::Call { .. }
        );
        if !sortable {
            let message =
                "sortBy can only be applied to a list, identifier, comprehension, call or select expression";
            return self.parser.refuse(target.id, message);
        }
        let (input, range) = (self.ident(SORT_INPUT)?, self.ident(SORT_INPUT)?);
        let keys = self.map(range, args)?;
        let sorted = self.node(Kind::Call {
            function: "@sortByAssociatedKeys".into(),
            target: Some(Box::new(input)),
            args: vec![keys],
        })?;
        self.bind(SORT_INPUT, target, sorted)
    }

    /// The same expression with node numbers of its own.
    fn copy(&mut self, expr: &Expr) -> Expr {
        let mut copied = expr.clone();
        self.renumber(&mut copied);
        copied
    }

    fn renumber(&mut self, expr: &mut Expr) {
        let position = self.parser.position(expr.id);
        expr.id = self.parser.next_id(position);
        match &mut expr.kind {
            Kind::Literal(_) | Kind::Ident(_) | Kind::Broken => {}
            Kind::Select { operand, .. } => self.renumber(operand),
            Kind::Call { target, args, .. } => {
                if let Some(target) = target {
                    self.renumber(target);
                }
                args.iter_mut().for_each(|arg| self.renumber(arg));
            }
            Kind::List { elements, .. } => elements.iter_mut().for_each(|element| self.renumber(element)),
            Kind::Map(entries) | Kind::Struct { fields: entries, .. } => {
                for entry in entries {
                    self.renumber(&mut entry.key);
                    self.renumber(&mut entry.value);
                }
            }
            Kind::Comprehension(fold) => {
                let fold = &mut **fold;
                for part in [
                    &mut fold.range,
                    &mut fold.init,
                    &mut fold.condition,
                    &mut fold.step,
                    &mut fold.result,
                ] {
                    self.renumber(part);
                }
            }
        }
    }
}
