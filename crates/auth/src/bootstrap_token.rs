//! Bootstrap tokens: `<id>.<secret>`, each a Secret of its own type in `kube-system`, by which machines that are not
//! part of the cluster yet are known. Nothing here makes or removes such a Secret.

use async_trait::async_trait;
use base64::Engine;
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::Arc;

use crate::{AuthError, Authenticated, TokenAuthenticator, UserInfo};

const PREFIX: &str = "bootstrap-token-";
const TYPE: &str = "bootstrap.kubernetes.io/token";
const GROUP: &str = "system:bootstrappers";
const USER_PREFIX: &str = "system:bootstrap:";

/// The Secrets of `kube-system`, as the cache has them.
#[async_trait]
pub trait SystemSecrets: Send + Sync {
    async fn secret(&self, name: &str) -> Option<Value>;
    /// In seconds of Unix time.
    fn now(&self) -> i64;
}

pub struct BootstrapTokens {
    pub secrets: Arc<dyn SystemSecrets>,
}

#[async_trait]
impl TokenAuthenticator for BootstrapTokens {
    async fn authenticate(
        &self,
        token: &str,
        _audiences: &[String],
    ) -> Result<Option<Authenticated>, AuthError> {
        let Some((id, secret)) = parse(token) else {
            return Ok(None);
        };
        let Some(object) = self.secrets.secret(&format!("{PREFIX}{id}")).await else {
            return Ok(None);
        };
        // COMPAT: what is wrong with the Secret is for the log; the token is as good as unknown.
        Ok(match user(&object, id, secret, self.secrets.now()) {
            Ok(user) => Some(Authenticated::anywhere(user)),
            Err(why) => {
                tracing::debug!(id, why, "a bootstrap token is refused");
                None
            }
        })
    }
}

/// The two parts of a token: six and sixteen letters or digits.
fn parse(token: &str) -> Option<(&str, &str)> {
    let (id, secret) = token.split_once('.')?;
    let plain = |text: &str| text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    (id.len() == 6 && secret.len() == 16 && plain(id) && plain(secret)).then_some((id, secret))
}

fn user(object: &Value, id: &str, secret: &str, now: i64) -> Result<UserInfo, &'static str> {
    let data = |key: &str| -> Vec<u8> {
        let text = object["data"][key].as_str().unwrap_or("");
        base64::engine::general_purpose::STANDARD
            .decode(text)
            .unwrap_or_default()
    };
    let text = |key: &str| String::from_utf8(data(key)).unwrap_or_default();
    if !object["metadata"]["deletionTimestamp"].is_null() {
        return Err("it is being deleted");
    }
    if object["type"] != TYPE {
        return Err("its Secret is of another type");
    }
    if !same(&data("token-secret"), secret.as_bytes()) {
        return Err("its secret is another");
    }
    if text("token-id") != id {
        return Err("its Secret is of another token");
    }
    let expiration = data("expiration");
    if !expiration.is_empty() {
        match std::str::from_utf8(&expiration)
            .ok()
            .and_then(skiff_meta::time::parse)
        {
            None => return Err("its expiration is no time"),
            Some(at) if at.as_second() <= now => return Err("it has expired"),
            Some(_) => {}
        }
    }
    if text("usage-bootstrap-authentication") != "true" {
        return Err("it is not for authentication");
    }
    let mut groups = BTreeSet::from([GROUP.to_owned()]);
    let extra = text("auth-extra-groups");
    for group in extra.split(',').filter(|_| !extra.is_empty()) {
        if !is_group(group) {
            return Err("its groups are not those of bootstrap tokens");
        }
        groups.insert(group.to_owned());
    }
    Ok(UserInfo::new(format!("{USER_PREFIX}{id}"), groups))
}

/// `system:bootstrappers:` and a name.
fn is_group(group: &str) -> bool {
    let Some(name) = group.strip_prefix("system:bootstrappers:") else {
        return false;
    };
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = name.as_bytes();
    (1..=256).contains(&bytes.len())
        && bytes.iter().all(|b| plain(*b) || matches!(b, b':' | b'-'))
        && bytes.last().is_some_and(|b| plain(*b))
}

/// Compares in a time that does not tell where the first difference is.
fn same(left: &[u8], right: &[u8]) -> bool {
    let mut different = usize::from(left.len() != right.len());
    for (a, b) in left.iter().zip(right) {
        different |= usize::from(a ^ b);
    }
    std::hint::black_box(different) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn secret(changes: &[(&str, &str)]) -> Value {
        let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
        let mut secret = json!({"type": TYPE, "metadata": {}, "data": {
            "token-id": encode("abcdef"), "token-secret": encode("0123456789abcdef"),
            "usage-bootstrap-authentication": encode("true"),
        }});
        for (key, value) in changes {
            match *key {
                "type" => secret["type"] = json!(value),
                "deletionTimestamp" => secret["metadata"][key] = json!(value),
                _ => secret["data"][key] = json!(encode(value)),
            }
        }
        secret
    }

    #[test]
    fn the_secret_decides() {
        let check = |changes: &[(&str, &str)], expected: Option<&[&str]>| {
            let found = user(&secret(changes), "abcdef", "0123456789abcdef", 1_800_000_000);
            match (&found, expected) {
                (Ok(user), Some(groups)) => {
                    assert_eq!(user.name, "system:bootstrap:abcdef");
                    assert_eq!(user.groups, groups, "{changes:?}");
                }
                (Err(_), None) => {}
                _ => panic!("{changes:?}: {found:?}"),
            }
        };
        let plain: &[&str] = &["system:bootstrappers", "system:authenticated"];
        check(&[], Some(plain));
        check(&[("expiration", "2027-01-15T08:00:01Z")], Some(plain));
        check(&[("expiration", "2027-01-15T08:00:00Z")], None);
        check(&[("expiration", "tomorrow")], None);
        check(&[("type", "Opaque")], None);
        check(&[("token-secret", "0123456789abcdee")], None);
        check(&[("token-secret", "0123456789abcde")], None);
        check(&[("token-id", "abcdeg")], None);
        check(&[("usage-bootstrap-authentication", "True")], None);
        check(&[("deletionTimestamp", "2027-01-15T08:00:00Z")], None);
        let extra = "system:bootstrappers:b,system:bootstrappers:a";
        let with: &[&str] = &[
            "system:bootstrappers",
            "system:bootstrappers:a",
            "system:bootstrappers:b",
            "system:authenticated",
        ];
        check(&[("auth-extra-groups", extra)], Some(with));
        check(&[("auth-extra-groups", "system:masters")], None);
        check(&[("auth-extra-groups", "system:bootstrappers:a-")], None);
        check(&[("auth-extra-groups", "system:bootstrappers:a,")], None);
    }

    #[test]
    fn tokens_have_two_parts() {
        assert_eq!(
            parse("abcdef.0123456789abcdef"),
            Some(("abcdef", "0123456789abcdef"))
        );
        for other in [
            "",
            "abcdef",
            "abcdef.",
            "Abcdef.0123456789abcdef",
            "abcdef.0123456789abcdef0",
            "abcdef.0123456789abcde.",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
