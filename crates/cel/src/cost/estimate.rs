//! The static estimate: a walk over the checked tree that adds up what each node can cost, with sizes from the
//! schema's limits. What single functions cost is in `calls.rs`.

use std::collections::HashMap;
use std::sync::Arc;

use super::calls::{Argument, CallCost, call_cost};
use super::range::Range;
use crate::ast::{ACCUMULATOR, Comprehension, Expr, Id, Kind, Literal};
use crate::checker::Checked;
use crate::decl::DeclType;
use crate::limits::cost::{LIST_CREATE, MAP_CREATE, STRUCT_CREATE};
use crate::types::Type;

/// The cost of an expression, the least and the most. Sizes of what can be reached from variables come from `root`.
pub(crate) fn estimate(checked: &Checked, root: Option<&DeclType>) -> Range {
    let count = checked.types.len();
    let mut estimator = Estimator {
        checked,
        root,
        paths: vec![None; count],
        sizes: vec![None; count],
        entries: vec![None; count],
        locals: HashMap::new(),
    };
    estimator.cost(&checked.root)
}

/// The way from a variable to a value, such as `self`, `spec`, `@items`.
pub(crate) type Trail = Arc<[Arc<str>]>;

/// The sizes of a container's keys and values.
#[derive(Debug, Clone, Copy)]
struct Entries {
    is_list: bool,
    key: Range,
    value: Range,
}

impl Entries {
    fn union(first: Option<Self>, second: Option<Self>) -> Option<Self> {
        let (first, second) = (first?, second?);
        Some(Self {
            is_list: first.is_list,
            key: first.key.union(second.key),
            value: first.value.union(second.value),
        })
    }
}

#[derive(Debug, Clone)]
struct Local {
    trail: Option<Trail>,
    size: Option<Range>,
    entries: Option<Entries>,
}

struct Estimator<'c> {
    checked: &'c Checked,
    root: Option<&'c DeclType>,
    paths: Vec<Option<Trail>>,
    sizes: Vec<Option<Range>>,
    entries: Vec<Option<Entries>>,
    locals: HashMap<Arc<str>, Vec<Local>>,
}

fn extend(trail: Option<Trail>, step: &str) -> Trail {
    let mut steps: Vec<Arc<str>> = trail.map(|trail| trail.to_vec()).unwrap_or_default();
    steps.push(step.into());
    steps.into()
}

/// Follows a trail through the declared type. It always begins at the root, whatever the variable is called.
pub(crate) fn size_at(root: Option<&DeclType>, trail: Option<&Trail>) -> Option<Range> {
    let mut at = root?;
    let steps = trail?;
    for step in steps.get(1..)? {
        at = match &**step {
            "@items" | "@values" => at.element.as_ref()?,
            "@keys" => at.key.as_ref()?,
            name => at
                .field(name)
                .or_else(|| at.element.as_ref().filter(|_| at.any_name))?,
        };
    }
    Some(Range::new(0, at.max_elements as u64))
}

fn is_scalar(kind: &Type) -> bool {
    match kind {
        Type::Bool | Type::Double | Type::Duration | Type::Int | Type::Timestamp | Type::Uint => true,
        other => other.as_optional().is_some_and(is_scalar),
    }
}

