//! Imports image archives: OCI layouts (as a tar or a directory) and `docker save` tars, plain, gzip or
//! zstd. Everything is checked before the list of images changes.

use super::config::{ConfigFile, Descriptor, Manifest};
use super::limits::{self, Budget};
use super::unpack::{MAX_HEADERS, Metered};
use super::{
    Error, Image, ImageStore, Platform, Progress, ProgressFn, chain_ids, digest_of, expect_digest, hex_of,
    io_error, is_digest, layer_name, normalize, parse_reference, stream,
};
use serde::Deserialize;
use std::cell::Cell;
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

/// An archive of images has a few files a layer.
const MAX_FILES: usize = 100_000;

impl ImageStore {
    /// Imports every image of an archive and returns their references. Blocking.
    pub fn import(&self, path: &Path, progress: &ProgressFn) -> Result<Vec<String>, Error> {
        self.importing(|| self.import_all(path, progress))
    }

    fn importing(&self, work: impl FnOnce() -> Result<Vec<String>, Error>) -> Result<Vec<String>, Error> {
        let busy = self.busy()?;
        let result = work();
        drop(busy);
        if result.is_err() {
            let _ = self.collect_garbage();
        }
        result
    }

    fn import_all(&self, path: &Path, progress: &ProgressFn) -> Result<Vec<String>, Error> {
        let stem = path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        let stem = stem.split('.').next().unwrap_or("image").to_lowercase();
        if path.is_dir() {
            return self.import_source(&self.source(path.to_owned(), false), &stem, progress);
        }
        let file = File::open(path).map_err(io_error(format!("open {}", path.display())))?;
        self.import_tar(file, &stem, progress)
    }

    /// The same for an archive as it comes. `stem` names an image without a name.
    pub(super) fn import_stream(
        &self,
        archive: impl Read,
        stem: &str,
        progress: &ProgressFn,
    ) -> Result<Vec<String>, Error> {
        self.importing(|| self.import_tar(archive, stem, progress))
    }

    fn import_tar(
        &self,
        archive: impl Read,
        stem: &str,
        progress: &ProgressFn,
    ) -> Result<Vec<String>, Error> {
        let temporary = self.temporary("import");
        std::fs::create_dir(&temporary).map_err(io_error("make a directory"))?;
        let source = self.source(temporary, true);
        let source = source.extract(archive, &mut self.budget()?)?;
        self.import_source(&source, stem, progress)
    }

    fn source(&self, directory: PathBuf, temporary: bool) -> Source {
        Source {
            directory,
            temporary,
            links: HashMap::new(),
            document_bytes: self.limits.document_bytes,
            platform: self.platform.clone(),
        }
    }

    fn import_source(
        &self,
        source: &Source,
        stem: &str,
        progress: &ProgressFn,
    ) -> Result<Vec<String>, Error> {
        let found = if source.open("index.json").is_ok() {
            source.oci_images(stem)?
        } else if source.open("manifest.json").is_ok() {
            source.docker_images()?
        } else {
            let text = "it holds neither index.json (OCI layout) nor manifest.json (docker save)";
            return Err(Error::Archive(text.into()));
        };
        if found.is_empty() {
            return Err(Error::Archive(format!("it holds no image for {}", self.platform)));
        }
        let mut names: Vec<String> = Vec::new();
        for image in found {
            for name in self.import_one(source, image, progress)? {
                if !names.contains(&name) {
                    names.push(name);
                }
            }
        }
        Ok(names)
    }

    /// Its references: all tags, or its id if it has none.
    fn import_one(&self, source: &Source, found: Found, progress: &ProgressFn) -> Result<Vec<String>, Error> {
        let config: ConfigFile = serde_json::from_slice(&found.config)
            .map_err(|error| Error::Archive(format!("image configuration: {error}")))?;
        let diff_ids = &config.rootfs.diff_ids;
        if diff_ids.len() != found.layers.len() {
            return Err(Error::Archive(format!(
                "the configuration names {} layers and the manifest {}",
                diff_ids.len(),
                found.layers.len()
            )));
        }
        let mut size = found.config.len() as u64;
        let chains = chain_ids(diff_ids, self.limits.layers)?;
        let mut budget = self.budget()?;
        for ((layer, diff_id), chain) in found.layers.iter().zip(diff_ids).zip(&chains) {
            progress(Progress::Unpacking {
                digest: diff_id.clone(),
            });
            let path = source.path(&layer.path)?;
            size += std::fs::metadata(&path).map_err(|_| missing(&layer.path))?.len();
            self.unpack_layer(&path, layer.digest.as_deref(), diff_id, chain, &mut budget)?;
        }
        let id = digest_of(&found.config);
        self.write_blob(&id, &found.config)?;
        if let Some((digest, body)) = &found.manifest {
            self.write_blob(digest, body)?;
        }
        let mut tags: Vec<String> = Vec::new();
        let mut repo_digests = Vec::new();
        for tag in found.tags {
            if let Some((digest, _)) = &found.manifest {
                let parsed = parse_reference(&tag)?;
                let repo_digest = format!("{}/{}@{digest}", parsed.registry(), parsed.repository());
                if !repo_digests.contains(&repo_digest) {
                    repo_digests.push(repo_digest);
                }
            }
            if !tags.contains(&tag) {
                tags.push(tag);
            }
        }
        let names = if tags.is_empty() {
            vec![id.clone()]
        } else {
            tags.clone()
        };
        self.add(Image {
            id,
            repo_tags: tags,
            repo_digests,
            size,
            layers: chains.iter().map(|chain| layer_name(chain)).collect(),
            config: config.config,
            pinned: false,
            source: None,
        })?;
        for reference in names.clone() {
            progress(Progress::Done { reference });
        }
        Ok(names)
    }
}

