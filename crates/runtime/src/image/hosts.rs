//! Which hosts serve a registry's images, as containerd's `hosts.toml` files say. They are read anew for each pull,
//! and one that cannot be understood refuses the pull instead of going to hosts that it does not name.

use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// COMPAT: containerd's default of `config_path`.
pub const DEFAULT_REGISTRY_CONFIG_PATHS: [&str; 2] = ["/etc/containerd/certs.d", "/etc/docker/certs.d"];

/// What a file of the configuration may have: all are held in memory.
const MAX_FILE_BYTES: u64 = 1 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Where docker.io's registry answers.
const DOCKER_API_HOST: &str = "registry-1.docker.io";

#[derive(Debug, thiserror::Error)]
#[error("invalid registry configuration {}: {message}", .path.display())]
pub(super) struct Error {
    path: PathBuf,
    message: String,
}

fn error(path: &Path, message: impl ToString) -> Error {
    Error {
        path: path.to_owned(),
        message: message.to_string(),
    }
}

/// A certificate and its key, which may be in the same file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClientCertificate {
    pub(super) certificate: PathBuf,
    pub(super) key: Option<PathBuf>,
}

/// One host, as it is configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Host {
    /// Scheme, host and port.
    pub(super) address: Url,
    /// What comes before the repository: `/v2`.
    pub(super) path: String,
    pub(super) pull: bool,
    /// Whether it is trusted to say which digest a tag has.
    pub(super) resolve: bool,
    pub(super) ca: Vec<PathBuf>,
    pub(super) client: Option<ClientCertificate>,
    pub(super) skip_verify: Option<bool>,
    pub(super) headers: HeaderMap,
    pub(super) connect_timeout: Duration,
}

impl Host {
    /// Whether anything is said about TLS.
    pub(super) fn configures_tls(&self) -> bool {
        !self.ca.is_empty() || self.client.is_some() || self.skip_verify.is_some()
    }

    /// Whether it is another's: it is told then which registry is meant.
    pub(super) fn is_proxy_of(&self, registry: &str) -> bool {
        let own = Url::parse(&format!("{}://{registry}", self.address.scheme()));
        let authority = |url: &Url| (url.host_str().map(str::to_owned), url.port_or_known_default());
        let is_own = own.is_ok_and(|own| authority(&own) == authority(&self.address));
        let is_docker = registry == "docker.io" && self.address.host_str() == Some(DOCKER_API_HOST);
        !is_own && !is_docker
    }

    /// The registry itself, with what is configured for it.
    fn of_registry(registry: &str, directory: &Path, mut configured: Host) -> Result<Host, Error> {
        let host = match registry {
            "docker.io" => DOCKER_API_HOST,
            registry => registry,
        };
        let (name, port) = host.rsplit_once(':').unwrap_or((host, ""));
        // COMPAT: like containerd, plain HTTP is spoken to registries on this machine but for the port of HTTPS, and
        // there anything that calls itself localhost is believed. All others have to prove who they are.
        let local = name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
        let scheme = match port {
            "" | "443" => "https",
            _ if local => "http",
            _ => "https",
        };
        if local && scheme == "https" {
            configured.skip_verify = configured.skip_verify.or(Some(true));
        }
        configured.address =
            Url::parse(&format!("{scheme}://{host}")).map_err(|cause| error(directory, cause))?;
        "/v2".clone_into(&mut configured.path);
        // COMPAT: without a server, what is said of capabilities is not for the registry itself.
        (configured.pull, configured.resolve) = (true, true);
        Ok(configured)
    }
}

/// The hosts for the images of `registry` (`name` or `name:port`), in the order in which they are asked.
pub(super) fn hosts_of(registry: &str, roots: &[PathBuf]) -> Result<Vec<Host>, Error> {
    for directory in roots.iter().flat_map(|root| directories(root, registry)) {
        match std::fs::metadata(&directory) {
            Ok(_) => return load(&directory, registry),
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => {}
            Err(cause) => return Err(error(&directory, cause)),
        }
    }
    let unconfigured = Fields::default().host(Path::new(""))?;
    Ok(vec![Host::of_registry(registry, Path::new(""), unconfigured)?])
}

/// `name_port_`, `name:port` and `_default`: the first that is there is used.
fn directories(root: &Path, registry: &str) -> Vec<PathBuf> {
    let with_port = registry
        .rsplit_once(':')
        .map(|(name, port)| root.join(format!("{name}_{port}_")));
    let others = [root.join(registry), root.join("_default")];
    with_port.into_iter().chain(others).collect()
}

