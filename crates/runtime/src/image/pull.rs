//! Pulls from registries that speak the OCI distribution protocol. Layers are downloaded to files,
//! checked, and unpacked in order; the list of images changes at the very end.

use super::config::{ConfigFile, Manifest};
use super::credentials::Credentials;
use super::download::download;
use super::reference::Reference;
use super::registry::{self, Registry};
use super::{
    Error, Image, ImageStore, Progress, ProgressFn, chain_ids, digest_of, expect_digest, io_error, is_digest,
    layer_name, normalize, parse_reference,
};
use futures::StreamExt;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const PARALLEL_LAYERS: usize = 3;
pub(super) const ATTEMPTS: u32 = 4;
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(250);

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
        let name = normalize(reference)?;
        let parsed = parse_reference(&name)?;
        let credentials = credentials.cloned().unwrap_or_default();
        let turn = self.pulls.lock().entry(name.clone()).or_default().clone();
        let guard = turn.lock().await;
        let busy = self.busy()?;
        let temporary = Temporary(self.temporary("pull"));
        std::fs::create_dir(&temporary.0).map_err(io_error("make a directory"))?;
        let result = self
            .pull_into(&name, &parsed, &credentials, &temporary.0, progress)
            .await;
        drop(temporary);
        drop(busy);
        if let Err(error) = &result
            && !matches!(
                error,
                Error::Pull {
                    interrupted: true,
                    ..
                }
            )
        {
            // Layers that came before the one that was refused are of no use to anybody.
            let store = self.clone();
            let _ = tokio::task::spawn_blocking(move || store.collect_garbage()).await;
        }
        drop(guard);
        drop(turn);
        self.pulls.lock().retain(|_, turn| Arc::strong_count(turn) > 1);
        result
    }

    async fn pull_into(
        self: &Arc<Self>,
        name: &str,
        reference: &Reference,
        credentials: &Credentials,
        temporary: &Path,
        progress: &ProgressFn,
    ) -> Result<String, Error> {
        let fail = |error: registry::Error| pull_error(name, &error);
        let refuse = |message: String| Error::Pull {
            reference: name.to_owned(),
            message,
            not_found: false,
            unauthorized: false,
            interrupted: false,
        };
        let registry =
            Registry::new(reference, credentials, &self.limits, &self.registry_configs).map_err(fail)?;
        let parse = |body: &[u8]| -> Result<Manifest, Error> {
            serde_json::from_slice(body).map_err(|error| refuse(format!("manifest: {error}")))
        };
        let asked = match reference.digest() {
            Some(digest) => digest.to_owned(),
            None => {
                let tag = reference.tag().unwrap_or("latest");
                retry(|| registry.resolve(tag)).await.map_err(fail)?
            }
        };
        let body = retry(|| registry.manifest(&asked)).await.map_err(fail)?;
        let top_digest = digest_of(&body);
        if asked.contains(':') {
            expect_digest("manifest", &asked, &top_digest)?;
        }
        let mut manifest = parse(&body)?;
        let top_body = body;
        if !manifest.manifests.is_empty() {
            let Some(own) = self.platform.choose(&manifest.manifests) else {
                return Err(Error::Pull {
                    reference: name.to_owned(),
                    message: format!("no match for platform in manifest: {}", self.platform),
                    not_found: true,
                    unauthorized: false,
                    interrupted: false,
                });
            };
            check_digest(&own.digest)?;
            let body = retry(|| registry.manifest(&own.digest)).await.map_err(fail)?;
            expect_digest("manifest", &own.digest, &digest_of(&body))?;
            manifest = parse(&body)?;
        }
        let Some(described) = manifest.config.clone() else {
            return Err(Error::Unsupported("a manifest without a configuration".into()));
        };
        check_digest(&described.digest)?;
        for layer in &manifest.layers {
            check_digest(&layer.digest)?;
        }
        let packed = manifest
            .layers
            .iter()
            .try_fold(0u64, |sum, layer| sum.checked_add(layer.size))
            .filter(|packed| *packed <= self.limits.packed_bytes)
            .ok_or_else(|| {
                refuse(format!(
                    "its layers are larger than {} bytes",
                    self.limits.packed_bytes
                ))
            })?;
        let config_body = retry(|| registry.small_blob(&described.digest, described.size))
            .await
            .map_err(fail)?;
        let id = digest_of(&config_body);
        expect_digest("configuration", &described.digest, &id)?;
        let config: ConfigFile = serde_json::from_slice(&config_body)
            .map_err(|error| Error::Archive(format!("image configuration: {error}")))?;
        let diff_ids = config.rootfs.diff_ids.clone();
        if diff_ids.len() != manifest.layers.len() {
            return Err(Error::Archive(
                "configuration and manifest name different numbers of layers".into(),
            ));
        }
        let chains = chain_ids(&diff_ids, self.limits.layers)?;
        let budget = Arc::new(Mutex::new(self.budget()?));

        // Layers that are here already are not fetched; the rest come in parallel and are unpacked in
        // order as they arrive.
        let is_present = |at: usize| self.layers_directory().join(layer_name(&chains[at])).exists();
        let missing: HashMap<&str, u64> = manifest
            .layers
            .iter()
            .enumerate()
            .filter(|(at, _)| !is_present(*at))
            .map(|(_, layer)| (layer.digest.as_str(), layer.size))
            .collect();
        progress(Progress::Needed {
            layers: missing.len(),
            bytes: missing.values().sum(),
        });
        let jobs = manifest.layers.iter().cloned().enumerate().map(|(at, layer)| {
            let present = is_present(at);
            let (registry, path) = (&registry, temporary.join(format!("layer-{at}")));
            async move {
                if present {
                    return Ok::<Option<PathBuf>, registry::Error>(None);
                }
                download(registry, &layer, &path, &self.limits, progress).await?;
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
            let (diff_id, chain, budget) = (diff_ids[at].clone(), chains[at].clone(), budget.clone());
            tokio::task::spawn_blocking(move || {
                let result = store.unpack_layer(&path, Some(&layer), &diff_id, &chain, &mut budget.lock());
                let _ = std::fs::remove_file(&path);
                result
            })
            .await
            .map_err(|error| Error::Archive(format!("unpacking ended early: {error}")))??;
        }
        drop(downloads);

        self.write_blob(&top_digest, &top_body)?;
        self.write_blob(&id, &config_body)?;
        let size = config_body.len() as u64 + packed;
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

/// Digests become parts of addresses and names of files.
fn check_digest(digest: &str) -> Result<(), Error> {
    if is_digest(digest) {
        Ok(())
    } else {
        Err(Error::Archive(format!("{digest:?} is not a sha256 digest")))
    }
}

/// Tries again what a second try can mend, with growing pauses.
pub(super) async fn retry<T, F: Future<Output = Result<T, registry::Error>>>(
    mut attempt: impl FnMut() -> F,
) -> Result<T, registry::Error> {
    let mut pause = FIRST_PAUSE;
    for _ in 1..ATTEMPTS {
        match attempt().await {
            Err(error) if error.is_transient() => {
                tracing::warn!(%error, "registry request failed, trying again");
                tokio::time::sleep(pause).await;
                pause *= 3;
            }
            result => return result,
        }
    }
    attempt().await
}

fn pull_error(reference: &str, error: &registry::Error) -> Error {
    let not_found = matches!(error, registry::Error::NotFound);
    // COMPAT: containerd's words, which end up in the pod's events.
    let message = if not_found {
        format!("failed to resolve reference {reference:?}: {reference}: not found")
    } else {
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(error);
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
        unauthorized: matches!(error, registry::Error::Denied(_)),
        interrupted: error.is_transient(),
    }
}
