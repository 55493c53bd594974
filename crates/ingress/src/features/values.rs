//! The annotations of one Ingress by what follows their prefix, as the features read them. What nobody asked for is
//! reported at the end.

use std::collections::BTreeMap;

use crate::compile::Problem;

/// Ours comes first: it wins where both are given.
const PREFIXES: [&str; 2] = ["ingress.skiff.io/", "nginx.ingress.kubernetes.io/"];

/// Prefixes of other controllers' annotations.
const OTHERS: [&str; 5] = [
    "nginx.org/",
    "traefik.ingress.kubernetes.io/",
    "haproxy.org/",
    "haproxy-ingress.github.io/",
    "alb.ingress.kubernetes.io/",
];

/// Of those that begin with `auth-`, the ones that only say how an answer is fetched or shown. Without any other, more
/// clients could pass than the Ingress means.
const HARMLESS: [&str; 7] = [
    "auth-cache-duration",
    "auth-cache-key",
    "auth-keepalive",
    "auth-keepalive-requests",
    "auth-keepalive-share-vars",
    "auth-keepalive-timeout",
    "auth-tls-error-page",
];

const CLOSED: &str = "so its requests are answered with 503";

struct Value<'a> {
    name: &'a str,
    text: &'a str,
    used: bool,
}

pub struct Values<'a> {
    all: BTreeMap<&'a str, Value<'a>>,
    problems: &'a mut Vec<Problem>,
    /// Something that restricts access cannot be enforced.
    pub closed: bool,
}

impl<'a> Values<'a> {
    pub fn new(
        annotations: impl Iterator<Item = (&'a String, &'a String)>,
        problems: &'a mut Vec<Problem>,
    ) -> Values<'a> {
        let mut all: BTreeMap<&str, Value<'_>> = BTreeMap::new();
        for (name, text) in annotations {
            if OTHERS.iter().any(|other| name.starts_with(other)) {
                problems.push(Problem {
                    reason: "UnsupportedAnnotation",
                    message: format!("the annotation {name} is another controller's and has no effect"),
                });
            }
            let Some(short) = PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix)) else {
                continue;
            };
            let value = Value {
                name,
                text: text.trim(),
                used: false,
            };
            let is_ours = name.starts_with(PREFIXES[0]);
            if is_ours || !all.contains_key(short) {
                all.insert(short, value);
            }
        }
        Values {
            all,
            problems,
            closed: false,
        }
    }

    pub fn text(&mut self, short: &str) -> Option<&'a str> {
        let value = self.all.get_mut(short)?;
        value.used = true;
        Some(value.text)
    }

    /// What `parse` makes of it. If that fails, the annotation has no effect.
    pub fn read<T, E: std::fmt::Display>(
        &mut self,
        short: &str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        let text = self.text(short)?;
        match parse(text) {
            Ok(value) => Some(value),
            Err(why) => {
                self.report(short, "BadAnnotation", format!("has no effect: {why}"));
                None
            }
        }
    }

    /// As [`Values::read`], for what decides who may do what: if that fails, the Ingress is closed.
    pub fn strict<T, E: std::fmt::Display>(
        &mut self,
        short: &str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        let text = self.text(short)?;
        match parse(text) {
            Ok(value) => Some(value),
            Err(why) => {
                self.close(short, &why.to_string());
                None
            }
        }
    }

    pub fn flag(&mut self, short: &str) -> Option<bool> {
        self.read(short, boolean)
    }

    /// Closes the Ingress, for what an annotation says or because it is missing.
    pub fn close(&mut self, short: &str, why: &str) {
        self.closed = true;
        self.report(
            short,
            "BadAnnotation",
            format!("cannot be enforced, {CLOSED}: {why}"),
        );
    }

    fn report(&mut self, short: &str, reason: &'static str, what: String) {
        let name = self.all.get(short).map_or(short, |value| value.name);
        self.problems.push(Problem {
            reason,
            message: format!("the annotation {name} {what}"),
        });
    }

    /// What was not read is not acted on.
    pub fn finish(mut self) -> bool {
        let unused: Vec<&str> = self
            .all
            .iter()
            .filter(|(_, value)| !value.used)
            .map(|(short, _)| *short)
            .collect();
        for short in unused {
            let restricts = short.starts_with("auth-") && !HARMLESS.contains(&short);
            let what = match short.ends_with("-snippet") {
                true => "has no effect: snippets are configuration of nginx, and this proxy is not nginx",
                false => "is not supported and has no effect",
            };
            let what = match restricts {
                true => format!("is not supported, {CLOSED}"),
                false => what.to_owned(),
            };
            self.closed |= restricts;
            self.report(short, "UnsupportedAnnotation", what);
        }
        self.closed
    }
}

