//! Limits that are too large for a row in `refused.ndjson`: each is kept, and one more is refused in the words of
//! Kubernetes v1.36.4.

use serde_json::{Value, json};
use skiff_api::kind;
use skiff_meta::field;

fn found(group: &str, object: &Value) -> Vec<String> {
    let rules = kind::kind(group, object["kind"].as_str().expect("typed"));
    let errors = (rules.validate)(object);
    errors.iter().map(field::Error::to_string).collect()
}

#[test]
fn ports_of_an_endpoint_slice() {
    let slice = |count: usize| {
        let ports: Vec<Value> = (0..count)
            .map(|n| json!({"name": format!("p{n}"), "port": 1 + n % 65_535, "protocol": "TCP"}))
            .collect();
        json!({"kind": "EndpointSlice", "metadata": {"name": "e", "namespace": "n"}, "addressType": "IPv4",
            "endpoints": [{"addresses": ["1.2.3.4"]}], "ports": ports})
    };
    assert!(found("discovery.k8s.io", &slice(20_000)).is_empty());
    assert_eq!(
        found("discovery.k8s.io", &slice(20_001)),
        ["ports: Too many: 20001: must have at most 20000 items"]
    );
}

#[test]
fn messages_of_a_volume_attachment() {
    let attachment = |length: usize| {
        json!({"kind": "VolumeAttachment", "metadata": {"name": "v"},
            "spec": {"attacher": "a", "nodeName": "n", "source": {"persistentVolumeName": "p"}},
            "status": {"attached": false, "attachError": {"message": "x".repeat(length)},
                "detachError": {"message": "y".repeat(length)}}})
    };
    assert!(found("storage.k8s.io", &attachment(1024)).is_empty());
    assert_eq!(
        found("storage.k8s.io", &attachment(1025)),
        [
            "status.attachError.message: Too long: may not be more than 262144 bytes",
            "status.detachError.message: Too long: may not be more than 262144 bytes",
        ]
    );
}

/// Each topology is looked up, and what is found of them all is bounded: upstream compares each with each.
#[test]
fn topologies_of_a_storage_class() {
    let class = |term: fn(usize) -> Value| {
        json!({"kind": "StorageClass", "metadata": {"name": "s"}, "provisioner": "p", "reclaimPolicy": "Delete",
            "volumeBindingMode": "Immediate", "allowedTopologies": (0..20_000).map(term).collect::<Vec<Value>>()})
    };
    let each = |n: usize| json!({"matchLabelExpressions": [{"key": "k", "values": [format!("v{n}")]}]});
    assert!(found("storage.k8s.io", &class(each)).is_empty());
    let doubles = found("storage.k8s.io", &class(|_| json!({})));
    assert!(
        !doubles.is_empty() && doubles.len() < 100_000,
        "{}",
        doubles.len()
    );
    assert_eq!(
        doubles[0],
        "allowedTopologies[0].matchLabelExpressions: Duplicate value: \"\""
    );
}
