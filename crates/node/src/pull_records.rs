//! Who may use an image that this node has pulled. A pod that comes later must have credentials that the image was once
//! pulled with, or it is pulled again with its own: else a private image could be had by its name alone. An image that
//! was not pulled by this node (imported, say) is everybody's.
//!
//! A pull is noted before it begins. If the process ends in the middle, or the pull is cancelled and the image is there all
//! the same, the image counts as pulled with credentials that nobody knows.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Of more credentials than this the oldest are forgotten.
const MOST_CREDENTIALS: usize = 100;

/// How an image may be had from its repository.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Access {
    /// It was pulled without credentials.
    #[serde(default)]
    by_all: bool,
    /// Hashes of credentials that it was pulled with, the newest last.
    #[serde(default)]
    by: Vec<String>,
}

/// What is known of one image, on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    image: String,
    /// By repository: the same image may be private in one and open in another.
    access: BTreeMap<String, Access>,
}

/// Which images that are on the node a pod must show credentials for (`imagePullCredentialsVerificationPolicy`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum VerificationPolicy {
    Never,
    /// Those that this node has pulled.
    #[default]
    Pulled,
    /// All but those of these repositories that were there before; one may end in `/*`.
    AllBut(Vec<String>),
    All,
}

impl VerificationPolicy {
    /// Whether an image that this node has not pulled is everybody's.
    fn trusts_preloaded(&self, repository: &str) -> bool {
        match self {
            VerificationPolicy::Never | VerificationPolicy::Pulled => true,
            VerificationPolicy::All => false,
            VerificationPolicy::AllBut(list) => list.iter().any(|pattern| match pattern.strip_suffix("/*") {
                Some(folder) => repository
                    .strip_prefix(folder)
                    .is_some_and(|rest| rest.starts_with('/')),
                None => pattern == repository,
            }),
        }
    }

    /// Whether a pod with these credentials may use the image.
    pub fn allows(
        &self,
        records: &PullRecords,
        (name, repository, image): (&str, &str, &str),
        credentials: &HashSet<String>,
    ) -> bool {
        if *self == VerificationPolicy::Never {
            return true;
        }
        if !records.knows(name, image) && !self.trusts_preloaded(repository) {
            return false;
        }
        records.allows(name, repository, image, credentials)
    }
}

pub struct PullRecords {
    folder: PathBuf,
    /// Pulls under way, by the name of the image. Held while files change.
    pulling: Mutex<HashMap<String, usize>>,
}

