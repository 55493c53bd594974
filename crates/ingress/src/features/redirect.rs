//! Redirects that an Ingress asks for: of everything, of `/` alone, and to HTTPS. Pure.

use http::{HeaderValue, StatusCode};

use super::template::{Scope, Template};
use super::values::{Values, is_plain};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redirect {
    status: StatusCode,
    to: Template,
}

impl Redirect {
    /// Of all requests. As with ingress-nginx, the temporal one comes first.
    pub fn read(values: &mut Values<'_>) -> Option<Redirect> {
        let temporal = read(values, "temporal-redirect", StatusCode::FOUND);
        let permanent = read(values, "permanent-redirect", StatusCode::MOVED_PERMANENTLY);
        temporal.or(permanent)
    }

    /// Of `/` to a path of the same host.
    pub fn app_root(values: &mut Values<'_>) -> Option<Redirect> {
        values.read("app-root", |path| {
            match path.starts_with('/') && is_plain(path) && !path.contains('$') {
                true => Template::parse(&format!("$scheme://$http_host{path}")).map(|to| Redirect {
                    status: StatusCode::FOUND,
                    to,
                }),
                false => Err("its value must be a path of printable ASCII that begins with /".to_owned()),
            }
        })
    }

    pub fn status(&self) -> StatusCode {
        self.status
    }

    pub fn location(&self, scope: Scope<'_>) -> Option<HeaderValue> {
        HeaderValue::try_from(self.to.fill(scope)).ok()
    }
}

fn read(values: &mut Values<'_>, name: &str, default: StatusCode) -> Option<Redirect> {
    let code = values.read(&format!("{name}-code"), |text| {
        let code = text.parse::<u16>().ok().filter(|code| (300..=308).contains(code));
        code.and_then(|code| StatusCode::from_u16(code).ok())
            .ok_or("its value must be a status of 300 to 308")
    });
    let to = values.read(name, |text| {
        let scheme = ["http://", "https://", "$scheme://", "/"];
        match scheme.iter().any(|scheme| text.starts_with(scheme)) {
            true => Template::parse(text),
            false => Err("its value must be an address that begins with http://, https:// or /".to_owned()),
        }
    })?;
    Some(Redirect {
        status: code.unwrap_or(default),
        to,
    })
}

/// Where a request without TLS goes instead.
pub fn to_https(host: &str, port: u16, path: &str) -> Option<HeaderValue> {
    let host = match host.contains(':') {
        true => format!("[{host}]"),
        false => host.to_owned(),
    };
    let port = match port {
        443 => String::new(),
        port => format!(":{port}"),
    };
    HeaderValue::try_from(format!("https://{host}{port}{path}")).ok()
}
