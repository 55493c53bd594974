//! Regular expressions as Go writes them (RE2), on an engine that is close to it: what only one of the two knows is
//! translated or refused, in Go's words.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use regex::Regex;
use regex_syntax::hir::{Hir, HirKind};

/// How much memory a compiled pattern may take.
const SIZE_LIMIT: usize = 2 << 20;
/// What looking for matches may take besides.
const SEARCH_LIMIT: usize = 256 << 10;
const NEST_LIMIT: u32 = 250;
/// How often something may be repeated.
const REPEATS: u32 = 1000;
/// Compiled patterns that are kept.
const KEPT: usize = 256;

/// Compiles a pattern.
pub fn compile(pattern: &str) -> Result<Regex, String> {
    check(pattern)?;
    regex::RegexBuilder::new(&ascii_classes(pattern))
        .size_limit(SIZE_LIMIT)
        .dfa_size_limit(SEARCH_LIMIT)
        .nest_limit(NEST_LIMIT)
        .build()
        .map_err(|error| match error {
            regex::Error::CompiledTooBig(_) => told("expression too large", pattern),
            error => told(&error.to_string(), pattern),
        })
}

/// Whether a pattern can be read. It is not compiled: that may take a thousand times as long.
pub fn check(pattern: &str) -> Result<(), String> {
    if let Some(problem) = unsupported(pattern) {
        return Err(format!("error parsing regexp: {problem}"));
    }
    let mut parser = regex_syntax::ParserBuilder::new().nest_limit(NEST_LIMIT).build();
    let read = parser
        .parse(&ascii_classes(pattern))
        .map_err(|error| told(&error.to_string(), pattern))?;
    match too_often(&read) {
        Some(operator) => Err(format!(
            "error parsing regexp: invalid repeat count: `{operator}`"
        )),
        None => Ok(()),
    }
}

/// The first operator with which something is repeated more than a thousand times, those within it counted.
fn too_often(read: &Hir) -> Option<String> {
    if let Some(inner) = read.kind().subs().iter().find_map(too_often) {
        return Some(inner);
    }
    let HirKind::Repetition(repetition) = read.kind() else {
        return None;
    };
    if repeats_within(read, REPEATS) {
        return None;
    }
    let most = repetition.max.map_or(String::new(), |most| most.to_string());
    let counts = match repetition.min {
        least if repetition.max == Some(least) => most,
        least => format!("{least},{most}"),
    };
    let lazy = if repetition.greedy { "" } else { "?" };
    Some(format!("{{{counts}}}{lazy}"))
}

fn repeats_within(read: &Hir, mut left: u32) -> bool {
    if let HirKind::Repetition(repetition) = read.kind() {
        let times = repetition.max.unwrap_or(repetition.min);
        if times > left {
            return false;
        }
        left /= times.max(1);
    }
    read.kind().subs().iter().all(|sub| repeats_within(sub, left))
}

/// A compiled pattern out of those that are kept: the same one is used again and again.
pub fn compiled(pattern: &str) -> Result<Arc<Regex>, String> {
    static CACHE: LazyLock<Mutex<HashMap<String, Arc<Regex>>>> = LazyLock::new(Mutex::default);
    let lock = || CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = lock().get(pattern) {
        return Ok(found.clone());
    }
    let made = Arc::new(compile(pattern)?);
    let mut kept = lock();
    if kept.len() >= KEPT {
        kept.clear();
    }
    kept.insert(pattern.to_owned(), made.clone());
    Ok(made)
}

/// What the engine says, in Go's words.
fn told(error: &str, pattern: &str) -> String {
    let last = error.lines().last().unwrap_or_default();
    let problem = match last.trim_start_matches("error: ") {
        "unclosed group" => "missing closing )",
        "unopened group" => "unexpected )",
        other => other,
    };
    format!("error parsing regexp: {problem}: `{pattern}`")
}

