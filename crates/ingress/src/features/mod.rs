//! What annotations of Ingresses ask for, a file for each feature: how it is read, and what it does to a request. Names
//! and meanings are those of ingress-nginx.
//!
//! ```text
//! annotations ── values ── read ──► Annotations ── resolve (Secrets, Services) ──► Features of a route ── course
//! ```
//!
//! A route without any of them has no `Features`, and its requests pay nothing. What restricts access and cannot be
//! enforced closes the Ingress: its requests are answered with 503.

pub mod affinity;
pub mod backend_tls;
pub mod basic;
pub mod canary;
pub mod cors;
pub mod course;
pub mod external;
pub mod limits;
mod md5;
mod passwords;
pub mod ranges;
pub mod redirect;
pub mod resolve;
pub mod rewrite;
pub mod template;
pub mod values;

use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;
use http::uri::Authority;
use k8s_openapi::api::networking::v1::Ingress;

use self::affinity::{Affinity, AffinitySpec};
use self::backend_tls::TlsSpec;
use self::basic::{Basic, BasicSpec};
use self::canary::{Canary, CanarySpec};
use self::cors::Cors;
use self::external::{External, ExternalSpec};
use self::limits::{LimitSpec, Limits};
use self::ranges::SourceRanges;
use self::redirect::Redirect;
use self::rewrite::Rewrite;
use self::values::{Values, is_plain, seconds, size};
use crate::backend::Protocol;
use crate::compile::Problem;
use crate::table::HostMatch;

/// What one Ingress asks for.
#[derive(Clone, Debug, Default)]
pub struct Annotations {
    pub closed: bool,
    /// Redirect to HTTPS where the host has a certificate.
    pub ssl_redirect: bool,
    /// Redirect to HTTPS, whoever has the certificate.
    pub force_ssl_redirect: bool,
    pub max_body: Option<u64>,
    pub connect_timeout: Option<Duration>,
    pub send_timeout: Option<Duration>,
    pub read_timeout: Option<Duration>,
    /// And whether it is spoken in TLS.
    pub protocol: Option<(Protocol, bool)>,
    pub tls: TlsSpec,
    pub use_regex: bool,
    /// With its text.
    pub rewrite: Option<(String, Rewrite)>,
    pub app_root: Option<Redirect>,
    pub redirect: Option<Redirect>,
    pub cors: Option<Cors>,
    pub ranges: Option<SourceRanges>,
    pub limits: Option<LimitSpec>,
    pub basic: Option<BasicSpec>,
    pub external: Option<ExternalSpec>,
    pub affinity: Option<AffinitySpec>,
    pub canary: Option<CanarySpec>,
    pub host: Option<HeaderValue>,
    pub prefix: Option<HeaderValue>,
    pub aliases: Vec<HostMatch>,
}

impl Annotations {
    pub fn read(ingress: &Ingress, problems: &mut Vec<Problem>) -> Annotations {
        let namespace = ingress.metadata.namespace.as_deref().unwrap_or_default();
        let mut all = Values::new(ingress.metadata.annotations.iter().flatten(), problems);
        let values = &mut all;
        // Older names of ours.
        let max_body = values.read("max-body-size", size);
        let read_timeout = values.read("read-timeout", seconds);
        let mut read = Annotations {
            ssl_redirect: values.flag("ssl-redirect").unwrap_or(true),
            force_ssl_redirect: values.flag("force-ssl-redirect").unwrap_or(false),
            max_body: values.read("proxy-body-size", size).or(max_body).flatten(),
            connect_timeout: values.read("proxy-connect-timeout", seconds),
            send_timeout: values.read("proxy-send-timeout", seconds),
            read_timeout: values.read("proxy-read-timeout", seconds).or(read_timeout),
            // Nothing is said in the clear that was to be said in TLS.
            protocol: values.strict("backend-protocol", protocol),
            tls: TlsSpec::read(values, namespace),
            use_regex: values.flag("use-regex").unwrap_or(false),
            // A backend must not see paths that it was not meant to see.
            rewrite: values.strict("rewrite-target", |text| {
                Ok::<_, String>((text.to_owned(), Rewrite::parse(text)?))
            }),
            app_root: Redirect::app_root(values),
            redirect: Redirect::read(values),
            cors: Cors::read(values),
            ranges: SourceRanges::read(values),
            limits: LimitSpec::read(values),
            basic: BasicSpec::read(values, namespace),
            external: ExternalSpec::read(values),
            affinity: AffinitySpec::read(values),
            canary: CanarySpec::read(values),
            host: values.read("upstream-vhost", host),
            prefix: values.read("x-forwarded-prefix", header_value),
            aliases: values.read("server-alias", aliases).unwrap_or_default(),
            closed: false,
        };
        read.closed = all.finish();
        read
    }
}

impl Annotations {
    /// How requests for this path are rewritten.
    pub fn rewrite_of(&self, path: &str) -> Option<&Rewrite> {
        let (target, rewrite) = self.rewrite.as_ref()?;
        (target != path).then_some(rewrite)
    }
}