fn hash(text: &str) -> String {
    use std::fmt::Write;
    let digest = Sha256::digest(text.as_bytes());
    digest.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// What is kept of credentials: enough to know them again.
pub fn credential_hash(username: &str, password: &str) -> String {
    hash(&format!("{}:{username}:{password}", username.len()))
}

impl PullRecords {
    pub fn new(folder: PathBuf) -> Self {
        PullRecords {
            folder,
            pulling: Mutex::default(),
        }
    }

    fn intent(&self, name: &str) -> PathBuf {
        self.folder.join("pulling").join(hash(name))
    }

    fn pulled(&self, image: &str) -> PathBuf {
        self.folder.join("pulled").join(hash(image))
    }

    fn read(&self, image: &str) -> io::Result<Option<Record>> {
        match std::fs::read(self.pulled(image)) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(io::Error::from),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether somebody with these credentials may use the image as it is on the node. What cannot be read is no leave.
    pub fn allows(&self, name: &str, repository: &str, image: &str, credentials: &HashSet<String>) -> bool {
        let pulling = self.pulling.lock();
        match self.read(image) {
            Ok(Some(record)) => record.access.get(repository).is_some_and(|access| {
                access.by_all || access.by.iter().any(|known| credentials.contains(known))
            }),
            // Not pulled by this node, unless a pull of it is under way or was cut off.
            Ok(None) => !pulling.contains_key(name) && !self.intent(name).exists(),
            Err(error) => {
                tracing::warn!(image, %error, "cannot read who may use an image");
                false
            }
        }
    }

    /// Whether this node has pulled the image, or may have.
    pub fn knows(&self, name: &str, image: &str) -> bool {
        let pulling = self.pulling.lock();
        !matches!(self.read(image), Ok(None)) || pulling.contains_key(name) || self.intent(name).exists()
    }

    /// Notes that a pull begins. It must not begin without.
    pub fn begin(&self, name: &str) -> io::Result<()> {
        let mut pulling = self.pulling.lock();
        let count = pulling.entry(name.to_owned()).or_default();
        if *count == 0 {
            let intent = self.intent(name);
            write(&intent, name.as_bytes())?;
        }
        *count += 1;
        Ok(())
    }

    /// Notes that a pull has ended. `pulled` is the image and the hash of the credentials, `None` without any.
    pub fn end(&self, name: &str, repository: &str, pulled: Option<(&str, Option<&str>)>) -> io::Result<()> {
        let mut pulling = self.pulling.lock();
        let left = count_down(&mut pulling, name);
        if let Some((image, credentials)) = pulled {
            // A record that cannot be read is written anew: it gives nobody leave.
            let mut record = self.read(image).ok().flatten().unwrap_or_default();
            image.clone_into(&mut record.image);
            let access = record.access.entry(repository.to_owned()).or_default();
            match credentials {
                None => access.by_all = true,
                Some(hash) => {
                    access.by.retain(|known| known != hash);
                    access.by.push(hash.to_owned());
                    let excess = access.by.len().saturating_sub(MOST_CREDENTIALS);
                    access.by.drain(..excess);
                }
            }
            write(&self.pulled(image), &serde_json::to_vec(&record)?)?;
        }
        if left == 0 {
            match std::fs::remove_file(self.intent(name)) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// A pull was cancelled and may have brought the image: nobody may use that until a pull succeeds.
    pub fn abandon(&self, name: &str) {
        count_down(&mut self.pulling.lock(), name);
    }

    /// Forgets images that are gone.
    pub fn keep_only(&self, images: &HashSet<String>) {
        let pulling = self.pulling.lock();
        if !pulling.is_empty() {
            return;
        }
        let known: HashSet<PathBuf> = images.iter().map(|image| self.pulled(image)).collect();
        for entry in std::fs::read_dir(self.folder.join("pulled"))
            .into_iter()
            .flatten()
            .flatten()
        {
            if !known.contains(&entry.path()) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

/// One pull of this name less: how many are left.
fn count_down(pulling: &mut HashMap<String, usize>, name: &str) -> usize {
    let left = pulling.get(name).map_or(0, |count| count.saturating_sub(1));
    match left {
        0 => pulling.remove(name),
        _ => pulling.insert(name.to_owned(), left),
    };
    left
}

fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        skiff_fs::create_folders_durably(folder, 0o700)?;
    }
    skiff_fs::write_durably(path, content, 0o600)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "registry.example.com/team/app:v1";
    const REPOSITORY: &str = "registry.example.com/team/app";

    fn of(user: &str) -> HashSet<String> {
        HashSet::from([credential_hash(user, "password")])
    }

    #[test]
    fn a_private_image_is_for_those_who_could_pull_it() {
        let dir = tempfile::tempdir().unwrap();
        let records = PullRecords::new(dir.path().join("image_manager"));
        let allows = |credentials: &HashSet<String>| records.allows(NAME, REPOSITORY, "id", credentials);
        assert!(allows(&HashSet::new()), "it was here before");

        records.begin(NAME).unwrap();
        assert!(!allows(&HashSet::new()), "it is being pulled");
        let ann = credential_hash("ann", "password");
        records.end(NAME, REPOSITORY, Some(("id", Some(&ann)))).unwrap();
        assert!(allows(&of("ann")));
        assert!(!allows(&of("bob")) && !allows(&HashSet::new()));
        let again = PullRecords::new(dir.path().join("image_manager"));
        assert!(again.allows(NAME, REPOSITORY, "id", &of("ann")), "it is on disk");
        assert!(!again.allows("elsewhere/app", "elsewhere/app", "id", &of("ann")));

        // Without credentials it is open in that repository, and in no other.
        records.begin(NAME).unwrap();
        records.end(NAME, REPOSITORY, Some(("id", None))).unwrap();
        assert!(allows(&HashSet::new()));
        assert!(!records.allows("elsewhere/app", "elsewhere/app", "id", &HashSet::new()));

        records.keep_only(&HashSet::from(["id".to_owned()]));
        assert!(!records.allows("elsewhere/app", "elsewhere/app", "id", &HashSet::new()));
        records.keep_only(&HashSet::new());
        assert!(records.read("id").unwrap().is_none());
    }

    #[test]
    fn a_pull_that_was_cut_off_gives_nobody_leave() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("image_manager");
        PullRecords::new(folder.clone()).begin(NAME).unwrap();
        let records = PullRecords::new(folder);
        assert!(!records.allows(NAME, REPOSITORY, "id", &of("ann")));
        // One that failed is none.
        records.begin(NAME).unwrap();
        records.begin(NAME).unwrap();
        records.end(NAME, REPOSITORY, None).unwrap();
        assert!(
            !records.allows(NAME, REPOSITORY, "id", &of("ann")),
            "another goes on"
        );
        records.end(NAME, REPOSITORY, None).unwrap();
        assert!(records.allows(NAME, REPOSITORY, "id", &of("ann")));
        // One that was cancelled may have brought the image, until the next one is answered.
        records.begin(NAME).unwrap();
        records.abandon(NAME);
        assert!(!records.allows(NAME, REPOSITORY, "id", &of("ann")), "cancelled");
        assert!(records.pulling.lock().is_empty());
        records.begin(NAME).unwrap();
        records.end(NAME, REPOSITORY, None).unwrap();
        std::fs::create_dir_all(dir.path().join("image_manager/pulled")).unwrap();
        std::fs::write(records.pulled("id"), "{").unwrap();
        assert!(!records.allows(NAME, REPOSITORY, "id", &of("ann")), "rot");
        assert_ne!(credential_hash("a:b", "c"), credential_hash("a", "b:c"));
    }

    #[test]
    fn policies() {
        let dir = tempfile::tempdir().unwrap();
        let records = PullRecords::new(dir.path().to_owned());
        records.begin("r.io/a:1").unwrap();
        let hash = credential_hash("u", "p");
        records
            .end("r.io/a:1", "r.io/a", Some(("pulled", Some(&hash))))
            .unwrap();
        let own = HashSet::from([hash]);
        let listed = VerificationPolicy::AllBut(vec!["r.io/team/*".to_owned(), "r.io/x".to_owned()]);
        let check =
            |policy: &VerificationPolicy, repository: &str, image: &str, is_own: bool, expected: bool| {
                let credentials = if is_own { own.clone() } else { HashSet::new() };
                let name = format!("{repository}:1");
                let allowed = policy.allows(&records, (&name, repository, image), &credentials);
                assert_eq!(allowed, expected, "{policy:?} {repository} {image} {is_own}");
            };
        for policy in [
            VerificationPolicy::Pulled,
            VerificationPolicy::All,
            listed.clone(),
        ] {
            check(&policy, "r.io/a", "pulled", true, true);
            check(&policy, "r.io/a", "pulled", false, false);
        }
        check(&VerificationPolicy::Never, "r.io/a", "pulled", false, true);
        check(&VerificationPolicy::Pulled, "r.io/b", "loaded", false, true);
        check(&VerificationPolicy::All, "r.io/b", "loaded", true, false);
        check(&listed, "r.io/b", "loaded", false, false);
        check(&listed, "r.io/x", "loaded", false, true);
        check(&listed, "r.io/team/b", "loaded", false, true);
        check(&listed, "r.io/teams", "loaded", false, false);
    }
}
