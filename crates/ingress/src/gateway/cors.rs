//! Cross-origin requests (CORS): preflights are answered here, and the responses of backends say what is allowed. Pure.

use http::header;
use http::{HeaderMap, HeaderValue, Method};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cors {
    /// `*`, or origins, of which the host may begin with `*` for any labels.
    pub origins: Vec<String>,
    pub credentials: bool,
    pub methods: Vec<String>,
    pub headers: Vec<String>,
    pub expose: Vec<String>,
    pub max_age: u32,
}

impl Cors {
    /// Whether the proxy answers the request instead of the backend.
    pub fn is_preflight(method: &Method, headers: &HeaderMap) -> bool {
        *method == Method::OPTIONS
            && headers.contains_key(header::ORIGIN)
            && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
    }

    /// What the response to a preflight says; nothing if the origin is not allowed.
    pub fn preflight(&self, request: &HeaderMap) -> HeaderMap {
        let mut answer = HeaderMap::new();
        if !self.allow(request, &mut answer) {
            return answer;
        }
        let asked = |name: header::HeaderName| request.get(name).and_then(|value| value.to_str().ok());
        let method = asked(header::ACCESS_CONTROL_REQUEST_METHOD);
        let names = asked(header::ACCESS_CONTROL_REQUEST_HEADERS);
        set(
            &mut answer,
            header::ACCESS_CONTROL_ALLOW_METHODS,
            self.listed(&self.methods, method),
        );
        set(
            &mut answer,
            header::ACCESS_CONTROL_ALLOW_HEADERS,
            self.listed(&self.headers, names),
        );
        answer.insert(header::ACCESS_CONTROL_MAX_AGE, self.max_age.into());
        answer
    }

    /// Makes the response to a request of another origin say what is allowed, whatever the backend said.
    pub fn respond(&self, request: &HeaderMap, response: &mut HeaderMap) {
        for name in [
            header::ACCESS_CONTROL_ALLOW_ORIGIN,
            header::ACCESS_CONTROL_ALLOW_CREDENTIALS,
            header::ACCESS_CONTROL_EXPOSE_HEADERS,
        ] {
            response.remove(name);
        }
        self.allow(request, response);
    }

    /// Says that the origin may, if it may.
    fn allow(&self, request: &HeaderMap, answer: &mut HeaderMap) -> bool {
        let Some(origin) = request.get(header::ORIGIN) else {
            return false;
        };
        let text = origin.to_str().unwrap_or_default();
        if !self.origins.iter().any(|allowed| allows(allowed, text)) {
            return false;
        }
        let any = self.origins.iter().any(|allowed| allowed == "*");
        let said = match any && !self.credentials {
            true => HeaderValue::from_static("*"),
            false => origin.clone(),
        };
        if said != "*" {
            answer.append(header::VARY, HeaderValue::from_static("Origin"));
        }
        answer.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, said);
        if self.credentials {
            answer.insert(
                header::ACCESS_CONTROL_ALLOW_CREDENTIALS,
                HeaderValue::from_static("true"),
            );
        }
        let exposed = (!self.expose.is_empty()).then(|| self.expose.join(", "));
        // With credentials, browsers take the wildcard for a name.
        let exposed = exposed.filter(|text| text != "*" || !self.credentials);
        set(answer, header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
        true
    }

    /// The list; with credentials, instead of a wildcard what was asked for.
    fn listed(&self, list: &[String], asked: Option<&str>) -> Option<String> {
        match list.iter().any(|each| each == "*") {
            true if self.credentials => asked.map(str::to_owned),
            true => Some("*".to_owned()),
            false => (!list.is_empty()).then(|| list.join(", ")),
        }
    }
}

fn set(headers: &mut HeaderMap, name: header::HeaderName, text: Option<String>) {
    if let Some(value) = text.and_then(|text| HeaderValue::try_from(text).ok()) {
        headers.insert(name, value);
    }
}

/// Whether an origin is the allowed one: scheme, host and port.
fn allows(allowed: &str, origin: &str) -> bool {
    let (allowed, origin) = (allowed.to_ascii_lowercase(), origin.to_ascii_lowercase());
    if allowed == "*" || allowed == origin {
        return true;
    }
    let Some((scheme, host)) = allowed.split_once("://") else {
        return false;
    };
    let Some(parent) = host.strip_prefix('*') else {
        return false;
    };
    let labels = origin
        .strip_prefix(scheme)
        .and_then(|rest| rest.strip_prefix("://"))
        .and_then(|rest| rest.strip_suffix(parent));
    labels.is_some_and(|labels| !labels.is_empty() && !labels.contains([':', '/', '@']))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(origin: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::ORIGIN, HeaderValue::from_str(origin).expect("an origin"));
        headers.insert(
            header::ACCESS_CONTROL_REQUEST_METHOD,
            HeaderValue::from_static("PUT"),
        );
        headers.insert(
            header::ACCESS_CONTROL_REQUEST_HEADERS,
            HeaderValue::from_static("x-a"),
        );
        headers
    }

    fn text(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
        headers.get(name).and_then(|value| value.to_str().ok())
    }

    #[test]
    fn origins_are_compared_whole() {
        for (allowed, origin, expected) in [
            ("*", "https://a.example", true),
            ("https://a.example", "https://A.example", true),
            ("https://a.example", "http://a.example", false),
            ("https://a.example", "https://a.example:8443", false),
            ("https://*.example", "https://a.example", true),
            ("https://*.example", "https://a.b.example", true),
            ("https://*.example", "https://example", false),
            ("https://*.example:8443", "https://a.example:8443", true),
            ("https://*.example", "https://evil:1/.example", false),
            ("https://*", "https://any.example", true),
        ] {
            assert_eq!(allows(allowed, origin), expected, "{allowed} {origin}");
        }
    }

    #[test]
    fn preflights_say_what_is_allowed() {
        let cors = Cors {
            origins: vec!["https://a.example".into()],
            credentials: true,
            methods: vec!["GET".into(), "PUT".into()],
            headers: vec!["*".into()],
            expose: vec!["x-b".into()],
            max_age: 60,
        };
        let answer = cors.preflight(&request("https://a.example"));
        assert_eq!(
            text(&answer, header::ACCESS_CONTROL_ALLOW_ORIGIN),
            Some("https://a.example")
        );
        assert_eq!(
            text(&answer, header::ACCESS_CONTROL_ALLOW_METHODS),
            Some("GET, PUT")
        );
        assert_eq!(text(&answer, header::ACCESS_CONTROL_ALLOW_HEADERS), Some("x-a"));
        assert_eq!(text(&answer, header::ACCESS_CONTROL_MAX_AGE), Some("60"));
        assert!(cors.preflight(&request("https://b.example")).is_empty());
        let mut response = request("ignored");
        response.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        cors.respond(&request("https://a.example"), &mut response);
        assert_eq!(
            text(&response, header::ACCESS_CONTROL_EXPOSE_HEADERS),
            Some("x-b")
        );
        assert_eq!(
            text(&response, header::ACCESS_CONTROL_ALLOW_CREDENTIALS),
            Some("true")
        );
        cors.respond(&HeaderMap::new(), &mut response);
        assert!(text(&response, header::ACCESS_CONTROL_ALLOW_ORIGIN).is_none());
    }
}