fn protocol(text: &str) -> Result<(Protocol, bool), &'static str> {
    match text.to_ascii_uppercase().as_str() {
        "HTTP" => Ok((Protocol::Http1, false)),
        "HTTPS" => Ok((Protocol::Http1, true)),
        "H2C" | "GRPC" => Ok((Protocol::Http2, false)),
        "GRPCS" => Ok((Protocol::Http2, true)),
        _ => Err("its value must be HTTP, HTTPS, GRPC, GRPCS or H2C"),
    }
}

fn header_value(text: &str) -> Result<HeaderValue, &'static str> {
    let value = HeaderValue::from_str(text).ok();
    let sound = !text.is_empty() && text.len() <= 1024 && is_plain(text) && !text.contains('$');
    value
        .filter(|_| sound)
        .ok_or("its value must be printable ASCII without quotes, spaces and variables")
}

fn host(text: &str) -> Result<HeaderValue, &'static str> {
    let is_host = text.parse::<Authority>().is_ok() && !text.contains('@');
    match is_host {
        true => header_value(text),
        false => Err("its value must be the name of a host"),
    }
}

fn aliases(text: &str) -> Result<Vec<HostMatch>, &'static str> {
    let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    let names: Vec<&str> = names.collect();
    let sound = |name: &&str| {
        let name = name.strip_prefix("*.").unwrap_or(name);
        !name.is_empty()
            && name
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte))
    };
    match names.len() <= 256 && names.iter().all(sound) {
        true => Ok(names.into_iter().map(HostMatch::parse).collect()),
        false => Err("its value must be names of hosts with commas between them, not expressions"),
    }
}

/// What holds for the requests of a route.
#[derive(Clone, Debug, Default)]
pub struct Features {
    /// All are answered with 503.
    pub closed: bool,
    pub redirect: Option<Redirect>,
    pub cors: Option<Cors>,
    pub ranges: Option<SourceRanges>,
    pub limits: Option<Arc<Limits>>,
    pub basic: Option<Basic>,
    pub external: Option<External>,
    pub affinity: Option<Affinity>,
    pub canary: Option<Canary>,
    /// What endpoints see as the host.
    pub host: Option<HeaderValue>,
    pub prefix: Option<HeaderValue>,
    /// Only of routes whose path is an expression.
    pub rewrite: Option<Rewrite>,
}

impl Features {
    /// Whether not all clients may.
    pub fn restricts(&self) -> bool {
        self.closed || self.ranges.is_some() || self.basic.is_some() || self.external.is_some()
    }

    pub fn is_empty(&self) -> bool {
        let Features {
            closed,
            redirect,
            cors,
            ranges,
            limits,
            basic,
            external,
            affinity,
            canary,
            host,
            prefix,
            rewrite,
        } = self;
        !closed
            && redirect.is_none()
            && cors.is_none()
            && ranges.is_none()
            && limits.is_none()
            && basic.is_none()
            && external.is_none()
            && affinity.is_none()
            && canary.is_none()
            && host.is_none()
            && prefix.is_none()
            && rewrite.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn annotations_are_acted_on_or_reported() {
        let ingress = serde_json::from_value(json!({"metadata": {"namespace": "d", "annotations": {
            "ingress.skiff.io/ssl-redirect": "false",
            "ingress.skiff.io/force-ssl-redirect": "yes",
            "ingress.skiff.io/max-body-size": "8m",
            "nginx.ingress.kubernetes.io/proxy-read-timeout": "300",
            "ingress.skiff.io/backend-protocol": "grpcs",
            "ingress.skiff.io/rewrite": "/",
            "nginx.ingress.kubernetes.io/proxy-buffering": "on",
            "nginx.ingress.kubernetes.io/server-snippet": "return 200;",
            "example.com/mine": "1",
        }}}))
        .expect("an Ingress");
        let mut problems = Vec::new();
        let read = Annotations::read(&ingress, &mut problems);
        assert!(!read.ssl_redirect && !read.force_ssl_redirect && !read.closed);
        assert_eq!(read.max_body, Some(8 << 20));
        assert_eq!(read.read_timeout, Some(Duration::from_secs(300)));
        assert_eq!(read.protocol, Some((Protocol::Http2, true)));
        let texts: Vec<&str> = problems.iter().map(|problem| problem.message.as_str()).collect();
        assert_eq!(texts.len(), 4, "{texts:?}");
        for name in ["force-ssl-redirect", "rewrite", "proxy-buffering", "snippets are"] {
            assert!(texts.iter().any(|text| text.contains(name)), "{name}: {texts:?}");
        }
    }

    #[test]
    fn values_that_would_break_a_header_are_refused() {
        for text in ["", "a b", "a\r\nx: y", "$host", "\"", "é"] {
            assert!(header_value(text).is_err(), "{text:?}");
        }
        for text in ["", "a/b", "u@a", "a b", "a\r\nb", "$host"] {
            assert!(host(text).is_err(), "{text:?}");
        }
        assert!(host("inner.example:8080").is_ok());
        for text in ["a/b", "~^www", "a b", "*"] {
            assert!(aliases(text).is_err(), "{text:?}");
        }
        assert_eq!(aliases("B.example, *.c.example").map(|all| all.len()), Ok(2));
    }
}
