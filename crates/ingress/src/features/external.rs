//! Authentication by another Service: before a request is sent on, that Service is asked with the request's head.
//!
//! Only Services of this cluster are asked, by the endpoints that the route table has for them: an Ingress cannot make
//! the proxy dial anything else.

use std::sync::Arc;

use http::header::{self, HeaderName};
use http::uri::{Authority, PathAndQuery};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Uri};

use super::template::{Scope, Template};
use super::values::{Values, is_plain};
use crate::backend::Backend;
use crate::headers::{self, Client};

const ORIGINAL_URL: HeaderName = HeaderName::from_static("x-original-url");
const ORIGINAL_URI: HeaderName = HeaderName::from_static("x-original-uri");
const ORIGINAL_METHOD: HeaderName = HeaderName::from_static("x-original-method");
const SENT_FROM: HeaderName = HeaderName::from_static("x-sent-from");
const REDIRECT: HeaderName = HeaderName::from_static("x-auth-request-redirect");
const SCHEME: HeaderName = HeaderName::from_static("x-scheme");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const MAX_HEADERS: usize = 64;

/// A Service as an address names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceAddress {
    pub namespace: String,
    pub service: String,
    pub port: u16,
    pub tls: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExternalSpec {
    pub service: ServiceAddress,
    host: HeaderValue,
    path: Template,
    method: Option<Method>,
    copied: Vec<HeaderName>,
    sign_in: Option<Template>,
    redirect: Option<Template>,
    always_cookie: bool,
}

impl ExternalSpec {
    pub fn read(values: &mut Values<'_>) -> Option<ExternalSpec> {
        let url = values.strict("auth-url", parse_url);
        let method = values.strict("auth-method", |text| match text {
            "GET" | "HEAD" | "POST" | "PUT" | "PATCH" | "DELETE" | "OPTIONS" => {
                Method::from_bytes(text.as_bytes()).map_err(|_| "it is no method")
            }
            _ => Err("its value must be a method, such as GET or POST"),
        });
        // Those that are not copied are not removed of what the client says either.
        let copied = values.strict("auth-response-headers", |text| {
            let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
            let names: Result<Vec<HeaderName>, _> = names.map(str::parse::<HeaderName>).collect();
            let names = names.map_err(|_| "its value must be names of headers with commas between them")?;
            match names.len() > MAX_HEADERS || names.iter().any(is_framing) {
                true => Err("it names too many headers, or one that frames messages"),
                false => Ok(names),
            }
        });
        let parameter = values.read("auth-signin-redirect-param", |text| {
            let is_name = !text.is_empty() && is_plain(text) && !text.contains(['$', '&', '=', '#', '?']);
            is_name
                .then(|| text.to_owned())
                .ok_or("its value must be the name of a parameter")
        });
        let sign_in = values.strict("auth-signin", |text| {
            if !["https://", "http://", "$scheme://", "/"]
                .iter()
                .any(|start| text.starts_with(start))
            {
                return Err(
                    "its value must be an address that begins with http://, https:// or /".to_owned(),
                );
            }
            Template::parse(&with_parameter(text, parameter.as_deref().unwrap_or("rd")))
        });
        let redirect = values.read("auth-request-redirect", Template::parse);
        let always_cookie = values.flag("auth-always-set-cookie").unwrap_or(false);
        let (service, host, path) = url?;
        Some(ExternalSpec {
            service,
            host,
            path,
            method,
            copied: copied.unwrap_or_default(),
            sign_in,
            redirect,
            always_cookie,
        })
    }
}

fn is_framing(name: &HeaderName) -> bool {
    let framing = [
        header::CONTENT_LENGTH,
        header::TRANSFER_ENCODING,
        header::CONNECTION,
        header::UPGRADE,
        header::TE,
        header::HOST,
    ];
    framing.contains(name)
}

/// The address of the page where clients log in, with the one that they wanted.
fn with_parameter(text: &str, parameter: &str) -> String {
    let wanted = format!("{parameter}=$scheme://$http_host$escaped_request_uri");
    match text.split_once('?') {
        None | Some((_, "")) => format!("{}?{wanted}", text.trim_end_matches('?')),
        Some((_, query)) => {
            let has = query.split('&').any(|pair| {
                let pair = pair.split_once('=').unwrap_or((pair, ""));
                pair.0 == parameter && !pair.1.is_empty()
            });
            if has {
                text.to_owned()
            } else {
                format!("{text}&{wanted}")
            }
        }
    }
}

