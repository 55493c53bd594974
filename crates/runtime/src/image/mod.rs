//! Images on disk: verified content, unpacked layers, and a list of names. It must not know
//! containers; who needs a layer says so with a lease.
//!
//! ```text
//! <root>/images.json        the list, replaced as a whole
//! <root>/blobs/sha256/…     manifests and configurations as they came
//! <root>/layers/<chain>     a layer on top of its parents, as overlayfs wants it
//! <root>/leases/<holder>    layers that something still uses
//! <root>/tmp                what is not finished; emptied at start
//! <root>/lock               held by whoever changes the list
//! <root>/busy               held, shared, by whoever brings in content that is not in the list yet
//! ```

mod archive;
mod binary;
mod challenge;
mod config;
mod credentials;
mod digests;
mod download;
mod endpoint;
mod engine;
mod hosts;
mod limits;
mod platform;
mod pull;
mod reference;
mod registry;
mod stream;
mod unpack;

pub use binary::{BinaryImage, save_binary_image};
pub use config::ImageConfig;
pub use credentials::Credentials;
pub use engine::EngineSocket;
pub use hosts::DEFAULT_REGISTRY_CONFIG_PATHS;
pub use limits::Limits;
pub use platform::Platform;

pub(crate) use credentials::split_auth;
use digests::{chain_ids, expect_digest, hex_of, is_digest, layer_name};
pub(crate) use digests::{digest_of, hex};
use limits::Budget;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use skiff_fs::remove_tree;
use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
    #[error("broken image archive: {0}")]
    Archive(String),
    #[error("digest mismatch: {what} should be {expected} but is {actual}")]
    Digest {
        what: String,
        expected: String,
        actual: String,
    },
    #[error("invalid image reference {0:?}: {1}")]
    Reference(String, String),
    #[error("failed to pull and unpack image {reference:?}: {message}")]
    Pull {
        reference: String,
        message: String,
        not_found: bool,
        unauthorized: bool,
        /// The next try may go on where this one was cut off.
        interrupted: bool,
    },
    #[error("image {0:?} not found")]
    NotFound(String),
    #[error(
        "no docker or podman answers on this machine ({0}); start one, or name its socket with --host unix://PATH"
    )]
    NoEngine(String),
    #[error("the container engine at {0}: {1}")]
    Engine(PathBuf, String),
    #[error("unsupported: {0}")]
    Unsupported(String),
}

pub(crate) fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let what = what.into();
    move |source| Error::Io { what, source }
}

/// What is going on, for whoever shows it.
#[derive(Debug, Clone)]
pub enum Progress {
    /// What a pull is going to download: layers that are not here yet, and their bytes together.
    Needed {
        layers: usize,
        bytes: u64,
    },
    /// Bytes of a layer that have arrived, out of `total` (0: unknown).
    Downloading {
        digest: String,
        done: u64,
        total: u64,
    },
    Unpacking {
        digest: String,
    },
    Done {
        reference: String,
    },
}

/// Called from any thread; must not block.
pub type ProgressFn = Arc<dyn Fn(Progress) + Send + Sync>;