impl<'c> Estimator<'c> {
    fn kind(&self, expr: &Expr) -> &'c Type {
        self.checked.kind_of(expr)
    }

    fn local(&self, name: &str) -> Option<&Local> {
        self.locals.get(name)?.last()
    }

    fn push(&mut self, name: &Arc<str>, local: Local) {
        self.locals.entry(name.clone()).or_default().push(local);
    }

    fn pop(&mut self, name: &str) {
        if let Some(stack) = self.locals.get_mut(name) {
            stack.pop();
        }
    }

    fn trail(&self, expr: &Expr) -> Option<Trail> {
        if let Kind::Ident(name) = &expr.kind
            && let Some(local) = self.local(name)
        {
            return local.trail.clone();
        }
        self.paths[expr.id as usize].clone()
    }

    fn size(&mut self, expr: &Expr) -> Option<Range> {
        if let Some(size) = self.sizes[expr.id as usize] {
            return Some(size);
        }
        match &expr.kind {
            Kind::Literal(Literal::String(text)) => return Some(Range::fixed(text.chars().count() as u64)),
            Kind::Literal(Literal::Bytes(bytes)) => return Some(Range::fixed(bytes.len() as u64)),
            Kind::Literal(_) => return Some(Range::fixed(1)),
            Kind::List { elements, .. } => return Some(Range::fixed(elements.len() as u64)),
            Kind::Map(entries) => return Some(Range::fixed(entries.len() as u64)),
            _ => {}
        }
        if let Some(size) = size_at(self.root, self.trail(expr).as_ref()) {
            self.sizes[expr.id as usize] = Some(size);
            return Some(size);
        }
        if is_scalar(self.kind(expr)) {
            return Some(Range::fixed(1));
        }
        match &expr.kind {
            Kind::Ident(name) => self.local(name)?.size,
            _ => None,
        }
    }

    fn size_or_unknown(&mut self, expr: &Expr) -> Range {
        self.size(expr).unwrap_or(Range::UNKNOWN)
    }

    fn entries(&self, expr: &Expr) -> Option<Entries> {
        if let Some(entries) = self.entries[expr.id as usize] {
            return Some(entries);
        }
        match &expr.kind {
            Kind::Ident(name) => self.local(name)?.entries,
            _ => None,
        }
    }

    fn cost(&mut self, expr: &Expr) -> Range {
        match &expr.kind {
            Kind::Literal(_) | Kind::Broken => Range::default(),
            Kind::Struct { fields, .. } => {
                let sum = fields
                    .iter()
                    .fold(Range::default(), |sum, field| sum.plus(self.cost(&field.value)));
                sum.plus(Range::fixed(STRUCT_CREATE))
            }
            Kind::Ident(name) => {
                let trail = match self.local(name) {
                    Some(local) => local.trail.clone(),
                    None => Some(Arc::from([name.clone()])),
                };
                self.paths[expr.id as usize] = trail;
                Range::fixed(1)
            }
            Kind::Select {
                operand,
                field,
                test_only,
            } => {
                let mut sum = self.cost(operand);
                if *test_only {
                    return sum;
                }
                if matches!(self.kind(operand), Type::Map(..) | Type::Struct(_)) {
                    sum = sum.plus(Range::fixed(1));
                }
                let trail = extend(self.trail(operand), field);
                self.paths[expr.id as usize] = Some(trail);
                sum
            }
            Kind::Call {
                function,
                target,
                args,
            } => self.call(expr, function, target.as_deref(), args),
            Kind::List { elements, .. } => {
                let mut sum = Range::default();
                let mut sizes = empty_union(elements.is_empty());
                for element in elements {
                    sum = sum.plus(self.cost(element));
                    sizes = sizes.union(self.size_or_unknown(element));
                }
                self.entries[expr.id as usize] = Some(Entries {
                    is_list: true,
                    key: Range::fixed(1),
                    value: sizes,
                });
                sum.plus(Range::fixed(LIST_CREATE))
            }
            Kind::Map(entries) => {
                let mut sum = Range::default();
                let (mut keys, mut values) =
                    (empty_union(entries.is_empty()), empty_union(entries.is_empty()));
                for entry in entries {
                    sum = sum.plus(self.cost(&entry.key)).plus(self.cost(&entry.value));
                    keys = keys.union(self.size_or_unknown(&entry.key));
                    values = values.union(self.size_or_unknown(&entry.value));
                }
                self.entries[expr.id as usize] = Some(Entries {
                    is_list: false,
                    key: keys,
                    value: values,
                });
                sum.plus(Range::fixed(MAP_CREATE))
            }
            Kind::Comprehension(fold) if is_bind(fold) => self.bind(expr, fold),
            Kind::Comprehension(fold) => self.fold(expr, fold),
        }
    }

    fn argument<'e>(&mut self, expr: &'e Expr) -> Argument<'e>
    where
        'c: 'e,
    {
        // Only what starts at a variable has a trail; the accumulator of a macro is none.
        let trail = self
            .trail(expr)
            .filter(|trail| trail.first().is_none_or(|first| &**first != ACCUMULATOR));
        Argument {
            kind: self.kind(expr),
            size: self.size(expr),
            trail,
            expr,
        }
    }

    fn call(&mut self, expr: &Expr, function: &str, target: Option<&Expr>, args: &[Expr]) -> Range {
        if function == "dyn" && args.len() == 1 {
            let cost = self.cost(&args[0]);
            self.copy_sizes(expr.id, &args[0]);
            return cost.plus(Range::fixed(1));
        }
        let mut costs = Vec::with_capacity(args.len());
        let mut arguments = Vec::with_capacity(args.len());
        for arg in args {
            costs.push(self.cost(arg));
            arguments.push(self.argument(arg));
        }
        let checked = self.checked;
        let overloads = checked.overloads(expr.id);
        if overloads.is_empty() {
            return Range::default();
        }
        let mut sum = Range::default();
        let target = target.map(|target| {
            sum = self.cost(target);
            self.argument(target)
        });
        let mut whole = Range::new(u64::MAX, 0);
        let mut result_size: Option<Range> = None;
        for overload in overloads {
            let cost = self.overload(
                expr,
                function,
                overload,
                target.as_ref(),
                args,
                &arguments,
                &costs,
            );
            whole = whole.union(cost.cost);
            result_size = match (result_size, cost.result) {
                (Some(before), Some(size)) => Some(before.union(size)),
                (before, size) => before.or(size),
            };
            let step = match *overload {
                "index_list" => Some("@items"),
                "index_map" => Some("@values"),
                _ => None,
            };
            if let (Some(step), Some(container)) = (step, args.first()) {
                result_size = self.entries(container).map(|entries| entries.value);
                let trail = extend(self.trail(container), step);
                self.paths[expr.id as usize] = Some(trail);
            }
            if result_size.is_none() {
                result_size = self.size(expr);
            }
        }
        if result_size.is_some() {
            self.sizes[expr.id as usize] = result_size;
        }
        sum.plus(whole)
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one call, used once")]
    fn overload(
        &mut self,
        expr: &Expr,
        function: &str,
        overload: &str,
        target: Option<&Argument<'_>>,
        args: &[Expr],
        arguments: &[Argument<'_>],
        costs: &[Range],
    ) -> CallCost {
        let of_args = costs.iter().fold(Range::default(), |sum, cost| sum.plus(*cost));
        match overload {
            "logical_and" | "logical_or" => {
                return CallCost::of(Range::new(costs[0].min, costs[0].plus(costs[1]).max));
            }
            "conditional" => {
                let size = self
                    .size_or_unknown(&args[1])
                    .union(self.size_or_unknown(&args[2]));
                let entries = Entries::union(self.entries(&args[1]), self.entries(&args[2]));
                if entries.is_some() {
                    self.entries[expr.id as usize] = entries;
                }
                let cost = costs[0].plus(costs[1].union(costs[2]));
                return CallCost::of(cost).with_result(size);
            }
            "add_string" | "add_bytes" | "add_list" => {
                let entries = Entries::union(self.entries(&args[0]), self.entries(&args[1]));
                if entries.is_some() {
                    self.entries[expr.id as usize] = entries;
                }
            }
            _ => {}
        }
        let call = call_cost(self.root, function, overload, target, arguments);
        CallCost {
            cost: call.cost.plus(of_args),
            result: call.result,
        }
    }

    fn copy_sizes(&mut self, to: Id, from: &Expr) {
        if let Some(size) = self.size(from) {
            self.sizes[to as usize] = Some(size);
        }
        if let Some(entries) = self.entries(from) {
            self.entries[to as usize] = Some(entries);
        }
    }

    fn push_accumulator(&mut self, fold: &Comprehension) {
        let local = Local {
            trail: self.trail(&fold.init),
            size: self.size(&fold.init),
            entries: self.entries(&fold.init),
        };
        self.push(&fold.accu, local);
    }

    fn bind(&mut self, expr: &Expr, fold: &Comprehension) -> Range {
        let sum = self.cost(&fold.range).plus(self.cost(&fold.init));
        self.push_accumulator(fold);
        let sum = sum.plus(self.cost(&fold.result));
        self.pop(&fold.accu);
        self.copy_sizes(expr.id, &fold.result);
        sum
    }

    fn fold(&mut self, expr: &Expr, fold: &Comprehension) -> Range {
        let mut sum = self.cost(&fold.range).plus(self.cost(&fold.init));
        self.push_accumulator(fold);
        self.push_iterated(fold);
        let each = self.cost(&fold.condition).plus(self.cost(&fold.step));
        self.pop(&fold.var);
        if let Some(var2) = &fold.var2 {
            self.pop(var2);
        }
        sum = sum.plus(self.cost(&fold.result));
        self.pop(&fold.accu);
        let count = self.size_or_unknown(&fold.range);
        sum = sum.plus(count.times(each));
        match &fold.init.kind {
            Kind::Literal(_) => self.sizes[expr.id as usize] = self.size(&fold.init),
            Kind::List { .. } | Kind::Map(_) => {
                self.sizes[expr.id as usize] = Some(count);
                if let Some(entries) = self.entries(&fold.step) {
                    self.entries[expr.id as usize] = Some(entries);
                }
            }
            _ => {}
        }
        sum
    }

    fn push_iterated(&mut self, fold: &Comprehension) {
        let entries = self.entries(&fold.range);
        let is_list = match entries {
            Some(entries) => entries.is_list,
            None => matches!(self.kind(&fold.range), Type::List(_)),
        };
        let trail = self.trail(&fold.range);
        let local = |step: &str, size: Option<Range>| Local {
            trail: Some(extend(trail.clone(), step)),
            size,
            entries: None,
        };
        let value = local(
            if is_list { "@items" } else { "@values" },
            entries.map(|entries| entries.value),
        );
        let key_size = entries.map(|entries| entries.key);
        match &fold.var2 {
            Some(var2) => {
                let key = local(if is_list { "@indices" } else { "@keys" }, key_size);
                self.push(&fold.var, key);
                self.push(var2, value);
            }
            None if is_list => self.push(&fold.var, value),
            None => self.push(&fold.var, local("@keys", key_size)),
        }
    }
}

/// The start of a union over elements: nothing yet, unless there are none.
fn empty_union(no_elements: bool) -> Range {
    Range::new(if no_elements { 0 } else { u64::MAX }, 0)
}

/// Comprehensions over an empty list only name a value.
pub(crate) fn is_bind(fold: &Comprehension) -> bool {
    matches!(&fold.range.kind, Kind::List { elements, .. } if elements.is_empty())
        && matches!(fold.condition.kind, Kind::Literal(Literal::Bool(false)))
}
