//! Clients that stay with one endpoint, by a cookie. The cookie is made from the endpoint's address alone, so that it
//! means the same to every server, after a restart, and however the other endpoints change. Pure.

use std::net::SocketAddr;

use aws_lc_rs::digest::{SHA256, digest};
use http::{HeaderMap, HeaderValue, header};

use super::values::{Values, boolean};

const NAME: &str = "INGRESSCOOKIE";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AffinitySpec {
    name: String,
    /// `None`: the path of the route.
    path: Option<String>,
    /// `; Domain=…` and the like, which are the same for all.
    attributes: String,
    expires: Option<i64>,
    /// `None`: where the request has TLS.
    secure: Option<bool>,
    change_on_failure: bool,
    /// Clients that a canary has served stay with it.
    pub keeps_canary: bool,
}

impl AffinitySpec {
    pub fn read(values: &mut Values<'_>) -> Option<AffinitySpec> {
        let kind = values.read("affinity", |text| match text {
            "cookie" => Ok(()),
            _ => Err("its value must be cookie"),
        });
        values.read("affinity-mode", |text| match text {
            "balanced" | "persistent" => Ok(()),
            _ => Err("its value must be balanced or persistent"),
        });
        let canary = values.read("affinity-canary-behavior", |text| match text {
            "sticky" => Ok(true),
            "legacy" => Ok(false),
            _ => Err("its value must be sticky or legacy"),
        });
        let name = values.read("session-cookie-name", |text| match is_token(text) {
            true => Ok(text.to_owned()),
            false => Err("its value must be the name of a cookie"),
        });
        let part = |text: &str| match is_attribute(text) {
            true => Ok(text.to_owned()),
            false => Err("its value must be printable ASCII without semicolons and commas"),
        };
        let path = values.read("session-cookie-path", part);
        let domain = values.read("session-cookie-domain", part);
        let number = |text: &str| {
            let number = text
                .parse::<i64>()
                .ok()
                .filter(|number| (0..=i64::from(u32::MAX)).contains(number));
            number.ok_or("its value must be a number of seconds")
        };
        let expires = values.read("session-cookie-expires", number);
        let max_age = values.read("session-cookie-max-age", number);
        let same_site = values.read("session-cookie-samesite", |text| match text {
            "None" | "Lax" | "Strict" => Ok(text.to_owned()),
            _ => Err("its value must be None, Lax or Strict"),
        });
        let secure = values.read("session-cookie-secure", boolean);
        let change = values.flag("session-cookie-change-on-failure").unwrap_or(false);
        kind?;
        let mut attributes = String::new();
        for (name, value) in [
            ("Domain", domain),
            ("Max-Age", max_age.map(|age| age.to_string())),
            ("SameSite", same_site),
        ] {
            if let Some(value) = value {
                attributes.push_str(&format!("; {name}={value}"));
            }
        }
        Some(AffinitySpec {
            name: name.unwrap_or_else(|| NAME.to_owned()),
            path,
            attributes,
            expires,
            secure,
            change_on_failure: change,
            keeps_canary: canary.unwrap_or(true),
        })
    }
}

fn is_token(text: &str) -> bool {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.len() <= 256 && text.bytes().all(sound)
}

fn is_attribute(text: &str) -> bool {
    text.len() <= 1024
        && text
            .bytes()
            .all(|byte| byte.is_ascii_graphic() && !b";,\"\\".contains(&byte))
}

/// Of one route.
#[derive(Clone, Debug)]
pub struct Affinity {
    pub spec: AffinitySpec,
    path: String,
    /// Nobody outside knows it, so that cookies do not tell the addresses of pods.
    salt: String,
}

impl Affinity {
    /// `path` is the route's.
    pub fn new(spec: AffinitySpec, path: &str, salt: &str) -> Affinity {
        let path = spec.path.clone().unwrap_or_else(|| path.to_owned());
        Affinity {
            path: if is_attribute(&path) { path } else { "/".to_owned() },
            spec,
            salt: salt.to_owned(),
        }
    }

