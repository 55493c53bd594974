//! Rules of the volumes of a pod spec. Exactly one source each; the sources that persistent volumes
//! have too are in `volume_sources.rs`.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use skiff_meta::{field, names};

use super::claim;
use super::env::{field_ref, resource_field_ref};
use super::mounts::local_path;
use super::resources::quantity;
use super::volume_sources::{self, VolumeOwner};
use crate::certificates::{
    SHORTEST_SECONDS, longest_seconds, signer_name, signer_of_name, trust_bundle_name, user_annotations,
};
use crate::errors::Errors;
use crate::node::{Node, list, text};
use crate::object_meta::label_selector;

const MODE: &str = "must be a number between 0 and 0777 (octal), both inclusive";
const ONE_TYPE: &str = "may not specify more than 1 volume type";
/// In upstream's order of checking.
const SOURCES: [&str; 31] = [
    "emptyDir",
    "hostPath",
    "gitRepo",
    "gcePersistentDisk",
    "awsElasticBlockStore",
    "secret",
    "nfs",
    "iscsi",
    "glusterfs",
    "flocker",
    "persistentVolumeClaim",
    "rbd",
    "cinder",
    "cephfs",
    "quobyte",
    "downwardAPI",
    "fc",
    "flexVolume",
    "configMap",
    "azureFile",
    "vsphereVolume",
    "photonPersistentDisk",
    "portworxVolume",
    "azureDisk",
    "storageos",
    "projected",
    "scaleIO",
    "csi",
    "ephemeral",
    "image",
    "local",
];
/// Checks all volumes; returns those that containers may mount.
pub fn volumes<'v>(spec: &Node<'_, 'v>, errors: &mut Errors) -> BTreeMap<&'v str, &'v Value> {
    let volumes = spec.field("volumes");
    let mut good = BTreeMap::new();
    for (volume, value) in volumes.items().zip(list(spec.value, "volumes")) {
        let mut own = Errors::new();
        source(&volume, &mut own);
        let name = volume.field("name");
        if own.require(&name) {
            own.rule(&name, names::dns1123_label(name.str()));
        }
        if good.contains_key(name.str()) {
            own.duplicate(&name);
        }
        if own.is_empty() {
            good.insert(text(value, "name"), value);
        } else {
            errors.extend(own.into_vec());
        }
    }
    good
}

fn source(volume: &Node, errors: &mut Errors) {
    let mut found = false;
    for name in SOURCES {
        let source = volume.field(name);
        if !source.is_set() {
            continue;
        }
        if found {
            // COMPAT: two are spelled in upstream's own way.
            let shown = match name {
                "cephfs" => "cephFS",
                "downwardAPI" => "downwarAPI",
                name => name,
            };
            errors.forbidden(&volume.field(shown), ONE_TYPE);
            continue;
        }
        found = true;
        one_source(volume, name, errors);
    }
    if !found {
        errors.required(volume, "must specify a volume type");
    }
}

fn one_source(volume: &Node, name: &str, errors: &mut Errors) {
    let source = &volume.field(name);
    match name {
        "emptyDir" => {
            let limit = source.field("sizeLimit");
            if quantity(limit.value).is_some_and(|q| q.is_negative()) {
                errors.forbidden(&limit, "SizeLimit field must be a valid resource quantity");
            }
        }
        "secret" => {
            errors.require(&source.field("secretName"));
            mode(&source.field("defaultMode"), errors);
            items(source, errors);
        }
        "configMap" => {
            errors.require(&source.field("name"));
            mode(&source.field("defaultMode"), errors);
            items(source, errors);
        }
        "downwardAPI" => {
            mode(&source.field("defaultMode"), errors);
            let files = source.field("items");
            // COMPAT: the path names neither `items` nor the index.
            for file in files.items() {
                downward_file(&source.with(file.value), errors);
            }
        }
        "projected" => projected(source, errors),
        "ephemeral" => {
            let template = source.field("volumeClaimTemplate");
            if template.is_set() {
                crate::object_meta::template(&template.field("metadata"), errors);
                claim::spec(&template.field("spec"), errors);
            } else {
                errors.required(&template, "");
            }
        }
        "image" => {
            errors.require(&source.field("reference"));
            errors.required_one_of(&source.field("pullPolicy"), &["Always", "IfNotPresent", "Never"]);
        }
        _ => volume_sources::source(volume, name, VolumeOwner::Pod, errors),
    }
}

