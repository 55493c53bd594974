//! Credential providers: programs on this machine that know credentials of registries. They are configured by a
//! CredentialProviderConfig, called with a request on their standard input, and what they answer is kept for as long as
//! they say. What they answer is secret: it is neither logged nor quoted.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::json;
use skiff_cri::v1::AuthConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;
use tokio::sync::Mutex;

use crate::credentials::{self, Keyring};
use crate::durations::parse_go_duration;

/// What a program may take, as upstream.
const TIMEOUT: Duration = Duration::from_secs(60);
/// What is read of an answer, and of what the program says of its failure.
const MAX_ANSWER: u64 = 1 << 20;
const MAX_COMPLAINT: usize = 4096;
/// Answers that are kept; of more the first to expire goes.
const MAX_KEPT: usize = 1000;
const VERSIONS: [&str; 3] = [
    "credentialprovider.kubelet.k8s.io/v1",
    "credentialprovider.kubelet.k8s.io/v1alpha1",
    "credentialprovider.kubelet.k8s.io/v1beta1",
];
const CONFIG_VERSIONS: [&str; 3] = [
    "kubelet.config.k8s.io/v1",
    "kubelet.config.k8s.io/v1alpha1",
    "kubelet.config.k8s.io/v1beta1",
];

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("plugin binary directory {0} did not exist")]
    NoDirectory(PathBuf),
    #[error("unable to read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("no configuration files found in directory {0}")]
    Empty(PathBuf),
    #[error("error decoding config {path}: {why}")]
    Decode { path: PathBuf, why: String },
    #[error("failed to validate credential provider config: {0}")]
    Invalid(String),
    #[error("plugin binary executable {0} did not exist")]
    NoProgram(PathBuf),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Config {
    api_version: String,
    kind: String,
    #[serde(default)]
    providers: Vec<ProviderConfig>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ProviderConfig {
    name: String,
    #[serde(default)]
    match_images: Vec<String>,
    default_cache_duration: Option<String>,
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    env: Vec<Variable>,
    token_attributes: Option<serde_json::Value>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Variable {
    name: String,
    value: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Response {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    kind: String,
    cache_key_type: String,
    cache_duration: Option<String>,
    #[serde(default)]
    auth: BTreeMap<String, Credentials>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Credentials {
    username: String,
    password: String,
}

struct Kept {
    until: Instant,
    auth: BTreeMap<String, Credentials>,
}

struct Provider {
    config: ProviderConfig,
    program: PathBuf,
    default_duration: Duration,
    /// Answers by what they are for. Held while the program runs: whoever comes meanwhile finds the answer.
    kept: Mutex<HashMap<String, Kept>>,
}

/// All of them, in the order of the configuration.
#[derive(Default)]
pub struct CredentialProviders(Vec<Provider>);

impl CredentialProviders {
    /// `config` is a file, or a folder of files that are read in the order of their names.
    pub fn load(config: &Path, programs: &Path) -> Result<Self, Error> {
        if !programs.is_dir() {
            return Err(Error::NoDirectory(programs.to_owned()));
        }
        let mut providers = Vec::new();
        for path in files(config)? {
            let data = std::fs::read(&path).map_err(|source| Error::Read {
                path: path.clone(),
                source,
            })?;
            let decode = |why: String| Error::Decode {
                path: path.clone(),
                why,
            };
            providers.extend(parse(&data).map_err(decode)?);
        }
        validate(&providers).map_err(Error::Invalid)?;
        let made = providers.into_iter().map(|config| {
            let program = programs.join(&config.name);
            if !program.is_file() {
                return Err(Error::NoProgram(program));
            }
            let duration = config.default_cache_duration.as_deref().unwrap_or("0");
            Ok(Provider {
                default_duration: parse_go_duration(duration).map_err(Error::Invalid)?,
                config,
                program,
                kept: Mutex::default(),
            })
        });
        made.collect::<Result<_, _>>().map(CredentialProviders)
    }

    /// All credentials that fit the repository. A program that fails is logged, and the others are asked.
    pub async fn lookup(&self, repository: &str) -> Vec<AuthConfig> {
        let mut found = Vec::new();
        for provider in &self.0 {
            let patterns = &provider.config.match_images;
            if !patterns
                .iter()
                .any(|pattern| credentials::matches(&credentials::normalize(pattern), repository))
            {
                continue;
            }
            match provider.credentials(repository).await {
                Ok(auth) => {
                    let entries = auth.into_iter().map(|(pattern, one)| {
                        let config = AuthConfig {
                            username: one.username,
                            password: one.password,
                            ..Default::default()
                        };
                        (pattern, config)
                    });
                    found.extend(Keyring::from_entries(entries).lookup(repository));
                }
                Err(error) => {
                    let provider = &provider.config.name;
                    tracing::error!(
                        provider,
                        repository,
                        error,
                        "cannot get credentials of a registry"
                    );
                }
            }
        }
        found
    }
}

fn files(config: &Path) -> Result<Vec<PathBuf>, Error> {
    let read = |source| Error::Read {
        path: config.to_owned(),
        source,
    };
    if !std::fs::metadata(config).map_err(read)?.is_dir() {
        return Ok(vec![config.to_owned()]);
    }
    let entries = std::fs::read_dir(config).map_err(read)?;
    let known = ["json", "yaml", "yml"];
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            path.is_file()
                && path
                    .extension()
                    .is_some_and(|end| known.iter().any(|one| end == *one))
        })
        .collect();
    if files.is_empty() {
        return Err(Error::Empty(config.to_owned()));
    }
    files.sort();
    Ok(files)
}

fn parse(data: &[u8]) -> Result<Vec<ProviderConfig>, String> {
    let decoded = skiff_schema::decode::from_yaml(data).map_err(|error| error.to_string())?;
    if !decoded.duplicate_fields.is_empty() {
        return Err(format!(
            "strict decoding error: {}",
            decoded.duplicate_fields.join(", ")
        ));
    }
    let config: Config = serde_json::from_value(decoded.value).map_err(|error| error.to_string())?;
    if config.kind != "CredentialProviderConfig" {
        return Err(format!("failed to decode {:?} (wrong Kind)", config.kind));
    }
    if !CONFIG_VERSIONS.contains(&config.api_version.as_str()) {
        return Err(format!("unexpected version {:?}", config.api_version));
    }
    Ok(config.providers)
}

fn validate(providers: &[ProviderConfig]) -> Result<(), String> {
    if providers.is_empty() {
        return Err("providers: Required value: at least 1 item in plugins is required".to_owned());
    }
    for (index, provider) in providers.iter().enumerate() {
        let name = &provider.name;
        if name.is_empty() || name.contains(['/', ' ']) || name == "." || name == ".." {
            return Err(format!(
                "providers.name: Invalid value: {name:?}: it must be the name of a file"
            ));
        }
        if providers[..index].iter().any(|other| other.name == *name) {
            return Err(format!(
                "duplicate provider name {name:?} found in configuration file(s)"
            ));
        }
        if !VERSIONS.contains(&provider.api_version.as_str()) {
            let version = &provider.api_version;
            return Err(format!("providers.apiVersion: Unsupported value: {version:?}"));
        }
        if provider.match_images.is_empty() {
            return Err(
                "providers.matchImages: Required value: at least 1 item in matchImages is required"
                    .to_owned(),
            );
        }
        let Some(duration) = &provider.default_cache_duration else {
            return Err("providers.defaultCacheDuration: Required value".to_owned());
        };
        parse_go_duration(duration).map_err(|why| format!("providers.defaultCacheDuration: {why}"))?;
        if provider.token_attributes.is_some() {
            return Err(
                "providers.tokenAttributes: skiff hands providers no tokens of service accounts".to_owned(),
            );
        }
    }
    Ok(())
}

impl Provider {
    async fn credentials(&self, repository: &str) -> Result<BTreeMap<String, Credentials>, String> {
        let registry = repository.split('/').next().unwrap_or_default();
        let mut kept = self.kept.lock().await;
        let now = Instant::now();
        kept.retain(|_, one| one.until > now);
        for key in [repository, registry, GLOBAL] {
            if let Some(found) = kept.get(key) {
                return Ok(found.auth.clone());
            }
        }
        let response = self.ask(repository).await?;
        let key = match response.cache_key_type.as_str() {
            "Image" => repository,
            "Registry" => registry,
            "Global" => GLOBAL,
            other => {
                return Err(format!(
                    "credential provider plugin did not return a valid cacheKeyType: {other}"
                ));
            }
        };
        let duration = match &response.cache_duration {
            Some(text) => parse_go_duration(text)?,
            None => self.default_duration,
        };
        if !duration.is_zero() {
            if kept.len() >= MAX_KEPT
                && let Some(first) = kept
                    .iter()
                    .min_by_key(|(_, one)| one.until)
                    .map(|(key, _)| key.clone())
            {
                kept.remove(&first);
            }
            let entry = Kept {
                until: now.checked_add(duration).unwrap_or(now),
                auth: response.auth.clone(),
            };
            kept.insert(key.to_owned(), entry);
        }
        Ok(response.auth)
    }

    async fn ask(&self, repository: &str) -> Result<Response, String> {
        let name = &self.config.name;
        let failed = |why: &dyn std::fmt::Display| {
            format!("error execing credential provider plugin {name} for image {repository}: {why}")
        };
        let version = &self.config.api_version;
        let request =
            json!({"kind": "CredentialProviderRequest", "apiVersion": version, "image": repository});
        let mut child = Command::new(&self.program)
            .args(&self.config.args)
            .envs(self.config.env.iter().map(|one| (&one.name, &one.value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| failed(&error))?;
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let run = async {
            let tell = async {
                if let Some(mut stdin) = stdin {
                    // One that does not read has decided without.
                    let _ = stdin.write_all(request.to_string().as_bytes()).await;
                }
            };
            let (mut answer, mut complaint) = (Vec::new(), Vec::new());
            let hear = async {
                match stdout {
                    Some(stdout) => stdout.take(MAX_ANSWER + 1).read_to_end(&mut answer).await,
                    None => Ok(0),
                }
            };
            let listen = async {
                match stderr {
                    Some(stderr) => stderr.take(MAX_ANSWER).read_to_end(&mut complaint).await,
                    None => Ok(0),
                }
            };
            let ((), heard, _) = tokio::join!(tell, hear, listen);
            heard?;
            let status = child.wait().await?;
            Ok::<_, std::io::Error>((status, answer, complaint))
        };
        let ended = tokio::time::timeout(TIMEOUT, run).await;
        let (status, answer, mut complaint) = ended
            .map_err(|_| failed(&"context deadline exceeded"))?
            .map_err(|error| failed(&error))?;
        if !status.success() {
            complaint.truncate(MAX_COMPLAINT);
            return Err(failed(&format!(
                "{status}: {}",
                String::from_utf8_lossy(&complaint).trim()
            )));
        }
        if answer.len() as u64 > MAX_ANSWER {
            return Err(failed(&format!("its answer has more than {MAX_ANSWER} bytes")));
        }
        read(&answer, version)
    }
}

const GLOBAL: &str = "<global>";

// What is wrong is not quoted: the answer is secret.
fn read(answer: &[u8], version: &str) -> Result<Response, String> {
    let wrong = || "error decoding credential provider plugin response from stdout".to_owned();
    let value: serde_json::Value = serde_json::from_slice(answer).map_err(|_| wrong())?;
    let actual = value["apiVersion"].as_str().unwrap_or_default().to_owned();
    if actual != version {
        return Err(format!(
            "apiVersion from credential plugin response did not match expected apiVersion:{version}, actual apiVersion:{actual}"
        ));
    }
    let response: Response = serde_json::from_value(value).map_err(|_| wrong())?;
    match response.kind.as_str() {
        "CredentialProviderResponse" => Ok(response),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const CONFIG: &str = "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n\
        - name: helper\n  matchImages: ['*.example.com', registry.io/team]\n  defaultCacheDuration: 1m\n  \
        apiVersion: credentialprovider.kubelet.k8s.io/v1\n  args: [get]\n  env: [{name: WHO, value: me}]\n";

    /// A program that notes its calls and answers for the registry.
    fn world(script: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("helper");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let config = dir.path().join("config.yaml");
        std::fs::write(&config, CONFIG).unwrap();
        (dir, config)
    }

    #[tokio::test]
    async fn programs_are_asked_once_a_registry() {
        let script = r#"cd "$(dirname "$0")"; cat >> calls; echo " $1 $WHO" >> calls
            echo '{"apiVersion": "credentialprovider.kubelet.k8s.io/v1", "kind": "CredentialProviderResponse",
                "cacheKeyType": "Registry", "auth": {"*.example.com": {"username": "u", "password": "p"}}}'"#;
        let (dir, config) = world(script);
        let providers = CredentialProviders::load(&config, dir.path()).unwrap();
        let users = async |repository: &str| -> Vec<String> {
            let found = providers.lookup(repository).await;
            found.into_iter().map(|one| one.username).collect()
        };
        assert_eq!(users("a.example.com/x").await, ["u"]);
        assert_eq!(users("a.example.com/y").await, ["u"]);
        assert!(users("other.org/x").await.is_empty());
        // Asked, and the answer is for others.
        assert!(users("registry.io/team/app").await.is_empty());
        let calls = std::fs::read_to_string(dir.path().join("calls")).unwrap();
        let lines: Vec<&str> = calls.lines().collect();
        assert_eq!(lines.len(), 2, "{calls}");
        assert!(
            lines[0].contains(r#""image":"a.example.com/x""#) && lines[0].ends_with(" get me"),
            "{calls}"
        );
    }

    #[tokio::test]
    async fn failures_are_told() {
        let check = async |script: &str, expected: &str| {
            let (dir, config) = world(script);
            let providers = CredentialProviders::load(&config, dir.path()).unwrap();
            let error = providers.0[0].credentials("a.example.com/x").await.err().unwrap();
            assert!(error.contains(expected), "{error} is not {expected}");
            assert!(providers.lookup("a.example.com/x").await.is_empty());
        };
        check("echo no key >&2; exit 3", "no key").await;
        check("echo '{\"password\": \"secret\"}'", "actual apiVersion:").await;
        check(
            "echo secret",
            "error decoding credential provider plugin response",
        )
        .await;
    }

    #[test]
    fn configurations_are_checked() {
        let check = |from: &str, to: &str, expected: &str| {
            let (dir, config) = world("");
            std::fs::write(&config, CONFIG.replace(from, to)).unwrap();
            let error = CredentialProviders::load(&config, dir.path())
                .err()
                .unwrap()
                .to_string();
            assert!(error.contains(expected), "{error} is not {expected}");
        };
        check("name: helper", "name: absent", "did not exist");
        check("name: helper", "name: ../helper", "Invalid value");
        check("args:", "arguments:", "unknown field");
        check("credentialprovider.kubelet.k8s.io/v1", "v1", "Unsupported value");
        check("kind: Cred", "kind: Kred", "wrong Kind");
        check("args: [get]", "tokenAttributes: {}", "tokenAttributes");
    }
}
