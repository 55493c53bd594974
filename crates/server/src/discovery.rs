//! Discovery: what groups, versions and resources there are, in the older form (one document a path) and
//! the aggregated one. Made from the resource tables; nothing here knows a kind.

use serde_json::{Value, json};
use skiff_api::facts::Resource;
use skiff_registry::Resources;
use skiff_registry::hooks::bootstrap::priorities;

use crate::aggregation::{Aggregator, Group, Groups};
use crate::negotiate::{Format, parse_accept};

/// All resources, those that were defined at run time last.
fn served(resources: &Resources) -> Vec<&'static Resource> {
    let customs = resources.customs();
    let all = resources.all().iter().chain(&customs.all);
    all.map(|resource| resource.facts).collect()
}

/// The groups with their versions, preferred first: this server's own and those of others.
fn groups(resources: &Resources, aggregator: &Aggregator) -> Vec<Group> {
    let mut local: Vec<(String, String, (i64, i64))> = Vec::new();
    for facts in served(resources) {
        let (group, version) = (facts.group, facts.version);
        if !local.iter().any(|(g, v, _)| g == group && v == version) {
            local.push((group.to_string(), version.to_string(), priorities(group, version)));
        }
    }
    Groups::merge(local, aggregator).0
}

fn group_version(group: &str, version: &str) -> String {
    if group.is_empty() {
        version.to_string()
    } else {
        format!("{group}/{version}")
    }
}

/// `/api`.
pub fn api_versions(server_address: &str) -> Value {
    json!({"kind": "APIVersions", "versions": ["v1"],
        "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": server_address}]})
}

fn group_value(group: &Group) -> Value {
    let version =
        |version: &String| json!({"groupVersion": group_version(&group.name, version), "version": version});
    let versions: Vec<Value> = group.versions.iter().map(version).collect();
    json!({"name": group.name, "versions": versions, "preferredVersion": versions[0]})
}

/// `/apis`.
pub fn api_groups(resources: &Resources, aggregator: &Aggregator) -> Value {
    let groups: Vec<Value> = groups(resources, aggregator)
        .iter()
        .filter(|group| !group.name.is_empty())
        .map(group_value)
        .collect();
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
}

/// `/apis/<group>`.
pub fn api_group(resources: &Resources, aggregator: &Aggregator, name: &str) -> Option<Value> {
    let group = groups(resources, aggregator)
        .into_iter()
        .find(|group| group.name == name && !name.is_empty())?;
    let mut value = group_value(&group);
    value["kind"] = json!("APIGroup");
    value["apiVersion"] = json!("v1");
    Some(value)
}

/// `/api/v1` and `/apis/<group>/<version>`.
pub fn api_resources(resources: &Resources, group: &str, version: &str) -> Option<Value> {
    let mut list = Vec::new();
    for resource in served(resources) {
        if resource.group != group || resource.version != version {
            continue;
        }
        let mut value = json!({"name": resource.plural, "singularName": resource.singular,
            "namespaced": resource.namespaced, "kind": resource.kind, "verbs": resource.verbs});
        if !resource.short_names.is_empty() {
            value["shortNames"] = json!(resource.short_names);
        }
        if !resource.categories.is_empty() {
            value["categories"] = json!(resource.categories);
        }
        if let Some(storage) = &resource.storage {
            value["storageVersionHash"] = json!(storage.version_hash);
        }
        list.push(value);
        for sub in &resource.subresources {
            let mut value = json!({"name": format!("{}/{}", resource.plural, sub.name), "singularName": "",
                "namespaced": resource.namespaced, "kind": sub.kind, "verbs": sub.verbs});
            if (sub.group, sub.version) != (resource.group, resource.version) {
                value["group"] = json!(sub.group);
                value["version"] = json!(sub.version);
            }
            list.push(value);
        }
    }
    if list.is_empty() {
        return None;
    }
    let mut value =
        json!({"kind": "APIResourceList", "groupVersion": group_version(group, version), "resources": list});
    if !group.is_empty() {
        value["apiVersion"] = json!("v1");
    }
    Some(value)
}

/// The form in which the client wants the aggregated document; `None`: it prefers the older ones.
pub fn wants_aggregated(accept: &str) -> Option<Format> {
    for clause in parse_accept(accept) {
        let format = match (clause.main, clause.sub) {
            ("application", "json" | "*") | ("*", "*") => Format::Json,
            ("application", "yaml") => Format::Yaml,
            ("application", "vnd.kubernetes.protobuf") => Format::Protobuf,
            _ => continue,
        };
        // Whoever takes this form gets it, wherever it stands.
        if let ("APIGroupDiscoveryList", "apidiscovery.k8s.io", "v2") =
            (clause.param("as"), clause.param("g"), clause.param("v"))
        {
            return Some(format);
        }
    }
    None
}

/// All groups (`/apis`), or the core group (`/api`), in one document.
pub fn aggregated(resources: &Resources, aggregator: &Aggregator, core: bool) -> Value {
    let items: Vec<Value> = groups(resources, aggregator)
        .iter()
        .filter(|group| group.name.is_empty() == core)
        .map(|group| {
            let versions: Vec<Value> = group
                .versions
                .iter()
                .map(|version| {
                    if let Some(remote) = aggregator.find(&group.name, version) {
                        return remote.discovery.lock().value(version);
                    }
                    let customs = resources.customs();
                    let all = resources.all().iter().chain(&customs.all);
                    let found: Vec<Value> = all
                        .filter(|r| r.facts.group == group.name && r.facts.version == *version)
                        .map(|r| aggregated_resource(r.facts, r.strategy.wire().full_names))
                        .collect();
                    json!({"version": version, "resources": found, "freshness": "Current"})
                })
                .collect();
            let mut metadata = json!({});
            if !core {
                metadata["name"] = json!(group.name);
            }
            json!({"metadata": metadata, "versions": versions})
        })
        .collect();
    json!({"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2",
        "metadata": {}, "items": items})
}

/// COMPAT: upstream names the group and version of a kind where the kind is defined at run time, or is another group's.
fn aggregated_resource(resource: &Resource, full_names: bool) -> Value {
    let kind = |group: &str, version: &str, kind: &str| {
        let own = (group, version) == (resource.group, resource.version);
        let (group, version) = if own && !full_names {
            ("", "")
        } else {
            (group, version)
        };
        json!({"group": group, "version": version, "kind": kind})
    };
    let mut value = json!({"resource": resource.plural, "responseKind": kind(resource.group, resource.version, resource.kind),
        "scope": if resource.namespaced { "Namespaced" } else { "Cluster" },
        "singularResource": resource.singular, "verbs": resource.verbs});
    if !resource.short_names.is_empty() {
        value["shortNames"] = json!(resource.short_names);
    }
    if !resource.categories.is_empty() {
        value["categories"] = json!(resource.categories);
    }
    let subresources: Vec<Value> = resource
        .subresources
        .iter()
        .map(|sub| {
            json!({"subresource": sub.name, "responseKind": kind(sub.group, sub.version, sub.kind), "verbs": sub.verbs})
        })
        .collect();
    if !subresources.is_empty() {
        value["subresources"] = json!(subresources);
    }
    value
}