fn load(directory: &Path, registry: &str) -> Result<Vec<Host>, Error> {
    let path = directory.join("hosts.toml");
    let text = match read(&path) {
        Ok(body) => String::from_utf8(body).map_err(|_| error(&path, "it is not UTF-8"))?,
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(cause) => return Err(error(&path, cause)),
    };
    if text.is_empty() {
        let configured = certificates(directory)?;
        return Ok(vec![Host::of_registry(registry, directory, configured)?]);
    }
    parse(&text, registry, directory).map_err(|message| error(&path, message.trim_end()))
}

/// A file of the configuration, as long as it is a small one.
pub(super) fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut body = Vec::new();
    std::fs::File::open(path)?
        .take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut body)?;
    if body.len() as u64 > MAX_FILE_BYTES {
        return Err(std::io::Error::other(format!(
            "it is larger than {MAX_FILE_BYTES} bytes"
        )));
    }
    Ok(body)
}

fn parse(text: &str, registry: &str, directory: &Path) -> Result<Vec<Host>, String> {
    let mut root: toml::Table = text.parse().map_err(|cause: toml::de::Error| cause.to_string())?;
    let server = match root.remove("server") {
        None => String::new(),
        Some(toml::Value::String(server)) => server,
        Some(_) => return Err("server is not a string".into()),
    };
    let named = match root.remove("host") {
        None => toml::Table::new(),
        Some(toml::Value::Table(named)) => named,
        Some(_) => return Err("host is not a table".into()),
    };
    let mut hosts = Vec::new();
    for (name, value) in named {
        let of_host = |message: String| format!("host {name:?}: {message}");
        let toml::Value::Table(value) = value else {
            return Err(of_host("it is not a table".into()));
        };
        let fields: Fields = value
            .try_into()
            .map_err(|cause: toml::de::Error| of_host(cause.to_string()))?;
        let host = fields.host_at(&name, directory).map_err(of_host)?;
        hosts.push(host);
    }
    let fields: Fields = root
        .try_into()
        .map_err(|cause: toml::de::Error| cause.to_string())?;
    hosts.push(if server.is_empty() {
        let configured = fields.host(directory).map_err(|cause| cause.message)?;
        Host::of_registry(registry, directory, configured).map_err(|cause| cause.message)?
    } else {
        let host = fields.host_at(&server, directory);
        host.map_err(|message| format!("server {server:?}: {message}"))?
    });
    Ok(hosts)
}

/// COMPAT: a folder without `hosts.toml` may hold certificates by Docker's pattern: `*.crt` of authorities, `*.cert` and
/// `*.key` of this client.
fn certificates(directory: &Path) -> Result<Host, Error> {
    let failed = |cause: std::io::Error| error(directory, cause);
    let mut fields = Fields::default();
    let mut pairs = Vec::new();
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        paths.push(entry.map_err(failed)?.path());
    }
    paths.sort();
    let mut authorities = Vec::new();
    for path in paths.into_iter().filter(|path| !path.is_dir()) {
        let text = path.to_string_lossy().into_owned();
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("crt") => authorities.push(text),
            Some("cert") => {
                let key = path.with_extension("key");
                let key = if key.exists() {
                    key.to_string_lossy().into_owned()
                } else {
                    String::new()
                };
                pairs.push(ClientFile::Pair([text, key]));
            }
            _ => {}
        }
    }
    if !authorities.is_empty() {
        fields.ca = Some(OneOrMany::Many(authorities));
    }
    if !pairs.is_empty() {
        fields.client = Some(ClientFiles::Many(pairs));
    }
    fields.host(directory)
}