fn mode(mode: &Node, errors: &mut Errors) {
    if mode.int().is_some_and(|m| !(0..=0o777).contains(&m)) {
        errors.invalid(mode, MODE);
    }
}

fn items(source: &Node, errors: &mut Errors) {
    let items = source.field("items");
    for item in items.items() {
        key_to_path(&item, errors);
    }
}

fn key_to_path(item: &Node, errors: &mut Errors) {
    errors.require(&item.field("key"));
    let path = item.field("path");
    errors.require(&path);
    local_path(&path, errors);
    mode(&item.field("mode"), errors);
}

fn downward_file(file: &Node, errors: &mut Errors) {
    let path = file.field("path");
    errors.require(&path);
    local_path(&path, errors);
    let (field, resource) = (file.field("fieldRef"), file.field("resourceFieldRef"));
    if field.is_set() {
        field_ref(
            &field,
            &[
                "metadata.annotations",
                "metadata.labels",
                "metadata.name",
                "metadata.namespace",
                "metadata.uid",
            ],
            errors,
        );
        if resource.is_set() {
            errors.invalid_value(
                file,
                "resource",
                "fieldRef and resourceFieldRef can not be specified simultaneously",
            );
        }
    } else if resource.is_set() {
        resource_field_ref(&resource, true, errors);
    } else {
        errors.required(file, "one of fieldRef and resourceFieldRef is required");
    }
    mode(&file.field("mode"), errors);
}

fn projected(projected: &Node, errors: &mut Errors) {
    mode(&projected.field("defaultMode"), errors);
    let mut paths: BTreeSet<String> = BTreeSet::new();
    let sources = projected.field("sources");
    for source in sources.items() {
        let mut count = 0;
        for name in ["secret", "configMap"] {
            let part = source.field(name);
            if !part.is_set() {
                continue;
            }
            count += 1;
            let name = part.field("name");
            errors.require(&name);
            let items = part.field("items");
            for item in items.items() {
                key_to_path(&item, errors);
                let path = item.field("path").str();
                if !path.is_empty() && !paths.insert(path.to_owned()) {
                    errors.invalid_value(projected, name.str(), "conflicting duplicate paths");
                }
            }
        }
        let downward = source.field("downwardAPI");
        if downward.is_set() {
            count += 1;
            let files = downward.field("items");
            for file in files.items() {
                downward_file(&downward.with(file.value), errors);
                let path = file.field("path").str();
                if !path.is_empty() && !paths.insert(path.to_owned()) {
                    errors.invalid_value(projected, path, "conflicting duplicate paths");
                }
            }
        }
        let token = source.field("serviceAccountToken");
        if token.is_set() {
            count += 1;
            let seconds = token.field("expirationSeconds");
            let value = seconds.int().unwrap_or(0);
            if value < 600 {
                errors.invalid_value(&seconds, value, "may not specify a duration less than 10 minutes");
            }
            if value > 1 << 32 {
                errors.invalid(&seconds, "may not specify a duration larger than 2^32 seconds");
            }
            // COMPAT: the path is that of the volume, not of the source.
            let (at, path) = (projected.field("path"), token.field("path"));
            if path.str().is_empty() {
                errors.required(&at, "");
            } else {
                local_path(&at.with(path.value), errors);
            }
        }
        let bundle = source.field("clusterTrustBundle");
        if bundle.is_set() {
            count += 1;
            trust_bundle(&bundle, errors);
            let path = bundle.field("path").str();
            if !paths.insert(path.to_owned()) {
                errors.invalid_value(projected, path, "conflicting duplicate paths");
            }
        }
        let certificate = source.field("podCertificate");
        if certificate.is_set() {
            count += 1;
            pod_certificate(&certificate, projected, &mut paths, errors);
        }
        if count > 1 {
            errors.forbidden(&source, format!("{ONE_TYPE} per source"));
        }
    }
}