fn missing(name: &str) -> Error {
    Error::Archive(format!("{name} is missing"))
}

struct Layer {
    path: String,
    /// Of the bytes as they are in the archive, where the format names it.
    digest: Option<String>,
}

struct Found {
    tags: Vec<String>,
    config: Vec<u8>,
    layers: Vec<Layer>,
    manifest: Option<(String, Vec<u8>)>,
}

/// The archive's files, in a directory.
struct Source {
    directory: PathBuf,
    temporary: bool,
    /// `docker save` of some versions links one layer to another.
    links: HashMap<PathBuf, PathBuf>,
    /// Manifests and configurations are small; one that is not is no image's.
    document_bytes: u64,
    platform: Platform,
}

impl Drop for Source {
    fn drop(&mut self) {
        if self.temporary {
            let _ = skiff_fs::remove_tree(&self.directory);
        }
    }
}

impl Source {
    fn extract(mut self, file: impl Read, budget: &mut Budget) -> Result<Source, Error> {
        let broken = |error: std::io::Error| Error::Archive(error.to_string());
        let mut plain = stream::decompress(file).map_err(broken)?;
        let headers_left = Rc::new(Cell::new(Some(MAX_HEADERS)));
        let mut archive = tar::Archive::new(Metered {
            inner: &mut plain,
            left: headers_left.clone(),
        });
        for (count, entry) in archive.entries().map_err(broken)?.enumerate() {
            let mut entry = entry.map_err(broken)?;
            headers_left.set(None);
            if count >= MAX_FILES {
                return Err(Error::Archive(format!("it holds more than {MAX_FILES} files")));
            }
            let name = relative(&entry.path().map_err(broken)?)?;
            let kind = entry.header().entry_type();
            if kind.is_file() {
                let target = self.directory.join(&name);
                if let Some(parent) = target.parent() {
                    std::fs::create_dir_all(parent).map_err(io_error("make a directory"))?;
                }
                let mut file = File::create(&target).map_err(io_error("write a file"))?;
                limits::copy(&mut entry, &mut file, budget).map_err(broken)?;
            } else if (kind.is_symlink() || kind.is_hard_link())
                && let Ok(Some(link)) = entry.link_name()
            {
                let base = if kind.is_symlink() {
                    name.parent().unwrap_or(Path::new(""))
                } else {
                    Path::new("")
                };
                self.links.insert(name.clone(), resolve(base, &link)?);
            }
            limits::copy(&mut entry, &mut std::io::sink(), budget).map_err(broken)?;
            headers_left.set(Some(MAX_HEADERS));
        }
        Ok(self)
    }

    /// The file of a name of the archive.
    fn path(&self, name: &str) -> Result<PathBuf, Error> {
        let mut name = relative(Path::new(name))?;
        for _ in 0..8 {
            match self.links.get(&name) {
                Some(target) => name = target.clone(),
                None => break,
            }
        }
        Ok(self.directory.join(name))
    }

    fn open(&self, name: &str) -> Result<Vec<u8>, Error> {
        let path = self.path(name)?;
        let metadata = std::fs::symlink_metadata(&path).map_err(|_| missing(name))?;
        if !metadata.is_file() || metadata.len() > self.document_bytes {
            return Err(Error::Archive(format!("{name} is not a small file")));
        }
        std::fs::read(&path).map_err(io_error(format!("read {name}")))
    }

    /// A blob of an OCI layout, checked.
    fn blob(&self, descriptor: &Descriptor) -> Result<Vec<u8>, Error> {
        let body = self.open(&blob_path(&descriptor.digest)?)?;
        expect_digest("blob", &descriptor.digest, &digest_of(&body))?;
        Ok(body)
    }

