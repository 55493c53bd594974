//! What a registry is shown to let a pull in: a password, an identity token or a token of the registry.

use super::{Error, parse_reference};
use reqwest::Url;
use serde::Deserialize;
use std::collections::BTreeMap;

/// Credentials as CRI's AuthConfig carries them.
#[derive(Clone, Default)]
pub struct Credentials {
    pub username: String,
    pub password: String,
    /// A refresh token of OAuth2, for which the registry's token server gives access tokens.
    pub identity_token: String,
    /// Shown to the registry as it is.
    pub registry_token: String,
    /// The registry that they are for, if that is said: a host, or an address such as docker's configuration has.
    pub server_address: String,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            formatter,
            "Credentials({})",
            if self.username.is_empty() {
                "token"
            } else {
                &self.username
            }
        )
    }
}

/// The part of docker's config.json that is read.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct DockerConfig {
    #[serde(default)]
    auths: BTreeMap<String, DockerAuth>,
    #[serde(default)]
    creds_store: String,
    #[serde(default)]
    cred_helpers: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct DockerAuth {
    username: String,
    password: String,
    auth: String,
    identitytoken: String,
    registrytoken: String,
}

impl Credentials {
    /// What docker's config.json says for this image: of several entries the one that names most of it. `None` if there is
    /// none.
    pub fn from_docker_config(body: &[u8], image: &str) -> Result<Option<Credentials>, Error> {
        let invalid = |why: String| Error::Unsupported(format!("credentials in this form: {why}"));
        let config: DockerConfig =
            serde_json::from_slice(body).map_err(|error| invalid(error.to_string()))?;
        let parsed = parse_reference(image)?;
        let name = format!("{}/{}", canonical(parsed.registry()), parsed.repository());
        let matching = |key: &str| {
            let (host, path) = split_key(key)?;
            let key = format!("{host}{path}");
            let of_name = name.strip_prefix(&key)?;
            of_name.starts_with('/').then_some((key.len(), host))
        };
        let found = config
            .auths
            .iter()
            .filter_map(|(key, entry)| matching(key).map(|(length, host)| (length, host, entry)))
            .max_by_key(|(length, ..)| *length);
        let entry = found.as_ref().filter(|(.., entry)| !entry.is_empty());
        let Some((_, server_address, entry)) = entry else {
            let helped = config.cred_helpers.keys().any(|key| matching(key).is_some());
            return match helped || (found.is_some() && !config.creds_store.is_empty()) {
                true => Err(invalid("credential helpers are not supported".into())),
                false => Ok(None),
            };
        };
        let (mut username, mut password) = (entry.username.clone(), entry.password.clone());
        if username.is_empty() && !entry.auth.is_empty() {
            let broken = || invalid(format!("auth of {server_address} is not base64 of user:password"));
            (username, password) = split_auth(&entry.auth).ok_or_else(broken)?;
        }
        Ok(Some(Credentials {
            username,
            password,
            identity_token: entry.identitytoken.clone(),
            registry_token: entry.registrytoken.clone(),
            server_address: server_address.clone(),
        }))
    }

    /// Whether they may be shown to this host (`name` or `name:port`).
    ///
    /// COMPAT: those that do not say which registry they are for are shown to all hosts that are configured for the
    /// image's registry, as by containerd.
    pub(super) fn are_for(&self, host: &str) -> bool {
        self.server_address.is_empty()
            || server_of(&self.server_address).is_some_and(|server| server == canonical(host))
    }

    fn has_password(&self) -> bool {
        !self.username.is_empty() && (!self.password.is_empty() || self.identity_token.is_empty())
    }

    /// The value of an Authorization header for a registry that wants a password.
    pub(super) fn basic(&self) -> Option<String> {
        self.has_password().then(|| basic(&self.username, &self.password))
    }

    /// The same for its token server: some take an identity token for a password.
    pub(super) fn basic_for_token(&self) -> Option<String> {
        self.basic()
            .or_else(|| self.refresh_token().map(|token| basic("", token)))
    }

    pub(super) fn refresh_token(&self) -> Option<&str> {
        (!self.has_password() && !self.identity_token.is_empty()).then_some(self.identity_token.as_str())
    }

    /// A token that the registry takes as it is.
    pub(super) fn bearer(&self) -> Option<&str> {
        let other = self.has_password() || !self.identity_token.is_empty();
        (!other && !self.registry_token.is_empty()).then_some(self.registry_token.as_str())
    }
}

impl DockerAuth {
    fn is_empty(&self) -> bool {
        [
            &self.username,
            &self.auth,
            &self.identitytoken,
            &self.registrytoken,
        ]
        .iter()
        .all(|field| field.is_empty())
    }
}

/// The host of a key of docker's `auths`, and the path that podman may add.
fn split_key(key: &str) -> Option<(String, String)> {
    let bare = key.trim_start_matches("https://").trim_start_matches("http://");
    let bare = bare.trim_end_matches('/');
    let bare = bare
        .strip_suffix("/v1")
        .or_else(|| bare.strip_suffix("/v2"))
        .unwrap_or(bare);
    let (host, path) = bare.split_at(bare.find('/').unwrap_or(bare.len()));
    (!host.is_empty()).then(|| (canonical(host), path.to_owned()))
}