/// Syntax that the engine here knows and RE2 does not, and the mistakes that RE2 shows in part.
fn unsupported(pattern: &str) -> Option<String> {
    let chars: Vec<char> = pattern.chars().collect();
    let text = |from: usize, to: usize| -> String { chars[from..to.min(chars.len())].iter().collect() };
    let mut class: Option<usize> = None;
    // Where an operator that repeats would apply to nothing, or to another such operator.
    let (mut nothing_before, mut repeated) = (true, None);
    let mut at = 0;
    while let Some(&c) = chars.get(at) {
        let start = at;
        at += 1;
        if class.is_some() {
            match c {
                '\\' => at += 1,
                ']' if class != Some(start.saturating_sub(1)) => class = None,
                '[' if chars.get(at) == Some(&':') => {
                    let end = chars[at..].windows(2).position(|pair| pair == [':', ']']);
                    at = end.map_or(at, |end| at + end + 2);
                }
                low => {
                    if let (Some('-'), Some(&high)) = (chars.get(at), chars.get(at + 1))
                        && ![']', '\\', '['].contains(&high)
                        && low > high
                    {
                        return Some(format!("invalid character class range: `{low}-{high}`"));
                    }
                }
            }
            continue;
        }
        let repeats = match c {
            '*' | '+' | '?' => true,
            '{' => {
                let body = chars[at..]
                    .iter()
                    .position(|c| *c == '}')
                    .map(|end| text(at, at + end));
                let counts = body.as_deref().filter(|body| {
                    let (least, most) = body.split_once(',').unwrap_or((body, ""));
                    let number = |text: &str| text.chars().all(|c| c.is_ascii_digit());
                    !least.is_empty() && number(least) && number(most)
                });
                if let Some(counts) = counts {
                    let too_many =
                        |count: &str| !count.is_empty() && count.parse::<u32>().is_ok_and(|n| n > REPEATS);
                    if counts.split(',').any(too_many) {
                        return Some(format!("invalid repeat count: `{{{counts}}}`"));
                    }
                    at += counts.len() + 1;
                }
                counts.is_some()
            }
            _ => false,
        };
        if repeats {
            if nothing_before {
                return Some(format!(
                    "missing argument to repetition operator: `{}`",
                    text(start, at)
                ));
            }
            if let Some(first) = repeated {
                return Some(format!(
                    "invalid nested repetition operator: `{}`",
                    text(first, at)
                ));
            }
            repeated = Some(start);
            // One question mark makes an operator lazy.
            if chars.get(at) == Some(&'?') {
                at += 1;
            }
            continue;
        }
        (nothing_before, repeated) = (matches!(c, '(' | '|'), None);
        match c {
            '\\' => match chars.get(at) {
                None => return Some("trailing backslash at end of expression: ``".to_owned()),
                Some('<' | '>' | 'u' | 'U' | '1'..='9') => {
                    return Some(format!("invalid escape sequence: `{}`", text(start, at + 1)));
                }
                Some('Q') => {
                    let end = chars[at..].windows(2).position(|pair| pair == ['\\', 'E']);
                    at = end.map_or(chars.len(), |end| at + end + 2);
                }
                Some(_) => at += 1,
            },
            '[' => {
                let negated = usize::from(chars.get(at) == Some(&'^'));
                at += negated;
                class = Some(at - 1);
                if !chars[at..].contains(&']') {
                    return Some(format!("missing closing ]: `{}`", text(start, chars.len())));
                }
            }
            '(' if chars.get(at) == Some(&'?') => {
                if matches!(chars.get(at + 1), Some('=' | '!')) {
                    return Some(format!(
                        "invalid or unsupported Perl syntax: `{}`",
                        text(start, at + 2)
                    ));
                }
                if chars.get(at + 1) == Some(&'<') && matches!(chars.get(at + 2), Some('=' | '!')) {
                    return Some(format!(
                        "invalid or unsupported Perl syntax: `{}`",
                        text(start, at + 2)
                    ));
                }
                // Flags and names are read over; the question mark is no operator.
                at += 1;
                while chars
                    .get(at)
                    .is_some_and(|c| c.is_ascii_alphanumeric() || "-_<>:".contains(*c))
                {
                    at += 1;
                    if matches!(chars[at - 1], ':' | '>') {
                        break;
                    }
                }
            }
            _ => {}
        }
    }
    None
}

/// RE2's `\d`, `\s`, `\w` and `\b` are ASCII; the engine's are not unless told.
fn ascii_classes(pattern: &str) -> String {
    let mut translated = String::with_capacity(pattern.len() + 16);
    let mut chars = pattern.chars().peekable();
    let mut in_class = false;
    while let Some(c) = chars.next() {
        match c {
            '\\' => {
                let Some(next) = chars.next() else {
                    translated.push('\\');
                    break;
                };
                match (next, in_class) {
                    ('d', false) => translated.push_str("[0-9]"),
                    ('D', false) => translated.push_str("[^0-9]"),
                    ('s', false) => translated.push_str("[\\t\\n\\f\\r ]"),
                    ('S', false) => translated.push_str("[^\\t\\n\\f\\r ]"),
                    ('w', false) => translated.push_str("[0-9A-Za-z_]"),
                    ('W', false) => translated.push_str("[^0-9A-Za-z_]"),
                    ('b', false) => translated.push_str("(?-u:\\b)"),
                    ('d', true) => translated.push_str("0-9"),
                    ('s', true) => translated.push_str("\\t\\n\\f\\r "),
                    ('w', true) => translated.push_str("0-9A-Za-z_"),
                    ('C', false) => translated.push_str("(?s:.)"),
                    ('Q', _) => {
                        let mut rest: String = chars.by_ref().collect();
                        let tail = match rest.find("\\E") {
                            Some(end) => rest.split_off(end).split_off(2),
                            None => String::new(),
                        };
                        translated.push_str(&regex::escape(&rest));
                        translated.push_str(&ascii_classes(&tail));
                        return translated;
                    }
                    _ => {
                        translated.push('\\');
                        translated.push(next);
                    }
                }
            }
            '[' if !in_class => {
                in_class = true;
                translated.push('[');
                if chars.peek() == Some(&'^') {
                    translated.push('^');
                    chars.next();
                }
                // A bracket that comes first stands for itself.
                if chars.peek() == Some(&']') {
                    translated.push_str("\\]");
                    chars.next();
                }
            }
            '[' if chars.peek() != Some(&':') => translated.push_str("\\["),
            ']' if in_class => {
                in_class = translated.ends_with(':')
                    && translated
                        .rfind("[:")
                        .is_some_and(|open| !translated[open..].contains(']'));
                translated.push(']');
            }
            '&' | '~' if in_class => {
                translated.push('\\');
                translated.push(c);
            }
            // A brace that counts nothing stands for itself.
            '{' if !in_class && !counts(chars.clone()) => translated.push_str("\\{"),
            c => translated.push(c),
        }
    }
    translated
}