    fn oci_images(&self, stem: &str) -> Result<Vec<Found>, Error> {
        let parse = |what: &str, body: &[u8]| -> Result<Manifest, Error> {
            serde_json::from_slice(body).map_err(|error| Error::Archive(format!("{what}: {error}")))
        };
        let index = parse("index.json", &self.open("index.json")?)?;
        let mut found: Vec<Found> = Vec::new();
        // `docker save` since version 25 writes both lists, and its first releases name images in docker's only.
        let docker = match self.open("manifest.json") {
            Ok(body) => docker_entries(&body)?,
            Err(_) => Vec::new(),
        };
        let by_platform = docker.is_empty()
            && index.manifests.len() > 1
            && index.manifests.iter().all(|entry| entry.annotations.is_empty());
        let entries: Vec<&Descriptor> = if by_platform {
            self.platform.choose(&index.manifests).into_iter().collect()
        } else {
            index.manifests.iter().collect()
        };
        for entry in entries {
            let mut tags = entry_tags(entry, stem)?;
            let mut digest = entry.digest.clone();
            let mut body = self.blob(entry)?;
            let mut manifest = parse("manifest", &body)?;
            // An index in the index: one image for several platforms.
            for _ in 0..4 {
                if manifest.manifests.is_empty() {
                    break;
                }
                let Some(own) = self.platform.choose(&manifest.manifests) else {
                    return Err(Error::Archive(format!("no manifest for {}", self.platform)));
                };
                digest = own.digest.clone();
                body = self.blob(own)?;
                manifest = parse("manifest", &body)?;
            }
            let Some(config) = &manifest.config else {
                return Err(Error::Archive("a manifest without a configuration".into()));
            };
            let config_path = blob_path(&config.digest)?;
            for named in docker.iter().filter(|named| named.config == config_path) {
                tags.extend(named.tags()?);
            }
            if tags.is_empty() && docker.is_empty() {
                tags.push(normalize(stem)?);
            }
            let layers = manifest.layers.iter().map(|layer| {
                Ok(Layer {
                    path: blob_path(&layer.digest)?,
                    digest: Some(layer.digest.clone()),
                })
            });
            found.push(Found {
                tags,
                config: self.blob(config)?,
                layers: layers.collect::<Result<_, Error>>()?,
                manifest: Some((digest, body)),
            });
        }
        Ok(found)
    }

    fn docker_images(&self) -> Result<Vec<Found>, Error> {
        let entries = docker_entries(&self.open("manifest.json")?)?;
        let mut found = Vec::new();
        for entry in entries {
            let tags = entry.tags()?;
            let config = self.open(&entry.config)?;
            // The configuration's name is its digest; a changed one must not pass for the image.
            let stem = entry
                .config
                .rsplit('/')
                .next()
                .unwrap_or_default()
                .trim_end_matches(".json");
            if stem.len() == 64 {
                expect_digest(
                    "image configuration",
                    &format!("sha256:{stem}"),
                    &digest_of(&config),
                )?;
            }
            found.push(Found {
                tags,
                config,
                layers: entry
                    .layers
                    .into_iter()
                    .map(|path| Layer { path, digest: None })
                    .collect(),
                manifest: None,
            });
        }
        Ok(found)
    }
}

/// containerd writes the whole reference, others only what they were told, which may be a bare tag.
fn entry_tags(entry: &Descriptor, stem: &str) -> Result<Vec<String>, Error> {
    if let Some(name) = entry.annotations.get("io.containerd.image.name") {
        return Ok(vec![normalize(name)?]);
    }
    Ok(match entry.annotations.get("org.opencontainers.image.ref.name") {
        Some(name) if name.contains([':', '/']) => vec![normalize(name)?],
        Some(tag) => vec![normalize(&format!("{stem}:{tag}"))?],
        None => Vec::new(),
    })
}

/// An image of docker's manifest.json.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerEntry {
    config: String,
    repo_tags: Option<Vec<String>>,
    #[serde(default)]
    layers: Vec<String>,
}

impl DockerEntry {
    fn tags(&self) -> Result<Vec<String>, Error> {
        self.repo_tags
            .iter()
            .flatten()
            .map(|tag| normalize(tag))
            .collect()
    }
}

fn docker_entries(body: &[u8]) -> Result<Vec<DockerEntry>, Error> {
    serde_json::from_slice(body).map_err(|error| Error::Archive(format!("manifest.json: {error}")))
}

fn blob_path(digest: &str) -> Result<String, Error> {
    if !is_digest(digest) {
        return Err(Error::Archive(format!("{digest:?} is not a sha256 digest")));
    }
    Ok(format!("blobs/sha256/{}", hex_of(digest)))
}

fn relative(path: &Path) -> Result<PathBuf, Error> {
    resolve(Path::new(""), path)
}

/// Joins without leaving the archive.
fn resolve(base: &Path, path: &Path) -> Result<PathBuf, Error> {
    let mut clean = base.to_owned();
    for component in path.components() {
        match component {
            Component::Normal(part) => clean.push(part),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir if clean.pop() => {}
            _ => return Err(Error::Archive(format!("it holds the path {}", path.display()))),
        }
    }
    Ok(clean)
}