/// A projection of a ClusterTrustBundle by its name, or of those of a signer.
fn trust_bundle(bundle: &Node, errors: &mut Errors) {
    let (name, signer) = (bundle.field("name"), bundle.field("signerName"));
    let selector = bundle.field("labelSelector");
    match (name.is_set(), signer.is_set()) {
        (true, true) => errors.invalid(bundle, "only one of name and signerName may be used"),
        (true, false) => {
            if name.str().is_empty() {
                errors.required(&name, "must be a valid object name");
            }
            let signer = signer_of_name(name.str());
            for complaint in trust_bundle_name(&signer, name.str(), false) {
                errors.invalid(&name, format!("not a valid clustertrustbundlename: {complaint}"));
            }
            if selector.is_set() {
                errors.invalid(&selector, "labelSelector must be unset if name is specified");
            }
        }
        (false, true) => {
            if signer.str().is_empty() {
                errors.required(&signer, "must be a valid signer name");
            }
            signer_name(&signer, errors);
            label_selector(&selector, errors);
        }
        (false, false) => errors.required(bundle, "either name or signerName must be specified"),
    }
    let path = bundle.field("path");
    if path.str().is_empty() {
        errors.required(&path, "");
    }
    local_path(&path, errors);
}

/// A certificate that a signer issues to the pod, with its key.
fn pod_certificate(certificate: &Node, projected: &Node, paths: &mut BTreeSet<String>, errors: &mut Errors) {
    const KEY_TYPES: [&str; 6] = [
        "RSA3072",
        "RSA4096",
        "ECDSAP256",
        "ECDSAP384",
        "ECDSAP521",
        "ED25519",
    ];
    let signer = certificate.field("signerName");
    signer_name(&signer, errors);
    user_annotations(&certificate.field("userAnnotations"), errors);
    errors.one_of(&certificate.field("keyType"), &KEY_TYPES);
    let seconds = certificate.field("maxExpirationSeconds");
    if let Some(wanted) = seconds.int() {
        let longest = longest_seconds(signer.str());
        if wanted < SHORTEST_SECONDS {
            let detail = format!("if provided, maxExpirationSeconds must be >= {SHORTEST_SECONDS}");
            errors.invalid(&seconds, detail);
        }
        if wanted > longest {
            let detail = format!("if provided, maxExpirationSeconds must be <= {longest}");
            errors.invalid(&seconds, detail);
        }
    }
    let mut has_path = false;
    for name in ["credentialBundlePath", "keyPath", "certificateChainPath"] {
        let path = certificate.field(name);
        if path.str().is_empty() {
            continue;
        }
        has_path = true;
        local_path(&path, errors);
        if !paths.insert(path.str().to_owned()) {
            errors.invalid_value(projected, path.str(), "conflicting duplicate paths");
        }
    }
    if !has_path {
        let detail = "specify at least one of credentialBundlePath, keyPath, and certificateChainPath";
        errors.required(certificate, detail);
    }
}

/// The claim of an ephemeral volume is named after the pod and the volume.
pub fn claims_have_names(root: &Node, errors: &mut Errors) {
    let (pod, volumes) = (root.field("metadata.name"), root.field("spec.volumes"));
    for volume in volumes.items() {
        let name = volume.field("name");
        if !volume.field("ephemeral").is_set() || pod.is_empty() || name.is_empty() {
            continue;
        }
        let claim = format!("{}-{}", pod.str(), name.str());
        for complaint in names::dns1123_subdomain(&claim) {
            errors.invalid(&name, format!("PVC name {}: {complaint}", field::quote(&claim)));
        }
    }
}