/// What may be said of each host, and of the server.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Fields {
    capabilities: Vec<String>,
    ca: Option<OneOrMany>,
    client: Option<ClientFiles>,
    skip_verify: Option<bool>,
    header: BTreeMap<String, OneOrMany>,
    override_path: bool,
    dial_timeout: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of strings")]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    fn into_vec(self) -> Vec<String> {
        match self {
            OneOrMany::One(one) => vec![one],
            OneOrMany::Many(many) => many,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a path, or an array of paths or of pairs of them"
)]
enum ClientFiles {
    One(String),
    Many(Vec<ClientFile>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a path or a pair of them")]
enum ClientFile {
    File(String),
    Pair([String; 2]),
}

impl Fields {
    fn host_at(self, server: &str, directory: &Path) -> Result<Host, String> {
        let text = if server.starts_with("http") {
            server.to_owned()
        } else {
            format!("https://{server}")
        };
        let mut address = Url::parse(&text).map_err(|cause| cause.to_string())?;
        if !matches!(address.scheme(), "http" | "https") {
            return Err(format!("{} is not a scheme of registries", address.scheme()));
        }
        if !address.username().is_empty() || address.password().is_some() {
            return Err("an address with a user or a password is not supported".into());
        }
        if address.query().is_some() || address.fragment().is_some() {
            return Err("an address with a query or a fragment is not supported".into());
        }
        let override_path = self.override_path;
        let mut host = self.host(directory).map_err(|cause| cause.message)?;
        let mut path = address.path().trim_end_matches('/').to_owned();
        if !override_path && !path.ends_with("/v2") {
            path.push_str("/v2");
        }
        address.set_path("");
        (host.address, host.path) = (address, path);
        Ok(host)
    }

    /// A host whose address is for the caller to set.
    fn host(self, directory: &Path) -> Result<Host, Error> {
        let invalid = |message: String| error(directory, message);
        let (mut pull, mut resolve) = (self.capabilities.is_empty(), self.capabilities.is_empty());
        for capability in &self.capabilities {
            match capability.to_ascii_lowercase().as_str() {
                "pull" => pull = true,
                "resolve" => resolve = true,
                // Nothing is pushed here, and nobody asks for referrers.
                "push" | "referrers" => {}
                _ => return Err(invalid(format!("unknown capability {capability:?}"))),
            }
        }
        let mut headers = HeaderMap::new();
        for (name, values) in self.header {
            let key = HeaderName::try_from(&name)
                .map_err(|_| invalid(format!("header {name:?} is not a header's name")))?;
            for value in values.into_vec() {
                let mut value = HeaderValue::try_from(value)
                    .map_err(|_| invalid(format!("no header can hold the value of header {name:?}")))?;
                value.set_sensitive(true);
                headers.append(key.clone(), value);
            }
        }
        let connect_timeout = match self.dial_timeout.as_deref() {
            None | Some("") => CONNECT_TIMEOUT,
            Some(text) => duration(text)
                .ok_or_else(|| invalid(format!("dial_timeout {text:?} is not a positive duration")))?,
        };
        let ca = self.ca.map(OneOrMany::into_vec).unwrap_or_default();
        Ok(Host {
            address: Url::parse("https://unset.invalid").map_err(|cause| invalid(cause.to_string()))?,
            path: String::new(),
            pull,
            resolve,
            ca: ca.iter().map(|path| directory.join(path)).collect(),
            client: client_certificate(self.client, directory).map_err(invalid)?,
            skip_verify: self.skip_verify,
            headers,
            connect_timeout,
        })
    }
}

fn client_certificate(
    files: Option<ClientFiles>,
    directory: &Path,
) -> Result<Option<ClientCertificate>, String> {
    let mut files = match files {
        None => Vec::new(),
        Some(ClientFiles::One(path)) => vec![ClientFile::File(path)],
        Some(ClientFiles::Many(files)) => files,
    };
    if files.len() > 1 {
        return Err("more than one client certificate for a host is not supported".into());
    }
    Ok(files.pop().map(|file| {
        let (certificate, key) = match file {
            ClientFile::File(path) => (path, String::new()),
            ClientFile::Pair([certificate, key]) => (certificate, key),
        };
        ClientCertificate {
            certificate: directory.join(certificate),
            key: (!key.is_empty()).then(|| directory.join(key)),
        }
    }))
}

/// Go's form of a duration, such as `1s` or `1m30s`.
fn duration(text: &str) -> Option<Duration> {
    let (mut seconds, mut rest) = (0f64, text);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let unit = rest[digits..].find(|c: char| c.is_ascii_digit() || c == '.');
        let end = unit.map_or(rest.len(), |length| digits + length);
        let factor = match &rest[digits..end] {
            "ns" => 1e-9,
            "us" | "µs" | "μs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        seconds += rest[..digits].parse::<f64>().ok()? * factor;
        rest = &rest[end..];
    }
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|duration| !duration.is_zero())
}

#[cfg(test)]
#[path = "hosts_tests.rs"]
mod tests;
