//! Regular expressions as Go writes them (RE2), on an engine that is close to it: what only one of the two knows is
//! translated or refused, in Go's words.

mod class;
mod kept;

use std::sync::Arc;

use regex_automata::meta;
use regex_automata::util::syntax;
use regex_syntax::hir::{Hir, HirKind};

/// How much memory a compiled pattern may take.
const SIZE_LIMIT: usize = 2 << 20;
/// What looking for matches may take besides.
const SEARCH_LIMIT: usize = 256 << 10;
const NEST_LIMIT: u32 = 250;
/// How often something may be repeated.
const REPEATS: u32 = 1000;

/// A compiled pattern.
#[derive(Debug)]
pub struct Regex(meta::Regex);

impl Regex {
    pub fn is_match(&self, text: &str) -> bool {
        self.0.is_match(text)
    }

    /// The first match.
    pub fn find<'t>(&self, text: &'t str) -> Option<&'t str> {
        self.0.find(text).map(|found| &text[found.range()])
    }

    /// All matches, one after the other.
    pub fn find_all<'t>(&self, text: &'t str) -> impl Iterator<Item = &'t str> {
        self.0.find_iter(text).map(|found| &text[found.range()])
    }

    /// The memory that it takes, with what a first search adds to it.
    fn bytes(&self) -> usize {
        self.0.memory_usage() + self.0.create_cache().memory_usage()
    }
}

/// Compiles a pattern.
pub fn compile(pattern: &str) -> Result<Regex, String> {
    check(pattern)?;
    meta::Builder::new()
        .configure(
            meta::Config::new()
                .nfa_size_limit(Some(SIZE_LIMIT))
                .hybrid_cache_capacity(SEARCH_LIMIT),
        )
        .syntax(syntax::Config::new().nest_limit(NEST_LIMIT))
        .build(&ascii_classes(pattern))
        .map(Regex)
        .map_err(|error| match (error.size_limit(), error.syntax_error()) {
            (Some(_), _) => told("expression too large", pattern),
            (None, Some(error)) => told(&error.to_string(), pattern),
            (None, None) => told(&error.to_string(), pattern),
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
    if let Some(found) = kept(pattern) {
        return Ok(found);
    }
    let made = Arc::new(compile(pattern)?);
    kept::all().insert(pattern, &made);
    Ok(made)
}

/// A pattern that is compiled already.
pub fn kept(pattern: &str) -> Option<Arc<Regex>> {
    kept::all().get(pattern)
}

/// What the engine says, in Go's words.
fn told(error: &str, pattern: &str) -> String {
    let last = error.lines().last().unwrap_or_default();
    let problem = match last.trim_start_matches("error: ") {
        "unclosed group" => "missing closing )",
        other => other,
    };
    format!("error parsing regexp: {problem}: `{pattern}`")
}

/// Syntax that the engine here knows and RE2 does not, and the mistakes that RE2 shows in part.
fn unsupported(pattern: &str) -> Option<String> {
    let chars: Vec<char> = pattern.chars().collect();
    let text = |from: usize, to: usize| -> String { chars[from..to.min(chars.len())].iter().collect() };
    // Where an operator that repeats would apply to nothing, or to another such operator.
    let (mut nothing_before, mut repeated) = (true, None);
    let mut open = 0;
    let mut at = 0;
    while let Some(&c) = chars.get(at) {
        let start = at;
        at += 1;
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
            // One question mark makes an operator lazy.
            at += usize::from(chars.get(at) == Some(&'?'));
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
            continue;
        }
        (nothing_before, repeated) = (matches!(c, '(' | '|'), None);
        open += i32::from(c == '(') - i32::from(c == ')');
        if open < 0 {
            return Some(format!("unexpected ): `{pattern}`"));
        }
        match c {
            '\\' => match class::escaped(&chars[start..]) {
                Ok((_, length)) => at = start + length,
                Err(problem) => return Some(problem),
            },
            '[' => match class::read(&chars[start..]) {
                Ok((_, length)) => at = start + length,
                Err(problem) => return Some(problem),
            },
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

/// The pattern as the engine is to read it. RE2's `\d`, `\s`, `\w` and `\b` are ASCII; the engine's are not unless told.
fn ascii_classes(pattern: &str) -> String {
    let chars: Vec<char> = pattern.chars().collect();
    let mut translated = String::with_capacity(pattern.len() + 16);
    let mut at = 0;
    while let Some(&c) = chars.get(at) {
        at += 1;
        let read = match c {
            '\\' => class::escaped(&chars[at - 1..]),
            '[' => class::read(&chars[at - 1..]),
            // A brace that counts nothing stands for itself.
            '{' if !counts(chars[at..].iter().copied()) => Ok(("\\{".to_owned(), 1)),
            c => Ok((c.to_string(), 1)),
        };
        // What cannot be read has been refused before.
        let (text, length) = read.unwrap_or_else(|_| (c.to_string(), 1));
        translated.push_str(&text);
        at += length - 1;
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
        check("^[0-9a-zA-Z-.]+$", "a-b.c", true);
        check(r"^[\w-.]+$", "a-b.c", true);
        check(r"^[\w-.]+$", "a+b", false);
        check(r"^[^\D-]+$", "12", true);
        check(r"^[^\D-]+$", "1-2", false);
        check("^[!--]+$", "#-", true);
        check("^[a-c-e]+$", "b-e", true);
        check("^[a-c-e]+$", "d", false);
        check(r"^[\x41-\x{43}\103\t\-]+$", "B-\tC", true);
        check(r"^[\pL-]+$", "ä-", true);
        check("^[[:digit:]-a]+$", "1-a", true);
        check(r"^\p{Greek}\x{43}{2}\101$", "αCCA", true);
        check(r"^\S\D\W\z", "αa-", true);
        for pattern in [
            "(",
            "a{2,1}",
            r"\1",
            "(?=a)",
            "[z-a]",
            r"[a-\d]",
            r"[\8]",
            r"[\x{110000}]",
            "[[:word",
            "[[:letter:]]",
            "[]a",
            "[a",
            r"[a\",
            "(?P<n>a)(?<n>b)",
            r"\u0041",
            r"\q",
            r"\E",
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
    fn a_pattern_is_compiled_once() {
        assert!(kept("^only here$").is_none());
        assert!(Arc::ptr_eq(
            &compiled("^only here$").unwrap(),
            &compiled("^only here$").unwrap()
        ));
        assert!(kept("^only here$").is_some());
        assert!(compiled("(").is_err());
    }

    #[test]
    fn matches_are_found() {
        let regex = compile("[a-c]+").expect("compiles");
        assert_eq!(regex.find("..ab.c"), Some("ab"));
        assert_eq!(regex.find("..."), None);
        assert_eq!(regex.find_all("..ab.c").collect::<Vec<_>>(), ["ab", "c"]);
    }
}
