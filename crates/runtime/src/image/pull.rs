//! Pulls from registries that speak the OCI distribution protocol. Layers are downloaded to files,
//! checked, and unpacked in order; the list of images changes at the very end.

use super::config::{ConfigFile, Descriptor, Manifest, choose_platform};
use super::{
    Error, Image, ImageStore, Progress, ProgressFn, chain_ids, digest_of, expect_digest, io_error,
    layer_name, normalize, parse_reference,
};
use futures::{StreamExt, TryStreamExt};
use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::errors::OciDistributionError;
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;

const ACCEPTED: &[&str] = &[
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];
const PARALLEL_LAYERS: usize = 3;
const ATTEMPTS: u32 = 4;
const MAX_MANIFEST: usize = 8 * 1024 * 1024;

/// Credentials as CRI's AuthConfig carries them.
#[derive(Clone, Default)]
pub struct Credentials {
    pub username: String,
    pub password: String,
    /// A bearer token, or a base64 `user:password`.
    pub identity_token: String,
    pub registry_token: String,
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

impl Credentials {
    fn registry_auth(this: Option<&Credentials>) -> RegistryAuth {
        match this {
            Some(credentials) if !credentials.username.is_empty() => {
                RegistryAuth::Basic(credentials.username.clone(), credentials.password.clone())
            }
            Some(credentials) if !credentials.registry_token.is_empty() => {
                RegistryAuth::Bearer(credentials.registry_token.clone())
            }
            _ => RegistryAuth::Anonymous,
        }
    }
}

/// Goes with the pull, also when its caller gives up in the middle.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = skiff_fs::remove_tree(&self.0);
    }
}

impl ImageStore {
    /// Pulls `reference` and returns the image's id.
    pub async fn pull(
        self: &Arc<Self>,
        reference: &str,
        credentials: Option<&Credentials>,
        progress: &ProgressFn,
    ) -> Result<String, Error> {
        if credentials.is_some_and(|credentials| !credentials.identity_token.is_empty()) {
            return Err(Error::Unsupported("identity tokens for registries".into()));
        }
        let name = normalize(reference)?;
        let parsed = parse_reference(&name)?;
        let auth = Credentials::registry_auth(credentials);
        let turn = self.pulls.lock().entry(name.clone()).or_default().clone();
        let guard = turn.lock().await;
        let _busy = self.busy()?;
        let temporary = Temporary(self.temporary("pull"));
        std::fs::create_dir(&temporary.0).map_err(io_error("make a directory"))?;
        let result = self
            .pull_into(&name, &parsed, &auth, &temporary.0, progress)
            .await;
        drop(guard);
        drop(turn);
        self.pulls.lock().retain(|_, turn| Arc::strong_count(turn) > 1);
        result
    }

