//! What a packet is to reach, as a user writes it: `service/b:80`, `pod/b:8080`, `example.com:443`. Pure.

use std::str::FromStr;

use serde::Serialize;

/// A namespaced object. Without a namespace, that of the command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ObjectName {
    pub namespace: Option<String>,
    pub name: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A port by number or name.
    Service(ObjectName, String),
    Pod(ObjectName, u16),
    /// A name or address outside of the cluster.
    Host(String, u16),
}

/// A pod by `pod/NAME` or `pod/NAMESPACE/NAME`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source(pub ObjectName);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    #[error("{0:?}: write pod/NAME or pod/NAMESPACE/NAME")]
    Source(String),
    #[error("{0:?}: write service/NAME:PORT, pod/NAME:PORT, HOST:PORT or [IPV6]:PORT")]
    Target(String),
}

fn object(text: &str) -> Option<ObjectName> {
    let (namespace, name) = match text.split_once('/') {
        Some((namespace, name)) => (Some(namespace.to_owned()), name),
        None => (None, text),
    };
    let is_name = |name: &str| !name.is_empty() && !name.contains(['/', ':', ' ']);
    (is_name(name) && namespace.as_deref().is_none_or(is_name)).then(|| ObjectName {
        namespace,
        name: name.to_owned(),
    })
}

/// What follows a kind, in the forms that kubectl takes.
fn after_kind<'a>(text: &'a str, kinds: &[&str]) -> Option<&'a str> {
    let (kind, rest) = text.split_once('/')?;
    kinds.contains(&kind).then_some(rest)
}

const PODS: [&str; 3] = ["pod", "pods", "po"];
const SERVICES: [&str; 3] = ["service", "services", "svc"];

impl FromStr for Source {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Source, TargetError> {
        let found = after_kind(text, &PODS).and_then(object);
        found
            .map(Source)
            .ok_or_else(|| TargetError::Source(text.to_owned()))
    }
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Target, TargetError> {
        let failed = || TargetError::Target(text.to_owned());
        let number = |port: &str| {
            port.parse::<u16>()
                .ok()
                .filter(|port| *port > 0)
                .ok_or_else(failed)
        };
        let (place, port) = text.rsplit_once(':').ok_or_else(failed)?;
        if let Some(name) = after_kind(place, &SERVICES) {
            let name = object(name).ok_or_else(failed)?;
            if port.is_empty() {
                return Err(failed());
            }
            return Ok(Target::Service(name, port.to_owned()));
        }
        if let Some(name) = after_kind(place, &PODS) {
            return Ok(Target::Pod(object(name).ok_or_else(failed)?, number(port)?));
        }
        let bracketed = place.strip_prefix('[').and_then(|place| place.strip_suffix(']'));
        let host = bracketed.unwrap_or(place);
        // A bare IPv6 address would leave open where the port begins.
        if host.is_empty() || host.contains(['/', ' ']) || (bracketed.is_none() && host.contains(':')) {
            return Err(failed());
        }
        Ok(Target::Host(host.to_owned(), number(port)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_users_write() {
        let name = |namespace: Option<&str>, name: &str| ObjectName {
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
        };
        for (text, expected) in [
            (
                "service/b:80",
                Some(Target::Service(name(None, "b"), "80".into())),
            ),
            (
                "svc/x/b:http",
                Some(Target::Service(name(Some("x"), "b"), "http".into())),
            ),
            ("pod/b:8080", Some(Target::Pod(name(None, "b"), 8080))),
            ("pod/x/b:8080", Some(Target::Pod(name(Some("x"), "b"), 8080))),
            ("example.com:443", Some(Target::Host("example.com".into(), 443))),
            ("192.0.2.1:1", Some(Target::Host("192.0.2.1".into(), 1))),
            ("[2001:db8::1]:53", Some(Target::Host("2001:db8::1".into(), 53))),
            ("2001:db8::1:53", None),
            ("service/b", None),
            ("service/b:", None),
            ("pod/b:http", None),
            ("pod/b:0", None),
            ("deployment/b:80", None),
        ] {
            assert_eq!(text.parse::<Target>().ok(), expected, "{text}");
        }
        assert_eq!("pod/a".parse(), Ok(Source(name(None, "a"))));
        assert_eq!("po/x/a".parse(), Ok(Source(name(Some("x"), "a"))));
        assert!("service/a".parse::<Source>().is_err());
    }
}
