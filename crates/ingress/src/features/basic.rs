//! Basic authentication (RFC 7617) with the users of a Secret.
//!
//! Checking a password takes milliseconds on purpose, so it is done on other threads than those of connections, a few at
//! a time and one of each Secret, and what was right is remembered, as a digest under a key of this process.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::digest::{Context, SHA256};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, HeaderValue, header};
use k8s_openapi::api::core::v1::Secret;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use super::passwords::Hash;
use super::values::Values;

/// Of an Authorization header that is looked at.
const MAX_HEADER: usize = 4096;
/// Of one Secret.
const MAX_USERS: usize = 16 * 1024;
/// Right passwords that are remembered for one Secret.
const MAX_REMEMBERED: usize = 1024;
/// Passwords that are checked at the same time, one of each Secret at most.
static CHECKS: Semaphore = Semaphore::const_new(2);
/// A request waits no longer for its turn.
const TURN: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BasicSpec {
    /// In the Ingress' namespace.
    pub secret: String,
    /// Each key of the Secret is a user; else its key `auth` is an htpasswd file.
    pub is_map: bool,
    pub challenge: HeaderValue,
}

impl BasicSpec {
    /// `namespace` is the Ingress'.
    pub fn read(values: &mut Values<'_>, namespace: &str) -> Option<BasicSpec> {
        let kind = values.strict("auth-type", |text| match text {
            "basic" => Ok(()),
            "digest" => Err("digest authentication is not supported"),
            _ => Err("its value must be basic"),
        });
        let has_kind = kind.is_some();
        let secret = values.strict("auth-secret", |text| local_secret(text, namespace));
        let is_map = values.strict("auth-secret-type", |text| match text {
            "auth-file" => Ok(false),
            "auth-map" => Ok(true),
            _ => Err("its value must be auth-file or auth-map"),
        });
        let challenge = |realm: &str| {
            let sound = |byte: u8| (b' '..=b'~').contains(&byte) && !b"\"\\".contains(&byte);
            let value = HeaderValue::try_from(format!("Basic realm=\"{realm}\"")).ok();
            value
                .filter(|_| realm.len() <= 256 && realm.bytes().all(sound))
                .ok_or("its value must be printable ASCII without quotes")
        };
        let realm = values.strict("auth-realm", challenge);
        match (has_kind, &secret) {
            (true, None) if !values.closed => values.close("auth-type", "auth-secret names no Secret"),
            (false, Some(_)) if !values.closed => values.close("auth-secret", "auth-type is not basic"),
            _ => {}
        }
        kind?;
        Some(BasicSpec {
            secret: secret?,
            is_map: is_map.unwrap_or(false),
            challenge: realm.unwrap_or_else(|| HeaderValue::from_static("Basic realm=\"\"")),
        })
    }
}

/// The name of a Secret of this namespace, which may be said too.
pub fn local_secret(text: &str, namespace: &str) -> Result<String, &'static str> {
    let name = match text.split_once('/') {
        Some((other, _)) if other != namespace => return Err("a Secret of another namespace is not read"),
        Some((_, name)) => name,
        None => text,
    };
    match name.is_empty() || name.contains('/') {
        true => Err("its value must be the name of a Secret"),
        false => Ok(name.to_owned()),
    }
}

/// The users of one Secret.
pub struct Users {
    by_name: HashMap<String, Hash>,
    key: [u8; 32],
    remembered: Mutex<HashSet<[u8; 32]>>,
    /// Who comes first here waits for [`CHECKS`]: the users of one Secret do not keep those of others waiting.
    first: Arc<Semaphore>,
}

impl std::fmt::Debug for Users {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} users", self.by_name.len())
    }
}

impl Users {
    /// With what cannot be read of it: those users cannot log in.
    pub fn read(secret: &Secret, is_map: bool) -> Result<(Users, Vec<String>), String> {
        let data = secret.data.iter().flatten();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
        let pairs: Vec<(String, String)> = match is_map {
            true => data
                .filter_map(|(user, hash)| Some((user.clone(), text(&hash.0)?.trim().to_owned())))
                .collect(),
            false => {
                let file = secret.data.as_ref().and_then(|data| data.get("auth"));
                let file = file
                    .and_then(|bytes| text(&bytes.0))
                    .ok_or("it has no key auth with text")?;
                let lines = file
                    .lines()
                    .map(str::trim)
                    .filter(|line| !line.is_empty() && !line.starts_with('#'));
                // A third field is a comment.
                let pair = |line: &str| {
                    let (user, rest) = line.split_once(':').unwrap_or((line, ""));
                    (
                        user.to_owned(),
                        rest.split(':').next().unwrap_or_default().to_owned(),
                    )
                };
                lines.map(pair).collect()
            }
        };
        if pairs.len() > MAX_USERS {
            return Err(format!("it has more than {MAX_USERS} users"));
        }
        let (mut by_name, mut problems) = (HashMap::new(), Vec::new());
        for (user, hash) in pairs {
            match Hash::parse(&hash) {
                // As nginx, the first line of a user counts.
                Ok(hash) => {
                    by_name.entry(user).or_insert(hash);
                }
                Err(why) if problems.len() < 3 => problems.push(format!("user {user:?}: {why}")),
                Err(_) => {}
            }
        }
        let users = Users {
            by_name,
            key: rand::random(),
            remembered: Mutex::default(),
            first: Arc::new(Semaphore::new(1)),
        };
        Ok((users, problems))
    }

