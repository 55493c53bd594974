//! What a registry wants to see before it answers: the WWW-Authenticate header.

/// `Bearer realm="https://…",service="…"` of a WWW-Authenticate header.
#[derive(Debug, PartialEq)]
pub(super) struct Challenge {
    /// In lower case.
    pub(super) scheme: String,
    values: Vec<(String, String)>,
}

impl Challenge {
    pub(super) fn parse(header: &str) -> Option<Challenge> {
        let header = header.trim();
        let (scheme, mut rest) = header.split_once(' ').unwrap_or((header, ""));
        if scheme.is_empty() {
            return None;
        }
        let mut values = Vec::new();
        loop {
            rest = rest.trim_start_matches([' ', ',', '\t']);
            let Some((key, after)) = rest.split_once('=') else {
                break;
            };
            let value;
            (value, rest) = match after.trim_start().strip_prefix('"') {
                Some(quoted) => unquote(quoted),
                None => {
                    let end = after.find([',', ' ']).unwrap_or(after.len());
                    (after[..end].to_owned(), &after[end..])
                }
            };
            values.push((key.trim().to_ascii_lowercase(), value));
        }
        Some(Challenge {
            scheme: scheme.to_ascii_lowercase(),
            values,
        })
    }

    pub(super) fn value(&self, key: &str) -> Option<&str> {
        let found = self.values.iter().find(|(have, _)| have == key);
        found.map(|(_, value)| value.as_str())
    }
}

/// Up to the closing quote, and what follows it.
fn unquote(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return (value, &text[at + 1..]),
            '\\' => value.extend(characters.next().map(|(_, escaped)| escaped)),
            other => value.push(other),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges() {
        let check = |header: &str, scheme: &str, expected: &[(&str, &str)]| {
            let values = expected
                .iter()
                .map(|(key, value)| (key.to_string(), value.to_string()))
                .collect();
            let scheme = scheme.to_owned();
            assert_eq!(
                Challenge::parse(header),
                Some(Challenge { scheme, values }),
                "{header}"
            );
        };
        check("Basic", "basic", &[]);
        check("Basic realm=\"a b\"", "basic", &[("realm", "a b")]);
        check(
            "Bearer realm=\"https://auth.docker.io/token\",service=\"registry.docker.io\", scope=\"repository:a/b:pull,push\"",
            "bearer",
            &[
                ("realm", "https://auth.docker.io/token"),
                ("service", "registry.docker.io"),
                ("scope", "repository:a/b:pull,push"),
            ],
        );
        check(
            "bearer Realm=x,service=y",
            "bearer",
            &[("realm", "x"), ("service", "y")],
        );
        check("Bearer realm=\"a\\\"b", "bearer", &[("realm", "a\"b")]);
        check("Bearer realm", "bearer", &[]);
        check("Bearer =,=,", "bearer", &[("", ""), ("", "")]);
        assert_eq!(Challenge::parse("  "), None);
    }
}
