//! Functions of lists and sets.

use std::cmp::Ordering;

use super::Native;
use super::operators::add;
use crate::error::EvalError;
use crate::limits::MAX_BUILT_SIZE;
use crate::meter::spend;
use crate::value::{Eval, List, Value};

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "isSorted" => |_, args| {
            with_list(args, |list| {
                let mut before: Option<Value<'_>> = None;
                for item in list.iter() {
                    let item = item?;
                    if let Some(before) = &before
                        && before.order(&item).is_ok_and(Ordering::is_gt)
                    {
                        return Ok(Value::Bool(false));
                    }
                    before = Some(item);
                }
                Ok(Value::Bool(true))
            })
        },
        "sum" => |_, args| {
            with_list(args, |list| {
                let mut sum: Option<Value<'_>> = None;
                for item in list.iter() {
                    let item = item?;
                    sum = Some(match sum {
                        None => item,
                        Some(sum) => add(&sum, &item)?,
                    });
                }
                Ok(sum.unwrap_or(Value::Int(0)))
            })
        },
        "min" => |_, args| with_list(args, |list| extreme(list, "min", Ordering::Less)),
        "max" => |_, args| with_list(args, |list| extreme(list, "max", Ordering::Greater)),
        "distinct" => |_, args| {
            with_list(args, |list| {
                let mut kept: Vec<Value<'_>> = Vec::new();
                for item in list.iter() {
                    let item = item?;
                    if !kept.iter().any(|known| item.equals(known).unwrap_or(false)) {
                        kept.push(item);
                    }
                }
                Ok(Value::list(kept))
            })
        },
        "reverse" => |_, args| {
            with_list(args, |list| {
                let items: Eval<Vec<Value<'_>>> =
                    (0..list.len()).rev().map(|index| list.get(index)).collect();
                Ok(Value::list(items?))
            })
        },
        "slice" => |_, args| match args {
            [Value::List(list), Value::Int(start), Value::Int(end)] => slice(list, *start, *end),
            _ => Err(EvalError::no_such_overload()),
        },
        "flatten" => |_, args| match args {
            [Value::List(list)] => flatten(list, 1).map(Value::list),
            [Value::List(list), Value::Int(depth)] => {
                if *depth < 0 {
                    return Err(EvalError::new("level must be non-negative"));
                }
                flatten(list, *depth).map(Value::list)
            }
            _ => Err(EvalError::no_such_overload()),
        },
        "sort" => |_, args| with_list(args, |list| sort(list, list)),
        "@sortByAssociatedKeys" => |_, args| match args {
            [Value::List(list), Value::List(keys)] => sort(list, keys),
            _ => Err(EvalError::no_such_overload()),
        },
        "lists.range" => |_, args| match args {
            [Value::Int(count)] => {
                if *count > MAX_BUILT_SIZE as i64 {
                    return Err(EvalError::new("list is too large"));
                }
                Ok(Value::list((0..*count).map(Value::Int).collect()))
            }
            _ => Err(EvalError::no_such_overload()),
        },
        "sets.contains" => |_, args| two(args, contains),
        "sets.equivalent" => |_, args| {
            two(args, |left, right| {
                Ok(contains(left, right)? && contains(right, left)?)
            })
        },
        "sets.intersects" => |_, args| {
            two(args, |left, right| {
                for item in left.iter() {
                    if right.contains(&item?).unwrap_or(false) {
                        return Ok(true);
                    }
                }
                Ok(false)
            })
        },
        _ => return None,
    })
}

fn with_list<'a>(args: &[Value<'a>], apply: impl FnOnce(&List<'a>) -> Eval<Value<'a>>) -> Eval<Value<'a>> {
    match args {
        [Value::List(list)] => {
            spend(list.len() * 2)?;
            apply(list)
        }
        _ => Err(EvalError::no_such_overload()),
    }
}

fn two<'a>(args: &[Value<'a>], apply: impl FnOnce(&List<'a>, &List<'a>) -> Eval<bool>) -> Eval<Value<'a>> {
    match args {
        [Value::List(left), Value::List(right)] => {
            spend((left.len() + right.len()) * 2)?;
            apply(left, right).map(Value::Bool)
        }
        _ => Err(EvalError::no_such_overload()),
    }
}

fn extreme<'a>(list: &List<'a>, name: &str, wanted: Ordering) -> Eval<Value<'a>> {
    let mut best: Option<Value<'a>> = None;
    for item in list.iter() {
        let item = item?;
        let better = match &best {
            None => true,
            Some(best) => item.order(best).is_ok_and(|order| order == wanted),
        };
        if better {
            best = Some(item);
        }
    }
    best.ok_or_else(|| EvalError::new(format!("{name} called on empty list")))
}

fn slice<'a>(list: &List<'a>, start: i64, end: i64) -> Eval<Value<'a>> {
    let problem = if start < 0 || end < 0 {
        "negative indexes not supported".to_owned()
    } else if start > end {
        "start index must be less than or equal to end index".to_owned()
    } else if (list.len() as i64) < end {
        format!("list is length {}", list.len())
    } else {
        let items: Eval<Vec<Value<'a>>> = (start..end).map(|index| list.get(index as usize)).collect();
        return Ok(Value::list(items?));
    };
    Err(EvalError::new(format!("cannot slice({start}, {end}), {problem}")))
}

fn flatten<'a>(list: &List<'a>, depth: i64) -> Eval<Vec<Value<'a>>> {
    let mut flat = Vec::new();
    for item in list.iter() {
        match item? {
            Value::List(inner) if depth > 0 => flat.extend(flatten(&inner, depth - 1)?),
            item => flat.push(item),
        }
        spend(2)?;
        if flat.len() > MAX_BUILT_SIZE {
            return Err(EvalError::new("list is too large"));
        }
    }
    Ok(flat)
}

fn sort<'a>(list: &List<'a>, keys: &List<'a>) -> Eval<Value<'a>> {
    if list.len() != keys.len() {
        return Err(EvalError::new(format!(
            "@sortByAssociatedKeys() expected a list of the same size as the associated keys list, but got {} and {} \
             elements respectively",
            list.len(),
            keys.len()
        )));
    }
    let mut keyed: Vec<(Value<'a>, Value<'a>)> = Vec::with_capacity(list.len());
    for (key, item) in keys.iter().zip(list.iter()) {
        keyed.push((key?, item?));
    }
    if let Some((first, _)) = keyed.first() {
        if first.order(first).is_err() && !matches!(first, Value::Double(_)) {
            return Err(EvalError::new("list elements must be comparable"));
        }
        let kind = first.type_name();
        if keyed.iter().any(|(key, _)| key.type_name() != kind) {
            return Err(EvalError::new("list elements must have the same type"));
        }
    }
    keyed.sort_by(|(left, _), (right, _)| left.order(right).unwrap_or(Ordering::Equal));
    Ok(Value::list(keyed.into_iter().map(|(_, item)| item).collect()))
}

fn contains<'a>(list: &List<'a>, wanted: &List<'a>) -> Eval<bool> {
    for item in wanted.iter() {
        if !list.contains(&item?)? {
            return Ok(false);
        }
    }
    Ok(true)
}