/// `http://name.namespace.svc:port/path`, also with `.cluster.local`.
fn parse_url(text: &str) -> Result<(ServiceAddress, HeaderValue, Template), String> {
    let not_service = || {
        "only Services of this cluster are asked: its value must be an address such as http://name.namespace.svc:8080/path".to_owned()
    };
    let (tls, rest) = match (text.strip_prefix("http://"), text.strip_prefix("https://")) {
        (Some(rest), _) => (false, rest),
        (_, Some(rest)) => (true, rest),
        _ => return Err(not_service()),
    };
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    let path = match path.starts_with('/') {
        true => path.to_owned(),
        false => format!("/{path}"),
    };
    if path.contains('#') || authority.contains(['@', '$', '%']) {
        return Err(not_service());
    }
    let authority: Authority = authority.parse().map_err(|_| not_service())?;
    let port = match (authority.port_u16(), tls) {
        (Some(port), _) => port,
        // A port that is no number.
        (None, _) if authority.as_str() != authority.host() => return Err(not_service()),
        (None, true) => 443,
        (None, false) => 80,
    };
    let host = authority.host().to_ascii_lowercase();
    let name = host
        .strip_suffix(".svc")
        .or_else(|| host.strip_suffix(".svc.cluster.local"));
    let (service, namespace) = name
        .and_then(|name| name.split_once('.'))
        .ok_or_else(not_service)?;
    let is_label = |text: &str| {
        let sound = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        !text.is_empty() && text.len() <= 63 && text.bytes().all(sound)
    };
    if !is_label(service) || !is_label(namespace) {
        return Err(not_service());
    }
    let address = ServiceAddress {
        namespace: namespace.to_owned(),
        service: service.to_owned(),
        port,
        tls,
    };
    let host = HeaderValue::try_from(authority.as_str()).map_err(|_| not_service())?;
    Ok((address, host, Template::parse(&path)?))
}

/// Of an Ingress.
#[derive(Clone, Debug)]
pub struct External {
    pub spec: ExternalSpec,
    pub backend: Arc<Backend>,
}

/// What the Service said.
#[derive(Debug)]
pub enum Verdict {
    /// With headers for the backend, and a cookie for the client.
    Allowed {
        headers: Vec<(HeaderName, Option<HeaderValue>)>,
        cookie: Option<HeaderValue>,
    },
    Denied {
        status: StatusCode,
        headers: HeaderMap,
    },
}

impl External {
    /// What the Service is asked; `None`: the request cannot be told of.
    pub fn question(
        &self,
        method: &Method,
        given: &HeaderMap,
        client: Client,
        scope: Scope<'_>,
    ) -> Option<(Request<()>, HeaderValue)> {
        let spec = &self.spec;
        let mut asked = given.clone();
        headers::remove_hop_by_hop(&mut asked);
        headers::join_cookies(&mut asked);
        for name in [header::CONTENT_LENGTH, header::EXPECT] {
            asked.remove(name);
        }
        let http_host = HeaderValue::try_from(scope.http_host).ok()?;
        headers::set_forwarded(&mut asked, client, &http_host);
        asked.remove(FORWARDED_PROTO);
        let uri = HeaderValue::try_from(scope.request_uri).ok()?;
        let url = format!("{}://{}{}", scope.scheme(), scope.http_host, scope.request_uri);
        let redirect = match &spec.redirect {
            Some(redirect) => HeaderValue::try_from(redirect.fill(scope)).ok()?,
            None => uri.clone(),
        };
        asked.insert(header::HOST, spec.host.clone());
        // Two of them ingress-nginx sets only with `auth-method`, and else lets clients say them.
        for (name, value) in [
            (ORIGINAL_URL, HeaderValue::try_from(url).ok()?),
            (ORIGINAL_METHOD, HeaderValue::try_from(method.as_str()).ok()?),
            (SENT_FROM, HeaderValue::from_static("nginx-ingress-controller")),
            (REDIRECT, redirect),
            (ORIGINAL_URI, uri),
            (SCHEME, HeaderValue::from_static(scope.scheme())),
        ] {
            headers::remove_all(&mut asked, &name);
            asked.insert(name, value);
        }
        let path = PathAndQuery::try_from(spec.path.fill(scope)).ok()?;
        let mut request = Request::new(());
        *request.method_mut() = spec.method.clone().unwrap_or(Method::GET);
        *request.uri_mut() = Uri::from(path);
        *request.headers_mut() = asked;
        Some((request, spec.host.clone()))
    }