/// For callers that show nothing.
pub fn silent() -> ProgressFn {
    Arc::new(|_| {})
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Image {
    /// The digest of the configuration: what Kubernetes calls the image id.
    pub id: String,
    pub repo_tags: Vec<String>,
    pub repo_digests: Vec<String>,
    pub size: u64,
    /// Directory names below `layers`, lowest first.
    pub layers: Vec<String>,
    pub config: ImageConfig,
    #[serde(default)]
    pub pinned: bool,
    /// What a binary image was made of, to see that nothing changed.
    #[serde(default)]
    pub source: Option<String>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Index {
    images: Vec<Image>,
}

/// The store. Several processes may use one at the same time: changes are made under a file lock, and
/// every read looks whether the list on disk is still the one in memory.
pub struct ImageStore {
    root: PathBuf,
    limits: Limits,
    /// Folders with the configuration of registries ([`hosts`]).
    registry_configs: Vec<PathBuf>,
    platform: Platform,
    cached: Mutex<(Option<Stamp>, Arc<Index>)>,
    /// Who pulls what right now: a second pull of a name waits and then finds the layers.
    pulls: Mutex<std::collections::HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
}

#[derive(PartialEq, Eq, Clone, Copy)]
struct Stamp(u64, i64, i64);

impl ImageStore {
    pub fn open(root: &Path) -> Result<ImageStore, Error> {
        for directory in ["blobs/sha256", "layers", "leases", "tmp"] {
            let path = root.join(directory);
            std::fs::create_dir_all(&path).map_err(io_error(format!("make {}", path.display())))?;
        }
        let root = root
            .canonicalize()
            .map_err(io_error(format!("open {}", root.display())))?;
        let store = ImageStore {
            root,
            limits: Limits::default(),
            registry_configs: DEFAULT_REGISTRY_CONFIG_PATHS.map(PathBuf::from).into(),
            platform: Platform::of_this_machine(),
            cached: Mutex::new((None, Arc::default())),
            pulls: Mutex::default(),
        };
        // Leftovers of a process that was killed, unless another brings in an image right now.
        if let Ok(Some(_idle)) = store.idle() {
            for entry in std::fs::read_dir(store.root.join("tmp"))
                .into_iter()
                .flatten()
                .flatten()
            {
                let _ = remove_tree(&entry.path());
            }
        }
        Ok(store)
    }

    /// The same store with other limits for what comes into it.
    pub fn with_limits(mut self, limits: Limits) -> ImageStore {
        self.limits = limits;
        self
    }

    /// The same store with other folders of `hosts.toml` files.
    pub fn with_registry_configs(mut self, paths: Vec<PathBuf>) -> ImageStore {
        self.registry_configs = paths;
        self
    }

    /// The same store, taking images of another platform than this machine's.
    pub fn with_platform(mut self, platform: Platform) -> ImageStore {
        self.platform = platform;
        self
    }

    /// For one image or one archive.
    fn budget(&self) -> Result<Budget, Error> {
        Budget::new(&self.limits, &self.root).map_err(|error| Error::Archive(error.to_string()))
    }

    pub fn layers_directory(&self) -> PathBuf {
        self.root.join("layers")
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn list(&self) -> Result<Vec<Image>, Error> {
        Ok(self.index()?.images.clone())
    }

    /// By id (whole or a prefix of it), tag or digest.
    pub fn find(&self, reference: &str) -> Result<Option<Image>, Error> {
        let index = self.index()?;
        Ok(find_in(&index.images, reference).map(|at| index.images[at].clone()))
    }

    /// Takes names off, or the whole image when `reference` is its id or its last name. Content that
    /// nothing else uses goes too. Removing what is not there is fine.
    pub fn remove(&self, reference: &str) -> Result<(), Error> {
        self.change(|images| {
            let Some(at) = find_in(images, reference) else {
                return;
            };
            let image = &mut images[at];
            let normal = normalize(reference).ok();
            let before = image.repo_tags.len() + image.repo_digests.len();
            image.repo_tags.retain(|tag| Some(tag) != normal.as_ref());
            image
                .repo_digests
                .retain(|digest| Some(digest) != normal.as_ref());
            let removed_a_name = image.repo_tags.len() + image.repo_digests.len() < before;
            if !removed_a_name || image.repo_tags.is_empty() {
                images.remove(at);
            }
        })?;
        self.collect_garbage()
    }

    /// Holds layers for `holder` (a container's id) until `release`.
    pub fn lease(&self, holder: &str, layers: &[String]) -> Result<(), Error> {
        let _lock = self.lock()?;
        for layer in layers {
            if !self.root.join("layers").join(layer).exists() {
                return Err(Error::NotFound(format!("layer {layer}")));
            }
        }
        let path = self.root.join("leases").join(holder);
        std::fs::write(&path, layers.join("\n")).map_err(io_error(format!("write {}", path.display())))
    }

    /// Ends the leases of holders that are no more.
    pub fn retain_leases(&self, alive: impl Fn(&str) -> bool) {
        for lease in std::fs::read_dir(self.root.join("leases"))
            .into_iter()
            .flatten()
            .flatten()
        {
            if !alive(&lease.file_name().to_string_lossy()) {
                let _ = std::fs::remove_file(lease.path());
            }
        }
    }

    pub fn release(&self, holder: &str) {
        let _ = std::fs::remove_file(self.root.join("leases").join(holder));
    }

    /// Bytes and inodes of images and layers.
    pub fn usage(&self) -> (u64, u64) {
        let images = self
            .index()
            .map(|index| index.images.iter().map(|image| image.size).sum())
            .unwrap_or(0);
        let layers = std::fs::read_dir(self.root.join("layers"))
            .map(|entries| entries.count())
            .unwrap_or(0);
        (images, layers as u64)
    }

    fn index(&self) -> Result<Arc<Index>, Error> {
        use std::os::unix::fs::MetadataExt;
        let path = self.root.join("images.json");
        let stamp = match std::fs::metadata(&path) {
            Ok(metadata) => Some(Stamp(metadata.ino(), metadata.mtime(), metadata.mtime_nsec())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(io_error(format!("read {}", path.display()))(error)),
        };
        let mut cached = self.cached.lock();
        if cached.0 != stamp {
            let index =
                crate::disk::read_json(&path).map_err(io_error(format!("read {}", path.display())))?;
            *cached = (stamp, Arc::new(index.unwrap_or_default()));
        }
        Ok(cached.1.clone())
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Image>)) -> Result<(), Error> {
        let _lock = self.lock()?;
        let mut images = self.index()?.images.clone();
        change(&mut images);
        let path = self.root.join("images.json");
        let body = serde_json::to_vec(&Index { images }).map_err(io::Error::other);
        body.and_then(|body| crate::disk::write_bytes(&path, &body, true))
            .map_err(io_error(format!("write {}", path.display())))
    }

    /// For short changes only.
    fn lock(&self) -> Result<std::fs::File, Error> {
        let file = self.lock_file("lock")?;
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)
            .map_err(|error| io_error("lock the image store")(error.into()))?;
        Ok(file)
    }

    /// While this is held, nothing that is not in the list is taken for garbage.
    fn busy(&self) -> Result<std::fs::File, Error> {
        let file = self.lock_file("busy")?;
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockShared)
            .map_err(|error| io_error("lock the image store")(error.into()))?;
        Ok(file)
    }

    /// `None` while somebody is busy.
    fn idle(&self) -> Result<Option<std::fs::File>, Error> {
        let file = self.lock_file("busy")?;
        Ok(
            rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)
                .ok()
                .map(|()| file),
        )
    }

    fn lock_file(&self, name: &str) -> Result<std::fs::File, Error> {
        let path = self.root.join(name);
        std::fs::File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(io_error(format!("open {}", path.display())))
    }

    /// Adds an image, or gives its names to the one that is there. A tag moves from its old image; an
    /// image that loses its last name stays until it is removed by id, as with other runtimes.
    fn add(&self, new: Image) -> Result<(), Error> {
        // The list must not name layers that a power cut would lose.
        let layers = std::fs::File::open(self.layers_directory()).map_err(io_error("open the layers"))?;
        rustix::fs::syncfs(&layers).map_err(|error| io_error("write out the layers")(error.into()))?;
        self.change(|images| {
            for other in images.iter_mut() {
                other
                    .repo_tags
                    .retain(|tag| other.id == new.id || !new.repo_tags.contains(tag));
            }
            if let Some(existing) = images.iter_mut().find(|image| image.id == new.id) {
                for tag in new.repo_tags {
                    if !existing.repo_tags.contains(&tag) {
                        existing.repo_tags.push(tag);
                    }
                }
                for digest in new.repo_digests {
                    if !existing.repo_digests.contains(&digest) {
                        existing.repo_digests.push(digest);
                    }
                }
                existing.source = new.source.or(existing.source.take());
                existing.layers = new.layers;
                existing.pinned |= new.pinned;
            } else {
                images.push(new);
            }
        })
    }

    /// Drops layers and blobs that no image names and no lease holds; the next one's work while
    /// somebody is busy.
    pub fn collect_garbage(&self) -> Result<(), Error> {
        let Some(_idle) = self.idle()? else { return Ok(()) };
        let lock = self.lock()?;
        let index = self.index()?;
        let mut layers: HashSet<String> = index
            .images
            .iter()
            .flat_map(|image| image.layers.clone())
            .collect();
        for lease in std::fs::read_dir(self.root.join("leases"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let held = std::fs::read_to_string(lease.path()).unwrap_or_default();
            layers.extend(held.lines().map(str::to_owned));
        }
        let mut trash = Vec::new();
        for entry in std::fs::read_dir(self.root.join("layers"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = entry.file_name().to_string_lossy().into_owned();
            if !layers.contains(&name) {
                // Renamed first, so that a half-removed layer never looks like one.
                let target = self.temporary("trash");
                if std::fs::rename(entry.path(), &target).is_ok() {
                    trash.push(target);
                }
            }
        }
        let blobs: HashSet<String> = index
            .images
            .iter()
            .flat_map(|image| {
                let digests = image
                    .repo_digests
                    .iter()
                    .filter_map(|digest| digest.split_once('@'))
                    .map(|(_, d)| d);
                digests
                    .chain([image.id.as_str()])
                    .map(|digest| hex_of(digest).to_owned())
                    .collect::<Vec<_>>()
            })
            .collect();
        for entry in std::fs::read_dir(self.root.join("blobs/sha256"))
            .into_iter()
            .flatten()
            .flatten()
        {
            if !blobs.contains(entry.file_name().to_string_lossy().as_ref()) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
        drop(lock);
        for directory in trash {
            let _ = remove_tree(&directory);
        }
        Ok(())
    }

    fn temporary(&self, what: &str) -> PathBuf {
        self.root
            .join("tmp")
            .join(format!("{what}-{:016x}", rand::random::<u64>()))
    }

    fn write_blob(&self, digest: &str, body: &[u8]) -> Result<(), Error> {
        let path = self.root.join("blobs/sha256").join(hex_of(digest));
        crate::disk::write_bytes(&path, body, true).map_err(io_error(format!("write {}", path.display())))
    }

    /// Unpacks one layer from a file with its compressed or plain tar. `chain` names it together with
    /// the layers below. Nothing is left behind on failure. `budget` is that of the whole image.
    fn unpack_layer(
        &self,
        file: &Path,
        blob: Option<&str>,
        diff_id: &str,
        chain: &str,
        budget: &mut Budget,
    ) -> Result<(), Error> {
        let target = self.root.join("layers").join(layer_name(chain));
        if target.exists() {
            return Ok(());
        }
        let temporary = self.temporary("layer");
        let result = (|| {
            unpack::make_layer_directory(&temporary).map_err(io_error("make a layer"))?;
            let mut stream =
                stream::Verified::open(file, self.limits.unpacked_bytes).map_err(io_error("open a layer"))?;
            unpack::unpack(&mut stream, &temporary, budget)
                .map_err(|error| Error::Archive(format!("layer {diff_id}: {error}")))?;
            let (raw, plain) = stream
                .finish()
                .map_err(|error| Error::Archive(format!("layer {diff_id}: {error}")))?;
            if let Some(blob) = blob {
                expect_digest("layer", blob, &raw)?;
            }
            expect_digest("unpacked layer", diff_id, &plain)?;
            match std::fs::rename(&temporary, &target) {
                // Another pull of the same layer was faster.
                Err(error) if !target.exists() => Err(io_error("keep a layer")(error)),
                _ => Ok(()),
            }
        })();
        if temporary.exists() {
            let _ = remove_tree(&temporary);
        }
        result
    }
}

fn find_in(images: &[Image], reference: &str) -> Option<usize> {
    let by_id = |id: &str| images.iter().position(|image| image.id == id);
    if let Some(at) = by_id(reference).or_else(|| by_id(&format!("sha256:{reference}"))) {
        return Some(at);
    }
    if let Ok(normal) = normalize(reference) {
        let named = |image: &Image| image.repo_tags.contains(&normal) || image.repo_digests.contains(&normal);
        if let Some(at) = images.iter().position(named) {
            return Some(at);
        }
    }
    let prefix = hex_of(reference);
    if prefix.len() >= 4 && prefix.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        let mut matches = images
            .iter()
            .enumerate()
            .filter(|(_, image)| hex_of(&image.id).starts_with(prefix));
        if let (Some((at, _)), None) = (matches.next(), matches.next()) {
            return Some(at);
        }
    }
    None
}

/// `busybox` is `docker.io/library/busybox:latest`; a reference with tag and digest is its digest.
pub fn normalize(reference: &str) -> Result<String, Error> {
    let parsed = parse_reference(reference)?;
    let name = format!("{}/{}", parsed.registry(), parsed.repository());
    Ok(match (parsed.digest(), parsed.tag()) {
        (Some(digest), _) => format!("{name}@{digest}"),
        (None, Some(tag)) => format!("{name}:{tag}"),
        (None, None) => format!("{name}:latest"),
    })
}

fn parse_reference(reference: &str) -> Result<reference::Reference, Error> {
    reference::parse(reference).map_err(|error| Error::Reference(reference.to_owned(), error.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references() {
        let check = |reference: &str, expected: Option<&str>| {
            assert_eq!(normalize(reference).ok().as_deref(), expected, "{reference}");
        };
        check("busybox", Some("docker.io/library/busybox:latest"));
        check("me/web:1", Some("docker.io/me/web:1"));
        check("localhost:5000/a:b", Some("localhost:5000/a:b"));
        check("registry.k8s.io/pause:3.10", Some("registry.k8s.io/pause:3.10"));
        check("UPPER", None);
        check("", None);
        let digest = format!("sha256:{}", "a".repeat(64));
        check(
            &format!("busybox:1@{digest}"),
            Some(&format!("docker.io/library/busybox@{digest}")),
        );
    }

    #[test]
    fn finds() {
        let image = |id: &str, tag: &str| Image {
            id: format!("sha256:{id}"),
            repo_tags: vec![tag.into()],
            repo_digests: Vec::new(),
            size: 0,
            layers: Vec::new(),
            config: ImageConfig::default(),
            pinned: false,
            source: None,
        };
        let images = [
            image("abcd11", "docker.io/library/a:1"),
            image("abcd22", "docker.io/library/b:latest"),
        ];
        let check = |reference: &str, expected: Option<usize>| {
            assert_eq!(find_in(&images, reference), expected, "{reference}");
        };
        check("sha256:abcd22", Some(1));
        check("abcd22", Some(1));
        check("abcd2", Some(1));
        check("abcd", None);
        check("a:1", Some(0));
        check("b", Some(1));
        check("c", None);
    }
}
