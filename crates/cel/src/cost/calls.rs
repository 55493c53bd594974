//! What a call of each function can cost, by the sizes of its arguments, without the arguments' own cost.

use super::estimate::{Trail, size_at};
use super::range::Range;
use crate::ast::{Expr, Kind, Literal};
use crate::decl::DeclType;
use crate::limits::cost::{LIST_CREATE, REGEX_LENGTH, STRING_TRAVERSAL};
use crate::types::Type;

/// A call as cost sees it: the cost, and how large the result can be.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CallCost {
    pub cost: Range,
    pub result: Option<Range>,
}

impl CallCost {
    pub fn of(cost: Range) -> Self {
        Self { cost, result: None }
    }

    pub fn with_result(self, size: Range) -> Self {
        Self {
            result: Some(size),
            ..self
        }
    }
}

/// An argument as cost sees it.
pub(crate) struct Argument<'e> {
    pub kind: &'e Type,
    /// The size that the expression itself tells.
    pub size: Option<Range>,
    pub trail: Option<Trail>,
    pub expr: &'e Expr,
}

impl Argument<'_> {
    fn size(&self, root: Option<&DeclType>) -> Range {
        self.size
            .or_else(|| size_at(root, self.trail.as_ref()))
            .unwrap_or(Range::UNKNOWN)
    }

    /// The size as the language's own functions see it, which do not look at the schema a second time.
    fn known(&self) -> Range {
        self.size.unwrap_or(Range::UNKNOWN)
    }

    /// The type and size of a list's elements.
    fn element(&self, root: Option<&DeclType>) -> Option<(&Type, Range)> {
        let element = match self.kind {
            Type::List(element) => element,
            Type::Map(key, _) => key,
            Type::Opaque(_, parameters) => parameters.first()?,
            Type::Type(Some(of)) => of,
            _ => return None,
        };
        let trail = self.trail.as_ref().map(|trail| -> Trail {
            let mut steps = trail.to_vec();
            steps.push("@items".into());
            steps.into()
        });
        let size = size_at(root, trail.as_ref()).unwrap_or(Range::UNKNOWN);
        Some((element, size))
    }

    fn int_literal(&self) -> Option<i64> {
        match self.expr.kind {
            Kind::Literal(Literal::Int(value)) => Some(value),
            _ => None,
        }
    }

    fn count(&self, otherwise: u64) -> u64 {
        self.int_literal().map_or(otherwise, |value| value.max(0) as u64)
    }
}

const ONE: Range = Range { min: 1, max: 1 };

