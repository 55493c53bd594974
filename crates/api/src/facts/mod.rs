//! The facts of the built-in kinds: every type and every resource that v1.36 serves by default, and those that are served
//! when `--runtime-config` asks for them. The tables come from `cargo xtask facts`; what is special to a kind is not here but in its own file.

mod openapi;
mod resources;
mod runtime_config;

use std::sync::LazyLock;

use skiff_schema::Schema;

pub use openapi::{KUBERNETES_VERSION, openapi, openapi_of};
pub use resources::{Resource, Storage, Subresource};
pub use runtime_config::{RuntimeConfig, RuntimeConfigError};

const TYPES: &str = include_str!("../../data/types.txt");
const RESOURCES_TEXT: &str = include_str!("../../data/resources.txt");

static SCHEMA: LazyLock<Schema> =
    LazyLock::new(|| Schema::parse(TYPES).expect("the committed type table is well formed"));

static RESOURCES: LazyLock<Vec<Resource>> = LazyLock::new(|| {
    resources::parse(RESOURCES_TEXT, schema()).expect("the committed resource table is well formed")
});

/// The types of all built-in kinds.
pub fn schema() -> &'static Schema {
    &SCHEMA
}

/// All resources, in the order of discovery: groups as upstream ranks them, preferred versions first. A server serves
/// those that its [`RuntimeConfig`] does.
pub fn resources() -> &'static [Resource] {
    &RESOURCES
}

pub fn resource(group: &str, version: &str, plural: &str) -> Option<&'static Resource> {
    resources()
        .iter()
        .find(|r| r.plural == plural && r.group == group && r.version == version)
}

pub fn resource_of_kind(group: &str, version: &str, kind: &str) -> Option<&'static Resource> {
    resources()
        .iter()
        .find(|r| r.kind == kind && r.group == group && r.version == version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_stable_versions_are_served_by_default() {
        for resource in resources() {
            let stable = !resource.version.contains("alpha") && !resource.version.contains("beta");
            assert_eq!(resource.on_by_default, stable, "{}", resource.api_version());
        }
        assert!(resources().len() > 60, "{}", resources().len());
    }

    #[test]
    fn storage_keys_are_upstreams() {
        let check = |group, plural, expected: Option<&str>| {
            let resource = resources()
                .iter()
                .find(|r| r.group == group && r.plural == plural)
                .expect(plural);
            assert_eq!(resource.storage.as_ref().map(|s| s.key), expected, "{plural}");
        };
        check("", "pods", Some("pods"));
        check("", "services", Some("services/specs"));
        check("", "endpoints", Some("services/endpoints"));
        check("", "nodes", Some("minions"));
        check("", "replicationcontrollers", Some("controllers"));
        check("networking.k8s.io", "ingresses", Some("ingress"));
        check("events.k8s.io", "events", Some("events"));
        check(
            "apiextensions.k8s.io",
            "customresourcedefinitions",
            Some("apiextensions.k8s.io/customresourcedefinitions"),
        );
        check("authorization.k8s.io", "subjectaccessreviews", None);
        check("", "componentstatuses", None);
    }

    #[test]
    fn every_resource_has_its_types() {
        let deployments = resource("apps", "v1", "deployments").expect("served");
        assert_eq!(*deployments.short_names, ["deploy"]);
        assert_eq!(
            schema().get(deployments.type_id).name,
            "io.k8s.api.apps.v1.Deployment"
        );
        let list = deployments.list_type_id.expect("listed");
        assert_eq!(schema().get(list).short_name(), "DeploymentList");
        let scale = deployments.subresource("scale").expect("served");
        assert_eq!(
            (scale.group, scale.version, scale.kind),
            ("autoscaling", "v1", "Scale")
        );
        for resource in resources() {
            assert_eq!(
                resource.verbs.contains(&"list"),
                resource.list_type_id.is_some(),
                "{}",
                resource.plural
            );
        }
    }
}
