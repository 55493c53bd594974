//! The discovery documents of extension API servers, and how they join ours: groups and versions in the order of
//! their priorities, a version that cannot be fetched marked as stale.

use std::cmp::Ordering;
use std::sync::Arc;

use http::{StatusCode, header};
use serde_json::{Value, json};

use super::{Aggregator, Remote, fetch};
use crate::server::Inner;

const ACCEPT: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,\
    application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList";

/// Built-in groups are above this.
const BUILT_IN: i64 = 16_000;

/// What is known of one group version.
#[derive(Default)]
pub struct Fetched {
    pub etag: String,
    /// Its resources in the aggregated form.
    pub resources: Option<Value>,
    pub stale: bool,
}

/// A group of the merged discovery: its name and versions, both in order.
pub struct Group {
    pub name: String,
    pub versions: Vec<String>,
    priority: i64,
    version_priorities: Vec<i64>,
}

pub struct Groups(pub Vec<Group>);

impl Groups {
    /// Adds what extension API servers serve to what this one serves, which comes in its order and with the
    /// priorities of each group and version.
    pub fn merge(local: Vec<(String, String, (i64, i64))>, aggregator: &Aggregator) -> Groups {
        let mut groups = Groups(Vec::new());
        for (group, version, priorities) in local {
            groups.add(&group, &version, priorities);
        }
        let mut remotes = aggregator.remotes();
        remotes.sort_by(|a, b| a.name.cmp(&b.name));
        for remote in &remotes {
            groups.add(
                &remote.group,
                &remote.version,
                (remote.group_priority, remote.version_priority),
            );
        }
        // Built-in groups of the same priority stay in the order of the tables; others go by name.
        groups.0.sort_by(|a, b| {
            let by_name = || {
                if a.priority > BUILT_IN {
                    Ordering::Equal
                } else {
                    a.name.cmp(&b.name)
                }
            };
            b.priority.cmp(&a.priority).then_with(by_name)
        });
        groups
    }

    fn add(&mut self, name: &str, version: &str, (of_group, of_version): (i64, i64)) {
        let at = match self.0.iter().position(|group| group.name == name) {
            Some(at) => at,
            None => {
                self.0.push(Group {
                    name: name.to_string(),
                    versions: Vec::new(),
                    priority: 0,
                    version_priorities: Vec::new(),
                });
                self.0.len() - 1
            }
        };
        let group = &mut self.0[at];
        group.priority = group.priority.max(of_group);
        if group.versions.iter().any(|known| known == version) {
            return;
        }
        let place = group
            .version_priorities
            .iter()
            .position(|priority| *priority < of_version)
            .unwrap_or(group.versions.len());
        group.versions.insert(place, version.to_string());
        group.version_priorities.insert(place, of_version);
    }
}

impl Fetched {
    /// The version as it stands in the aggregated document.
    pub fn value(&self, version: &str) -> Value {
        let mut value = json!({"version": version});
        if let Some(resources) = &self.resources {
            value["resources"] = resources.clone();
        }
        value["freshness"] = json!(if self.stale || self.resources.is_none() {
            "Stale"
        } else {
            "Current"
        });
        value
    }
}

/// Fetches the document anew. False: it could not be had.
pub async fn refresh(remote: &Arc<Remote>, inner: &Arc<Inner>) -> bool {
    let etag = remote.discovery.lock().etag.clone();
    let fetched = tokio::time::timeout(fetch::LIMIT, download(remote, inner, &etag)).await;
    let mut known = remote.discovery.lock();
    match fetched {
        Ok(Ok(Some((etag, resources)))) => {
            *known = Fetched {
                etag,
                resources: Some(resources),
                stale: false,
            };
            true
        }
        // Not modified.
        Ok(Ok(None)) => {
            known.stale = false;
            true
        }
        Ok(Err(error)) => {
            tracing::debug!(%error, name = remote.name, "no discovery of an aggregated API server");
            known.stale = true;
            false
        }
        Err(_) => {
            known.stale = true;
            false
        }
    }
}

async fn download(
    remote: &Arc<Remote>,
    inner: &Arc<Inner>,
    etag: &str,
) -> Result<Option<(String, Value)>, String> {
    // A check that just failed says enough.
    let target = fetch::target(inner, remote).await?;
    let mut headers = vec![(header::ACCEPT, ACCEPT)];
    if !etag.is_empty() {
        headers.push((header::IF_NONE_MATCH, etag));
    }
    let whole = fetch::get(&target, "/apis", &headers).await?;
    if whole.code == StatusCode::NOT_MODIFIED {
        return Ok(None);
    }
    if whole.code == StatusCode::SERVICE_UNAVAILABLE {
        return Err(format!(
            "service returned non-success response code: {}",
            whole.code.as_u16()
        ));
    }
    let content_type = whole.header(header::CONTENT_TYPE);
    if whole.code == StatusCode::OK && content_type.contains("as=APIGroupDiscoveryList") {
        let document: Value = serde_json::from_slice(&whole.body).map_err(|error| error.to_string())?;
        let resources = aggregated_resources(&document, remote).unwrap_or_else(|| json!([]));
        return Ok(Some((whole.header(header::ETAG).to_string(), resources)));
    }
    // An older server: one document a group version.
    let accept = [(header::ACCEPT, "application/json")];
    let legacy = fetch::get(&target, &remote.path(), &accept).await?;
    if legacy.code != StatusCode::OK {
        return Err(format!(
            "failed to download legacy discovery for {}",
            remote.path()
        ));
    }
    let document: Value = serde_json::from_slice(&legacy.body).map_err(|error| error.to_string())?;
    Ok(Some((String::new(), from_legacy(&document))))
}

