//! Requests that go to the Service of a canary Ingress instead: by a header, a cookie or a share. Pure.

use std::sync::Arc;

use http::HeaderMap;
use http::header::HeaderName;
use regex::{Regex, RegexBuilder};

use super::affinity::cookie;
use super::values::{Values, positive};
use crate::backend::Backend;

const MAX_PATTERN: usize = 1024;
const MAX_COMPILED: usize = 32 << 10;
/// Of a header that is compared with a pattern; longer ones match none.
const MAX_COMPARED: usize = 1024;

#[derive(Clone, Debug)]
enum HeaderRule {
    /// `always` or `never`.
    Words,
    Value(String),
    Pattern(Regex),
}

#[derive(Clone, Debug, Default)]
pub struct CanarySpec {
    header: Option<(HeaderName, Option<HeaderRule>)>,
    cookie: Option<String>,
    weight: u32,
    /// At least 100.
    total: u32,
}

impl CanarySpec {
    /// `None`: the Ingress is no canary.
    pub fn read(values: &mut Values<'_>) -> Option<CanarySpec> {
        // What cannot be read must not become an Ingress of its own.
        let is_canary = values.strict("canary", super::values::boolean);
        let name = values.read("canary-by-header", |text| {
            text.parse::<HeaderName>()
                .map_err(|_| "its value must be the name of a header")
        });
        let value = values
            .text("canary-by-header-value")
            .filter(|text| !text.is_empty());
        let pattern = values.read("canary-by-header-pattern", |text| {
            if text.len() > MAX_PATTERN {
                return Err(format!("it is longer than {MAX_PATTERN} bytes"));
            }
            let built = RegexBuilder::new(text)
                .size_limit(MAX_COMPILED)
                .dfa_size_limit(MAX_COMPILED)
                .build();
            built.map_err(|error| error.to_string())
        });
        let has_pattern = values.text("canary-by-header-pattern").is_some();
        let cookie = values.text("canary-by-cookie").filter(|name| !name.is_empty());
        let weight = values.read("canary-weight", |text| {
            text.parse::<u32>()
                .map_err(|_| "its value must be a whole number")
        });
        let total = values
            .read("canary-weight-total", positive)
            .unwrap_or(100)
            .max(100);
        is_canary.filter(|is_canary| *is_canary)?;
        let rule = match (value, pattern) {
            (Some(value), _) => Some(HeaderRule::Value(value.to_owned())),
            (None, Some(pattern)) => Some(HeaderRule::Pattern(pattern)),
            // A pattern that cannot be read matches nothing.
            (None, None) if has_pattern => None,
            (None, None) => Some(HeaderRule::Words),
        };
        Some(CanarySpec {
            header: name.map(|name| (name, rule)),
            cookie: cookie.map(str::to_owned),
            weight: weight.unwrap_or_default(),
            total,
        })
    }

    /// Whether a request goes to the canary; `chance` is of 0 to 1.
    fn takes(&self, headers: &HeaderMap, chance: f64) -> bool {
        let by_word = |word: &str| match word {
            "always" => Some(true),
            "never" => Some(false),
            _ => None,
        };
        let header = self.header.as_ref().and_then(|(name, rule)| {
            let text = headers.get(name)?.to_str().ok()?;
            match rule.as_ref()? {
                HeaderRule::Words => by_word(text),
                HeaderRule::Value(value) => (text == value).then_some(true),
                HeaderRule::Pattern(pattern) => {
                    (text.len() <= MAX_COMPARED && pattern.is_match(text)).then_some(true)
                }
            }
        });
        let cookie = || by_word(cookie(headers, self.cookie.as_ref()?)?);
        header
            .or_else(cookie)
            .unwrap_or_else(|| chance * f64::from(self.total) < f64::from(self.weight))
    }
}

/// Of one route.
#[derive(Clone, Debug)]
pub struct Canary {
    pub spec: CanarySpec,
    pub backend: Option<Arc<Backend>>,
}

impl Canary {
    pub fn takes(&self, headers: &HeaderMap, chance: f64) -> bool {
        self.spec.takes(headers, chance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use std::collections::BTreeMap;

    fn takes(annotations: &[(&str, &str)], headers: &[(&'static str, &'static str)], chance: f64) -> bool {
        let map: BTreeMap<String, String> = annotations
            .iter()
            .chain(&[("canary", "true")])
            .map(|(name, value)| (format!("nginx.ingress.kubernetes.io/{name}"), (*value).to_owned()))
            .collect();
        let mut problems = Vec::new();
        let spec = CanarySpec::read(&mut Values::new(map.iter(), &mut problems)).expect("a canary");
        let mut all = HeaderMap::new();
        for (name, value) in headers {
            all.append(*name, HeaderValue::from_static(value));
        }
        spec.takes(&all, chance)
    }

    #[test]
    fn header_comes_before_cookie_and_that_before_weight() {
        let header = ("canary-by-header", "x-canary");
        let cookie = ("canary-by-cookie", "trial");
        assert!(takes(&[header], &[("x-canary", "always")], 0.99));
        assert!(!takes(
            &[header, ("canary-weight", "100")],
            &[("x-canary", "never")],
            0.0
        ));
        assert!(takes(
            &[header, ("canary-weight", "10")],
            &[("x-canary", "maybe")],
            0.09
        ));
        assert!(!takes(
            &[header, ("canary-weight", "10")],
            &[("x-canary", "maybe")],
            0.11
        ));
        let value = ("canary-by-header-value", "blue");
        assert!(takes(&[header, value], &[("x-canary", "blue")], 0.99));
        assert!(!takes(&[header, value], &[("x-canary", "always")], 0.99));
        let pattern = ("canary-by-header-pattern", "^b.*e$");
        assert!(takes(&[header, pattern], &[("x-canary", "blue")], 0.99));
        assert!(!takes(
            &[header, ("canary-by-header-pattern", "(")],
            &[("x-canary", "always")],
            0.99
        ));
        assert!(takes(&[header, cookie], &[("cookie", "a=b; trial=always")], 0.99));
        assert!(!takes(
            &[header, cookie],
            &[("x-canary", "never"), ("cookie", "trial=always")],
            0.99
        ));
        assert!(!takes(
            &[cookie, ("canary-weight", "100")],
            &[("cookie", "trial=never")],
            0.0
        ));
        assert!(takes(
            &[("canary-weight", "50"), ("canary-weight-total", "1000")],
            &[],
            0.049
        ));
        assert!(!takes(
            &[("canary-weight", "50"), ("canary-weight-total", "1000")],
            &[],
            0.051
        ));
        assert!(!takes(&[], &[], 0.0));
    }
}
