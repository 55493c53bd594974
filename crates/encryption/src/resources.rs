//! Which resource a key of the store belongs to.

use std::collections::HashMap;
use std::sync::LazyLock;

use skiff_api::facts;

pub(crate) const ROOT: &str = "/registry/";

/// The group and the plural name of built-in resources by the key below the root. A resource that several groups
/// serve is the one of the group that it is stored in.
static BUILT_IN: LazyLock<HashMap<&'static str, (&'static str, &'static str)>> = LazyLock::new(|| {
    let mut found = HashMap::new();
    for resource in facts::resources() {
        if let Some(storage) = &resource.storage {
            found.insert(storage.key, (storage.group, resource.plural));
        }
    }
    found
});

/// The part of a key below the root that names its resource, if it is a resource's.
fn resource_part(key: &str) -> Option<&str> {
    let rest = key.strip_prefix(ROOT)?;
    let first = rest.find('/')?;
    if BUILT_IN.contains_key(&rest[..first]) {
        return Some(&rest[..first]);
    }
    let second = rest[first + 1..].find('/')?;
    Some(&rest[..first + 1 + second])
}

/// The record of the allocated node ports, which is no resource that is served.
const NODE_PORTS: &str = "/registry/ranges/servicenodeports";

/// Group and plural name of the resource that a key belongs to.
pub(crate) fn of_key(key: &str) -> Option<(&str, &str)> {
    if key == NODE_PORTS {
        return Some(("", "servicenodeportallocations"));
    }
    let part = resource_part(key)?;
    match BUILT_IN.get(part) {
        Some(found) => Some(*found),
        // One that was defined at run time: its group and its name.
        None => part.split_once('/'),
    }
}

/// The prefix of all keys of the resource of this one.
pub(crate) fn prefix_of(key: &str) -> String {
    match resource_part(key) {
        Some(part) => format!("{ROOT}{part}/"),
        None => key.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_tell_their_resource() {
        for (key, expected) in [
            ("/registry/secrets/default/a", Some(("", "secrets"))),
            ("/registry/deployments/default/a", Some(("apps", "deployments"))),
            ("/registry/services/specs/default/a", Some(("", "services"))),
            ("/registry/minions/a", Some(("", "nodes"))),
            ("/registry/events/default/a", Some(("", "events"))),
            (
                "/registry/example.com/foos/default/a",
                Some(("example.com", "foos")),
            ),
            (
                "/registry/apiregistration.k8s.io/apiservices/v1.apps",
                Some(("apiregistration.k8s.io", "apiservices")),
            ),
            (NODE_PORTS, Some(("", "servicenodeportallocations"))),
            ("/skiff/release", None),
            ("/registry/x", None),
        ] {
            assert_eq!(of_key(key), expected, "{key}");
        }
        assert_eq!(prefix_of("/registry/secrets/default/a"), "/registry/secrets/");
        assert_eq!(
            prefix_of("/registry/example.com/foos/a"),
            "/registry/example.com/foos/"
        );
    }
}
