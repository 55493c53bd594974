//! Rules of the volume sources that pods and persistent volumes share: host paths, network file systems,
//! disks of clouds, CSI. What only pods have (config maps, projections, …) is in `volume.rs`.

use skiff_meta::names;

use super::mounts::{local_path, no_backsteps};
use crate::errors::Errors;
use crate::node::Node;

const HOST_PORT: &str = "must be a host:port pair or multiple pairs separated by commas";

/// Where the source is: a persistent volume asks for more than a pod.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum VolumeOwner<'a> {
    Pod,
    /// With the name of the volume.
    PersistentVolume(&'a str),
}

/// What each source must have, in the order of checking.
fn required(name: &str) -> &'static [&'static str] {
    match name {
        "gitRepo" => &["repository"],
        "gcePersistentDisk" => &["pdName"],
        "awsElasticBlockStore" | "cinder" | "portworxVolume" => &["volumeID"],
        "nfs" => &["server", "path"],
        "glusterfs" => &["endpoints", "path"],
        "rbd" => &["monitors", "image"],
        "cephfs" => &["monitors"],
        "flexVolume" => &["driver"],
        "azureFile" => &["secretName", "shareName"],
        "azureDisk" => &["diskName", "diskURI"],
        "vsphereVolume" => &["volumePath"],
        "photonPersistentDisk" => &["pdID"],
        "scaleIO" => &["gateway", "system", "volumeName"],
        "persistentVolumeClaim" => &["claimName"],
        _ => &[],
    }
}

/// Checks one source of the older sort. `volume` is the place that holds the source.
pub fn source(volume: &Node, name: &str, place: VolumeOwner, errors: &mut Errors) {
    // COMPAT: upstream names this one differently from the field.
    let shown = if name == "gcePersistentDisk" {
        "persistentDisk"
    } else {
        name
    };
    let at = volume.field(shown);
    let value = volume.field(name).value;
    let source = at.with(value);
    for field in required(name) {
        errors.require(&source.field(field));
    }
    match name {
        "hostPath" => host_path(&source, errors),
        "gitRepo" => local_path(&source.field("directory"), errors),
        "gcePersistentDisk" | "awsElasticBlockStore" => {
            within(
                &source.field("partition"),
                0..=255,
                "must be between 1 and 255, inclusive",
                errors,
            );
        }
        "nfs" => {
            let path = source.field("path");
            if !path.str().starts_with('/') {
                errors.invalid(&path, "must be an absolute path");
            }
        }
        "iscsi" => iscsi(&source, place, errors),
        "fc" => fibre_channel(&source, errors),
        "glusterfs" => {
            let namespace = source.field("endpointsNamespace");
            if namespace.is_set() && namespace.is_empty() {
                errors.invalid(
                    &namespace,
                    "if the endpointnamespace is set, it must be a valid namespace name",
                );
            } else if namespace.is_set() {
                errors.rule(&namespace, names::dns1123_label(namespace.str()));
            }
        }
        "flocker" => flocker(&source, errors),
        "quobyte" => quobyte(&source, errors),
        "cinder" => secret_ref(&source, place, errors),
        "storageos" => {
            let volume_name = source.field("volumeName");
            if errors.require(&volume_name) {
                errors.rule(&volume_name, names::dns1123_label(volume_name.str()));
            }
            let namespace = source.field("volumeNamespace");
            if !namespace.is_empty() {
                errors.rule(&namespace, names::dns1123_label(namespace.str()));
            }
            secret_ref(&source, place, errors);
        }
        "flexVolume" => {
            let options = source.field("options");
            for (key, option) in options.entries() {
                let namespace = key.split_once('/').map_or(key, |(namespace, _)| namespace);
                let namespace = format!(".{}", namespace.to_lowercase());
                if namespace.ends_with(".kubernetes.io") || namespace.ends_with(".k8s.io") {
                    errors.invalid_value(&option, key, "kubernetes.io and k8s.io namespaces are reserved");
                }
            }
        }
        "azureFile" => {
            let namespace = source.field("secretNamespace");
            if namespace.is_set() {
                errors.require(&namespace);
            }
        }
        "azureDisk" => azure_disk(&source, errors),
        "local" => {
            let path = source.field("path");
            if errors.require(&path) {
                no_backsteps(&path, errors);
            }
        }
        "csi" => csi(&source, place, errors),
        _ => {}
    }
}