    /// What the answer means, as nginx' `auth_request` reads it.
    pub fn verdict(&self, status: StatusCode, answer: &HeaderMap, scope: Scope<'_>) -> Verdict {
        let spec = &self.spec;
        let cookie = answer.get(header::SET_COOKIE).cloned();
        if status.is_success() {
            let copied = spec
                .copied
                .iter()
                .map(|name| (name.clone(), answer.get(name).cloned()));
            return Verdict::Allowed {
                headers: copied.collect(),
                cookie,
            };
        }
        let mut headers = HeaderMap::new();
        let status = match status {
            StatusCode::UNAUTHORIZED => {
                let sign_in = spec
                    .sign_in
                    .as_ref()
                    .map(|page| HeaderValue::try_from(page.fill(scope)));
                match sign_in {
                    Some(Ok(location)) => {
                        headers.insert(header::LOCATION, location);
                        headers.extend(cookie.map(|cookie| (header::SET_COOKIE, cookie)));
                        StatusCode::FOUND
                    }
                    _ => {
                        for value in answer.get_all(header::WWW_AUTHENTICATE) {
                            headers.append(header::WWW_AUTHENTICATE, value.clone());
                        }
                        StatusCode::UNAUTHORIZED
                    }
                }
            }
            StatusCode::FORBIDDEN => StatusCode::FORBIDDEN,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Verdict::Denied { status, headers }
    }

    /// Whether a response of the backend takes the cookie along.
    pub fn shows_cookie(&self, status: StatusCode) -> bool {
        let usual = [200, 201, 204, 206, 301, 302, 303, 304, 307, 308];
        self.spec.always_cookie || usual.contains(&status.as_u16())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_services_of_the_cluster_are_addresses() {
        let check = |text: &str| parse_url(text).map(|(address, host, _)| (address, host));
        let (address, host) =
            check("http://auth.login.svc.cluster.local:4180/oauth2/auth?x=$request_uri").expect("a Service");
        let expected = ServiceAddress {
            namespace: "login".into(),
            service: "auth".into(),
            port: 4180,
            tls: false,
        };
        assert_eq!(
            (address, host),
            (
                expected,
                HeaderValue::from_static("auth.login.svc.cluster.local:4180")
            )
        );
        assert_eq!(
            check("https://auth.login.svc").map(|(address, _)| (address.port, address.tls)),
            Ok((443, true))
        );
        for text in [
            "",
            "http://",
            "http://example.com/",
            "http://127.0.0.1/",
            "http://169.254.169.254/latest/meta-data",
            "http://[::1]/",
            "http://localhost/",
            "http://$host/auth",
            "http://auth.login.svc.evil.example/",
            "http://auth.login.svc@evil.example/",
            "http://evil.example#.login.svc/",
            "http://a.b.login.svc/",
            "http://.login.svc/",
            "http://auth..svc/",
            "http://auth.login.svc:99999/",
            "http://auth.login.svc:0x50/",
            "http://auth.login.svc/\r\nX: y",
            "http://auth.login.svc/ x",
            "http://auth.login.svc/$http_cookie",
            "ftp://auth.login.svc/",
            "unix:/run/x.sock",
        ] {
            assert!(check(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sign_in_pages_are_told_where_to_return_to() {
        for (text, expected) in [
            (
                "https://l/start",
                "https://l/start?rd=$scheme://$http_host$escaped_request_uri",
            ),
            (
                "https://l/start?a=b",
                "https://l/start?a=b&rd=$scheme://$http_host$escaped_request_uri",
            ),
            (
                "https://l/start?rd=$escaped_request_uri",
                "https://l/start?rd=$escaped_request_uri",
            ),
        ] {
            assert_eq!(with_parameter(text, "rd"), expected);
        }
    }
}
