//! Rules of paths, and of what a container mounts.

use std::collections::BTreeSet;

use super::container::Pod;
use serde_json::Value;

use crate::errors::Errors;
use crate::node::{Node, list, text};

pub fn no_backsteps(path: &Node, errors: &mut Errors) {
    if path.str().split('/').any(|part| part == "..") {
        errors.invalid(path, "must not contain '..'");
    }
}

pub fn descending_path(path: &Node, errors: &mut Errors) {
    if path.str().starts_with('/') {
        errors.invalid(path, "must be a relative path");
    }
    no_backsteps(path, errors);
}

pub fn local_path(path: &Node, errors: &mut Errors) {
    descending_path(path, errors);
    if path.str().starts_with("..") && !path.str().starts_with("../") {
        errors.invalid(path, "must not start with '..'");
    }
}

/// What the entries of a list say under a key.
fn texts<'v>(value: &'v Value, name: &str, key: &str) -> BTreeSet<&'v str> {
    list(value, name).iter().map(|entry| text(entry, key)).collect()
}

pub(super) fn volume_mounts(container: &Node, pod: &Pod, errors: &mut Errors) {
    let mounts = container.field("volumeMounts");
    let devices = |key: &str| texts(container.value, "volumeDevices", key);
    let (device_names, device_paths) = (devices("name"), devices("devicePath"));
    let mut points = BTreeSet::new();
    for mount in mounts.items() {
        let (name, path) = (mount.field("name"), mount.field("mountPath"));
        errors.require(&name);
        if !pod.volumes.contains_key(name.str()) {
            errors.not_found(&name);
        }
        errors.require(&path);
        if !points.insert(path.str()) {
            errors.invalid(&path, "must be unique");
        }
        if device_names.contains(name.str()) {
            errors.invalid(&name, "must not already exist in volumeDevices");
        }
        if device_paths.contains(path.str()) {
            errors.invalid(&path, "must not already exist as a path in volumeDevices");
        }
        // COMPAT: upstream names these fields without the index of the mount.
        let (sub_path, expression) = (mount.field("subPath"), mount.field("subPathExpr"));
        if !sub_path.str().is_empty() {
            descending_path(&mounts.field("subPath").with(sub_path.value), errors);
        }
        if !expression.str().is_empty() {
            if !sub_path.str().is_empty() {
                errors.invalid(&expression, "subPathExpr and subPath are mutually exclusive");
            }
            descending_path(&mounts.field("subPathExpr").with(expression.value), errors);
        }
        let propagation = mount.field("mountPropagation");
        if propagation.is_set() {
            let at = mounts.field("mountPropagation");
            let at = at.with(propagation.value);
            errors.one_of(&at, &["Bidirectional", "HostToContainer", "None"]);
            let privileged = container.field("securityContext.privileged").bool();
            if propagation.str() == "Bidirectional" && !privileged {
                errors.forbidden(
                    &at,
                    "Bidirectional mount propagation is available only to privileged containers",
                );
            }
        }
        let recursive = mount.field("recursiveReadOnly");
        if recursive.is_set() {
            let at = mounts.field("recursiveReadOnly");
            let at = at.with(recursive.value);
            errors.one_of(&at, &["Disabled", "Enabled", "IfPossible"]);
            if ["Enabled", "IfPossible"].contains(&recursive.str()) {
                if !mount.field("readOnly").bool() {
                    errors.forbidden(&at, "may only be specified when readOnly is true");
                }
                if !["", "None"].contains(&propagation.str()) {
                    errors.forbidden(
                        &at,
                        "may only be specified when mountPropagation is None or not specified",
                    );
                }
            }
        }
    }
}

pub(super) fn volume_devices(container: &Node, pod: &Pod, errors: &mut Errors) {
    let devices = container.field("volumeDevices");
    let mounts = |key: &str| texts(container.value, "volumeMounts", key);
    let (mount_names, mount_paths) = (mounts("name"), mounts("mountPath"));
    let (mut names, mut paths) = (BTreeSet::new(), BTreeSet::new());
    for device in devices.items() {
        let (name, path) = (device.field("name"), device.field("devicePath"));
        errors.require(&name);
        if !name.str().is_empty() && !names.insert(name.str()) {
            errors.invalid(&name, "must be unique");
        }
        match pod.volumes.get_key_value(name.str()) {
            None => errors.not_found(&name),
            Some((_, source)) => {
                if source.get("persistentVolumeClaim").is_none() && source.get("ephemeral").is_none() {
                    errors.invalid(
                        &name,
                        "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode",
                    );
                }
            }
        }
        errors.require(&path);
        if paths.contains(path.str()) {
            errors.invalid(&path, "must be unique");
        }
        if path.str().split('/').any(|part| part == "..") {
            errors.invalid(&path, "can not contain backsteps ('..')");
        } else {
            paths.insert(path.str());
        }
        if mount_names.contains(name.str()) {
            errors.invalid(&name, "must not already exist in volumeMounts");
        }
        if mount_paths.contains(path.str()) {
            errors.invalid(&path, "must not already exist as a path in volumeMounts");
        }
    }
}