    async fn pull_into(
        self: &Arc<Self>,
        name: &str,
        reference: &Reference,
        auth: &RegistryAuth,
        temporary: &Path,
        progress: &ProgressFn,
    ) -> Result<String, Error> {
        let client = client(reference.resolve_registry());
        let fail = |error: OciDistributionError| pull_error(name, error);
        let parse = |body: &[u8]| -> Result<Manifest, Error> {
            serde_json::from_slice(body).map_err(|error| Error::Pull {
                reference: name.to_owned(),
                message: format!("manifest: {error}"),
                not_found: false,
                unauthorized: false,
            })
        };
        let (body, _) = retry(|| client.pull_manifest_raw(reference, auth, ACCEPTED))
            .await
            .map_err(fail)?;
        if body.len() > MAX_MANIFEST {
            return Err(Error::Archive("manifest too large".into()));
        }
        let top_digest = digest_of(&body);
        if let Some(asked) = reference.digest() {
            expect_digest("manifest", asked, &top_digest)?;
        }
        self.write_blob(&top_digest, &body)?;
        let mut manifest = parse(&body)?;
        if !manifest.manifests.is_empty() {
            let Some(own) = choose_platform(&manifest.manifests) else {
                return Err(Error::Pull {
                    reference: name.to_owned(),
                    message: format!(
                        "no match for platform in manifest: linux/{}",
                        super::config::architecture()
                    ),
                    not_found: true,
                    unauthorized: false,
                });
            };
            let by_digest = reference.clone_with_digest(own.digest.clone());
            let (body, _) = retry(|| client.pull_manifest_raw(&by_digest, auth, ACCEPTED))
                .await
                .map_err(fail)?;
            expect_digest("manifest", &own.digest, &digest_of(&body))?;
            manifest = parse(&body)?;
        }
        let Some(config_descriptor) = manifest.config.clone() else {
            return Err(Error::Unsupported("a manifest without a configuration".into()));
        };
        // It is read into memory, so its size is not the registry's to choose.
        if config_descriptor.size == 0 || config_descriptor.size > MAX_MANIFEST as u64 {
            return Err(Error::Archive(format!(
                "an image configuration of {} bytes",
                config_descriptor.size
            )));
        }
        let config_path = temporary.join("config");
        download(&client, reference, &config_descriptor, &config_path, progress)
            .await
            .map_err(fail)?;
        let config_body = tokio::fs::read(&config_path)
            .await
            .map_err(io_error("read the configuration"))?;
        let id = digest_of(&config_body);
        expect_digest("configuration", &config_descriptor.digest, &id)?;
        let config: ConfigFile = serde_json::from_slice(&config_body)
            .map_err(|error| Error::Archive(format!("image configuration: {error}")))?;
        let diff_ids = config.rootfs.diff_ids.clone();
        if diff_ids.len() != manifest.layers.len() {
            return Err(Error::Archive(
                "configuration and manifest name different numbers of layers".into(),
            ));
        }
        let chains = chain_ids(&diff_ids)?;

        // Layers that are here already are not fetched; the rest come in parallel and are unpacked in
        // order as they arrive.
        let jobs = manifest.layers.iter().cloned().enumerate().map(|(at, layer)| {
            let present = self.layers_directory().join(layer_name(&chains[at])).exists();
            let (client, path) = (&client, temporary.join(format!("layer-{at}")));
            async move {
                if present {
                    return Ok::<Option<PathBuf>, OciDistributionError>(None);
                }
                download(client, reference, &layer, &path, progress).await?;
                Ok(Some(path))
            }
        });
        let mut downloads = futures::stream::iter(jobs).buffered(PARALLEL_LAYERS).enumerate();
        while let Some((at, path)) = downloads.next().await {
            let Some(path) = path.map_err(fail)? else { continue };
            progress(Progress::Unpacking {
                digest: manifest.layers[at].digest.clone(),
            });
            let (store, layer) = (self.clone(), manifest.layers[at].digest.clone());
            let (diff_id, chain) = (diff_ids[at].clone(), chains[at].clone());
            tokio::task::spawn_blocking(move || {
                let result = store.unpack_layer(&path, Some(&layer), &diff_id, &chain);
                let _ = std::fs::remove_file(&path);
                result
            })
            .await
            .map_err(|error| Error::Archive(format!("unpacking ended early: {error}")))??;
        }
        drop(downloads);

        self.write_blob(&id, &config_body)?;
        let size = config_body.len() as u64 + manifest.layers.iter().map(|layer| layer.size).sum::<u64>();
        let repository = format!("{}/{}", reference.registry(), reference.repository());
        let tags = if reference.digest().is_some() {
            Vec::new()
        } else {
            vec![name.to_owned()]
        };
        self.add(Image {
            id: id.clone(),
            repo_tags: tags,
            repo_digests: vec![format!("{repository}@{top_digest}")],
            size,
            layers: chains.iter().map(|chain| layer_name(chain)).collect(),
            config: config.config,
            pinned: false,
            source: None,
        })?;
        progress(Progress::Done {
            reference: name.to_owned(),
        });
        Ok(id)
    }
}

