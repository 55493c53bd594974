//! The annotations of an Ingress that are acted on. Any other that is meant for an ingress controller is a problem: what
//! it asks for does not happen.

use std::time::Duration;

use k8s_openapi::api::networking::v1::Ingress;

use crate::backend::Protocol;
use crate::compile::{Problem, READ_TIMEOUT};

const PREFIX: &str = "ingress.skiff.io/";

/// Prefixes of other controllers' annotations.
const OTHERS: [&str; 6] = [
    "nginx.ingress.kubernetes.io/",
    "nginx.org/",
    "traefik.ingress.kubernetes.io/",
    "haproxy.org/",
    "haproxy-ingress.github.io/",
    "alb.ingress.kubernetes.io/",
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Redirect to HTTPS where the host has a certificate.
    pub redirect: bool,
    /// Redirect to HTTPS, whoever has the certificate.
    pub force_redirect: bool,
    pub max_body: Option<u64>,
    pub read_timeout: Duration,
    pub protocol: Option<Protocol>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            redirect: true,
            force_redirect: false,
            max_body: None,
            read_timeout: READ_TIMEOUT,
            protocol: None,
        }
    }
}

pub fn read(ingress: &Ingress, problems: &mut Vec<Problem>) -> Options {
    let mut options = Options::default();
    for (name, value) in ingress.metadata.annotations.iter().flatten() {
        if OTHERS.iter().any(|other| name.starts_with(other)) {
            problems.push(Problem {
                reason: "UnsupportedAnnotation",
                message: format!("the annotation {name} is another controller's and has no effect"),
            });
            continue;
        }
        let Some(short) = name.strip_prefix(PREFIX) else {
            continue;
        };
        if let Err(expected) = set(&mut options, short, value) {
            problems.push(Problem {
                reason: "BadAnnotation",
                message: format!("the annotation {name} has no effect: {expected}"),
            });
        }
    }
    options
}

fn set(options: &mut Options, name: &str, value: &str) -> Result<(), &'static str> {
    let boolean = || {
        value
            .parse::<bool>()
            .map_err(|_| "its value must be true or false")
    };
    match name {
        "ssl-redirect" => options.redirect = boolean()?,
        "force-ssl-redirect" => options.force_redirect = boolean()?,
        "max-body-size" => options.max_body = size(value)?,
        "read-timeout" => {
            let seconds = value.parse::<u32>().ok().filter(|seconds| *seconds > 0);
            let seconds = seconds.ok_or("its value must be a number of seconds above 0")?;
            options.read_timeout = Duration::from_secs(seconds.into());
        }
        "backend-protocol" => {
            options.protocol = Some(match value.to_ascii_uppercase().as_str() {
                "HTTP" => Protocol::Http1,
                "H2C" | "GRPC" => Protocol::Http2,
                _ => return Err("its value must be HTTP, H2C or GRPC"),
            });
        }
        _ => return Err("it is not known"),
    }
    Ok(())
}

/// Bytes, with `k`, `m` or `g` for powers of 1,024; 0 is no limit.
fn size(text: &str) -> Result<Option<u64>, &'static str> {
    let expected = "its value must be a number of bytes, such as 512k, 8m or 0 for no limit";
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        _ => return Err(expected),
    };
    let number: u64 = digits.parse().map_err(|_| expected)?;
    let bytes = number.checked_mul(1 << shift).ok_or(expected)?;
    Ok(Some(bytes).filter(|bytes| *bytes > 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn annotations_are_acted_on_or_reported() {
        let ingress = serde_json::from_value(json!({"metadata": {"annotations": {
            "ingress.skiff.io/ssl-redirect": "false",
            "ingress.skiff.io/force-ssl-redirect": "yes",
            "ingress.skiff.io/max-body-size": "8m",
            "ingress.skiff.io/read-timeout": "300",
            "ingress.skiff.io/backend-protocol": "grpc",
            "ingress.skiff.io/rewrite": "/",
            "nginx.ingress.kubernetes.io/auth-url": "http://auth",
            "example.com/mine": "1",
        }}}))
        .expect("an Ingress");
        let mut problems = Vec::new();
        let options = read(&ingress, &mut problems);
        let expected = Options {
            redirect: false,
            force_redirect: false,
            max_body: Some(8 << 20),
            read_timeout: Duration::from_secs(300),
            protocol: Some(Protocol::Http2),
        };
        assert_eq!(options, expected);
        let texts: Vec<&str> = problems.iter().map(|problem| problem.message.as_str()).collect();
        assert_eq!(texts.len(), 3, "{texts:?}");
        for name in ["force-ssl-redirect", "rewrite", "auth-url"] {
            assert!(texts.iter().any(|text| text.contains(name)), "{name}: {texts:?}");
        }
    }

    #[test]
    fn sizes_have_units() {
        for (text, expected) in [
            ("0", Ok(None)),
            ("1", Ok(Some(1))),
            ("2K", Ok(Some(2048))),
            ("1g", Ok(Some(1 << 30))),
        ] {
            assert_eq!(size(text), expected, "{text}");
        }
        for text in ["", "k", "-1", "1t", "1 m", "99999999999g"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
