//! Where a webhook is, by a file in the form of a kubeconfig: the server of its current context, whom to trust, and what
//! to show it. What a file names lies beside it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, header};
use serde::Deserialize;
use skiff_pki::Identity;
use thiserror::Error;

use crate::{Answer, Call, CallTarget, Client, Failure, trusting_as};

#[derive(Debug, Error)]
pub enum BadKubeconfig {
    #[error("{0}: {1}")]
    File(PathBuf, std::io::Error),
    #[error("{0}: {1}")]
    Form(PathBuf, String),
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    clusters: Vec<Named<Cluster>>,
    #[serde(default)]
    users: Vec<Named<User>>,
    #[serde(default)]
    contexts: Vec<Named<Context>>,
    #[serde(default, rename = "current-context")]
    current_context: String,
}

#[derive(Deserialize)]
struct Named<T> {
    #[serde(default)]
    name: String,
    #[serde(alias = "cluster", alias = "user", alias = "context")]
    value: Option<T>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Cluster {
    #[serde(default)]
    server: String,
    certificate_authority: Option<PathBuf>,
    certificate_authority_data: Option<String>,
    #[serde(default)]
    insecure_skip_tls_verify: bool,
    tls_server_name: Option<String>,
    proxy_url: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "kebab-case")]
struct User {
    client_certificate: Option<PathBuf>,
    client_certificate_data: Option<String>,
    client_key: Option<PathBuf>,
    client_key_data: Option<String>,
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<PathBuf>,
    username: Option<String>,
    password: Option<String>,
    exec: Option<serde_json::Value>,
    auth_provider: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Context {
    #[serde(default)]
    cluster: String,
    #[serde(default)]
    user: String,
}

/// A server that is posted to, and how.
pub struct Endpoint {
    client: Client,
    place: CallTarget,
    headers: HeaderMap,
    /// Holds a token that is changed from time to time: it is read for each call.
    token_file: Option<PathBuf>,
    /// With the timeout that it is told, as upstream shows it.
    url: String,
    timeout: Duration,
}

impl Endpoint {
    /// Reads a file. A call may take `timeout` in all, and the server is told so.
    pub fn load(path: &Path, timeout: Duration) -> Result<Endpoint, BadKubeconfig> {
        let text = read(path)?;
        let form = |why: String| BadKubeconfig::Form(path.to_owned(), why);
        let config: Config = serde_saphyr::from_str(&text).map_err(|error| form(error.to_string()))?;
        let context = find(&config.contexts, &config.current_context);
        let Some(context) = context else {
            return Err(form(
                "invalid configuration: no configuration has been provided, or its current context is not there"
                    .to_owned(),
            ));
        };
        let cluster = find(&config.clusters, &context.cluster)
            .filter(|cluster| !cluster.server.is_empty())
            .ok_or_else(|| form(format!("cluster {:?} has no server", context.cluster)))?;
        let nobody = User::default();
        let user = match context.user.as_str() {
            "" => &nobody,
            name => find(&config.users, name).ok_or_else(|| form(format!("user {name:?} is not there")))?,
        };
        if user.exec.is_some() || user.auth_provider.is_some() {
            return Err(form("exec and auth-provider are not supported here".to_owned()));
        }
        if cluster.proxy_url.as_deref().is_some_and(|url| !url.is_empty()) {
            return Err(form("proxy-url is not supported here".to_owned()));
        }
        let folder = path.parent().unwrap_or(Path::new("."));
        let pem = |data: &Option<String>, file: &Option<PathBuf>| pem(folder, data, file);
        let ca = pem(
            &cluster.certificate_authority_data,
            &cluster.certificate_authority,
        )?;
        let certificate = pem(&user.client_certificate_data, &user.client_certificate)?;
        let key = pem(&user.client_key_data, &user.client_key)?;
        let identity = match (certificate, key) {
            (Some(certificate), Some(key)) => Some(Identity { certificate, key }),
            (None, None) => None,
            _ => return Err(form("a client certificate needs its key".to_owned())),
        };
        if cluster.insecure_skip_tls_verify && ca.is_some() {
            let why = "specifying a root certificates file with the insecure flag is not allowed";
            return Err(form(why.to_owned()));
        }
        let tls = if cluster.insecure_skip_tls_verify {
            skiff_pki::insecure_client_config(identity.as_ref())
                .map(std::sync::Arc::new)
                .map_err(|error| error.to_string())
        } else {
            trusting_as(ca.as_deref(), identity.as_ref())
        };
        let tls = tls.map_err(form)?;
        let joined = if cluster.server.contains('?') { '&' } else { '?' };
        let url = format!("{}{joined}timeout={}s", cluster.server, timeout.as_secs());
        let mut place = CallTarget::of(&url).map_err(form)?;
        if let (Some(name), Some(_)) = (&cluster.tls_server_name, &place.server_name) {
            place.server_name = Some(name.clone());
        }
        Ok(Endpoint {
            client: Client::new(Ok(tls)),
            place,
            headers: authorization(folder, user)?.into_iter().collect(),
            token_file: user.token_file.as_ref().map(|file| folder.join(file)),
            url,
            timeout,
        })
    }

