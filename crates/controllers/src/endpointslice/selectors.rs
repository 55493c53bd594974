//! Which Services select a pod. A pod event looks up the Services by the pod's labels: it neither scans the Services of
//! the namespace nor decodes one.
//!
//! Shared by the controllers that make endpoints; each keeps its own, fed by the events of the Services.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use k8s_openapi::api::core::v1::{Pod, Service};
use parking_lot::RwLock;
use skiff_client::{Change, Key};

use crate::pods;
use crate::selector::{Labels, matches_map};

/// True if the Service's endpoints are made from pods.
pub(crate) fn selects_pods(service: &Service) -> bool {
    selector_of(service).is_some()
}

fn selector_of(service: &Service) -> Option<&Labels> {
    let spec = service.spec.as_ref()?;
    let selector = spec.selector.as_ref().filter(|selector| !selector.is_empty())?;
    (spec.type_.as_deref() != Some("ExternalName")).then_some(selector)
}

/// Namespace, label and value.
type Pair = (String, String, String);

/// The selectors of all Services. Each is filed under one pair of its selector: a pod that is selected has that label.
#[derive(Default)]
pub(crate) struct Selectors {
    inner: RwLock<Inner>,
}

#[derive(Default)]
struct Inner {
    by_pair: HashMap<Pair, BTreeMap<String, Labels>>,
    /// Where a Service is filed.
    filed: HashMap<Key, Pair>,
}

impl Selectors {
    /// Takes in a change of a Service; its key is what has to be looked at.
    pub(crate) fn follow(&self, change: &Change<Service>) -> [Key; 1] {
        let service = change.object();
        let key = Key::of(&**service);
        let selector = match change {
            Change::Applied { .. } => selector_of(service),
            Change::Deleted { .. } => None,
        };
        self.inner.write().set(&key, selector);
        [key]
    }

    /// The Services whose selector takes the pod.
    pub(crate) fn services_of(&self, pod: &Pod) -> BTreeSet<Key> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let labels = pod.metadata.labels.as_ref();
        let inner = self.inner.read();
        let mut found = BTreeSet::new();
        for (label, value) in labels.into_iter().flatten() {
            let pair = (namespace.to_owned(), label.clone(), value.clone());
            let filed = inner.by_pair.get(&pair).into_iter().flatten();
            let selecting = filed.filter(|(_, selector)| matches_map(selector, labels));
            found.extend(selecting.map(|(name, _)| Key::new(namespace, name.as_str())));
        }
        found
    }

    /// The Services that a change of a pod touches, those it no longer belongs to as well.
    pub(crate) fn woken_by_pod(&self, change: &Change<Pod>) -> BTreeSet<Key> {
        let mut keys = self.services_of(change.object());
        if let Change::Applied { old: Some(old), new } = change {
            let relabelled = old.metadata.labels != new.metadata.labels;
            if !relabelled && (keys.is_empty() || !endpoint_changed(old, new)) {
                return BTreeSet::new();
            }
            if relabelled {
                keys.extend(self.services_of(old));
            }
        }
        keys
    }
}

impl Inner {
    fn set(&mut self, key: &Key, selector: Option<&Labels>) {
        if let Some(pair) = self.filed.remove(key)
            && let Some(filed) = self.by_pair.get_mut(&pair)
        {
            filed.remove(&key.name);
            if filed.is_empty() {
                self.by_pair.remove(&pair);
            }
        }
        let Some(selector) = selector else { return };
        // The pair that fewest others are filed under: `app=web-17` rather than `tier=front`.
        let pairs = selector
            .iter()
            .map(|(label, value)| (key.namespace.clone(), label.clone(), value.clone()));
        let rarest = pairs.min_by_key(|pair| self.by_pair.get(pair).map_or(0, BTreeMap::len));
        if let Some(pair) = rarest {
            let filed = self.by_pair.entry(pair.clone()).or_default();
            filed.insert(key.name.clone(), selector.clone());
            self.filed.insert(key.clone(), pair);
        }
    }
}

/// True if something changed that an endpoint shows, besides labels.
fn endpoint_changed(old: &Pod, new: &Pod) -> bool {
    let addresses = |pod: &Pod| {
        let status = pod.status.as_ref();
        status.map(|status| (status.pod_ip.clone(), status.pod_ips.clone()))
    };
    let names = |pod: &Pod| {
        let spec = pod.spec.as_ref();
        spec.map(|spec| (spec.hostname.clone(), spec.subdomain.clone()))
    };
    old.metadata.deletion_timestamp.is_some() != new.metadata.deletion_timestamp.is_some()
        || pods::is_ready(old) != pods::is_ready(new)
        || pods::is_terminal(old) != pods::is_terminal(new)
        || pods::node_name(old) != pods::node_name(new)
        || addresses(old) != addresses(new)
        || names(old) != names(new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::sync::Arc;

    fn service(name: &str, spec: Value) -> Arc<Service> {
        Arc::new(
            serde_json::from_value(json!({"metadata": {"namespace": "ns", "name": name}, "spec": spec}))
                .unwrap(),
        )
    }

    fn pod(namespace: &str, labels: Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"namespace": namespace, "name": "p", "labels": labels}}))
            .unwrap()
    }

    #[test]
    fn a_pod_finds_the_services_that_select_it() {
        let selectors = Selectors::default();
        let put = |name: &str, spec: Value| {
            let new = service(name, spec);
            selectors.follow(&Change::Applied { old: None, new });
        };
        let check = |namespace: &str, labels: Value, expected: &[&str]| {
            let found = selectors.services_of(&pod(namespace, labels.clone()));
            let found: Vec<&str> = found.iter().map(|key| key.name.as_str()).collect();
            assert_eq!(found, expected, "{labels}");
        };
        for number in 0..20 {
            let app = format!("app-{number}");
            put(&app, json!({"selector": {"tier": "front", "app": app}}));
        }
        put("all", json!({"selector": {"tier": "front"}}));
        put("none", json!({"selector": {}}));
        put(
            "external",
            json!({"type": "ExternalName", "selector": {"tier": "front"}}),
        );
        check("ns", json!({"app": "app-7", "tier": "front"}), &["all", "app-7"]);
        check("ns", json!({"app": "app-7"}), &[]);
        check("ns", json!({"app": "app-7", "tier": "back"}), &[]);
        check("other", json!({"app": "app-7", "tier": "front"}), &[]);
        // Hardly any are filed under the pair that all have.
        let tier = ("ns".to_owned(), "tier".to_owned(), "front".to_owned());
        assert!(selectors.inner.read().by_pair[&tier].len() <= 3);

        put("app-7", json!({"selector": {"app": "other"}}));
        check("ns", json!({"app": "app-7", "tier": "front"}), &["all"]);
        check("ns", json!({"app": "other"}), &["app-7"]);
        for name in ["all", "app-7"] {
            let last = service(name, json!({"selector": {"tier": "front"}}));
            selectors.follow(&Change::Deleted { last });
        }
        check("ns", json!({"app": "other", "tier": "front"}), &[]);
        assert_eq!(selectors.inner.read().filed.len(), 19);
    }
}
