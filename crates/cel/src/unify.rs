//! Which types agree, and what type variables stand for. A failed attempt leaves no trace.

use std::sync::Arc;

use crate::types::Type;

/// The bindings of type variables during one check.
#[derive(Debug, Default)]
pub(crate) struct Bindings {
    bound: Vec<Option<Type>>,
    /// What was bound before, so that a failed attempt can be undone.
    trail: Vec<(u32, Option<Type>)>,
}

impl Bindings {
    pub fn fresh(&mut self) -> Type {
        self.bound.push(None);
        Type::Var(self.bound.len() as u32 - 1)
    }

    fn find(&self, var: &Type) -> Option<&Type> {
        match var {
            Type::Var(number) => self.bound[*number as usize].as_ref(),
            _ => None,
        }
    }

    fn bind(&mut self, var: &Type, to: Type) {
        if let Type::Var(number) = var {
            let before = self.bound[*number as usize].replace(to);
            self.trail.push((*number, before));
        }
    }

    /// Whether a value of one type may stand where the other is expected; binds variables if so.
    pub fn assignable(&mut self, left: &Type, right: &Type) -> bool {
        self.attempt(|bindings| bindings.agrees(left, right))
    }

    pub fn all_assignable(&mut self, left: &[Type], right: &[Type]) -> bool {
        self.attempt(|bindings| bindings.all_agree(left, right))
    }

    fn attempt(&mut self, attempt: impl FnOnce(&mut Self) -> bool) -> bool {
        let mark = self.trail.len();
        let agreed = attempt(self);
        if !agreed {
            for (number, before) in self.trail.drain(mark..).rev() {
                self.bound[number as usize] = before;
            }
        }
        agreed
    }

    fn all_agree(&mut self, left: &[Type], right: &[Type]) -> bool {
        left.len() == right.len()
            && left
                .iter()
                .zip(right)
                .all(|(left, right)| self.agrees(left, right))
    }

    fn agrees(&mut self, left: &Type, right: &Type) -> bool {
        if let Type::Var(_) = right {
            let (valid, bound) = self.substitutes(left, right);
            if valid || bound {
                return valid;
            }
        }
        if let Type::Var(_) = left {
            return self.substitutes(right, left).0;
        }
        if left.is_dyn_or_error() || right.is_dyn_or_error() {
            return true;
        }
        match (left, right) {
            (Type::Null, other) | (other, Type::Null) => matches!(
                other,
                Type::Null | Type::Opaque(..) | Type::Struct(_) | Type::Duration | Type::Timestamp
            ),
            (Type::List(left), Type::List(right)) => self.agrees(left, right),
            (Type::Map(left_key, left_value), Type::Map(right_key, right_value)) => {
                self.agrees(left_key, right_key) && self.agrees(left_value, right_value)
            }
            (Type::Opaque(left_name, left), Type::Opaque(right_name, right)) => {
                left_name == right_name && self.all_agree(left, right)
            }
            (Type::Type(_), Type::Type(_)) => true,
            _ => left == right,
        }
    }

    /// Whether `var`, or what it is bound to, can be `other`; and whether it was bound.
    fn substitutes(&mut self, other: &Type, var: &Type) -> (bool, bool) {
        if other == var {
            return (true, true);
        }
        if let Some(bound) = self.find(var).cloned() {
            if *other == bound {
                return (true, true);
            }
            if !self.agrees(other, &bound) {
                return (false, true);
            }
            let general = if less_specific(other, &bound) {
                other.clone()
            } else {
                bound
            };
            if self.absent_from(var, &general) {
                self.bind(var, general);
            }
            return (true, true);
        }
        if self.absent_from(var, other) {
            self.bind(var, other.clone());
            return (true, false);
        }
        (false, false)
    }

    /// True when a variable does not occur in a type.
    fn absent_from(&self, var: &Type, within: &Type) -> bool {
        if var == within {
            return false;
        }
        match within {
            Type::Var(_) => self.find(within).is_none_or(|bound| self.absent_from(var, bound)),
            Type::List(element) | Type::Type(Some(element)) => self.absent_from(var, element),
            Type::Map(key, value) => self.absent_from(var, key) && self.absent_from(var, value),
            Type::Opaque(_, parameters) => parameters
                .iter()
                .all(|parameter| self.absent_from(var, parameter)),
            _ => true,
        }
    }

    /// The type with its variables replaced by what they stand for; what is unbound stays, or becomes `dyn`.
    pub fn resolve(&self, kind: &Type, unbound_is_dyn: bool) -> Type {
        let inner = |kind: &Type| self.resolve(kind, unbound_is_dyn);
        match kind {
            Type::Var(_) => match self.find(kind) {
                Some(bound) => inner(bound),
                None if unbound_is_dyn => Type::Dyn,
                None => kind.clone(),
            },
            Type::List(element) => Type::list(inner(element)),
            Type::Map(key, value) => Type::map(inner(key), inner(value)),
            Type::Opaque(name, parameters) if !parameters.is_empty() => {
                Type::Opaque(name.clone(), parameters.iter().map(inner).collect())
            }
            Type::Type(Some(of)) => Type::Type(Some(Arc::new(inner(of)))),
            Type::Param(_) if unbound_is_dyn => Type::Dyn,
            other => other.clone(),
        }
    }
}

/// True when the first type is as general as the second, or more.
pub(crate) fn less_specific(first: &Type, second: &Type) -> bool {
    match (first, second) {
        (Type::Dyn | Type::Var(_) | Type::Param(_), _) => true,
        (_, Type::Dyn | Type::Var(_) | Type::Param(_)) => false,
        (Type::List(first), Type::List(second)) => less_specific(first, second),
        (Type::Map(first_key, first_value), Type::Map(second_key, second_value)) => {
            less_specific(first_key, second_key) && less_specific(first_value, second_value)
        }
        (Type::Opaque(first_name, first), Type::Opaque(second_name, second)) => {
            first_name == second_name
                && first.len() == second.len()
                && first
                    .iter()
                    .zip(second.iter())
                    .all(|(first, second)| less_specific(first, second))
        }
        (Type::Type(_), Type::Type(_)) => true,
        _ => first == second,
    }
}

/// An overload's type with its parameters replaced.
pub(crate) fn instantiate(kind: &Type, with: &[(Arc<str>, Type)]) -> Type {
    let inner = |kind: &Type| instantiate(kind, with);
    match kind {
        Type::Param(name) => with
            .iter()
            .find(|(parameter, _)| parameter == name)
            .map_or_else(|| kind.clone(), |(_, kind)| kind.clone()),
        Type::List(element) => Type::list(inner(element)),
        Type::Map(key, value) => Type::map(inner(key), inner(value)),
        Type::Opaque(name, parameters) if !parameters.is_empty() => {
            Type::Opaque(name.clone(), parameters.iter().map(inner).collect())
        }
        Type::Type(Some(of)) => Type::Type(Some(Arc::new(inner(of)))),
        other => other.clone(),
    }
}
