//! `$(VAR)` expansion in commands, arguments, environment values and sub-paths. Pure.

/// Replaces `$(NAME)` by what `lookup` knows; `$$` is a literal `$`, and a reference that nobody knows
/// stays as it was written.
pub fn expand(input: &str, lookup: &dyn Fn(&str) -> Option<String>) -> String {
    let mut output = String::with_capacity(input.len());
    let mut rest = input;
    while let Some(at) = rest.find('$') {
        output.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            output.push('$');
            rest = after;
        } else if let Some(inner) = rest.strip_prefix('(') {
            match inner.find(')') {
                Some(end) => {
                    let name = &inner[..end];
                    match lookup(name) {
                        Some(value) => output.push_str(&value),
                        None => {
                            output.push_str("$(");
                            output.push_str(name);
                            output.push(')');
                        }
                    }
                    rest = &inner[end + 1..];
                }
                // An unclosed reference is text.
                None => {
                    output.push_str("$(");
                    rest = inner;
                }
            }
        } else {
            output.push('$');
        }
    }
    output.push_str(rest);
    output
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expansions() {
        let check = |input: &str, expected: &str| {
            let lookup = |name: &str| match name {
                "A" => Some("1".to_owned()),
                "B" => Some("$(A)".to_owned()),
                "EMPTY" => Some(String::new()),
                _ => None,
            };
            assert_eq!(expand(input, &lookup), expected, "{input}");
        };
        check("x-$(A)-y", "x-1-y");
        check("$(B)", "$(A)");
        check("$$(A)", "$(A)");
        check("$$$(A)", "$1");
        check("$(NOPE)", "$(NOPE)");
        check("$(A", "$(A");
        check("cost $5 $", "cost $5 $");
        check("[$(EMPTY)]", "[]");
        check("$()", "$()");
        check("é$(A)é", "é1é");
    }
}
