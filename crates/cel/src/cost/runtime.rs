//! What a call costs while it runs, by the sizes of its actual arguments. It is charged before the call, so that a
//! call that is too expensive is not made.

use super::calls::{compares_sizes, selector};
use super::range::{Range, scale};
use crate::limits::cost::{LIST_CREATE, REGEX_LENGTH, STRING_TRAVERSAL};
use crate::value::Value;

/// The cost of a call. The overload is known when the types decided for one.
pub(crate) fn call_cost(function: &str, overload: Option<&str>, args: &[Value<'_>]) -> u64 {
    overload
        .and_then(|overload| list_extensions(overload, args))
        .or_else(|| kubernetes(function, overload, args))
        .unwrap_or_else(|| language(overload.unwrap_or_default(), args))
}

/// The cost of calls that are costed by their result, when an argument failed and the result is an error.
pub(crate) fn cost_of_failure(function: &str, overload: Option<&str>) -> Option<u64> {
    match (function, overload) {
        ("join", _) => Some(scale(1, 2.0 * STRING_TRAVERSAL)),
        (_, Some("list_slice" | "lists_range" | "list_reverse")) => Some(2 + LIST_CREATE),
        _ => None,
    }
}

fn size(args: &[Value<'_>], index: usize) -> u64 {
    args.get(index).map_or(1, Value::size)
}

fn list_extensions(overload: &str, args: &[Value<'_>]) -> Option<u64> {
    let allocating = |factor: f64, size: u64| ((size as f64 * factor) as u64).saturating_add(1 + LIST_CREATE);
    let sets = |factor: f64| {
        let product = size(args, 0).saturating_mul(size(args, 1));
        ((product as f64 * factor) as u64).saturating_add(1)
    };
    let compared = |index: usize| {
        let count = size(args, index);
        let textual = match args.get(index) {
            Some(Value::List(list)) if count > 0 => {
                matches!(list.get(0), Ok(Value::String(_) | Value::Bytes(_)))
            }
            _ => false,
        };
        allocating(
            if textual { 2.0 + STRING_TRAVERSAL } else { 2.0 },
            count.saturating_mul(count),
        )
    };
    let int = |index: usize| match args.get(index) {
        Some(Value::Int(value)) => *value,
        _ => 0,
    };
    Some(match overload {
        "list_sets_contains_list" | "list_sets_intersects_list" => sets(1.0),
        "list_sets_equivalent_list" => sets(2.0),
        // What is sliced in vain is an error, which has the size of one.
        "list_slice" => {
            let (start, end, length) = (int(1), int(2), size(args, 0) as i64);
            let valid = start >= 0 && start <= end && end <= length;
            allocating(1.0, if valid { (end - start) as u64 } else { 1 })
        }
        "list_flatten" => allocating(1.0, size(args, 0)),
        "list_flatten_int" => allocating(int(1).max(0) as f64, size(args, 0)),
        "lists_range" => allocating(1.0, int(0).max(0) as u64),
        "list_reverse" => allocating(1.0, size(args, 0)),
        "list_distinct" => compared(0),
        sort if sort.ends_with("_sort") => compared(0),
        sort if sort.ends_with("_sortByAssociatedKeys") => compared(1),
        _ => return None,
    })
}

fn kubernetes(function: &str, overload: Option<&str>, args: &[Value<'_>]) -> Option<u64> {
    let traverse = |index: usize, factor: f64| scale(size(args, index), factor);
    let text_by_pattern = |text: u64, pattern: u64| {
        scale(text.saturating_add(1), STRING_TRAVERSAL).saturating_mul(scale(pattern, REGEX_LENGTH))
    };
    Some(match function {
        "check" => 350_000,
        "serviceAccount" | "path" | "group" | "resource" | "subresource" | "namespace" | "name"
        | "allowed" | "reason" | "error" | "errored" => 1,
        "fieldSelector" | "labelSelector" if args.len() >= 2 => selector(Range::fixed(size(args, 1))).max,
        "isSorted" | "sum" | "max" | "min" | "indexOf" | "lastIndexOf" => args.first().map_or(0, traversal),
        "url"
        | "lowerAscii"
        | "upperAscii"
        | "substring"
        | "trim"
        | "cidr"
        | "isIP"
        | "isCIDR"
        | "quantity"
        | "isQuantity"
        | "semver"
        | "isSemver"
        | "jsonpatch.escapeKey"
            if !args.is_empty() =>
        {
            traverse(0, STRING_TRAVERSAL)
        }
        "replace" | "split" | "ip.isCanonical" if !args.is_empty() => traverse(0, 2.0 * STRING_TRAVERSAL),
        "join" if !args.is_empty() => scale(joined(args), 2.0 * STRING_TRAVERSAL),
        "find" | "findAll" if args.len() >= 2 => text_by_pattern(size(args, 0), size(args, 1)),
        "ip" if overload == Some("cidr_ip") => 1,
        "ip" if !args.is_empty() => traverse(0, STRING_TRAVERSAL),
        "containsIP" | "containsCIDR" if args.len() >= 2 => {
            let address = size(args, 0);
            let mut cost = scale(address * 2, STRING_TRAVERSAL);
            if function == "containsCIDR" {
                cost += scale(address, STRING_TRAVERSAL) + 1;
            }
            if overload.is_some_and(|overload| overload.ends_with("_string")) {
                cost += traverse(1, STRING_TRAVERSAL);
            }
            cost
        }
        "validate" => match args {
            [Value::Format(format), text, ..] => text_by_pattern(text.size(), format.max_regex_size),
            _ => return None,
        },
        name if super::costs_one(name) => 1,
        "_==_" => match args.first() {
            Some(
                Value::Quantity(_)
                | Value::Ip(_)
                | Value::Cidr(_)
                | Value::Format(_)
                | Value::Url(_)
                | Value::Semver(_)
                | Value::Authorizer(_),
            ) => 1,
            _ => return None,
        },
        _ => return None,
    })
}

/// The length of what `join` makes.
fn joined(args: &[Value<'_>]) -> u64 {
    let Value::List(list) = &args[0] else {
        return 1;
    };
    let texts: u64 = list.iter().map(|item| item.map_or(1, |item| item.size())).sum();
    let separator = args.get(1).map_or(0, Value::size);
    texts.saturating_add(separator.saturating_mul((list.len() as u64).saturating_sub(1)))
}

/// What it costs to look at everything in a value.
fn traversal(value: &Value<'_>) -> u64 {
    match value {
        Value::String(text) => (text.len() as f64 * STRING_TRAVERSAL) as u64,
        Value::Bytes(bytes) => (bytes.len() as f64 * STRING_TRAVERSAL) as u64,
        Value::List(list) => list
            .iter()
            .map(|item| item.map_or(1, |item| traversal(&item)))
            .sum(),
        Value::Map(map) => map
            .keys()
            .iter()
            .map(|key| {
                let value = map.find(key).ok().flatten();
                traversal(key) + value.map_or(1, |value| traversal(&value))
            })
            .sum(),
        _ => 1,
    }
}

fn language(overload: &str, args: &[Value<'_>]) -> u64 {
    match overload {
        "starts_with_string" | "ends_with_string" | "string_to_bytes" | "bytes_to_string"
        | "strings_quote" | "string_format" => scale(size(args, 0), STRING_TRAVERSAL),
        "in_list" => size(args, 1),
        "add_string" | "add_bytes" => scale(size(args, 0).saturating_add(size(args, 1)), STRING_TRAVERSAL),
        "matches_string" => {
            let text = scale(size(args, 0).saturating_add(1), STRING_TRAVERSAL);
            text.saturating_mul(scale(size(args, 1), REGEX_LENGTH))
        }
        "contains_string" => {
            let text = scale(size(args, 0), STRING_TRAVERSAL);
            text.saturating_mul(scale(size(args, 1), STRING_TRAVERSAL))
        }
        compared if compares_sizes(compared) => scale(size(args, 0).min(size(args, 1)), STRING_TRAVERSAL),
        _ => 1,
    }
}
