//! Which ids of the machine the pods with `hostUsers: false` have: a range of 65536 each, noted in the pod's directory
//! before the runtime hears of it, and free again when that directory is gone.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;

use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use skiff_cri::v1;

use crate::kubelet::Kubelet;
use crate::pods;
use crate::sandbox_config::NO_USER_NAMESPACES;

/// Upstream's `userNamespaces.idsPerPod`.
const IDS_PER_POD: u32 = 65536;
/// COMPAT: the user whose subordinate ids are the pods', where the machine has one.
const USER: &str = "kubelet";
/// COMPAT: upstream's name and format, so that its kubelet and this one find each other's.
const FILE: &str = "userns";

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Mappings {
    #[serde(rename = "uidMappings")]
    uids: Vec<IdMapping>,
    #[serde(rename = "gidMappings")]
    gids: Vec<IdMapping>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct IdMapping {
    host_id: u32,
    container_id: u32,
    length: u32,
}

impl Mappings {
    fn new(first: u32) -> Mappings {
        let mapping = IdMapping {
            host_id: first,
            container_id: 0,
            length: IDS_PER_POD,
        };
        Mappings {
            uids: vec![mapping.clone()],
            gids: vec![mapping],
        }
    }

    /// The first id, if this is something that `new` made.
    fn first(&self) -> Result<u32, String> {
        match (self.uids.as_slice(), self.gids.as_slice()) {
            ([uid], [gid]) if uid == gid => match (uid.container_id, uid.length) {
                (0, IDS_PER_POD) if uid.host_id.is_multiple_of(IDS_PER_POD) => Ok(uid.host_id),
                (0, length) => Err(format!("wrong user namespace length {length}")),
                _ => Err("invalid user namespace configuration: UID 0 must be mapped".into()),
            },
            ([_], [_]) => {
                Err("invalid user namespace configuration: GID and UID mapping should be identical".into())
            }
            _ => Err("invalid user namespace configuration: no more than one mapping allowed.".into()),
        }
    }

    fn to_cri(&self) -> v1::UserNamespace {
        let list = |mappings: &[IdMapping]| {
            let one = |mapping: &IdMapping| v1::IdMapping {
                host_id: mapping.host_id,
                container_id: mapping.container_id,
                length: mapping.length,
            };
            mappings.iter().map(one).collect()
        };
        v1::UserNamespace {
            mode: v1::NamespaceMode::Pod as i32,
            uids: list(&self.uids),
            gids: list(&self.gids),
        }
    }
}

/// For a pod that shares the machine's users.
pub fn of_host() -> v1::UserNamespace {
    v1::UserNamespace {
        mode: v1::NamespaceMode::Node as i32,
        ..Default::default()
    }
}

/// The ids that may be given away, in ranges of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slots {
    /// The number of the first range: its first id is this times the ids of a pod.
    first: u32,
    count: u32,
}

impl Slots {
    /// All ids but those that the machine's own users have.
    const DEFAULT: Slots = Slots {
        first: 1,
        count: u32::MAX / IDS_PER_POD,
    };

    fn new(first_id: u32, length: u32, max_pods: u32) -> Result<Slots, String> {
        if !first_id.is_multiple_of(IDS_PER_POD) {
            return Err(format!(
                "kubelet user assigned ID {first_id} is not a multiple of {IDS_PER_POD}"
            ));
        }
        if first_id < IDS_PER_POD {
            return Err(format!(
                "kubelet user assigned ID {first_id} must be greater or equal to {IDS_PER_POD}"
            ));
        }
        if !length.is_multiple_of(IDS_PER_POD) {
            return Err(format!(
                "kubelet user assigned IDs length {length} is not a multiple of {IDS_PER_POD}"
            ));
        }
        if length / IDS_PER_POD < max_pods {
            return Err(format!(
                "kubelet user assigned IDs are not enough to support {max_pods} pods"
            ));
        }
        Ok(Slots {
            first: first_id / IDS_PER_POD,
            count: length / IDS_PER_POD,
        })
    }