fn aggregated_resources(document: &Value, remote: &Remote) -> Option<Value> {
    let groups = document["items"].as_array()?;
    let group = groups
        .iter()
        .find(|group| group["metadata"]["name"].as_str().unwrap_or("") == remote.group)?;
    let versions = group["versions"].as_array()?;
    let version = versions
        .iter()
        .find(|version| version["version"].as_str() == Some(&remote.version))?;
    version.get("resources").filter(|list| list.is_array()).cloned()
}

/// The older form of a version's resources in the newer one.
fn from_legacy(document: &Value) -> Value {
    let mut out: Vec<Value> = Vec::new();
    let group_version = document["groupVersion"].as_str().unwrap_or("");
    let (own_group, own_version) = group_version.split_once('/').unwrap_or(("", group_version));
    for resource in document["resources"].as_array().into_iter().flatten() {
        let name = resource["name"].as_str().unwrap_or("");
        let of = |field: &str, own: &str| {
            let value = resource[field].as_str().unwrap_or("");
            if value.is_empty() {
                own.to_string()
            } else {
                value.to_string()
            }
        };
        let kind = json!({"group": of("group", own_group), "version": of("version", own_version),
            "kind": resource["kind"]});
        if let Some((parent, sub)) = name.split_once('/') {
            let sub = json!({"subresource": sub, "responseKind": kind, "verbs": resource["verbs"]});
            let at = out.iter().position(|entry| entry["resource"] == parent);
            let at = at.unwrap_or_else(|| {
                let scope = scope(resource);
                out.push(json!({"resource": parent, "scope": scope, "responseKind": {"group": "", "version": "", "kind": ""}}));
                out.len() - 1
            });
            match out[at].get_mut("subresources").and_then(Value::as_array_mut) {
                Some(list) => list.push(sub),
                None => out[at]["subresources"] = json!([sub]),
            }
            continue;
        }
        let mut entry = json!({"resource": name, "responseKind": kind, "scope": scope(resource),
            "singularResource": resource["singularName"], "verbs": resource["verbs"]});
        for field in ["shortNames", "categories"] {
            if let Some(list) = resource.get(field).filter(|list| list.is_array()) {
                entry[field] = list.clone();
            }
        }
        out.push(entry);
    }
    Value::Array(out)
}

fn scope(resource: &Value) -> &'static str {
    if resource["namespaced"] == true {
        "Namespaced"
    } else {
        "Cluster"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_servers() {
        let document = json!({"groupVersion": "wardle.example.com/v1alpha1", "resources": [
            {"name": "flunders", "singularName": "flunder", "namespaced": true, "kind": "Flunder", "verbs": ["get"]},
            {"name": "flunders/status", "singularName": "", "namespaced": true, "kind": "Flunder", "verbs": ["get"]}]});
        let kind = json!({"group": "wardle.example.com", "version": "v1alpha1", "kind": "Flunder"});
        assert_eq!(
            from_legacy(&document),
            json!([{"resource": "flunders", "responseKind": kind, "scope": "Namespaced", "singularResource": "flunder",
                "verbs": ["get"], "subresources": [{"subresource": "status", "responseKind": kind, "verbs": ["get"]}]}])
        );
    }

    #[test]
    fn priorities_order_groups_and_versions() {
        let aggregator = Aggregator::new(None);
        let service = json!({"namespace": "a", "name": "b"});
        for (name, group, version, of_group, of_version) in [
            ("v1.middle", "middle", "v1", 17_900, 10),
            ("v2.middle", "middle", "v2", 2_000, 20),
            ("v1.last", "last", "v1", 100, 15),
        ] {
            let object = json!({"metadata": {"name": name}, "spec": {"group": group, "version": version,
                "groupPriorityMinimum": of_group, "versionPriority": of_version, "insecureSkipTLSVerify": true, "service": service}});
            aggregator.put(Remote::read(&object, &None, None, None).expect("a remote one"));
        }
        let local = vec![
            ("first".to_string(), "v1".to_string(), (20_001, 1)),
            ("apps".to_string(), "v1".to_string(), (17_800, 15)),
        ];
        let merged: Vec<String> = Groups::merge(local, &aggregator)
            .0
            .iter()
            .map(|group| format!("{} {}", group.name, group.versions.join(",")))
            .collect();
        assert_eq!(merged, ["first v1", "middle v2,v1", "apps v1", "last v1"]);
        assert_eq!(
            aggregator
                .find_path("/apis/last/v1/things/x")
                .map(|r| r.name.clone()),
            Some("v1.last".to_string())
        );
        assert!(aggregator.find_path("/apis/last").is_none());
        aggregator.take("v1.last");
        assert!(aggregator.find("last", "v1").is_none());
    }
}