pub(crate) fn call_cost(
    root: Option<&DeclType>,
    function: &str,
    overload: &str,
    target: Option<&Argument<'_>>,
    args: &[Argument<'_>],
) -> CallCost {
    list_extensions(root, overload, target, args)
        .or_else(|| kubernetes(root, function, overload, target, args))
        .unwrap_or_else(|| language(overload, target, args))
}

/// The list and set libraries, which are told apart by overload.
fn list_extensions(
    root: Option<&DeclType>,
    overload: &str,
    target: Option<&Argument<'_>>,
    args: &[Argument<'_>],
) -> Option<CallCost> {
    let allocating = |factor: f64, size: Range| {
        let cost = size.factor(factor).plus(ONE).plus(Range::fixed(LIST_CREATE));
        CallCost::of(cost).with_result(size)
    };
    let sets = |factor: f64| {
        let (first, second) = (args.first()?.size(root), args.get(1)?.size(root));
        Some(CallCost::of(first.times(second).factor(factor).plus(ONE)))
    };
    let sorting = |argument: &Argument<'_>, overload: &str| {
        let textual = overload.starts_with("list_string_") || overload.starts_with("list_bytes_");
        let size = argument.size(root);
        allocating(
            if textual { 2.0 + STRING_TRAVERSAL } else { 2.0 },
            size.times(size),
        )
    };
    match overload {
        "list_sets_contains_list" | "list_sets_intersects_list" => sets(1.0),
        "list_sets_equivalent_list" => sets(2.0),
        "list_slice" => {
            let most = target?.size(root).max;
            let (start, end) = (args.first()?.count(0), args.get(1)?.count(most));
            Some(allocating(1.0, Range::fixed(end.wrapping_sub(start))))
        }
        "list_flatten" | "list_flatten_int" => {
            let depth = args.first().map_or(1, |depth| depth.count(u64::MAX));
            Some(allocating(depth as f64, target?.size(root)))
        }
        "lists_range" => Some(allocating(1.0, Range::fixed(args.first()?.count(u64::MAX)))),
        "list_reverse" => Some(allocating(1.0, target?.size(root))),
        "list_distinct" => {
            let size = target?.size(root);
            Some(allocating(2.0, size.times(size)))
        }
        sort if sort.ends_with("_sort") => Some(sorting(target?, sort)),
        sort if sort.ends_with("_sortByAssociatedKeys") => Some(sorting(args.first()?, sort)),
        _ => None,
    }
}

/// Kubernetes' libraries, and the string functions that it counts in its own way; told apart by function.
fn kubernetes(
    root: Option<&DeclType>,
    function: &str,
    overload: &str,
    target: Option<&Argument<'_>>,
    args: &[Argument<'_>],
) -> Option<CallCost> {
    let unit = Some(CallCost::of(ONE));
    let traverse = |argument: &Argument<'_>, factor: f64| CallCost::of(argument.size(root).factor(factor));
    match function {
        "check" => Some(CallCost::of(Range::fixed(350_000))),
        "serviceAccount" | "path" | "group" | "resource" | "subresource" | "namespace" | "name"
        | "allowed" | "reason" | "error" | "errored" => unit,
        "fieldSelector" | "labelSelector" if args.len() == 1 => {
            Some(CallCost::of(selector(args[0].size(root))))
        }
        "isSorted" | "sum" | "max" | "min" | "indexOf" | "lastIndexOf" => {
            let list = target?;
            let Some((element, size)) = list.element(root) else {
                return Some(traverse(list, STRING_TRAVERSAL));
            };
            let each = match element {
                Type::String | Type::Bytes => ONE.plus(size.factor(STRING_TRAVERSAL)),
                _ => ONE,
            };
            Some(CallCost::of(list.size(root).times(each)))
        }
        "url" if args.len() == 1 => {
            Some(traverse(&args[0], STRING_TRAVERSAL).with_result(args[0].size(root)))
        }
        "lowerAscii" | "upperAscii" | "substring" | "trim" => {
            let text = target?;
            Some(traverse(text, STRING_TRAVERSAL).with_result(text.size(root)))
        }
        "replace" if args.len() >= 2 => {
            let text = target?.size(root);
            let result = replaced(text, args[0].size(root), args[1].size(root));
            Some(CallCost::of(text.factor(2.0 * STRING_TRAVERSAL)).with_result(result))
        }
        "split" => {
            let text = target?.size(root);
            let most = args
                .get(1)
                .and_then(Argument::int_literal)
                .map_or(text.max, |limit| limit as u64);
            Some(CallCost::of(text.factor(2.0 * STRING_TRAVERSAL)).with_result(Range::new(0, most)))
        }
        "join" => {
            let list = target?;
            let count = list.size(root);
            let mut size = list
                .element(root)
                .map_or(Range::default(), |(_, size)| count.times(size));
            if let Some(separator) = args.first() {
                let separators = Range::new(count.min.saturating_sub(1), count.max.saturating_sub(1));
                size = size.plus(separator.size(root).times(separators));
            }
            Some(CallCost::of(size.factor(STRING_TRAVERSAL)).with_result(size))
        }
        "find" | "findAll" if !args.is_empty() => {
            let text = target?.size(root);
            let per_text = text.plus(ONE).factor(STRING_TRAVERSAL);
            let per_pattern = args[0].size(root).factor(REGEX_LENGTH);
            Some(CallCost::of(per_text.times(per_pattern)).with_result(Range::new(0, text.max)))
        }
        "ip" if overload == "cidr_ip" => unit,
        "cidr" | "isIP" | "isCIDR" | "ip" | "quantity" | "isQuantity" | "semver" | "isSemver" => {
            Some(traverse(args.first()?, STRING_TRAVERSAL))
        }
        "ip.isCanonical" => Some(traverse(args.first()?, 2.0 * STRING_TRAVERSAL)),
        "containsIP" | "containsCIDR" => {
            let address = Range::new(4, 16);
            let mut cost = address.plus(address).factor(STRING_TRAVERSAL);
            if function == "containsCIDR" {
                cost = cost.plus(address.factor(STRING_TRAVERSAL)).plus(ONE);
            }
            if overload.ends_with("_string") {
                cost = cost.plus(args.first()?.size(root).factor(STRING_TRAVERSAL));
            }
            Some(CallCost::of(cost))
        }
        "validate" => {
            let text = args.first()?.size(root).factor(STRING_TRAVERSAL);
            Some(CallCost::of(text.factor(128.0 * REGEX_LENGTH)))
        }
        name if super::costs_one(name) => unit,
        "_==_" if args.len() == 2 && args[0].kind == args[1].kind => equality(args),
        _ => None,
    }
}

/// The library's types compare in one step, but for those made of text.
fn equality(args: &[Argument<'_>]) -> Option<CallCost> {
    let (Type::Opaque(name, _) | Type::Struct(name)) = args[0].kind else {
        return None;
    };
    match &**name {
        "net.IP" | "net.CIDR" | "kubernetes.Quantity" | "kubernetes.Semver" => Some(CallCost::of(ONE)),
        "kubernetes.NamedFormat" => Some(CallCost::of(Range::new(1, 64).factor(STRING_TRAVERSAL))),
        "kubernetes.URL" => {
            let most = args[1].size.map_or(1, |size| size.max);
            Some(CallCost::of(Range::new(1, most).factor(STRING_TRAVERSAL)))
        }
        name if name.starts_with("kubernetes.authorization.") => Some(CallCost::of(ONE)),
        _ => None,
    }
}

/// Parsing a selector: its text, and a list and a structure for every two characters.
pub(crate) fn selector(length: Range) -> Range {
    let requirements = length.factor(0.5).factor((LIST_CREATE + 40) as f64);
    Range::fixed(LIST_CREATE)
        .plus(length.factor(STRING_TRAVERSAL))
        .plus(requirements)
}

/// How long a text can be after replacing.
fn replaced(text: Range, from: Range, to: Range) -> Range {
    let (mut count, mut kept) = (Range::default(), Range::default());
    if from.min == 0 {
        count.max = text.max.saturating_add(1);
        kept.max = text.max;
    } else if to.max <= from.min {
        kept.max = text.max;
    } else {
        count.max = (text.max as f64 / from.min as f64).ceil() as u64;
    }
    if from.max == 0 {
        count.min = text.min.saturating_add(1);
        kept.min = text.min;
    } else if from.max <= to.min {
        kept.min = text.min;
    } else {
        count.min = (text.min as f64 / from.max as f64).ceil() as u64;
    }
    count.times(to).plus(kept)
}

/// The language's own functions, told apart by overload.
fn language(overload: &str, target: Option<&Argument<'_>>, args: &[Argument<'_>]) -> CallCost {
    let first = args.first();
    match (overload, target, first) {
        ("string_format", Some(format), _) => CallCost::of(format.known().factor(STRING_TRAVERSAL)),
        ("string_to_bytes", _, Some(text)) => {
            let size = text.known();
            CallCost::of(size.factor(STRING_TRAVERSAL))
                .with_result(Range::new(size.min, size.max.wrapping_mul(4)))
        }
        ("bytes_to_string", _, Some(bytes)) => {
            let size = bytes.known();
            CallCost::of(size.factor(STRING_TRAVERSAL)).with_result(Range::new(size.min / 4, size.max))
        }
        ("strings_quote", _, Some(text)) => {
            let size = text.known();
            let most = size.max.wrapping_mul(2).wrapping_add(2);
            CallCost::of(size.factor(STRING_TRAVERSAL))
                .with_result(Range::new(size.min.wrapping_add(2), most))
        }
        ("starts_with_string" | "ends_with_string", _, Some(part)) => {
            CallCost::of(part.known().factor(STRING_TRAVERSAL))
        }
        ("in_list", _, Some(_)) if args.len() == 2 => CallCost::of(args[1].known()),
        ("matches_string", Some(text), Some(pattern)) => {
            let per_text = text.known().plus(ONE).factor(STRING_TRAVERSAL);
            CallCost::of(per_text.times(pattern.known().factor(REGEX_LENGTH)))
        }
        ("contains_string", Some(text), Some(part)) => {
            let per_text = text.known().factor(STRING_TRAVERSAL);
            CallCost::of(per_text.times(part.known().factor(STRING_TRAVERSAL)))
        }
        ("add_list", _, Some(left)) => CallCost::of(ONE).with_result(left.known().plus(args[1].known())),
        ("add_string" | "add_bytes", _, Some(left)) => {
            let size = left.known().plus(args[1].known());
            CallCost::of(size.factor(STRING_TRAVERSAL)).with_result(size)
        }
        (compared, _, Some(left)) if compares_sizes(compared) => {
            let most = left.known().max.min(args[1].known().max);
            CallCost::of(Range::new(u64::from(most > 0), most).factor(STRING_TRAVERSAL))
        }
        _ => CallCost::of(ONE),
    }
}

/// Comparisons that look at as much as the smaller side has.
pub(crate) fn compares_sizes(overload: &str) -> bool {
    matches!(
        overload,
        "equals"
            | "not_equals"
            | "less_string"
            | "less_bytes"
            | "less_equals_string"
            | "less_equals_bytes"
            | "greater_string"
            | "greater_bytes"
            | "greater_equals_string"
            | "greater_equals_bytes"
    )
}
