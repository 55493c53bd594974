//! The evaluator. Every step is charged; errors are values that `&&`, `||` and comprehensions may absorb, but for
//! those that end the evaluation.

mod access;

use access::{explained, grow, missing, step_into};

use crate::error::EvalError;
use crate::limits::CHECK_FREQUENCY;
use crate::limits::cost::{LIST_CREATE, MAP_CREATE};
use crate::meter::spend;
use crate::plan::{Attribute, Call, Fold, Node, Root, Step};
use crate::value::{Eval, Map, Value, identity};

/// Gives variables their values, when an expression asks for them.
pub trait Activation<'a> {
    /// The value of a variable, or `None` if it has none. May be asked more than once.
    fn resolve(&self, name: &str) -> Option<Result<Value<'a>, EvalError>>;
}

impl<'a, F> Activation<'a> for F
where
    F: Fn(&str) -> Option<Result<Value<'a>, EvalError>>,
{
    fn resolve(&self, name: &str) -> Option<Result<Value<'a>, EvalError>> {
        self(name)
    }
}

#[derive(Debug, Clone)]
enum Slot<'a> {
    Empty,
    /// To be computed when first read.
    Lazy(&'a Node),
    Ready(Eval<Value<'a>>),
}

pub(crate) struct Evaluator<'a, 'v> {
    variables: &'v dyn Activation<'a>,
    slots: Vec<Slot<'a>>,
    pub cost: u64,
    limit: u64,
    interrupted: Option<&'v dyn Fn() -> bool>,
    iterations: u32,
}

impl<'a, 'v> Evaluator<'a, 'v> {
    pub fn new(
        variables: &'v dyn Activation<'a>,
        slots: usize,
        limit: u64,
        interrupted: Option<&'v dyn Fn() -> bool>,
    ) -> Self {
        Self {
            variables,
            slots: vec![Slot::Empty; slots],
            cost: 0,
            limit,
            interrupted,
            iterations: 0,
        }
    }

    fn charge(&mut self, cost: u64) -> Eval<()> {
        self.cost = self.cost.saturating_add(cost);
        if self.cost > self.limit {
            Err(EvalError::CostLimit)
        } else {
            Ok(())
        }
    }

    pub fn eval(&mut self, node: &'a Node) -> Eval<Value<'a>> {
        match node {
            Node::Const(value) => Ok(value.clone()),
            Node::Attribute(attribute) => {
                // Reading a variable costs one; a presence test and a conditional cost what is inside.
                let free = attribute.test_only || matches!(attribute.root, Root::Conditional(_));
                let value = self.resolve(attribute);
                if !free {
                    self.charge(1)?;
                }
                value
            }
            Node::And(sides) => self.logic(sides, false),
            Node::Or(sides) => self.logic(sides, true),
            Node::NotStrictlyFalse(condition) => {
                let condition = self.eval(condition);
                self.charge(1)?;
                match condition {
                    Err(error) if error.is_final() => Err(error),
                    Ok(Value::Bool(false)) => Ok(Value::Bool(false)),
                    _ => Ok(Value::Bool(true)),
                }
            }
            Node::OptionalOr { sides, unwrap } => match self.eval(&sides[0])? {
                Value::Optional(Some(value)) if *unwrap => Ok((*value).clone()),
                some @ Value::Optional(Some(_)) => Ok(some),
                Value::Optional(None) => self.eval(&sides[1]),
                other => Ok(other),
            },
            Node::Call(call) => self.call(call),
            Node::InSet { wanted, set } => {
                let wanted = self.eval(wanted)?;
                Ok(Value::Bool(set.contains(&identity(&wanted))))
            }
            Node::List(elements) => {
                let items = self.elements(elements);
                self.charge(LIST_CREATE)?;
                Ok(Value::list(items?))
            }
            Node::Map(entries) => {
                let map = self.entries(entries);
                self.charge(MAP_CREATE)?;
                Ok(Value::Map(map?))
            }
            Node::Fold(fold) => self.fold(fold),
        }
    }

    /// `&&` and `||`: one side can decide although the other failed.
    fn logic(&mut self, sides: &'a [Node; 2], decisive: bool) -> Eval<Value<'a>> {
        let mut failed = None;
        for side in sides {
            match self.eval(side) {
                Ok(Value::Bool(value)) if value == decisive => return Ok(Value::Bool(decisive)),
                Ok(Value::Bool(_)) => {}
                Ok(_) => failed = failed.or(Some(EvalError::no_such_overload())),
                Err(error) if error.is_final() => return Err(error),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(Value::Bool(!decisive)), Err)
    }

    fn elements(&mut self, elements: &'a [(Node, bool)]) -> Eval<Vec<Value<'a>>> {
        let mut items = Vec::with_capacity(elements.len());
        for (element, optional) in elements {
            let value = self.eval(element)?;
            if !optional {
                items.push(value);
                continue;
            }
            match value {
                Value::Optional(Some(value)) => items.push((*value).clone()),
                Value::Optional(None) => {}
                other => {
                    return Err(EvalError::new(format!(
                        "cannot initialize optional list element from non-optional value {}",
                        other.shown()
                    )));
                }
            }
        }
        Ok(items)
    }

    fn entries(&mut self, entries: &'a [(Node, Node, bool)]) -> Eval<Map<'a>> {
        let mut map = Map::empty();
        for (key, value, optional) in entries {
            let key = self.eval(key)?;
            let value = self.eval(value)?;
            let value = match (value, optional) {
                (Value::Optional(Some(value)), true) => (*value).clone(),
                (Value::Optional(None), true) => {
                    map.remove(&key);
                    continue;
                }
                (other, true) => {
                    return Err(EvalError::new(format!(
                        "cannot initialize optional entry '{}' from non-optional value {}",
                        key.shown(),
                        other.shown()
                    )));
                }
                (value, false) => value,
            };
            map.insert(key, value)?;
        }
        Ok(map)
    }

    fn slot(&mut self, slot: usize) -> Eval<Value<'a>> {
        match self.slots[slot] {
            Slot::Lazy(init) => {
                let value = self.eval(init);
                if let Err(error) = &value
                    && error.is_final()
                {
                    return value;
                }
                self.slots[slot] = Slot::Ready(value.clone());
                value
            }
            Slot::Ready(ref value) => value.clone(),
            Slot::Empty => Err(EvalError::new("no such attribute(s)")),
        }
    }

    /// The value of an attribute, with the cost of its qualifiers only.
    fn resolve(&mut self, attribute: &'a Attribute) -> Eval<Value<'a>> {
        let root = match &attribute.root {
            Root::Variable(name) => match self.variables.resolve(name) {
                Some(value) => {
                    // Reading a policy's variable is a step into `variables`.
                    self.charge(u64::from(name.starts_with("variables.")))?;
                    value?
                }
                None => return Err(EvalError::new(format!("no such attribute(s): {name}"))),
            },
            Root::Slot(slot) => self.slot(*slot)?,
            Root::Expr(node) => self.eval(node)?,
            Root::Conditional(parts) => match self.eval(&parts[0])? {
                Value::Bool(true) => self.branch(&parts[1])?,
                Value::Bool(false) => self.branch(&parts[2])?,
                _ => return Err(EvalError::no_such_overload()),
            },
        };
        if attribute.qualifiers.is_empty() {
            return Ok(root);
        }
        self.qualified(root, attribute)
    }

    /// A branch of a conditional, or an index: reading a variable there is free.
    fn branch(&mut self, node: &'a Node) -> Eval<Value<'a>> {
        match node {
            Node::Attribute(attribute) => self.resolve(attribute),
            other => self.eval(other),
        }
    }

    fn qualified(&mut self, root: Value<'a>, attribute: &'a Attribute) -> Eval<Value<'a>> {
        let (mut value, mut optional) = match root {
            Value::Optional(Some(value)) => ((*value).clone(), true),
            none @ Value::Optional(None) => {
                return Ok(if attribute.test_only {
                    Value::Bool(false)
                } else {
                    none
                });
            }
            value => (value, false),
        };
        let last = attribute.qualifiers.len() - 1;
        for (position, qualifier) in attribute.qualifiers.iter().enumerate() {
            optional = optional || qualifier.optional;
            let index = self.branch(&qualifier.index);
            let test = attribute.test_only && position == last;
            let found = index.and_then(|index| {
                let found = step_into(&value, &index)?;
                if found.is_none() && !optional && !test {
                    return Err(missing(&value, &index));
                }
                Ok(found)
            });
            if let Err(error) = &found
                && error.is_final()
            {
                return Err(error.clone());
            }
            // What is looked for in an optional way costs only where it is found.
            if !optional || matches!(found, Ok(Some(_))) {
                self.charge(1)?;
            }
            match found? {
                present if test => return Ok(Value::Bool(present.is_some())),
                Some(found) => value = found,
                None => return Ok(Value::Optional(None)),
            }
        }
        Ok(if optional { Value::some(value) } else { value })
    }

    fn call(&mut self, call: &'a Call) -> Eval<Value<'a>> {
        // One and two arguments are always all evaluated; others stop at the first that fails. The call is charged if
        // all were evaluated, even if it is not made.
        let stops = call.args.len() > 2 || call.pattern.is_some();
        let last = call.args.len().saturating_sub(1);
        let mut failed = None;
        let mut args = Vec::with_capacity(call.args.len());
        for (position, arg) in call.args.iter().enumerate() {
            match self.eval(arg) {
                Ok(value) => args.push(value),
                Err(error) if error.is_final() || (stops && position < last) => return Err(error),
                Err(error) => {
                    failed = failed.or(Some(error));
                    args.push(Value::Null);
                }
            }
        }
        for arg in &args {
            // Cost goes by code points, which must be counted.
            if let Value::String(text) = arg {
                spend(text.len() / 256)?;
            }
        }
        self.charge(call.cost(&args, failed.is_some()))?;
        match failed {
            Some(error) => Err(error),
            None => {
                (call.native)(call.pattern.as_ref(), &args).map_err(|error| explained(error, call, &args))
            }
        }
    }

    fn fold(&mut self, fold: &'a Fold) -> Eval<Value<'a>> {
        let range = self.eval(&fold.range)?;
        self.slots[fold.accu] = Slot::Lazy(&fold.init);
        match &range {
            Value::List(list) => {
                for index in 0..list.len() {
                    let item = list.get(index);
                    let more = match fold.var2 {
                        None => self.iteration(fold, item, None)?,
                        Some(_) => self.iteration(fold, Ok(Value::Int(index as i64)), Some(item))?,
                    };
                    if !more {
                        break;
                    }
                }
            }
            Value::Map(map) => {
                for key in map.iter_keys() {
                    let value = fold.var2.map(|_| match map.find(&key) {
                        Ok(Some(value)) => Ok(value),
                        Ok(None) => Err(EvalError::new(format!("no such key: {}", key.shown()))),
                        Err(error) => Err(error),
                    });
                    if !self.iteration(fold, Ok(key), value)? {
                        break;
                    }
                }
            }
            other => {
                let name = match other {
                    Value::Null => "types.Null",
                    Value::Bool(_) => "types.Bool",
                    Value::Int(_) => "types.Int",
                    Value::Uint(_) => "types.Uint",
                    Value::Double(_) => "types.Double",
                    Value::String(_) => "types.String",
                    Value::Bytes(_) => "types.Bytes",
                    Value::Duration(_) => "types.Duration",
                    Value::Timestamp(_) => "types.Timestamp",
                    Value::Optional(_) => "*types.Optional",
                    other => other.type_name(),
                };
                return Err(EvalError::new(format!("got '{name}', expected iterable type")));
            }
        }
        let result = self.eval(&fold.result);
        self.slots[fold.accu] = Slot::Empty;
        result
    }

    /// One turn of a loop; `false` when the loop is over.
    fn iteration(
        &mut self,
        fold: &'a Fold,
        var: Eval<Value<'a>>,
        var2: Option<Eval<Value<'a>>>,
    ) -> Eval<bool> {
        self.slots[fold.var] = Slot::Ready(var);
        if let (Some(slot), Some(value)) = (fold.var2, var2) {
            self.slots[slot] = Slot::Ready(value);
        }
        match self.eval(&fold.condition) {
            Ok(Value::Bool(false)) => return Ok(false),
            Err(error) if error.is_final() => return Err(error),
            _ => {}
        }
        match &fold.step {
            Step::Plain(step) => {
                let value = self.eval(step);
                if let Err(error) = &value
                    && error.is_final()
                {
                    return Err(error.clone());
                }
                self.slots[fold.accu] = Slot::Ready(value);
            }
            Step::Append { filter, element } => {
                if self.passes(filter.as_ref(), fold)? {
                    self.append(fold, element)?;
                }
            }
            Step::Insert { filter, entry } => {
                if self.passes(filter.as_ref(), fold)? {
                    self.insert(fold, entry)?;
                }
            }
        }
        self.iterations += 1;
        if self.iterations.is_multiple_of(CHECK_FREQUENCY)
            && let Some(interrupted) = self.interrupted
            && interrupted()
        {
            return Err(EvalError::Interrupted);
        }
        Ok(true)
    }

    /// Whether the filter lets this element in. A filter that fails is the fold's new result.
    fn passes(&mut self, filter: Option<&'a Node>, fold: &'a Fold) -> Eval<bool> {
        let Some(filter) = filter else {
            return Ok(true);
        };
        let error = match self.eval(filter) {
            Ok(Value::Bool(pass)) => return Ok(pass),
            Ok(_) => EvalError::no_such_overload(),
            Err(error) if error.is_final() => return Err(error),
            Err(error) => error,
        };
        self.slots[fold.accu] = Slot::Ready(Err(error));
        Ok(false)
    }

    /// Takes the accumulator out of its slot, so that it can be changed in place.
    fn take(&mut self, fold: &'a Fold, empty: Value<'a>) -> Eval<Value<'a>> {
        match std::mem::replace(&mut self.slots[fold.accu], Slot::Empty) {
            Slot::Ready(value) => value,
            Slot::Lazy(_) | Slot::Empty => Ok(empty),
        }
    }

    fn append(&mut self, fold: &'a Fold, element: &'a Node) -> Eval<()> {
        self.charge(1)?;
        let value = self.eval(element);
        if let Err(error) = &value
            && error.is_final()
        {
            return Err(error.clone());
        }
        let list_cost = if matches!(element, Node::Const(_)) {
            0
        } else {
            LIST_CREATE
        };
        self.charge(list_cost + 1)?;
        let grown = match (self.take(fold, Value::list(Vec::new())), value) {
            (Ok(Value::List(mut list)), Ok(value)) => {
                list.push(value);
                Ok(Value::List(list))
            }
            (Err(error), _) | (_, Err(error)) => Err(error),
            _ => Err(EvalError::no_such_overload()),
        };
        self.slots[fold.accu] = Slot::Ready(grown);
        Ok(())
    }

    fn insert(&mut self, fold: &'a Fold, entry: &'a [Node]) -> Eval<()> {
        self.charge(1)?;
        // With a key and a value there are three arguments, which stop at the first that fails.
        let stops = entry.len() == 2;
        if stops && matches!(self.slots[fold.accu], Slot::Ready(Err(_))) {
            return Ok(());
        }
        let mut values = Vec::with_capacity(2);
        let mut failed = None;
        for (position, part) in entry.iter().enumerate() {
            match self.eval(part) {
                Ok(value) => values.push(value),
                Err(error) if error.is_final() => return Err(error),
                Err(error) => {
                    failed = Some((error, position + 1 == entry.len()));
                    break;
                }
            }
        }
        self.charge(u64::from(!matches!(failed, Some((_, false)))))?;
        let failed = failed.map(|(error, _)| error);
        let grown = match (self.take(fold, Value::Map(Map::empty())), failed) {
            (Err(error), _) | (_, Some(error)) => Err(error),
            (Ok(Value::Map(map)), None) => grow(map, &values).map(Value::Map),
            _ => Err(EvalError::no_such_overload()),
        };
        self.slots[fold.accu] = Slot::Ready(grown);
        Ok(())
    }
}