fn within(at: &Node, range: std::ops::RangeInclusive<i64>, complaint: &str, errors: &mut Errors) {
    if at.int().is_some_and(|n| !range.contains(&n)) {
        errors.invalid(at, complaint);
    }
}

fn host_path(source: &Node, errors: &mut Errors) {
    let path = source.field("path");
    if !errors.require(&path) {
        return;
    }
    no_backsteps(&path, errors);
    errors.one_of_if_set(
        &source.field("type"),
        &[
            "",
            "BlockDevice",
            "CharDevice",
            "Directory",
            "DirectoryOrCreate",
            "File",
            "FileOrCreate",
            "Socket",
        ],
    );
}

/// A secret that a storage system needs. Volumes are not in a namespace, so they say whose secret it is.
fn secret_ref(source: &Node, place: VolumeOwner, errors: &mut Errors) {
    let reference = source.field("secretRef");
    if reference.is_set() {
        errors.require(&reference.field("name"));
        if place != VolumeOwner::Pod {
            errors.require(&reference.field("namespace"));
        }
    }
}

/// How an initiator or target is named; the text says in which scheme.
fn iscsi_name_is_good(name: &str) -> bool {
    let alphanumeric =
        |text: &str, count| text.len() == count && text.bytes().all(|b| b.is_ascii_alphanumeric());
    match name.get(..3) {
        Some("iqn") => iqn_is_good(name),
        Some("eui") => name.get(4..).is_some_and(|rest| alphanumeric(rest, 16)),
        Some("naa") => name.get(4..).is_some_and(|rest| alphanumeric(rest, 32)),
        _ => false,
    }
}

/// `iqn.2001-04.com.example:storage`
fn iqn_is_good(name: &str) -> bool {
    let Some((date, rest)) = name.strip_prefix("iqn.").and_then(|n| n.split_once('.')) else {
        return false;
    };
    let digits = |text: &str, count| text.len() == count && text.bytes().all(|b| b.is_ascii_digit());
    let dated = date
        .split_once('-')
        .is_some_and(|(year, month)| digits(year, 4) && digits(month, 2));
    let named = rest.split_once(':').is_some_and(|(authority, unique)| {
        !authority.is_empty()
            && authority
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.')
            && !unique.is_empty()
            && !unique.contains([',', ';', '*', '&', '$', '|'])
            && !unique.contains(char::is_whitespace)
    });
    dated && named
}

fn iscsi(source: &Node, place: VolumeOwner, errors: &mut Errors) {
    let unknown = match place {
        VolumeOwner::Pod => "must be valid format starting with iqn, eui, or naa",
        VolumeOwner::PersistentVolume(_) => "must be valid format",
    };
    let known = |name: &str| ["iqn", "eui", "naa"].iter().any(|p| name.starts_with(p));
    let portal = source.field("targetPortal");
    errors.require(&portal);
    let initiator = source.field("initiatorName");
    if let VolumeOwner::PersistentVolume(name) = place
        && initiator.is_set()
        && name.len() + 1 + portal.len() > 64
    {
        errors.invalid(
            &source.field("targetportal").with(portal.value),
            "Total length of <volume name>:<iscsi.targetPortal> must be under 64 characters if iscsi.initiatorName is specified.",
        );
    }
    let iqn = source.field("iqn");
    if errors.require(&iqn) {
        if !known(iqn.str()) {
            errors.invalid(&iqn, unknown);
        } else if !iscsi_name_is_good(iqn.str()) {
            errors.invalid(&iqn, "must be valid format");
        }
    }
    within(
        &source.field("lun"),
        0..=255,
        "must be between 0 and 255, inclusive",
        errors,
    );
    let secret = source.field("secretRef");
    if (source.field("chapAuthDiscovery").bool() || source.field("chapAuthSession").bool())
        && !secret.is_set()
    {
        errors.required(&secret, "");
    }
    if secret.is_set() && place != VolumeOwner::Pod {
        errors.require(&secret.field("name"));
    }
    if initiator.is_set() {
        // COMPAT: upstream's path is in lower case.
        let at = source.field("initiatorname");
        let at = at.with(initiator.value);
        if !known(initiator.str()) {
            errors.invalid(&at, unknown);
        } else if !iscsi_name_is_good(initiator.str()) {
            errors.invalid(&at, "must be valid format");
        }
    }
}

