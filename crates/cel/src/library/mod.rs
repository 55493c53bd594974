//! What the functions do. One file a library; `native` is the list of all.

pub(crate) mod authorizer;
mod convert;
mod lists;
pub(crate) mod named_format;
pub(crate) mod net;
mod operators;
mod optional;
mod quantity;
pub(crate) mod regex;
pub(crate) mod semver;
pub(crate) mod string_format;
mod strings;
mod times;
pub(crate) mod url;

use crate::value::{Eval, Value};
use regex::Pattern;

/// A function: the pattern if it has a constant one, and the arguments, the receiver first.
pub(crate) type Native = for<'a> fn(Option<&Pattern>, &[Value<'a>]) -> Eval<Value<'a>>;

/// The implementation of a function, with its name.
pub(crate) fn native(name: &str) -> Option<(&'static str, Native)> {
    let (name, _) = crate::functions::FUNCTIONS.get_key_value(name)?;
    operators::native(name)
        .or_else(|| convert::native(name))
        .or_else(|| strings::native(name))
        .or_else(|| regex::native(name))
        .or_else(|| lists::native(name))
        .or_else(|| optional::native(name))
        .or_else(|| times::native(name))
        .or_else(|| quantity::native(name))
        .or_else(|| semver::native(name))
        .or_else(|| net::native(name))
        .or_else(|| url::native(name))
        .or_else(|| named_format::native(name))
        .or_else(|| authorizer::native(name))
        .map(|native| (*name, native))
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_function_is_implemented() {
        // These are part of the evaluator.
        let built_in = [
            "_&&_",
            "_||_",
            "_?_:_",
            "_[_]",
            "_[?_]",
            "_?._",
            "@not_strictly_false",
            "or",
            "orValue",
        ];
        let mut missing: Vec<_> = crate::functions::FUNCTIONS
            .keys()
            .filter(|name| !built_in.contains(name) && super::native(name).is_none())
            .collect();
        missing.sort();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
