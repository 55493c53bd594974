//! The sorts of volumes that a pod may name by itself.

use skiff_api::node::{at, list, text};

use super::{Found, Pod, Violation, plural, quoted};

const ALLOWED: [&str; 9] = [
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
];

/// The others; a volume has one, and if it had several the first is told.
const RESTRICTED: [&str; 21] = [
    "hostPath",
    "gcePersistentDisk",
    "awsElasticBlockStore",
    "gitRepo",
    "nfs",
    "iscsi",
    "glusterfs",
    "rbd",
    "flexVolume",
    "cinder",
    "cephfs",
    "flocker",
    "fc",
    "azureFile",
    "vsphereVolume",
    "quobyte",
    "azureDisk",
    "photonPersistentDisk",
    "portworxVolume",
    "scaleIO",
    "storageos",
];

pub fn host_path(pod: Pod<'_>) -> Option<Violation> {
    let bad: Vec<&str> = list(pod.spec, "volumes")
        .iter()
        .filter(|volume| !at(volume, "hostPath").is_null())
        .map(|volume| text(volume, "name"))
        .collect();
    (!bad.is_empty()).then(|| Violation {
        reason: "hostPath volumes",
        detail: format!(
            "{} {}",
            plural("volume", "volumes", bad.len()),
            quoted(bad.iter().copied())
        ),
    })
}

pub fn sorts(pod: Pod<'_>) -> Option<Violation> {
    let (mut bad, mut found) = (Vec::new(), Found::new());
    for volume in list(pod.spec, "volumes") {
        let has = |sort: &&&str| !at(volume, sort).is_null();
        if ALLOWED.iter().any(|sort| has(&sort)) {
            continue;
        }
        bad.push(text(volume, "name"));
        found.insert(RESTRICTED.iter().find(has).copied().unwrap_or("unknown"));
    }
    (!bad.is_empty()).then(|| Violation {
        reason: "restricted volume types",
        detail: format!(
            "{} {} {} {} {}",
            plural("volume", "volumes", bad.len()),
            quoted(bad.iter().copied()),
            plural("uses", "use", bad.len()),
            plural("restricted volume type", "restricted volume types", found.len()),
            quoted(found)
        ),
    })
}
