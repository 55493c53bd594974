//! Registry credentials out of image pull secrets (`kubernetes.io/dockerconfigjson`, `kubernetes.io/dockercfg`).
//! It reads secrets it is given; it must not fetch or log them.

use std::collections::BTreeMap;

use base64::Engine as _;
use k8s_openapi::api::core::v1::Secret;
use serde::Deserialize;
use skiff_cri::v1::AuthConfig;

#[derive(Deserialize)]
struct DockerConfigJson {
    auths: BTreeMap<String, DockerAuth>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct DockerAuth {
    username: String,
    password: String,
    auth: String,
}

/// Credentials by the registry (and path) they are for.
#[derive(Default)]
pub struct Keyring {
    entries: Vec<(String, AuthConfig)>,
}

impl Keyring {
    pub fn from_secrets<'a>(
        secrets: impl IntoIterator<Item = &'a Secret>,
    ) -> Result<Self, serde_json::Error> {
        let mut keyring = Keyring::default();
        for secret in secrets {
            let Some(data) = &secret.data else { continue };
            let auths = match secret.type_.as_deref() {
                Some("kubernetes.io/dockerconfigjson") => match data.get(".dockerconfigjson") {
                    Some(bytes) => serde_json::from_slice::<DockerConfigJson>(&bytes.0)?.auths,
                    None => continue,
                },
                Some("kubernetes.io/dockercfg") => match data.get(".dockercfg") {
                    Some(bytes) => serde_json::from_slice(&bytes.0)?,
                    None => continue,
                },
                _ => continue,
            };
            for (registry, auth) in auths {
                if let Some(config) = auth_config(auth) {
                    keyring.entries.push((normalize(&registry), config));
                }
            }
        }
        Ok(keyring.sorted())
    }

    pub fn from_entries(entries: impl IntoIterator<Item = (String, AuthConfig)>) -> Self {
        let entries = entries
            .into_iter()
            .map(|(registry, auth)| (normalize(&registry), auth));
        Keyring {
            entries: entries.collect(),
        }
        .sorted()
    }

    /// The most specific entry first, as `docker.io/team/app` beats `docker.io`.
    fn sorted(mut self) -> Self {
        self.entries.sort_by(|a, b| b.0.cmp(&a.0));
        self
    }

    /// All credentials that fit the repository, to be tried in turn.
    pub fn lookup(&self, repository: &str) -> Vec<AuthConfig> {
        self.entries
            .iter()
            .filter(|(pattern, _)| matches(pattern, repository))
            .map(|(_, a)| a.clone())
            .collect()
    }
}

fn auth_config(auth: DockerAuth) -> Option<AuthConfig> {
    let (username, password) = if auth.username.is_empty() && !auth.auth.is_empty() {
        let decoded = base64::engine::general_purpose::STANDARD
            .decode(auth.auth.trim())
            .ok()?;
        let text = String::from_utf8(decoded).ok()?;
        let (user, password) = text.split_once(':')?;
        (user.to_owned(), password.trim_end_matches('\0').to_owned())
    } else {
        (auth.username, auth.password)
    };
    if username.is_empty() {
        return None;
    }
    Some(AuthConfig {
        username,
        password,
        ..Default::default()
    })
}

/// Scheme, API version and the names docker's own hub goes by are not part of a match.
pub(crate) fn normalize(registry: &str) -> String {
    let bare = registry
        .trim_start_matches("https://")
        .trim_start_matches("http://");
    let bare = bare.trim_end_matches('/');
    let bare = bare
        .strip_suffix("/v1")
        .or_else(|| bare.strip_suffix("/v2"))
        .unwrap_or(bare);
    match bare {
        "index.docker.io" | "registry-1.docker.io" => "docker.io".to_owned(),
        other => other.to_owned(),
    }
}

pub(crate) fn matches(pattern: &str, repository: &str) -> bool {
    let (pattern_host, pattern_path) = pattern.split_once('/').unwrap_or((pattern, ""));
    let (host, path) = repository.split_once('/').unwrap_or((repository, ""));
    let (pattern_name, pattern_port) = pattern_host.split_once(':').unwrap_or((pattern_host, ""));
    let (name, port) = host.split_once(':').unwrap_or((host, ""));
    let pattern_parts: Vec<&str> = pattern_name.split('.').collect();
    let parts: Vec<&str> = name.split('.').collect();
    pattern_port == port
        && pattern_parts.len() == parts.len()
        && pattern_parts.iter().zip(&parts).all(|(p, s)| glob(p, s))
        && path.starts_with(pattern_path)
}

fn glob(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((head, tail)) => text.strip_prefix(head).is_some_and(|rest| {
            (0..=rest.len())
                .filter(|at| rest.is_char_boundary(*at))
                .any(|at| glob(tail, &rest[at..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lookups() {
        let config = json!({"auths": {
            "https://index.docker.io/v1/": {"auth": base64::engine::general_purpose::STANDARD.encode("hub:secret:x")},
            "*.example.com": {"username": "u", "password": "p"},
            "reg.example.com/team": {"username": "team", "password": "t"},
            "broken": {"auth": "!!"}}});
        let secret: Secret = serde_json::from_value(json!({
            "type": "kubernetes.io/dockerconfigjson",
            "data": {".dockerconfigjson": base64::engine::general_purpose::STANDARD.encode(config.to_string())}
        }))
        .unwrap();
        let keyring = Keyring::from_secrets([&secret]).unwrap();
        let check = |repository: &str, users: &[&str]| {
            let found: Vec<String> = keyring
                .lookup(repository)
                .into_iter()
                .map(|a| a.username)
                .collect();
            assert_eq!(found, users, "{repository}");
        };
        check("docker.io/library/busybox", &["hub"]);
        check("reg.example.com/team/app", &["team", "u"]);
        check("reg.example.com/other", &["u"]);
        check("a.b.example.com/x", &[]);
        assert_eq!(keyring.lookup("docker.io/x")[0].password, "secret:x");
    }
}