    fn contain(self, first_id: u32) -> bool {
        let slot = first_id / IDS_PER_POD;
        slot >= self.first && slot - self.first < self.count
    }
}

/// What the administrator gave the pods by /etc/subuid and /etc/subgid, or all that is free by rule.
fn configured(max_pods: u32) -> Result<Slots, String> {
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    if !passwd.lines().any(|line| line.split(':').next() == Some(USER)) {
        return Ok(Slots::DEFAULT);
    }
    let ask = |arguments: &[&str], what: &str| match Command::new("getsubids").args(arguments).output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Ok(output) if output.status.success() => {
            Ok(Some(String::from_utf8_lossy(&output.stdout).into_owned()))
        }
        Ok(output) => Err(format!(
            "error retrieving additional {what} for user {USER:?}: {}",
            output.status
        )),
        Err(error) => Err(format!(
            "error retrieving additional {what} for user {USER:?}: {error}"
        )),
    };
    let Some(uids) = ask(&[USER], "uids")? else {
        return Ok(Slots::DEFAULT);
    };
    if ask(&["-g", USER], "gids")?.as_ref() != Some(&uids) {
        return Err(format!("mismatched subuids and subgids for user {USER:?}"));
    }
    let (first, length) = parse_getsubids(&uids)?;
    Slots::new(first, length, max_pods)
}

/// `0: kubelet 65536 7208960`
fn parse_getsubids(text: &str) -> Result<(u32, u32), String> {
    let [line] = text.trim_matches('\n').split('\n').collect::<Vec<_>>()[..] else {
        return Err(format!(
            "error parsing line {text:?}: it must contain only one line"
        ));
    };
    let words: Vec<&str> = line.split_whitespace().collect();
    let [_, _, first, length] = words[..] else {
        return Err(format!("invalid line {line:?}"));
    };
    let number = |word: &str| {
        word.parse()
            .map_err(|error| format!("error parsing line {text:?}: {error}"))
    };
    Ok((number(first)?, number(length)?))
}

pub struct UserNamespaces {
    slots: Result<Slots, String>,
    /// The first id of a pod, by its uid: of all pods that have one on disk. Held while one is noted there. A leaf lock.
    taken: Mutex<HashMap<String, u32>>,
}

impl UserNamespaces {
    /// Takes over what is noted on disk. `pods` are the pods' uids and directories.
    pub fn restore(max_pods: u32, pods: impl Iterator<Item = (String, PathBuf)>) -> Self {
        let taken = pods
            .filter_map(|(uid, directory)| match load(&directory) {
                Ok(mappings) => Some((uid, mappings?.first().ok()?)),
                Err(error) => {
                    tracing::warn!(uid, error, "cannot read which ids a pod has");
                    None
                }
            })
            .collect();
        UserNamespaces {
            slots: configured(max_pods),
            taken: Mutex::new(taken),
        }
    }

    /// The ids of a pod that has some.
    pub fn existing(&self, uid: &str, pod_dir: &Path) -> Result<Option<v1::UserNamespace>, String> {
        let Some(mappings) = load(pod_dir).map_err(|error| format!("user namespace: {error}"))? else {
            return Ok(None);
        };
        let first = mappings
            .first()
            .map_err(|error| format!("user namespace: {error}"))?;
        let mut taken = self.taken.lock();
        if taken
            .iter()
            .any(|(other, theirs)| other != uid && *theirs == first)
        {
            return Err(format!(
                "user namespace: range picked for pod {uid:?} already taken"
            ));
        }
        taken.insert(uid.to_owned(), first);
        Ok(Some(mappings.to_cri()))
    }

