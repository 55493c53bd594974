//! The other objects that a pod or a volume names: what its node has to be able to read.

use serde_json::Value;
use skiff_meta::field;

use crate::node::{at, by_text, list, text};

/// A Secret, named by what needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretName<'a> {
    pub namespace: &'a str,
    pub name: &'a str,
}

fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    [
        "spec.initContainers",
        "spec.containers",
        "spec.ephemeralContainers",
    ]
    .into_iter()
    .flat_map(|field| list(pod, field))
}

/// What the environments of all containers name, by the two words for it.
fn environments<'a>(pod: &'a Value, whole: &'a str, key: &'a str) -> impl Iterator<Item = &'a str> {
    containers(pod).flat_map(move |container| {
        let all = list(container, "envFrom").iter().map(move |from| at(from, whole));
        let keys = list(container, "env")
            .iter()
            .map(move |variable| at(at(variable, "valueFrom"), key));
        all.chain(keys).map(|reference| text(reference, "name"))
    })
}

/// The names of the Secrets that a pod needs, in its own namespace. Some come twice.
pub fn secrets(pod: &Value) -> Vec<&str> {
    const IN_VOLUMES: [&str; 10] = [
        "azureFile.secretName",
        "cephfs.secretRef.name",
        "cinder.secretRef.name",
        "flexVolume.secretRef.name",
        "rbd.secretRef.name",
        "secret.secretName",
        "scaleIO.secretRef.name",
        "iscsi.secretRef.name",
        "storageos.secretRef.name",
        "csi.nodePublishSecretRef.name",
    ];
    let pulling = list(pod, "spec.imagePullSecrets")
        .iter()
        .map(|reference| text(reference, "name"));
    let volumes = list(pod, "spec.volumes").iter().flat_map(|volume| {
        let projected = list(volume, "projected.sources")
            .iter()
            .map(|source| text(source, "secret.name"));
        IN_VOLUMES.iter().map(|path| text(volume, path)).chain(projected)
    });
    pulling
        .chain(environments(pod, "secretRef", "secretKeyRef"))
        .chain(volumes)
        .filter(|name| !name.is_empty())
        .collect()
}

/// The names of the ConfigMaps that a pod needs, in its own namespace. Some come twice.
pub fn config_maps(pod: &Value) -> Vec<&str> {
    let volumes = list(pod, "spec.volumes").iter().flat_map(|volume| {
        let projected = list(volume, "projected.sources")
            .iter()
            .map(|source| text(source, "configMap.name"));
        std::iter::once(text(volume, "configMap.name")).chain(projected)
    });
    environments(pod, "configMapRef", "configMapKeyRef")
        .chain(volumes)
        .filter(|name| !name.is_empty())
        .collect()
}

/// The names of the claims of a pod's volumes; those of ephemeral volumes are made for them.
pub fn claims(pod: &Value) -> Vec<String> {
    let name = |volume: &Value| match text(volume, "persistentVolumeClaim.claimName") {
        "" if at(volume, "ephemeral").is_object() => {
            Some(format!("{}-{}", text(pod, "metadata.name"), text(volume, "name")))
        }
        "" => None,
        name => Some(name.to_owned()),
    };
    list(pod, "spec.volumes").iter().filter_map(name).collect()
}

/// The names of the ResourceClaims of a pod, as far as they are known.
pub fn resource_claims(pod: &Value) -> Vec<&str> {
    let statuses = by_text(list(pod, "status.resourceClaimStatuses"), "name");
    let made = |claim: &str| {
        let status = statuses.get(claim);
        status.map_or("", |status| text(status, "resourceClaimName"))
    };
    let asked = list(pod, "spec.resourceClaims")
        .iter()
        .map(|claim| match text(claim, "resourceClaimName") {
            "" => made(text(claim, "name")),
            name => name,
        });
    asked
        .chain([text(pod, "status.extendedResourceClaimStatus.resourceClaimName")])
        .filter(|name| !name.is_empty())
        .collect()
}

/// The first sort of object that a pod needs from the API: pods of a node's own manifests may name none.
pub fn api_object(pod: &Value) -> Result<Option<&'static str>, String> {
    /// Volumes that need nothing.
    const FREE: [&str; 22] = [
        "awsElasticBlockStore",
        "azureDisk",
        "cephfs",
        "cinder",
        "downwardAPI",
        "emptyDir",
        "fc",
        "flexVolume",
        "flocker",
        "gcePersistentDisk",
        "gitRepo",
        "hostPath",
        "image",
        "iscsi",
        "nfs",
        "photonPersistentDisk",
        "portworxVolume",
        "quobyte",
        "rbd",
        "scaleIO",
        "storageos",
        "vsphereVolume",
    ];
    const VOLUMES: [(&str, &str); 7] = [
        ("configMap", "configmaps (via configmap volumes)"),
        ("secret", "secrets (via secret volumes)"),
        ("csi", "csidrivers (via CSI volumes)"),
        ("glusterfs", "endpoints (via glusterFS volumes)"),
        ("persistentVolumeClaim", "persistentvolumeclaims"),
        ("ephemeral", "persistentvolumeclaims (via ephemeral volumes)"),
        ("azureFile", "secrets (via azureFile volumes)"),
    ];
    const SOURCES: [(&str, &str); 5] = [
        ("configMap", "configmaps (via projected volumes)"),
        ("secret", "secrets (via projected volumes)"),
        ("serviceAccountToken", "serviceaccounts (via projected volumes)"),
        ("clusterTrustBundle", "clustertrustbundles"),
        ("podCertificate", "podcertificates"),
    ];
    let has = |value: &Value, field: &str| !at(value, field).is_null();
    let first = |value: &Value, known: &[(&str, &'static str)]| {
        known
            .iter()
            .find(|(field, _)| has(value, field))
            .map(|(_, what)| *what)
    };
    if !text(pod, "spec.serviceAccountName").is_empty() {
        return Ok(Some("serviceaccounts"));
    }
    if !secrets(pod).is_empty() {
        return Ok(Some("secrets"));
    }
    if !config_maps(pod).is_empty() {
        return Ok(Some("configmaps"));
    }
    if !list(pod, "spec.resourceClaims").is_empty() {
        return Ok(Some("resourceclaims"));
    }
    for volume in list(pod, "spec.volumes") {
        if FREE.iter().any(|field| has(volume, field)) {
            continue;
        }
        if let Some(what) = first(volume, &VOLUMES) {
            return Ok(Some(what));
        }
        if !has(volume, "projected") {
            let name = field::quote(text(volume, "name"));
            return Err(format!("unknown volume type for volume  {name}"));
        }
        for source in list(volume, "projected.sources") {
            if let Some(what) = first(source, &SOURCES) {
                return Ok(Some(what));
            }
            if !has(source, "downwardAPI") {
                let name = field::quote(text(volume, "name"));
                return Err(format!("unknown source for projected volume {name}"));
            }
        }
    }
    Ok(None)
}

