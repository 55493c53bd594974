//! Checks after type checking: literals that can never work are refused before anything runs.

use skiff_meta::regexp;

use crate::ast::{Expr, Id, Kind, Literal};
use crate::checker::Checked;
use crate::library::string_format::{Clause, FormatSegment, next_part};
use crate::source::Mistake;
use crate::time::Timestamp;
use crate::types::Type;

pub(crate) fn validate(checked: &Checked) -> Vec<Mistake> {
    let mut validator = Validator {
        checked,
        mistakes: Vec::new(),
    };
    validator.visit(&checked.root, false);
    validator.mistakes
}

struct Validator<'c> {
    checked: &'c Checked,
    mistakes: Vec<Mistake>,
}

impl<'c> Validator<'c> {
    fn report(&mut self, id: Id, message: String) {
        self.mistakes.push(Mistake {
            offset: Some(self.checked.positions[id as usize]),
            message,
        });
    }

    fn visit(&mut self, expr: &'c Expr, in_format: bool) {
        let mut in_format = in_format;
        match &expr.kind {
            Kind::Call {
                function,
                target,
                args,
            } => {
                self.literal_argument(function, args);
                if &**function == "format" {
                    in_format = true;
                    if let Some(target) = target {
                        self.format(expr, target, args);
                    }
                }
            }
            Kind::List { elements, optional } if !in_format => self.list(elements, optional),
            Kind::Map(entries) if !in_format => {
                let mut first: Option<(&Type, &Type)> = None;
                for entry in entries {
                    let key = self.checked.kind_of(&entry.key);
                    let value = self.inner(&entry.value, entry.optional);
                    match first {
                        None => first = Some((key, value)),
                        Some((first_key, first_value)) => {
                            self.same(entry.key.id, first_key, key);
                            self.same(entry.value.id, first_value, value);
                        }
                    }
                }
            }
            _ => {}
        }
        let mut children = Vec::new();
        expr.children(&mut |child| children.push(child));
        for child in children {
            self.visit(child, in_format);
        }
    }

    fn literal_argument(&mut self, function: &str, args: &[Expr]) {
        let Some(argument) = args.first() else {
            return;
        };
        let Kind::Literal(literal) = &argument.kind else {
            return;
        };
        let valid = match (function, literal) {
            ("duration", Literal::String(text)) => skiff_meta::duration::parse(text).is_ok(),
            ("duration" | "timestamp", Literal::Null) | ("duration", Literal::Int(_)) => false,
            ("timestamp", Literal::String(text)) => Timestamp::parse(text).is_ok(),
            ("timestamp", Literal::Int(seconds)) => Timestamp::from_seconds(*seconds).is_ok(),
            ("matches", Literal::String(pattern)) => regexp::check(pattern).is_ok(),
            _ => true,
        };
        if !valid {
            self.report(argument.id, format!("invalid {function} argument"));
        }
    }

    /// The type of an element; inside its optional if it is one.
    fn inner(&self, expr: &Expr, optional: bool) -> &'c Type {
        let kind = self.checked.kind_of(expr);
        match kind.as_optional() {
            Some(of) if optional => of,
            _ => kind,
        }
    }

    fn same(&mut self, id: Id, expected: &Type, found: &Type) -> bool {
        if expected == found {
            return true;
        }
        self.report(id, format!("expected type '{expected}' but found '{found}'"));
        false
    }

    /// Elements must be of one type, `dyn` included.
    fn list(&mut self, elements: &'c [Expr], optional: &[usize]) {
        let mut first = None;
        for (position, element) in elements.iter().enumerate() {
            let kind = self.inner(element, optional.binary_search(&position).is_ok());
            match first {
                None => first = Some(kind),
                Some(first) => {
                    if !self.same(element.id, first, kind) {
                        break;
                    }
                }
            }
        }
    }

    /// Constant format strings are checked against the types of their arguments.
    fn format(&mut self, call: &Expr, target: &Expr, args: &'c [Expr]) {
        let Kind::Literal(Literal::String(format)) = &target.kind else {
            return;
        };
        let [
            Expr {
                kind: Kind::List { elements, .. },
                ..
            },
        ] = args
        else {
            return;
        };
        let mut rest = &**format;
        let mut next = 0;
        while !rest.is_empty() {
            let starts_clause = rest.starts_with('%') && !rest.starts_with("%%");
            if starts_clause && rest.len() > 1 && next >= elements.len() {
                return self.report(call.id, format!("index {next} out of range"));
            }
            match next_part(rest) {
                Err(problem) => return self.report(call.id, problem),
                Ok((FormatSegment::Text(_), tail)) => rest = tail,
                Ok((FormatSegment::Clause(clause), tail)) => {
                    if let Err((id, problem)) = self.argument(clause, &elements[next]) {
                        return self.report(id, format!("error during formatting: {problem}"));
                    }
                    next += 1;
                    rest = tail;
                }
            }
        }
        if elements.len() > next {
            let count = elements.len();
            self.report(
                call.id,
                format!("too many arguments supplied to string.format (expected {next}, got {count})"),
            );
        }
    }

    fn argument(&self, clause: Clause, expr: &Expr) -> Result<(), (Id, String)> {
        let kind = self.checked.kind_of(expr);
        let fits = kind.is_dyn()
            || match clause {
                Clause::String => matches!(
                    kind,
                    Type::List(_)
                        | Type::Map(..)
                        | Type::Int
                        | Type::Uint
                        | Type::Double
                        | Type::Bool
                        | Type::String
                        | Type::Timestamp
                        | Type::Bytes
                        | Type::Duration
                        | Type::Type(_)
                        | Type::Null
                ),
                Clause::Decimal | Clause::Octal => matches!(kind, Type::Int | Type::Uint),
                Clause::Fixed(_) | Clause::Scientific => matches!(kind, Type::Double | Type::String),
                Clause::Binary => matches!(kind, Type::Int | Type::Uint | Type::Bool),
                Clause::Hex { .. } => matches!(kind, Type::Int | Type::Uint | Type::String | Type::Bytes),
            };
        if !fits {
            return Err((expr.id, clause.refuse(kind.runtime_name())));
        }
        if clause != Clause::String {
            return Ok(());
        }
        match &expr.kind {
            Kind::List { elements, .. } => elements
                .iter()
                .try_for_each(|element| self.argument(clause, element)),
            Kind::Map(entries) => entries.iter().try_for_each(|entry| {
                self.argument(clause, &entry.key)?;
                self.argument(clause, &entry.value)
            }),
            _ => Ok(()),
        }
    }
}
