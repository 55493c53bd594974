//! Cross-origin requests as ingress-nginx answers them: every OPTIONS of an allowed origin is answered here, and every
//! response says all that is allowed. Pure.

use http::header::{self, HeaderName};
use http::{HeaderMap, HeaderValue, Method};

use super::values::{Values, boolean};

const METHODS: &str = "GET, PUT, POST, DELETE, PATCH, OPTIONS";
const HEADERS: &str = "DNT,Keep-Alive,User-Agent,X-Requested-With,If-Modified-Since,Cache-Control,Content-Type,Range,Authorization";
const MAX_AGE: &str = "1728000";
/// Of the names that every response lists.
const MAX_LIST: usize = 4096;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cors {
    /// In lower case; none for any.
    origins: Vec<String>,
    /// What responses say beside the origin.
    said: Vec<(HeaderName, HeaderValue)>,
}

impl Cors {
    pub fn read(values: &mut Values<'_>) -> Option<Cors> {
        let enabled = values.flag("enable-cors").unwrap_or(false);
        // Malformed, nobody is allowed anything.
        let origins = values.text("cors-allow-origin").map(|text| (text, origins(text)));
        let origins = match origins {
            None => Some(Vec::new()),
            Some((_, Ok(origins))) => Some(origins),
            Some((text, Err(why))) => {
                values.read("cors-allow-origin", |_| {
                    Err::<(), _>(format!("{why} in {text:?}"))
                });
                None
            }
        };
        let mut list = |name: &str, also: &'static [u8], default: &str| -> Option<HeaderValue> {
            let given = values.read(name, |text| {
                let sound = |byte: u8| {
                    byte.is_ascii_alphanumeric() || b"-_, ".contains(&byte) || also.contains(&byte)
                };
                let sound = !text.is_empty() && text.len() <= MAX_LIST && text.bytes().all(sound);
                let value = HeaderValue::from_str(text).ok().filter(|_| sound);
                value.ok_or("its value must be a list of names with commas between them")
            });
            given.or_else(|| {
                HeaderValue::from_str(default)
                    .ok()
                    .filter(|value| !value.is_empty())
            })
        };
        let methods = list("cors-allow-methods", b"", METHODS);
        let headers = list("cors-allow-headers", b"", HEADERS);
        let exposed = list("cors-expose-headers", b"*", "");
        let credentials = values.read("cors-allow-credentials", boolean).unwrap_or(true);
        let age = values.read("cors-max-age", |text| {
            let age = text
                .parse::<u32>()
                .map_err(|_| "its value must be a number of seconds");
            age.map(HeaderValue::from)
        });
        let age = age.unwrap_or_else(|| HeaderValue::from_static(MAX_AGE));
        let said = [
            (
                header::ACCESS_CONTROL_ALLOW_CREDENTIALS,
                credentials.then(|| HeaderValue::from_static("true")),
            ),
            (header::ACCESS_CONTROL_ALLOW_METHODS, methods),
            (header::ACCESS_CONTROL_ALLOW_HEADERS, headers),
            (header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed),
            (header::ACCESS_CONTROL_MAX_AGE, Some(age)),
        ];
        let said = said.into_iter().filter_map(|(name, value)| Some((name, value?)));
        Some(Cors {
            origins: origins.filter(|_| enabled)?,
            said: said.collect(),
        })
    }

    /// What a response to a request with these headers says; `None`: the origin is not allowed.
    pub fn allow(&self, request: &HeaderMap) -> Option<Allowed<'_>> {
        if self.origins.is_empty() {
            return Some(Allowed {
                cors: self,
                origin: HeaderValue::from_static("*"),
            });
        }
        let origin = request.get(header::ORIGIN)?;
        let text = origin.to_str().ok()?.to_ascii_lowercase();
        let allowed = self.origins.iter().any(|allowed| allows(allowed, &text));
        allowed.then(|| Allowed {
            cors: self,
            origin: origin.clone(),
        })
    }

    /// Says it in a response, whatever the backend said.
    pub fn respond(&self, origin: &HeaderValue, response: &mut HeaderMap) {
        for (name, value) in &self.said {
            response.insert(name, value.clone());
        }
        if origin != "*" {
            response.append(header::VARY, HeaderValue::from_static("Origin"));
        }
        response.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
    }
}

pub struct Allowed<'a> {
    cors: &'a Cors,
    pub origin: HeaderValue,
}

impl Allowed<'_> {
    /// The response that the proxy gives itself.
    pub fn preflight(&self, method: &Method) -> Option<HeaderMap> {
        (*method == Method::OPTIONS).then(|| {
            let mut headers = HeaderMap::new();
            self.cors.respond(&self.origin, &mut headers);
            headers
        })
    }
}

fn origins(text: &str) -> Result<Vec<String>, &'static str> {
    let all: Vec<&str> = text
        .split(',')
        .map(str::trim)
        .filter(|each| !each.is_empty())
        .collect();
    if all.is_empty() || all.len() > 1024 {
        return Err("there is no origin, or more than 1024,");
    }
    if all.contains(&"*") {
        return Ok(Vec::new());
    }
    all.into_iter()
        .map(|each| {
            let host = each.split_once("://").filter(|(scheme, _)| !scheme.is_empty());
            let host = host.map(|(_, host)| host.strip_prefix("*.").unwrap_or(host));
            let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte);
            let sound = host.is_some_and(|host| !host.is_empty() && host.bytes().all(sound));
            match sound || each == "null" {
                true => Ok(each.to_ascii_lowercase()),
                false => Err("something is not an origin such as https://a.example or https://*.a.example"),
            }
        })
        .collect()
}

/// Both in lower case. A wildcard stands for one label.
fn allows(allowed: &str, origin: &str) -> bool {
    let Some((scheme, parent)) = allowed.split_once("://*") else {
        return allowed == origin;
    };
    let label = origin
        .strip_prefix(scheme)
        .and_then(|rest| rest.strip_prefix("://"))
        .and_then(|rest| rest.strip_suffix(parent));
    let is_label = |label: &str| {
        label
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    label.is_some_and(|label| !label.is_empty() && is_label(label))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_are_one_label() {
        for (allowed, origin, expected) in [
            ("https://a.example", "https://a.example", true),
            ("https://a.example", "https://a.example.evil", false),
            ("https://*.example", "https://a.example", true),
            ("https://*.example", "https://b.a.example", false),
            ("https://*.example", "https://evil/.example", false),
            ("https://*.example:8443", "https://a.example:8443", true),
            ("https://*.example", "http://a.example", false),
        ] {
            assert_eq!(allows(allowed, origin), expected, "{allowed} {origin}");
        }
        for text in [
            "",
            "https://",
            "a.example",
            "https://a.*.example",
            "https://a/b",
            "https://a\r\nx",
        ] {
            assert!(origins(text).is_err(), "{text}");
        }
        assert_eq!(origins("https://a.example, *"), Ok(Vec::new()));
    }
}