fn fibre_channel(source: &Node, errors: &mut Errors) {
    let (names, ids, lun) = (
        source.field("targetWWNs"),
        source.field("wwids"),
        source.field("lun"),
    );
    match (names.is_empty(), ids.is_empty()) {
        (true, true) => errors.required(&names, "must specify either targetWWNs or wwids, but not both"),
        (false, false) => {
            errors.invalid(&names, "targetWWNs and wwids can not be specified simultaneously");
        }
        _ => {}
    }
    if !names.is_empty() {
        if lun.is_set() {
            within(&lun, 0..=255, "must be between 0 and 255, inclusive", errors);
        } else {
            errors.required(&lun, "lun is required if targetWWNs is specified");
        }
    }
}

fn flocker(source: &Node, errors: &mut Errors) {
    let (name, uuid) = (source.field("datasetName"), source.field("datasetUUID"));
    match (name.is_empty(), uuid.is_empty()) {
        (true, true) => errors.required(source, "one of datasetName and datasetUUID is required"),
        (false, false) => errors.invalid_value(
            source,
            "resource",
            "datasetName and datasetUUID can not be specified simultaneously",
        ),
        _ => {}
    }
    if name.str().contains('/') {
        errors.invalid(&name, "must not contain '/'");
    }
}

fn quobyte(source: &Node, errors: &mut Errors) {
    let registry = source.field("registry");
    if registry.is_empty() {
        errors.required(&registry, HOST_PORT);
    } else if source.field("tenant").len() >= 65 {
        errors.required(
            &source.field("tenant"),
            "must be a UUID and may not exceed a length of 64 characters",
        );
    } else {
        for pair in registry.str().split(',') {
            if !is_host_port(pair) {
                errors.invalid(&registry, HOST_PORT);
            }
        }
    }
    errors.require(&source.field("volume"));
}

fn is_host_port(text: &str) -> bool {
    text.rsplit_once(':').is_some_and(|(host, _)| {
        let inner = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        !inner.unwrap_or(host).contains(['[', ']']) && (inner.is_some() || !host.contains(':'))
    })
}

fn azure_disk(source: &Node, errors: &mut Errors) {
    errors.one_of_if_set(&source.field("cachingMode"), &["None", "ReadOnly", "ReadWrite"]);
    let kind = source.field("kind");
    errors.one_of_if_set(&kind, &["Dedicated", "Managed", "Shared"]);
    let uri = source.field("diskURI");
    if kind.is_set() && kind.str() == "Managed" && !uri.str().starts_with("/subscriptions/") {
        errors.not_supported(
            &uri,
            &["/subscriptions/{sub-id}/resourcegroups/{group-name}/providers/microsoft.compute/disks/{disk-id}"],
        );
    }
    if kind.is_set() && kind.str() != "Managed" && !uri.str().starts_with("https://") {
        errors.not_supported(
            &uri,
            &["https://{account-name}.blob.core.windows.net/{container-name}/{disk-name}.vhd"],
        );
    }
}

/// The name of a CSI driver, also in the group `storage.k8s.io`.
pub fn csi_driver_name(name: &Node, errors: &mut Errors) {
    if !errors.require(name) {
        return;
    }
    if name.len() > 63 {
        errors.too_long(name, 63);
    }
    errors.rule(name, names::dns1123_subdomain(&name.str().to_lowercase()));
}