    fn digest(&self, user: &str, password: &str) -> [u8; 32] {
        let mut context = Context::new(&SHA256);
        context.update(&self.key);
        context.update(&(user.len() as u64).to_le_bytes());
        context.update(user.as_bytes());
        context.update(password.as_bytes());
        let mut digest = [0; 32];
        digest.copy_from_slice(context.finish().as_ref());
        digest
    }

    /// Held while a password is checked, also for a client that went away.
    async fn turn(&self) -> Option<(OwnedSemaphorePermit, SemaphorePermit<'static>)> {
        let first = self.first.clone().acquire_owned().await.ok()?;
        Some((first, CHECKS.acquire().await.ok()?))
    }

    /// `None`: it could not be checked now.
    pub async fn verify(self: &Arc<Self>, Credentials { user, password }: Credentials) -> Option<bool> {
        let Some(hash) = self.by_name.get(&user) else {
            return Some(false);
        };
        if !hash.is_slow() {
            return Some(hash.verify(password.as_bytes()));
        }
        let digest = self.digest(&user, &password);
        if self.remembered.lock().contains(&digest) {
            return Some(true);
        }
        let turn = tokio::time::timeout(TURN, self.turn()).await.ok()??;
        // Many requests come at once with one password: it may have been checked meanwhile.
        if self.remembered.lock().contains(&digest) {
            return Some(true);
        }
        let users = self.clone();
        let checked = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            users
                .by_name
                .get(&user)
                .is_some_and(|hash| hash.verify(password.as_bytes()))
        });
        let right = checked.await.ok()?;
        if right {
            let mut remembered = self.remembered.lock();
            if remembered.len() >= MAX_REMEMBERED {
                remembered.clear();
            }
            remembered.insert(digest);
        }
        Some(right)
    }
}

pub struct Credentials {
    user: String,
    password: String,
}

impl Credentials {
    /// Of a request that has exactly one Authorization header, of a size that is sound.
    pub fn of(headers: &HeaderMap) -> Option<Credentials> {
        let mut all = headers.get_all(header::AUTHORIZATION).iter();
        let value = all.next().filter(|value| value.len() <= MAX_HEADER)?;
        if all.next().is_some() {
            return None;
        }
        let (scheme, encoded) = value.to_str().ok()?.split_once(' ')?;
        if !scheme.eq_ignore_ascii_case("basic") {
            return None;
        }
        let text = String::from_utf8(STANDARD.decode(encoded.trim()).ok()?).ok()?;
        let (user, password) = text.split_once(':')?;
        Some(Credentials {
            user: user.to_owned(),
            password: password.to_owned(),
        })
    }
}

/// What requests of an Ingress must show.
#[derive(Clone, Debug)]
pub struct Basic {
    pub users: Arc<Users>,
    pub challenge: HeaderValue,
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::ByteString;
    use std::collections::BTreeMap;

    fn read(pairs: &[(&str, &str)]) -> (Option<BasicSpec>, bool) {
        let map: BTreeMap<String, String> = pairs
            .iter()
            .map(|(name, value)| (format!("nginx.ingress.kubernetes.io/{name}"), (*value).to_owned()))
            .collect();
        let mut problems = Vec::new();
        let mut values = Values::new(map.iter(), &mut problems);
        let spec = BasicSpec::read(&mut values, "d");
        (spec, values.finish())
    }

    #[test]
    fn what_is_not_whole_closes() {
        let (kind, secret) = (("auth-type", "basic"), ("auth-secret", "users"));
        let (spec, closed) = read(&[kind, ("auth-secret", "d/users"), ("auth-realm", "Log in")]);
        assert!(!closed);
        assert_eq!(
            spec.map(|spec| (spec.secret, spec.challenge)),
            Some((
                "users".to_owned(),
                HeaderValue::from_static("Basic realm=\"Log in\"")
            ))
        );
        for bad in [
            &[kind][..],
            &[secret],
            &[("auth-type", "digest"), secret],
            &[("auth-type", ""), secret],
            &[kind, ("auth-secret", "other/users")],
            &[kind, ("auth-secret", "")],
            &[kind, secret, ("auth-secret-type", "file")],
            &[kind, secret, ("auth-realm", "a\"b")],
            &[kind, secret, ("auth-realm", "a\r\nSet-Cookie: b")],
        ] {
            assert!(read(bad).1, "{bad:?}");
        }
    }

    #[tokio::test]
    async fn one_secret_does_not_keep_others_waiting() {
        let hash = bcrypt::hash("secret", 4).expect("a hash");
        let users = || {
            let data = [("auth".to_owned(), ByteString(format!("ann:{hash}").into_bytes()))];
            let secret = Secret {
                data: Some(data.into()),
                ..Secret::default()
            };
            Arc::new(Users::read(&secret, false).expect("users").0)
        };
        // Nobody is checked until all wait.
        let held = CHECKS.acquire_many(2).await.expect("both places");
        let order: Arc<Mutex<Vec<&str>>> = Arc::default();
        let mut waiting = tokio::task::JoinSet::new();
        let (many, one) = (users(), users());
        let all = std::iter::repeat_n((&many, "many"), 8).chain([(&one, "one")]);
        for (users, name) in all {
            let (users, order) = (users.clone(), order.clone());
            waiting.spawn(async move {
                let wrong = Credentials {
                    user: "ann".to_owned(),
                    password: "wrong".to_owned(),
                };
                assert_eq!(users.verify(wrong).await, Some(false));
                order.lock().push(name);
            });
        }
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        drop(held);
        while let Some(done) = waiting.join_next().await {
            done.expect("a check");
        }
        let order = order.lock();
        let place = order.iter().position(|name| *name == "one");
        assert!(place.is_some_and(|place| place < 4), "{order:?}");
    }
}
