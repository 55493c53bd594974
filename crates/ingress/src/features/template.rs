//! Addresses of annotations that name a few of nginx' variables, such as `https://$host/login?rd=$escaped_request_uri`.

use super::values::is_plain;

/// Of an annotation's text.
const MAX_BYTES: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variable {
    Scheme,
    Host,
    HttpHost,
    RequestUri,
    EscapedRequestUri,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Variable(Variable),
}

/// A text with variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template(Vec<Piece>);

/// What the variables stand for.
#[derive(Clone, Copy)]
pub struct Scope<'a> {
    pub tls: bool,
    /// Without a port.
    pub host: &'a str,
    /// As the client wrote it.
    pub http_host: &'a str,
    /// Path and query as the client wrote them.
    pub request_uri: &'a str,
}

impl Scope<'_> {
    pub fn scheme(&self) -> &'static str {
        if self.tls { "https" } else { "http" }
    }
}

impl Template {
    pub fn parse(text: &str) -> Result<Template, String> {
        if text.is_empty() || text.len() > MAX_BYTES || !is_plain(text) {
            return Err(
                "its value must be an address of printable ASCII without quotes and spaces".to_owned(),
            );
        }
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some(at) = rest.find('$') {
            if at > 0 {
                pieces.push(Piece::Text(rest[..at].to_owned()));
            }
            let after = &rest[at + 1..];
            let (name, tail) = match after.strip_prefix('{') {
                Some(inner) => inner.split_once('}').ok_or("a ${ is not closed")?,
                None => {
                    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
                    after.split_at(after.find(|c: char| !is_name(c)).unwrap_or(after.len()))
                }
            };
            pieces.push(Piece::Variable(match name {
                "scheme" | "pass_access_scheme" => Variable::Scheme,
                "host" => Variable::Host,
                "http_host" | "best_http_host" => Variable::HttpHost,
                "request_uri" => Variable::RequestUri,
                "escaped_request_uri" => Variable::EscapedRequestUri,
                other => {
                    return Err(format!(
                        "the variable ${other} is not known; $scheme, $host, $http_host, $request_uri and $escaped_request_uri are"
                    ));
                }
            }));
            rest = tail;
        }
        if !rest.is_empty() {
            pieces.push(Piece::Text(rest.to_owned()));
        }
        Ok(Template(pieces))
    }

    pub fn fill(&self, scope: Scope<'_>) -> String {
        let mut text = String::new();
        for piece in &self.0 {
            match piece {
                Piece::Text(piece) => text.push_str(piece),
                Piece::Variable(Variable::Scheme) => text.push_str(scope.scheme()),
                Piece::Variable(Variable::Host) => text.push_str(scope.host),
                Piece::Variable(Variable::HttpHost) => text.push_str(scope.http_host),
                Piece::Variable(Variable::RequestUri) => text.push_str(scope.request_uri),
                Piece::Variable(Variable::EscapedRequestUri) => text.push_str(&escaped(scope.request_uri)),
            }
        }
        text
    }
}

/// As a value of a query.
pub fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => escaped.push(byte.into()),
            byte => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_filled_in() {
        let scope = Scope {
            tls: true,
            host: "a.example",
            http_host: "a.example:8443",
            request_uri: "/p?q=1&r=%20",
        };
        for (text, expected) in [
            ("https://b.example", "https://b.example"),
            ("https://b.example$request_uri", "https://b.example/p?q=1&r=%20"),
            ("$scheme://$http_host/x", "https://a.example:8443/x"),
            (
                "https://${host}/login?rd=$escaped_request_uri",
                "https://a.example/login?rd=%2Fp%3Fq%3D1%26r%3D%2520",
            ),
        ] {
            let template = Template::parse(text).expect("a template");
            assert_eq!(template.fill(scope), expected, "{text}");
        }
        for text in [
            "",
            "https://a b",
            "a\r\nb: c",
            "$http_cookie",
            "a$",
            "${host",
            "\"",
            "é",
        ] {
            assert!(Template::parse(text).is_err(), "{text}");
        }
    }
}