/// The Secrets that the node needs to mount a PersistentVolume.
pub fn volume_secrets<'a>(volume: &'a Value) -> Vec<SecretName<'a>> {
    // Where a reference without a namespace means that of the claim, and where it means none.
    const OF_CLAIM: [&str; 5] = ["cephfs", "flexVolume", "rbd", "scaleIO", "iscsi"];
    const OF_NONE: [&str; 2] = ["cinder", "storageos"];
    const OF_CSI: [&str; 3] = [
        "nodePublishSecretRef",
        "nodeStageSecretRef",
        "nodeExpandSecretRef",
    ];
    let spec = at(volume, "spec");
    let own = text(spec, "claimRef.namespace");
    let or_own = |namespace: &'a str| if namespace.is_empty() { own } else { namespace };
    let mut found = vec![SecretName {
        namespace: or_own(text(spec, "azureFile.secretNamespace")),
        name: text(spec, "azureFile.secretName"),
    }];
    let mut add = |reference, claim: bool| {
        let namespace = text(reference, "namespace");
        found.push(SecretName {
            namespace: if claim { or_own(namespace) } else { namespace },
            name: text(reference, "name"),
        });
    };
    for sort in OF_CLAIM {
        add(at(at(spec, sort), "secretRef"), true);
    }
    for sort in OF_NONE {
        add(at(at(spec, sort), "secretRef"), false);
    }
    for field in OF_CSI {
        add(at(at(spec, "csi"), field), false);
    }
    found.retain(|secret| !secret.name.is_empty());
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pod_names_what_its_node_reads() {
        let pod = json!({"metadata": {"name": "p"}, "spec": {
            "imagePullSecrets": [{"name": "pull"}],
            "initContainers": [{"envFrom": [{"secretRef": {"name": "all"}}, {"configMapRef": {"name": "whole"}}]}],
            "containers": [{"env": [{"valueFrom": {"secretKeyRef": {"name": "one"}}}, {"valueFrom": {"configMapKeyRef": {"name": "key"}}}]}],
            "ephemeralContainers": [{"envFrom": [{"secretRef": {"name": "late"}}]}],
            "volumes": [
                {"name": "a", "secret": {"secretName": "mounted"}},
                {"name": "b", "configMap": {"name": "files"}},
                {"name": "c", "projected": {"sources": [{"secret": {"name": "part"}}, {"configMap": {"name": "piece"}}]}},
                {"name": "d", "csi": {"nodePublishSecretRef": {"name": "csi"}}},
                {"name": "e", "persistentVolumeClaim": {"claimName": "claim"}},
                {"name": "f", "ephemeral": {"volumeClaimTemplate": {}}},
            ],
            "resourceClaims": [{"name": "x", "resourceClaimName": "direct"}, {"name": "y", "resourceClaimTemplateName": "t"}, {"name": "z"}],
        }, "status": {"resourceClaimStatuses": [{"name": "y", "resourceClaimName": "made"}]}});
        assert_eq!(
            secrets(&pod),
            ["pull", "all", "one", "late", "mounted", "part", "csi"]
        );
        assert_eq!(config_maps(&pod), ["whole", "key", "files", "piece"]);
        assert_eq!(claims(&pod), ["claim", "p-f"]);
        assert_eq!(resource_claims(&pod), ["direct", "made"]);
    }

    #[test]
    fn a_volume_names_secrets_in_its_claims_namespace_or_another() {
        let check = |spec: Value, expected: &[(&str, &str)]| {
            let mut volume = json!({"spec": spec});
            volume["spec"]["claimRef"] = json!({"namespace": "own", "name": "c"});
            let found: Vec<_> = volume_secrets(&volume)
                .iter()
                .map(|secret| (secret.namespace.to_owned(), secret.name.to_owned()))
                .collect();
            let expected: Vec<_> = expected
                .iter()
                .map(|(a, b)| (a.to_string(), b.to_string()))
                .collect();
            assert_eq!(found, expected);
        };
        check(json!({"azureFile": {"secretName": "s"}}), &[("own", "s")]);
        check(
            json!({"iscsi": {"secretRef": {"name": "s", "namespace": "n"}}}),
            &[("n", "s")],
        );
        check(
            json!({"csi": {"nodeStageSecretRef": {"name": "s", "namespace": "n"}, "controllerPublishSecretRef": {"name": "no", "namespace": "n"}}}),
            &[("n", "s")],
        );
    }
}