fn csi(source: &Node, place: VolumeOwner, errors: &mut Errors) {
    csi_driver_name(&source.field("driver"), errors);
    if place == VolumeOwner::Pod {
        let reference = source.field("nodePublishSecretRef");
        if reference.is_set() {
            let name = reference.field("name");
            if errors.require(&name) {
                // COMPAT: the path leaves out the reference.
                let at = source.field("name");
                errors.rule(&at.with(name.value), names::dns1123_subdomain(name.str()));
            }
        }
        return;
    }
    errors.require(&source.field("volumeHandle"));
    for name in [
        "controllerPublishSecretRef",
        "controllerExpandSecretRef",
        "nodePublishSecretRef",
        "nodeExpandSecretRef",
    ] {
        let reference = source.field(name);
        if !reference.is_set() {
            continue;
        }
        let name = reference.field("name");
        if errors.require(&name) {
            errors.rule(&name, names::dns1123_subdomain(name.str()));
        }
        let namespace = reference.field("namespace");
        if errors.require(&namespace) {
            errors.rule(&namespace, names::dns1123_label(namespace.str()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check(place: VolumeOwner, name: &str, value: Value, expected: &[&str]) {
        let object = json!({ name: value });
        let mut errors = Errors::new();
        source(&Node::root(&object), name, place, &mut errors);
        let found: Vec<String> = errors.into_vec().iter().map(ToString::to_string).collect();
        assert_eq!(found, expected, "{object}");
    }

    #[test]
    fn sources() {
        let volume = VolumeOwner::PersistentVolume("pv");
        check(VolumeOwner::Pod, "nfs", json!({"server": "s", "path": "/x"}), &[]);
        check(
            VolumeOwner::Pod,
            "nfs",
            json!({"path": "x"}),
            &[
                "nfs.server: Required value",
                "nfs.path: Invalid value: \"x\": must be an absolute path",
            ],
        );
        check(
            VolumeOwner::Pod,
            "gcePersistentDisk",
            json!({"pdName": "p", "partition": 256}),
            &["persistentDisk.partition: Invalid value: 256: must be between 1 and 255, inclusive"],
        );
        let good = "iqn.2001-04.com.example:storage";
        check(
            volume,
            "iscsi",
            json!({"targetPortal": "1.2.3.4", "iqn": good, "lun": 0}),
            &[],
        );
        check(
            VolumeOwner::Pod,
            "iscsi",
            json!({"targetPortal": "1.2.3.4", "iqn": "x", "lun": 256, "chapAuthSession": true}),
            &[
                "iscsi.iqn: Invalid value: \"x\": must be valid format starting with iqn, eui, or naa",
                "iscsi.lun: Invalid value: 256: must be between 0 and 255, inclusive",
                "iscsi.secretRef: Required value",
            ],
        );
        check(
            volume,
            "cinder",
            json!({"volumeID": "v", "secretRef": {"name": "s"}}),
            &["cinder.secretRef.namespace: Required value"],
        );
        check(
            volume,
            "quobyte",
            json!({"registry": "a", "volume": "v"}),
            &[
                "quobyte.registry: Invalid value: \"a\": must be a host:port pair or multiple pairs separated by commas",
            ],
        );
        check(
            volume,
            "fc",
            json!({"targetWWNs": ["a"]}),
            &["fc.lun: Required value: lun is required if targetWWNs is specified"],
        );
        check(
            volume,
            "csi",
            json!({"driver": "d", "nodeStageSecretRef": {}, "nodePublishSecretRef": {"name": "a", "namespace": "A"}}),
            &[
                "csi.volumeHandle: Required value",
                "csi.nodePublishSecretRef.namespace: Invalid value: \"A\": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')",
            ],
        );
        check(
            VolumeOwner::Pod,
            "azureDisk",
            json!({"diskName": "d", "diskURI": "x", "kind": "Managed"}),
            &[
                "azureDisk.diskURI: Unsupported value: \"x\": supported values: \"/subscriptions/{sub-id}/resourcegroups/{group-name}/providers/microsoft.compute/disks/{disk-id}\"",
            ],
        );
    }
}