    /// What a client shows.
    pub fn shown<'a>(&self, headers: &'a HeaderMap) -> Option<&'a str> {
        cookie(headers, &self.spec.name).filter(|value| value.len() == 32)
    }

    /// What clients of this endpoint show.
    pub fn token(&self, endpoint: SocketAddr) -> String {
        let hashed = digest(&SHA256, format!("{} {endpoint}", self.salt).as_bytes());
        hashed
            .as_ref()
            .iter()
            .take(16)
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    /// The cookie for a client that `endpoint` answered. `wanted` is the endpoint that it had, if that is still there.
    pub fn set_cookie(
        &self,
        wanted: Option<SocketAddr>,
        endpoint: SocketAddr,
        tls: bool,
        now: jiff::Timestamp,
    ) -> Option<HeaderValue> {
        let keep = wanted.is_some_and(|wanted| wanted == endpoint || !self.spec.change_on_failure);
        if keep {
            return None;
        }
        let spec = &self.spec;
        let mut text = format!(
            "{}={}; Path={}{}",
            spec.name,
            self.token(endpoint),
            self.path,
            spec.attributes
        );
        let until = spec
            .expires
            .and_then(|seconds| now.checked_add(jiff::SignedDuration::from_secs(seconds)).ok());
        if let Some(until) = until {
            text.push_str(&until.strftime("; Expires=%a, %d %b %Y %H:%M:%S GMT").to_string());
        }
        if spec.secure.unwrap_or(tls) {
            text.push_str("; Secure");
        }
        text.push_str("; HttpOnly");
        HeaderValue::try_from(text).ok()
    }
}

/// The value of a cookie; the first, if a client sends several.
pub fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let lines = headers
        .get_all(header::COOKIE)
        .iter()
        .filter_map(|line| line.to_str().ok());
    let mut pairs = lines
        .flat_map(|line| line.split(';'))
        .filter_map(|pair| pair.trim().split_once('='));
    pairs.find_map(|(key, value)| (key == name).then_some(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn read(pairs: &[(&str, &str)]) -> (Option<AffinitySpec>, usize) {
        let map: BTreeMap<String, String> = pairs
            .iter()
            .map(|(name, value)| (format!("ingress.skiff.io/{name}"), (*value).to_owned()))
            .collect();
        let mut problems = Vec::new();
        let mut values = Values::new(map.iter(), &mut problems);
        let spec = AffinitySpec::read(&mut values);
        values.finish();
        (spec, problems.len())
    }

    #[test]
    fn cookies_are_stable_and_have_attributes() {
        let (spec, _) = read(&[
            ("affinity", "cookie"),
            ("session-cookie-name", "route"),
            ("session-cookie-max-age", "60"),
            ("session-cookie-expires", "60"),
            ("session-cookie-samesite", "Lax"),
            ("session-cookie-domain", "a.example"),
        ]);
        let affinity = Affinity::new(spec.expect("a spec"), "/app", "uid");
        let (one, two) = (
            SocketAddr::from(([10, 0, 0, 1], 80)),
            SocketAddr::from(([10, 0, 0, 2], 80)),
        );
        let now = jiff::Timestamp::UNIX_EPOCH;
        let value = affinity.set_cookie(None, one, true, now).expect("a cookie");
        let expected = format!(
            "route={}; Path=/app; Domain=a.example; Max-Age=60; SameSite=Lax; Expires=Thu, 01 Jan 1970 00:01:00 GMT; Secure; HttpOnly",
            affinity.token(one)
        );
        assert_eq!(value, expected.as_str());
        assert_ne!(affinity.token(one), affinity.token(two));
        assert_eq!(affinity.set_cookie(Some(one), two, true, now), None);
        let mut headers = HeaderMap::new();
        let sent = format!("x=1; route={}; route=2", affinity.token(two));
        headers.insert(header::COOKIE, HeaderValue::from_str(&sent).expect("a value"));
        assert_eq!(affinity.shown(&headers), Some(affinity.token(two).as_str()));
    }

    #[test]
    fn values_that_would_break_the_header_are_refused() {
        for (name, value) in [
            ("session-cookie-name", "a=b"),
            ("session-cookie-name", "a\r\nSet-Cookie: b"),
            ("session-cookie-path", "/; Domain=evil"),
            ("session-cookie-path", "/\r\nX: y"),
            ("session-cookie-domain", "a, b"),
            ("session-cookie-samesite", "lax; Secure"),
            ("session-cookie-max-age", "-1"),
        ] {
            let (spec, problems) = read(&[("affinity", "cookie"), (name, value)]);
            assert_eq!(problems, 1, "{name} {value:?}");
            assert!(spec.is_some_and(|spec| !spec.attributes.contains(value)));
        }
        assert_eq!(read(&[("affinity", "ip")]).1, 1);
    }
}