/// Whether `2}`, `2,}` or `2,3}` follows.
fn counts(rest: impl Iterator<Item = char>) -> bool {
    let body: String = rest.take_while(|c| *c != '}').take(16).collect();
    let (least, most) = body.split_once(',').unwrap_or((&body, ""));
    let number = |text: &str| text.chars().all(|c| c.is_ascii_digit());
    !least.is_empty() && number(least) && number(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_mean_what_re2_means() {
        let check = |pattern: &str, text: &str, expected: bool| {
            let regex = compile(pattern).expect(pattern);
            assert_eq!(regex.is_match(text), expected, "{pattern} {text}");
        };
        check(r"^\d+$", "12", true);
        check(r"^\d+$", "١٢", false);
        check(r"^[\w.]+$", "a.b", true);
        check(r"^[\w.]+$", "ä", false);
        check(r"^[]a]+$", "]a", true);
        check(r"^[[:alpha:]]+$", "ab", true);
        check(r"^[^[:alpha:]]+$", "12", true);
        check(r"^[[:alpha:]_]+$", "a_", true);
        check(r"^[a[]+$", "a[", true);
        check(r"^\Qa.b\E+$", "a.bb", true);
        check(r"^[a&&b]+$", "a&b", true);
        check("(?i)^ab$", "AB", true);
        check("^(?:a|b)*?$", "ab", true);
        check("^(?P<n>a){1,2}$", "aa", true);
        check("^a{,2}$", "a{,2}", true);
        check(r"^[\]]$", "]", true);
        check("^[^]]$", "a", true);
        for pattern in [
            "(",
            "a{2,1}",
            r"\1",
            "(?=a)",
            "[z-a]",
            "(?P<n>a)(?<n>b)",
            r"\u0041",
            "a**",
            "a{1001}",
            "*",
        ] {
            assert!(compile(pattern).is_err(), "{pattern}");
            assert_eq!(super::check(pattern), compile(pattern).map(|_| ()), "{pattern}");
        }
    }

    #[test]
    fn repeated_repetitions_are_counted() {
        let check = |pattern: &str, expected: Option<&str>| {
            let expected =
                expected.map(|operator| format!("error parsing regexp: invalid repeat count: `{operator}`"));
            assert_eq!(super::check(pattern).err(), expected, "{pattern}");
        };
        check("(a{1000}){1000}", Some("{1000}"));
        check("((((a{100}){100}){100}){100}){100}", Some("{100}"));
        check("((a{100}){10}){10}", Some("{10}"));
        check("(a{100}){10}", None);
        check("(a{10}b{20}){60}", Some("{60}"));
        check("(a{0,1000}){2}", Some("{2}"));
        check("(a{600}){2,}?", Some("{2,}?"));
        check("((a{30}){30}){1,}", None);
        check("(a{1000})+", None);
        check("(x{1000}){0}", None);
    }

    #[test]
    fn large_patterns_are_refused() {
        assert_eq!(check(&"[a-z]{1000}".repeat(200)), Ok(()));
        let refused = compile(&"[a-z]{1000}".repeat(200)).expect_err("too large");
        assert!(refused.contains("expression too large"), "{refused}");
    }

    #[test]
    fn as_many_as_there_are_and_no_more_are_kept() {
        for number in 0..3 * KEPT {
            let regex = compiled(&format!("^a{number}$")).expect("compiles");
            assert!(regex.is_match(&format!("a{number}")));
        }
        assert!(Arc::ptr_eq(&compiled("^x$").unwrap(), &compiled("^x$").unwrap()));
        assert!(compiled("(").is_err());
    }
}
