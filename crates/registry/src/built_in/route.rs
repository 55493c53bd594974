//! The paths of a built-in resource, as upstream's router has them.

use skiff_api::facts;
use skiff_meta::Status;

use crate::strategy::Route;

pub(super) fn check(facts: &facts::Resource, route: &Route<'_>) -> Result<(), Status> {
    if facts.namespaced && unnamed_namespace(route) {
        return Err(Status::bad_request("Namespace parameter required."));
    }
    if !fits_scope(facts, route) {
        return Err(Status::resource_not_found());
    }
    Ok(())
}

/// Whether `/namespaces//` stands before something that is looked for in one namespace.
fn unnamed_namespace(route: &Route<'_>) -> bool {
    route.unnamed_namespace && !matches!(route.verb, "create" | "list" | "watch" | "")
}

/// Whether such a path exists at all.
fn fits_scope(facts: &facts::Resource, route: &Route<'_>) -> bool {
    let named_by_path = route.parts.len() >= 2;
    if !facts.namespaced {
        // `/namespaces/x/nodes` is no path; `/namespaces/x` is.
        return route.namespace.is_empty() || (named_by_path && route.parts[0] == "namespaces");
    }
    // What can only be made has no path across namespaces.
    let listed = ["list", "watch", "deletecollection"]
        .iter()
        .any(|verb| facts.can(verb));
    !route.namespace.is_empty() || (!named_by_path && listed)
}
