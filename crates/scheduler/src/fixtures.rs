//! Pods and nodes for tests.

use crate::node::{NodeInfo, NodeMeta};
use crate::pod::{PodInfo, Shapes};
use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::{Value, json};
use std::sync::Arc;

/// In the namespace `default`, with its name as its uid.
pub(crate) fn object(name: &str, labels: Value, spec: Value) -> Pod {
    let mut spec = spec;
    if spec["containers"].is_null() {
        spec["containers"] = json!([{"name": "c"}]);
    }
    let meta =
        json!({"name": name, "namespace": "default", "uid": name, "labels": labels, "resourceVersion": "1"});
    serde_json::from_value(json!({"metadata": meta, "spec": spec})).unwrap()
}

pub(crate) fn pod(name: &str, spec: Value) -> Arc<PodInfo> {
    labelled(name, json!({}), spec)
}

thread_local! {
    static SHAPES: std::cell::RefCell<Shapes> = std::cell::RefCell::default();
}

pub(crate) fn labelled(name: &str, labels: Value, spec: Value) -> Arc<PodInfo> {
    info(&object(name, labels, spec))
}

/// Pods of one test share their shapes, as pods of one cache do.
pub(crate) fn info(pod: &Pod) -> Arc<PodInfo> {
    SHAPES.with_borrow_mut(|shapes| Arc::new(PodInfo::new(pod, shapes)))
}

pub(crate) fn node_meta(name: &str, spec: Value, labels: Value, status: Value) -> NodeMeta {
    let object = json!({"metadata": {"name": name, "labels": labels}, "spec": spec, "status": status});
    let node: Node = serde_json::from_value(object).unwrap();
    NodeMeta::new(&node)
}

pub(crate) fn node(name: &str, spec: Value, labels: Value, allocatable: Value) -> NodeInfo {
    NodeInfo {
        name: name.into(),
        meta: Arc::new(node_meta(name, spec, labels, json!({"allocatable": allocatable}))),
        exists: true,
        ..NodeInfo::default()
    }
}

pub(crate) fn plain_meta(name: &str) -> NodeMeta {
    let labels = json!({"kubernetes.io/hostname": name});
    let allocatable = json!({"cpu": "2", "memory": "4Gi", "pods": "110"});
    node_meta(name, json!({}), labels, json!({"allocatable": allocatable}))
}

pub(crate) fn plain_node(name: &str) -> NodeInfo {
    NodeInfo {
        name: name.into(),
        meta: Arc::new(plain_meta(name)),
        exists: true,
        ..NodeInfo::default()
    }
}