/// User and password of base64.
pub(crate) fn split_auth(auth: &str) -> Option<(String, String)> {
    use base64::Engine;
    let decoded = base64::engine::general_purpose::STANDARD
        .decode(auth.trim())
        .ok()?;
    let decoded = String::from_utf8(decoded).ok()?;
    let (user, password) = decoded.split_once(':')?;
    Some((user.to_owned(), password.trim_end_matches('\0').to_owned()))
}

fn basic(username: &str, password: &str) -> String {
    use base64::Engine;
    let encoded = base64::engine::general_purpose::STANDARD.encode(format!("{username}:{password}"));
    format!("Basic {encoded}")
}

/// The host of `https://host:port/v1/`, or of the same without a scheme. The port of HTTPS is not said.
fn server_of(address: &str) -> Option<String> {
    let text = if address.contains("://") {
        address.to_owned()
    } else {
        format!("https://{address}")
    };
    let url = Url::parse(&text).ok()?;
    let host = url.host_str()?;
    Some(match url.port() {
        Some(port) => canonical(&format!("{host}:{port}")),
        None => canonical(host),
    })
}

/// docker.io has three names.
fn canonical(host: &str) -> String {
    match host.to_ascii_lowercase().as_str() {
        "index.docker.io" | "registry-1.docker.io" => "docker.io".to_owned(),
        host => host.strip_suffix(":443").unwrap_or(host).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_for_one_registry() {
        let check = |address: &str, host: &str, expected: bool| {
            let credentials = Credentials {
                server_address: address.to_owned(),
                ..Credentials::default()
            };
            assert_eq!(credentials.are_for(host), expected, "{address} {host}");
        };
        check("", "mirror.example", true);
        check("https://index.docker.io/v1/", "registry-1.docker.io", true);
        check("docker.io", "registry-1.docker.io", true);
        check("docker.io", "mirror.example", false);
        check("reg.example:5000", "reg.example:5000", true);
        check("http://reg.example:5000/v2/", "reg.example:5000", true);
        check("reg.example:5000", "reg.example", false);
        check("reg.example", "reg.example:5000", false);
        check("https://reg.example:443", "reg.example", true);
        check("reg.example", "evil-reg.example", false);
        check("reg.example", "reg.example.evil", false);
        check("https://reg.example@evil.example/", "reg.example", false);
        check("://", "reg.example", false);
    }

    #[test]
    fn entries_of_dockers_configuration() {
        // a:b, robot:c and user:d
        let body = r#"{"auths": {
            "https://index.docker.io/v1/": {"auth": "YTpi"},
            "reg.example:5000": {"identitytoken": "it"},
            "quay.example/team": {"auth": "cm9ib3Q6Yw=="},
            "quay.example": {"auth": "dXNlcjpk"},
            "stored.example": {}, "token.example": {"registrytoken": "rt"}},
            "credsStore": "desktop", "credHelpers": {"helped.example": "x"}}"#;
        let check = |image: &str, expected: Option<&str>| {
            let found = match Credentials::from_docker_config(body.as_bytes(), image) {
                Err(error) => Some(format!("{error}")),
                Ok(found) => found.map(|found| {
                    format!(
                        "{}:{}:{}:{}@{}",
                        found.username,
                        found.password,
                        found.identity_token,
                        found.registry_token,
                        found.server_address
                    )
                }),
            };
            assert_eq!(found.as_deref(), expected, "{image}");
        };
        check("busybox", Some("a:b::@docker.io"));
        check("docker.io/me/web:1", Some("a:b::@docker.io"));
        check("reg.example:5000/a/b", Some("::it:@reg.example:5000"));
        check("reg.example/a/b", None);
        check("quay.example/team/web", Some("robot:c::@quay.example"));
        check("quay.example/teams/web", Some("user:d::@quay.example"));
        check("token.example/a", Some(":::rt@token.example"));
        check("other.example/a", None);
        let helpers = "unsupported: credentials in this form: credential helpers are not supported";
        check("stored.example/a", Some(helpers));
        check("helped.example/a", Some(helpers));
    }

    #[test]
    fn which_secret_is_shown() {
        let check = |username: &str, password: &str, identity: &str, registry: &str, expected: [bool; 3]| {
            let credentials = Credentials {
                username: username.to_owned(),
                password: password.to_owned(),
                identity_token: identity.to_owned(),
                registry_token: registry.to_owned(),
                server_address: String::new(),
            };
            let shown = [
                credentials.basic().is_some(),
                credentials.refresh_token().is_some(),
                credentials.bearer().is_some(),
            ];
            assert_eq!(shown, expected, "{username} {password} {identity} {registry}");
        };
        check("", "", "", "", [false, false, false]);
        check("user", "secret", "", "", [true, false, false]);
        check("user", "secret", "identity", "token", [true, false, false]);
        // What registries that hand out identity tokens write into docker's configuration.
        check(
            "00000000-0000-0000-0000-000000000000",
            "",
            "identity",
            "",
            [false, true, false],
        );
        check("", "", "identity", "token", [false, true, false]);
        check("", "", "", "token", [false, false, true]);
    }
}
