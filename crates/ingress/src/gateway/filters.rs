//! What rules change of requests and responses: headers, addresses, redirects. Pure.

use std::sync::Arc;

use http::header::{self, HeaderName};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, StatusCode};

use super::cors::Cors;
use crate::backend::Backend;

/// Set, then added, then removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderChange {
    pub set: Vec<(HeaderName, HeaderValue)>,
    pub add: Vec<(HeaderName, HeaderValue)>,
    pub remove: Vec<HeaderName>,
}

/// Headers that frame a message: changing them would make two messages of one.
const FRAMING: [HeaderName; 5] = [
    header::CONTENT_LENGTH,
    header::TRANSFER_ENCODING,
    header::CONNECTION,
    header::UPGRADE,
    header::TE,
];

impl HeaderChange {
    /// Whether it changes what frames a message.
    pub fn breaks_framing(&self) -> bool {
        let named = self.set.iter().chain(&self.add).map(|(name, _)| name);
        named.chain(&self.remove).any(|name| FRAMING.contains(name))
    }

    pub fn apply(&self, headers: &mut HeaderMap) {
        for (name, value) in &self.set {
            headers.insert(name, value.clone());
        }
        for (name, value) in &self.add {
            headers.append(name, value.clone());
        }
        for name in &self.remove {
            headers.remove(name);
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathEdit {
    Full(String),
    Prefix(String),
}

impl PathEdit {
    /// The path that takes the place of one whose `prefix` was matched, which ends without a slash.
    fn edit(&self, path: &str, prefix: &str) -> String {
        match self {
            PathEdit::Full(full) => full.clone(),
            PathEdit::Prefix(new) => {
                let rest = path.strip_prefix(prefix).unwrap_or(path);
                let new = match rest.is_empty() {
                    true => new.as_str(),
                    false => new.trim_end_matches('/'),
                };
                match format!("{new}{rest}") {
                    edited if edited.starts_with('/') => edited,
                    edited => format!("/{edited}"),
                }
            }
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rewrite {
    pub host: Option<HeaderValue>,
    pub path: Option<PathEdit>,
}

impl Rewrite {
    /// The path and query that are sent on. `path` is the one that was matched.
    pub fn address(&self, path: &str, prefix: &str, query: Option<&str>) -> Option<PathAndQuery> {
        let path = self.path.as_ref()?.edit(path, prefix);
        let text = match query {
            Some(query) => format!("{path}?{query}"),
            None => path,
        };
        PathAndQuery::try_from(text).ok()
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Redirect {
    pub scheme: Option<&'static str>,
    pub host: Option<String>,
    pub path: Option<PathEdit>,
    pub port: Option<u16>,
    pub status: StatusCode,
}

/// What a redirect takes from the request.
pub struct Redirected<'a> {
    pub tls: bool,
    /// Without a port.
    pub host: &'a str,
    /// Of the listener.
    pub port: u16,
    pub path: &'a str,
    pub prefix: &'a str,
    pub query: Option<&'a str>,
}

impl Redirect {
    pub fn location(&self, request: &Redirected<'_>) -> String {
        let scheme = self.scheme.unwrap_or(if request.tls { "https" } else { "http" });
        let known = |scheme: &str| if scheme == "https" { 443 } else { 80 };
        // Of a scheme that the rule names, the port is that scheme's; else it is the listener's.
        let port = match (self.port, self.scheme) {
            (Some(port), _) => port,
            (None, Some(scheme)) => known(scheme),
            (None, None) => request.port,
        };
        let host = self.host.as_deref().unwrap_or(request.host);
        let host = match host.contains(':') {
            true => format!("[{host}]"),
            false => host.to_owned(),
        };
        let port = match port == known(scheme) {
            true => String::new(),
            false => format!(":{port}"),
        };
        let path = match &self.path {
            Some(edit) => edit.edit(request.path, request.prefix),
            None => request.path.to_owned(),
        };
        let query = request.query.map(|query| format!("?{query}"));
        format!("{scheme}://{host}{port}{path}{}", query.unwrap_or_default())
    }
}

/// A backend that gets a copy of some requests.
#[derive(Clone, Debug)]
pub struct Mirror {
    pub backend: Option<Arc<Backend>>,
    /// Of 0 to 1.
    pub share: f64,
}

#[derive(Clone, Debug, Default)]
pub struct Filters {
    pub request: HeaderChange,
    pub response: HeaderChange,
    pub redirect: Option<Redirect>,
    pub rewrite: Option<Rewrite>,
    pub mirrors: Vec<Mirror>,
    pub cors: Option<Cors>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> HeaderName {
        text.parse().expect("a name")
    }

    fn value(text: &str) -> HeaderValue {
        HeaderValue::from_str(text).expect("a value")
    }

    #[test]
    fn headers_are_set_added_and_removed() {
        let mut headers = HeaderMap::new();
        for (key, text) in [
            ("x-set", "old"),
            ("x-set", "older"),
            ("x-add", "a"),
            ("x-gone", "1"),
        ] {
            headers.append(name(key), value(text));
        }
        let change = HeaderChange {
            set: vec![(name("X-Set"), value("new"))],
            add: vec![(name("x-add"), value("b")), (name("x-new"), value("c"))],
            remove: vec![name("X-Gone")],
        };
        change.apply(&mut headers);
        let all = |key: &str| headers.get_all(name(key)).iter().cloned().collect::<Vec<_>>();
        assert_eq!(all("x-set"), [value("new")]);
        assert_eq!(all("x-add"), [value("a"), value("b")]);
        assert_eq!(all("x-new"), [value("c")]);
        assert!(all("x-gone").is_empty());
        assert!(!change.breaks_framing());
        let framing = HeaderChange {
            remove: vec![name("Content-Length")],
            ..HeaderChange::default()
        };
        assert!(framing.breaks_framing());
    }

    #[test]
    fn paths_are_replaced() {
        for (edit, path, prefix, expected) in [
            (PathEdit::Full("/one".into()), "/a/b", "/a", "/one"),
            (PathEdit::Prefix("/xyz".into()), "/foo/bar", "/foo", "/xyz/bar"),
            (PathEdit::Prefix("/xyz/".into()), "/foo/bar", "/foo", "/xyz/bar"),
            (PathEdit::Prefix("/xyz".into()), "/foo", "/foo", "/xyz"),
            (PathEdit::Prefix("/xyz/".into()), "/foo", "/foo", "/xyz/"),
            (PathEdit::Prefix("/".into()), "/foo/bar", "/foo", "/bar"),
            (PathEdit::Prefix("/".into()), "/foo", "/foo", "/"),
            (PathEdit::Prefix(String::new()), "/foo", "/foo", "/"),
            (PathEdit::Prefix("/xyz".into()), "/foo/", "/foo", "/xyz/"),
            (PathEdit::Prefix("/xyz".into()), "/foo", "", "/xyz/foo"),
        ] {
            assert_eq!(edit.edit(path, prefix), expected, "{edit:?} {path}");
        }
        let rewrite = Rewrite {
            path: Some(PathEdit::Prefix("/x".into())),
            ..Rewrite::default()
        };
        let address = rewrite.address("/a/b", "/a", Some("q=1"));
        assert_eq!(address.expect("an address"), "/x/b?q=1");
        assert!(Rewrite::default().address("/a", "/a", None).is_none());
    }

    #[test]
    fn redirects_name_the_port_only_where_it_is_not_the_schemes() {
        let request = |tls, port| Redirected {
            tls,
            host: "a.example",
            port,
            path: "/p/q",
            prefix: "/p",
            query: Some("x=1"),
        };
        let check = |redirect: Redirect, tls: bool, port: u16, expected: &str| {
            assert_eq!(redirect.location(&request(tls, port)), expected, "{redirect:?}");
        };
        let plain = Redirect::default;
        check(plain(), false, 80, "http://a.example/p/q?x=1");
        check(plain(), false, 8080, "http://a.example:8080/p/q?x=1");
        check(plain(), true, 443, "https://a.example/p/q?x=1");
        let https = Redirect {
            scheme: Some("https"),
            ..plain()
        };
        check(https.clone(), false, 8080, "https://a.example/p/q?x=1");
        let port = Redirect {
            port: Some(443),
            ..https
        };
        check(port, false, 80, "https://a.example/p/q?x=1");
        let moved = Redirect {
            host: Some("b.example".into()),
            port: Some(8443),
            path: Some(PathEdit::Prefix("/n".into())),
            ..plain()
        };
        check(moved, false, 80, "http://b.example:8443/n/q?x=1");
    }
}