    /// Gives the pod ids that no other has.
    pub fn create(&self, uid: &str, pod_dir: &Path) -> Result<v1::UserNamespace, String> {
        let slots = self
            .slots
            .clone()
            .map_err(|error| format!("create user namespace: kubelet mappings: {error}"))?;
        let mut taken = self.taken.lock();
        let used: BTreeSet<u32> = taken.values().copied().filter(|id| slots.contain(*id)).collect();
        let free = (slots.first..slots.first + slots.count)
            .map(|slot| slot * IDS_PER_POD)
            .find(|first| !used.contains(first));
        let Some(first) = free else {
            return Err(
                "create user namespace: could not find an empty slot to allocate a user namespace".into(),
            );
        };
        let mappings = Mappings::new(first);
        save(&mappings, pod_dir).map_err(|error| format!("create user namespace: {error}"))?;
        taken.insert(uid.to_owned(), first);
        Ok(mappings.to_cri())
    }

    /// The pod's directory is gone, and so is all that ran with its ids.
    pub fn release(&self, uid: &str) {
        self.taken.lock().remove(uid);
    }
}

fn load(pod_dir: &Path) -> Result<Option<Mappings>, String> {
    match std::fs::read(pod_dir.join(FILE)) {
        Ok(bytes) if bytes.is_empty() => Ok(None),
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| format!("invalid user namespace mappings file: {error}")),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

fn save(mappings: &Mappings, pod_dir: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(pod_dir)?;
    let bytes = serde_json::to_vec(mappings).map_err(std::io::Error::other)?;
    skiff_fs::write_atomically(&pod_dir.join(FILE), &bytes, 0o600)
}

impl Kubelet {
    /// What the runtime is told about the pod's users. The error is upstream's sentence.
    pub async fn user_namespace(&self, pod: &Pod) -> Result<v1::UserNamespace, String> {
        if pod.spec.as_ref().and_then(|s| s.host_users) != Some(false) {
            return Ok(of_host());
        }
        let uid = pods::uid(pod);
        let pod_dir = self.volumes.pod_dir(uid);
        if let Some(existing) = self.user_namespaces.existing(uid, &pod_dir)? {
            return Ok(existing);
        }
        let handler = self.runtime_handler(pod).await?;
        let known = self.runtime_status.lock().clone();
        let status = match known {
            Some(status) => status,
            None => self
                .runtime
                .status(self.config.runtime_request_timeout)
                .await
                .map_err(|s| s.message().to_owned())?,
        };
        supported(&status.runtime_handlers, &handler)?;
        self.user_namespaces.create(uid, &pod_dir)
    }
}

/// Pod Security allows such a pod more because of the field: without the namespace it must not run.
fn supported(handlers: &[v1::RuntimeHandler], name: &str) -> Result<(), String> {
    let message = match name {
        "" => NO_USER_NAMESPACES.to_owned(),
        name => format!(
            "can't set `spec.hostUsers: false`, RuntimeClass handler {name:?} does not support user namespaces"
        ),
    };
    if handlers.is_empty() {
        return Err(message);
    }
    match handlers.iter().find(|handler| handler.name == name) {
        Some(handler) if handler.features.as_ref().is_some_and(|f| f.user_namespaces) => Ok(()),
        Some(_) => Err(message),
        None => Err(format!("{message}: the handler {name:?} is not known")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(root: &Path, max_pods: u32) -> UserNamespaces {
        let pods = std::fs::read_dir(root).unwrap().flatten();
        UserNamespaces::restore(
            max_pods,
            pods.map(|entry| (entry.file_name().into_string().unwrap(), entry.path())),
        )
    }

    #[test]
    fn ranges_are_kept_over_a_restart_and_freed_at_the_end() {
        let root = tempfile::tempdir().unwrap();
        let dir = |uid: &str| root.path().join(uid);
        let mut all = ids(root.path(), 110);
        all.slots = Slots::new(65536, 3 * 65536, 3);
        let first = |namespace: v1::UserNamespace| {
            assert_eq!(namespace.uids, namespace.gids);
            assert_eq!(
                (namespace.uids[0].container_id, namespace.uids[0].length),
                (0, 65536)
            );
            namespace.uids[0].host_id
        };
        assert_eq!(first(all.create("a", &dir("a")).unwrap()), 65536);
        assert_eq!(first(all.create("b", &dir("b")).unwrap()), 131_072);
        let text = std::fs::read_to_string(dir("a").join(FILE)).unwrap();
        assert_eq!(
            text,
            r#"{"uidMappings":[{"hostId":65536,"containerId":0,"length":65536}],"gidMappings":[{"hostId":65536,"containerId":0,"length":65536}]}"#
        );
        let mut all = ids(root.path(), 110);
        all.slots = Slots::new(65536, 3 * 65536, 3);
        assert_eq!(first(all.existing("b", &dir("b")).unwrap().unwrap()), 131_072);
        assert_eq!(all.existing("c", &dir("c")), Ok(None));
        assert_eq!(first(all.create("c", &dir("c")).unwrap()), 196_608);
        let full = all.create("d", &dir("d")).unwrap_err();
        assert!(full.contains("could not find an empty slot"), "{full}");
        std::fs::remove_dir_all(dir("a")).unwrap();
        all.release("a");
        assert_eq!(first(all.create("d", &dir("d")).unwrap()), 65536);
    }

    #[test]
    fn what_is_on_disk_is_not_trusted() {
        let root = tempfile::tempdir().unwrap();
        let dir = |uid: &str| root.path().join(uid);
        let all = ids(root.path(), 110);
        all.create("a", &dir("a")).unwrap();
        for (uid, text) in [
            ("no-json", "{"),
            (
                "not-zero",
                r#"{"uidMappings":[{"hostId":65536,"containerId":5,"length":65536}],"gidMappings":[{"hostId":65536,"containerId":5,"length":65536}]}"#,
            ),
            ("two", r#"{"uidMappings":[],"gidMappings":[]}"#),
            (
                "another's",
                &std::fs::read_to_string(dir("a").join(FILE)).unwrap(),
            ),
        ] {
            std::fs::create_dir(dir(uid)).unwrap();
            std::fs::write(dir(uid).join(FILE), text).unwrap();
            let error = all.existing(uid, &dir(uid)).unwrap_err();
            assert!(error.starts_with("user namespace: "), "{error}");
        }
    }

    #[test]
    fn subordinate_ids() {
        assert_eq!(
            parse_getsubids("0: kubelet 65536 7208960\n"),
            Ok((65536, 7_208_960))
        );
        for text in [
            "",
            "0: kubelet 1 2\n1: kubelet 3 4\n",
            "0: kubelet x 1",
            "0: kubelet 1",
        ] {
            assert!(parse_getsubids(text).is_err(), "{text}");
        }
        assert!(Slots::new(65536, 110 * 65536, 110).is_ok());
        for (first, length, pods, why) in [
            (0, 110 * 65536, 110, "must be greater"),
            (100_000, 65536, 1, "not a multiple"),
            (65536, 100_000, 1, "not a multiple"),
            (65536, 65536, 2, "not enough"),
        ] {
            let error = Slots::new(first, length, pods).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        assert!(Slots::DEFAULT.contain(u32::MAX) && !Slots::DEFAULT.contain(65535));
    }

    #[test]
    fn handlers() {
        let handler = |name: &str, user_namespaces| v1::RuntimeHandler {
            name: name.into(),
            features: Some(v1::RuntimeHandlerFeatures {
                user_namespaces,
                ..Default::default()
            }),
        };
        let all = [handler("", true), handler("runc", false)];
        assert_eq!(supported(&all, ""), Ok(()));
        assert_eq!(supported(&[], ""), Err(NO_USER_NAMESPACES.to_owned()));
        assert!(
            supported(&all, "runc")
                .unwrap_err()
                .contains("RuntimeClass handler \"runc\"")
        );
        assert!(
            supported(&all, "kata")
                .unwrap_err()
                .ends_with("the handler \"kata\" is not known")
        );
    }
}