/// COMPAT: like containerd, plain HTTP is spoken to registries on this machine, HTTPS to all others.
fn client(registry: &str) -> Client {
    let host = registry.rsplit_once(':').map_or(registry, |(host, _)| host);
    let local = host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
    let protocol = if local {
        ClientProtocol::Http
    } else {
        ClientProtocol::Https
    };
    Client::new(ClientConfig {
        protocol,
        connect_timeout: Some(Duration::from_secs(30)),
        read_timeout: Some(Duration::from_secs(60)),
        user_agent: concat!("skiff/", env!("CARGO_PKG_VERSION")),
        ..Default::default()
    })
}

/// Tries again what a second try can mend, with growing pauses.
async fn retry<T, F: Future<Output = Result<T, OciDistributionError>>>(
    mut attempt: impl FnMut() -> F,
) -> Result<T, OciDistributionError> {
    let mut pause = Duration::from_millis(250);
    for _ in 1..ATTEMPTS {
        match attempt().await {
            Err(error) if transient(&error) => {
                tracing::warn!(%error, "registry request failed, trying again");
                tokio::time::sleep(pause).await;
                pause *= 3;
            }
            result => return result,
        }
    }
    attempt().await
}

fn transient(error: &OciDistributionError) -> bool {
    match error {
        // A refused connection is a wrong address more often than a restart; the kubelet tries again.
        OciDistributionError::RequestError(error) => !error.is_connect(),
        OciDistributionError::IoError(_) => true,
        OciDistributionError::ServerError { code, .. } => *code >= 500 || *code == 429,
        _ => false,
    }
}

async fn download(
    client: &Client,
    reference: &Reference,
    descriptor: &Descriptor,
    path: &Path,
    progress: &ProgressFn,
) -> Result<(), OciDistributionError> {
    retry(|| async {
        let oci = oci_client::manifest::OciDescriptor {
            digest: descriptor.digest.clone(),
            size: i64::try_from(descriptor.size).unwrap_or(i64::MAX),
            media_type: descriptor.media_type.clone(),
            ..Default::default()
        };
        let mut stream = client.pull_blob_stream(reference, &oci).await?;
        let mut file = tokio::fs::File::create(path).await?;
        let mut done = 0u64;
        while let Some(chunk) = stream.stream.try_next().await? {
            done += chunk.len() as u64;
            if descriptor.size > 0 && done > descriptor.size {
                return Err(OciDistributionError::GenericError(Some(format!(
                    "{} is longer than the {} bytes of its manifest",
                    descriptor.digest, descriptor.size
                ))));
            }
            file.write_all(&chunk).await?;
            progress(Progress::Downloading {
                digest: descriptor.digest.clone(),
                done,
                total: descriptor.size,
            });
        }
        file.flush().await?;
        Ok(())
    })
    .await
}

fn pull_error(reference: &str, error: OciDistributionError) -> Error {
    let (not_found, unauthorized) = match &error {
        OciDistributionError::ImageManifestNotFoundError(_) => (true, false),
        OciDistributionError::UnauthorizedError { .. } | OciDistributionError::AuthenticationFailure(_) => {
            (false, true)
        }
        OciDistributionError::RegistryError { envelope, .. } => {
            use oci_client::errors::OciErrorCode::{
                Denied, ManifestUnknown, NameUnknown, NotFound, Unauthorized,
            };
            let has = |code| envelope.errors.iter().any(|error| error.code == code);
            (
                has(ManifestUnknown) || has(NameUnknown) || has(NotFound),
                has(Denied) || has(Unauthorized),
            )
        }
        OciDistributionError::ServerError { code, .. } => (*code == 404, *code == 401 || *code == 403),
        _ => (false, false),
    };
    // COMPAT: containerd's words, which end up in the pod's events.
    let message = if not_found {
        format!("failed to resolve reference {reference:?}: {reference}: not found")
    } else {
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(inner) = cause {
            let inner_text = inner.to_string();
            if !text.contains(&inner_text) {
                text = format!("{text}: {inner_text}");
            }
            cause = inner.source();
        }
        format!("failed to resolve reference {reference:?}: {text}")
    };
    Error::Pull {
        reference: reference.to_owned(),
        message,
        not_found,
        unauthorized,
    }
}