    pub async fn post(&self, body: Bytes) -> Result<Answer, Failure> {
        let mut headers = std::borrow::Cow::Borrowed(&self.headers);
        if let Some(file) = &self.token_file
            && let Ok(token) = tokio::fs::read_to_string(file).await
            && let Some(bearer) = secret(&format!("Bearer {}", token.trim()))
        {
            headers.to_mut().insert(header::AUTHORIZATION, bearer);
        }
        let call = Call::post(&self.place, &headers, body, self.timeout);
        self.client.call(call).await
    }

    /// A failure with what was tried, in upstream's words.
    pub fn explain(&self, failure: &Failure) -> String {
        format!("Post \"{}\": {failure}", self.url)
    }
}

fn find<'a, T>(list: &'a [Named<T>], name: &str) -> Option<&'a T> {
    list.iter()
        .find(|entry| entry.name == name)
        .and_then(|entry| entry.value.as_ref())
}

fn read(path: &Path) -> Result<String, BadKubeconfig> {
    std::fs::read_to_string(path).map_err(|error| BadKubeconfig::File(path.to_owned(), error))
}

/// A PEM in the file itself, or in another.
fn pem(
    folder: &Path,
    data: &Option<String>,
    file: &Option<PathBuf>,
) -> Result<Option<String>, BadKubeconfig> {
    if let Some(data) = data.as_ref().filter(|data| !data.is_empty()) {
        let bad = |why: String| BadKubeconfig::Form(folder.to_owned(), why);
        let bytes = base64::engine::general_purpose::STANDARD
            .decode(data.trim())
            .map_err(|error| bad(error.to_string()))?;
        return String::from_utf8(bytes)
            .map(Some)
            .map_err(|error| bad(error.to_string()));
    }
    match file {
        Some(file) if !file.as_os_str().is_empty() => read(&folder.join(file)).map(Some),
        _ => Ok(None),
    }
}

fn authorization(
    folder: &Path,
    user: &User,
) -> Result<Option<(header::HeaderName, HeaderValue)>, BadKubeconfig> {
    // Of a file and a token, the file counts.
    let text = if let Some(file) = &user.token_file {
        format!("Bearer {}", read(&folder.join(file))?.trim())
    } else if let Some(token) = user.token.as_ref().filter(|token| !token.is_empty()) {
        format!("Bearer {token}")
    } else if let Some(name) = user.username.as_ref().filter(|name| !name.is_empty()) {
        let both = format!("{name}:{}", user.password.as_deref().unwrap_or(""));
        format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(both))
    } else {
        return Ok(None);
    };
    let bad = || {
        BadKubeconfig::Form(
            folder.to_owned(),
            "a credential that no header can hold".to_owned(),
        )
    };
    Ok(Some((header::AUTHORIZATION, secret(&text).ok_or_else(bad)?)))
}

/// A header that is not logged.
fn secret(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn load(text: &str) -> Result<Endpoint, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config");
        std::fs::write(&path, text).unwrap();
        Endpoint::load(&path, Duration::from_secs(30)).map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn a_token_in_a_file_may_change() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let folder = tempfile::tempdir().unwrap();
        let (config, token) = (folder.path().join("config"), folder.path().join("token"));
        std::fs::write(&token, "one\n").unwrap();
        let text = json!({"current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": format!("http://127.0.0.1:{port}")}}],
            "users": [{"name": "u", "user": {"tokenFile": "token", "token": "passed over"}}]});
        std::fs::write(&config, text.to_string()).unwrap();
        let endpoint = Endpoint::load(&config, Duration::from_secs(30)).unwrap();
        for expected in ["one", "two"] {
            let peer = async {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = vec![0; 4096];
                let count = stream.read(&mut request).await.unwrap();
                let answer = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}";
                stream.write_all(answer).await.unwrap();
                String::from_utf8_lossy(&request[..count]).to_lowercase()
            };
            let (answer, request) = tokio::join!(endpoint.post(Bytes::new()), peer);
            assert_eq!(answer.unwrap().code, 200);
            assert!(
                request.contains(&format!("authorization: bearer {expected}\r\n")),
                "{request}"
            );
            std::fs::write(&token, "two").unwrap();
        }
    }

    #[test]
    fn the_current_context_says_where() {
        let file = |server: &str, user: &str| {
            format!(
                "apiVersion: v1\nkind: Config\nclusters:\n- name: c\n  cluster: {{server: '{server}'}}\n\
                 users:\n- name: u\n  user: {user}\ncontexts:\n- name: x\n  context: {{cluster: c, user: u}}\ncurrent-context: x\n"
            )
        };
        let found = load(&file("https://a.example/authn", "{token: abc}")).unwrap();
        assert_eq!(found.url, "https://a.example/authn?timeout=30s");
        assert_eq!(found.headers["authorization"], "Bearer abc");
        let found = load(&file("http://127.0.0.1:1/x?y", "{username: a, password: b}")).unwrap();
        assert_eq!(found.place.path, "/x?y&timeout=30s");
        assert_eq!(found.headers["authorization"], "Basic YTpi");
        let refused = |text: &str, why: &str| {
            let error = load(text).map(|_| ()).unwrap_err();
            assert!(error.contains(why), "{error}");
        };
        refused(&file("", "{}"), "has no server");
        refused(&file("https://a", "{exec: {command: x}}"), "not supported");
        refused(
            &file("https://a", "{client-certificate-data: YQ==}"),
            "needs its key",
        );
        refused(
            &file("https://a", "{}").replace("current-context: x", ""),
            "current context",
        );
    }
}