pub fn boolean(text: &str) -> Result<bool, &'static str> {
    // As Go reads them.
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("its value must be true or false"),
    }
}

/// nginx' own switch.
pub fn on_or_off(text: &str) -> Result<bool, &'static str> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("its value must be on or off"),
    }
}

/// Bytes, with `k`, `m` or `g` for powers of 1,024; 0 is no limit.
pub fn size(text: &str) -> Result<Option<u64>, &'static str> {
    let expected = "its value must be a number of bytes, such as 512k, 8m or 0 for no limit";
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        _ => return Err(expected),
    };
    let number = digits.bytes().all(|byte| byte.is_ascii_digit()).then_some(digits);
    let number: u64 = number.and_then(|digits| digits.parse().ok()).ok_or(expected)?;
    let bytes = number.checked_mul(1 << shift).ok_or(expected)?;
    Ok(Some(bytes).filter(|bytes| *bytes > 0))
}

/// A number above 0.
pub fn positive(text: &str) -> Result<u32, &'static str> {
    let number = text.parse::<u32>().ok().filter(|number| *number > 0);
    number.ok_or("its value must be a whole number above 0")
}

pub fn seconds(text: &str) -> Result<std::time::Duration, &'static str> {
    let seconds = positive(text).map_err(|_| "its value must be a number of seconds above 0")?;
    Ok(std::time::Duration::from_secs(seconds.into()))
}

/// Whether all is printable ASCII without spaces, quotes and backslashes, so that it can be a part of any header.
pub fn is_plain(text: &str) -> bool {
    text.bytes()
        .all(|byte| byte.is_ascii_graphic() && !b"\"\\<>`".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, expected) in [
            ("0", Ok(None)),
            ("1", Ok(Some(1))),
            ("1b", Ok(Some(1))),
            ("2K", Ok(Some(2048))),
            ("1g", Ok(Some(1 << 30))),
        ] {
            assert_eq!(size(text), expected, "{text}");
        }
        for text in ["", "k", "-1", "+1", "1t", "1 m", "99999999999g"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_nobody_reads_is_reported_and_closes_if_it_restricts() {
        let check = |names: &[&str], expected_closed: bool| {
            let map: BTreeMap<String, String> = names
                .iter()
                .map(|name| ((*name).to_owned(), "x".to_owned()))
                .collect();
            let mut problems = Vec::new();
            let closed = Values::new(map.iter(), &mut problems).finish();
            assert_eq!(closed, expected_closed, "{names:?}: {problems:?}");
            assert_eq!(problems.len(), names.len(), "{problems:?}");
            assert!(
                problems
                    .iter()
                    .all(|problem| problem.reason == "UnsupportedAnnotation")
            );
        };
        check(&["nginx.ingress.kubernetes.io/proxy-buffering"], false);
        check(&["nginx.ingress.kubernetes.io/configuration-snippet"], false);
        check(&["nginx.org/rewrites"], false);
        check(&["nginx.ingress.kubernetes.io/auth-tls-secret"], true);
        check(&["ingress.skiff.io/auth-something-new"], true);
        check(&["nginx.ingress.kubernetes.io/auth-cache-key"], false);
    }

    #[test]
    fn our_own_name_wins() {
        let map: BTreeMap<String, String> = [
            (
                "nginx.ingress.kubernetes.io/use-regex".to_owned(),
                "false".to_owned(),
            ),
            ("ingress.skiff.io/use-regex".to_owned(), "true".to_owned()),
        ]
        .into();
        let mut problems = Vec::new();
        let mut values = Values::new(map.iter(), &mut problems);
        assert_eq!(values.flag("use-regex"), Some(true));
        assert!(!values.finish());
        assert!(problems.is_empty());
    }
}
