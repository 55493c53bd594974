//! The Node authorizer: what a kubelet may do. Users `system:node:NAME` in group `system:nodes` read what their own pods
//! name, and touch their own node, lease and CSINode; the rest are the rules of `system:node`. What a rule here cannot
//! see (the content of what is written) is left to the admission plugin NodeRestriction.

mod graph;

pub use graph::{Graph, Sort};

use skiff_meta::selector::FieldSelector;

use crate::{Attributes, Rule, UserInfo};

const NODE_LEASES: &str = "kube-node-lease";

/// The name of the node that a user is; empty if it has none.
pub fn node_name(user: &UserInfo) -> Option<&str> {
    let name = user.name.strip_prefix("system:node:")?;
    user.in_group(crate::NODES_GROUP).then_some(name)
}

/// What the authorizer says: yes, or why it does not say yes (there may be nothing to say).
pub enum Opinion {
    Allowed,
    None(String),
}

use Opinion::Allowed;

fn none(why: impl Into<String>) -> Opinion {
    Opinion::None(why.into())
}

/// The opinion about a request; `None` about those who are no nodes. `rules` are those of `system:node`.
pub fn authorize(graph: &Graph, rules: &[Rule], user: &UserInfo, a: &Attributes<'_>) -> Option<Opinion> {
    let node = node_name(user)?;
    if node.is_empty() {
        let user = skiff_meta::field::quote(&user.name);
        return Some(none(format!("unknown node for user {user}")));
    }
    let asked = NodeRequest {
        graph,
        rules,
        node,
        a,
    };
    if a.is_resource
        && let Some(opinion) = asked.of_resource()
    {
        return Some(opinion);
    }
    let by_rule = rules.iter().any(|rule| rule.allows(a));
    Some(if by_rule { Allowed } else { none("") })
}

struct NodeRequest<'a> {
    graph: &'a Graph,
    rules: &'a [Rule],
    node: &'a str,
    a: &'a Attributes<'a>,
}

impl NodeRequest<'_> {
    /// About resources whose objects belong to nodes; `None` about others.
    fn of_resource(&self) -> Option<Opinion> {
        Some(match (self.a.group, self.a.resource) {
            ("", "secrets") => self.read(Sort::Secret),
            ("", "configmaps") => self.read(Sort::ConfigMap),
            ("", "persistentvolumeclaims") if self.a.subresource == "status" => match self.a.verb {
                "update" | "patch" => self.related(Sort::PersistentVolumeClaim),
                _ => none("can only get/update/patch this type"),
            },
            ("", "persistentvolumeclaims") => self.get(Sort::PersistentVolumeClaim),
            ("", "persistentvolumes") => self.get(Sort::PersistentVolume),
            ("resource.k8s.io", "resourceclaims") => self.get(Sort::ResourceClaim),
            ("storage.k8s.io", "volumeattachments") => self.get(Sort::VolumeAttachment),
            ("", "serviceaccounts") => self.service_account(),
            ("coordination.k8s.io", "leases") => self.lease(),
            ("storage.k8s.io", "csinodes") => self.csi_node(),
            ("resource.k8s.io", "resourceslices") => self.resource_slice(),
            ("", "nodes") => self.nodes(),
            ("", "pods") => self.pods(),
            ("certificates.k8s.io", "podcertificaterequests") => self.pod_certificate_request(),
            _ => return None,
        })
    }

    /// Whether the object that is named belongs to the node.
    fn related(&self, sort: Sort) -> Opinion {
        let (graph, a, node) = (self.graph, self.a, self.node);
        if a.name.is_empty() {
            return none("No Object name found");
        }
        if graph.belongs(sort, a.namespace, a.name, node) {
            return Allowed;
        }
        none(format!(
            "no relationship found between node '{node}' and this object"
        ))
    }

    fn get(&self, sort: Sort) -> Opinion {
        if self.a.verb != "get" {
            return none("can only get individual resources of this type");
        }
        if !self.a.subresource.is_empty() {
            return none("cannot get subresource");
        }
        self.related(sort)
    }

    fn read(&self, sort: Sort) -> Opinion {
        if !matches!(self.a.verb, "get" | "list" | "watch") {
            return none("can only read resources of this type");
        }
        if !self.a.subresource.is_empty() {
            return none("cannot read subresource");
        }
        if self.a.namespace.is_empty() {
            return none("can only read namespaced object of this type");
        }
        self.related(sort)
    }

    fn service_account(&self) -> Opinion {
        let a = self.a;
        if a.verb == "get" && a.subresource.is_empty() {
            return self.read(Sort::ServiceAccount);
        }
        if a.verb != "create" || a.name.is_empty() {
            return none("can only create tokens for individual service accounts");
        }
        if a.subresource != "token" {
            return none("can only create token subresource of serviceaccount");
        }
        self.related(Sort::ServiceAccount)
    }

    /// Verbs on an object that has the name of the node. What is created has no name here yet.
    fn own(&self, what: &str, object: &str) -> Opinion {
        match self.a.verb {
            "create" => Allowed,
            "get" | "update" | "patch" | "delete" if self.a.name == self.node => Allowed,
            "get" | "update" | "patch" | "delete" => none(format!(
                "can only access {object} with the same name as the requesting node"
            )),
            _ => none(format!("can only get, create, update, patch, or delete a {what}")),
        }
    }

    fn lease(&self) -> Opinion {
        let known = matches!(self.a.verb, "get" | "create" | "update" | "patch" | "delete");
        if known && self.a.namespace != NODE_LEASES {
            return none(format!(
                "can only access leases in the \"{NODE_LEASES}\" system namespace"
            ));
        }
        self.own("node lease", "node lease")
    }

    fn csi_node(&self) -> Opinion {
        let known = matches!(self.a.verb, "get" | "create" | "update" | "patch" | "delete");
        if known && !self.a.subresource.is_empty() {
            return none("cannot authorize CSINode subresources");
        }
        self.own("CSINode", "CSINode")
    }

    fn resource_slice(&self) -> Opinion {
        if !self.a.subresource.is_empty() {
            return none("cannot authorize ResourceSlice subresources");
        }
        match self.a.verb {
            "create" => Allowed,
            "get" | "update" | "patch" | "delete" => self.related(Sort::ResourceSlice),
            "watch" | "list" | "deletecollection" if self.selects("spec.nodeName") => Allowed,
            "watch" | "list" | "deletecollection" => {
                none("can only list/watch/deletecollection resourceslices with nodeName field selector")
            }
            _ => none(
                "only the following verbs are allowed for a ResourceSlice: get, watch, list, create, update, patch, delete, deletecollection",
            ),
        }
    }

    fn pod_certificate_request(&self) -> Opinion {
        let a = self.a;
        let is_named = |rule: &Rule| rule.resources.iter().any(|one| one == a.resource);
        if !self.rules.iter().any(is_named) {
            // COMPAT: the feature is off, and then nodes have no access.
            return none("");
        }
        if !a.subresource.is_empty() {
            return none("nodes may not access the status subresource of PodCertificateRequests");
        }
        match a.verb {
            // What it asks for is looked at by NodeRestriction.
            "create" => Allowed,
            "get" => self.related(Sort::PodCertificateRequest),
            "list" | "watch" if self.selects("spec.nodeName") => Allowed,
            "list" | "watch" => {
                none("can only list/watch podcertificaterequests with nodeName field selector")
            }
            verb => none(format!("nodes may not {verb} podcertificaterequests")),
        }
    }

    fn nodes(&self) -> Opinion {
        let (a, node) = (self.a, self.node);
        match (a.subresource, a.verb) {
            ("", "create" | "update" | "patch") | ("status", "update" | "patch") => Allowed,
            // By name, not by what is there: a kubelet looks for its node before it makes it.
            ("", "get" | "list" | "watch") if a.name == node => Allowed,
            ("", "get" | "list" | "watch") if a.name.is_empty() => none(format!(
                "node '{node}' cannot read all nodes, only its own Node object"
            )),
            ("", "get" | "list" | "watch") => none(format!(
                "node '{node}' cannot read '{}', only its own Node object",
                a.name
            )),
            _ => none(""),
        }
    }

    fn pods(&self) -> Opinion {
        let a = self.a;
        match (a.subresource, a.verb) {
            ("", "get") => self.get(Sort::Pod),
            ("", "list" | "watch") if self.selects("spec.nodeName") => Allowed,
            ("", "list" | "watch") if !a.name.is_empty() => self.related(Sort::Pod),
            ("", "list" | "watch") => none("can only list/watch pods with spec.nodeName field selector"),
            // Mirror pods, status and eviction of its own pods: NodeRestriction sees to that.
            ("", "create" | "delete") | ("status", "update" | "patch") | ("eviction", "create") => Allowed,
            _ => none(""),
        }
    }

    /// Whether the request is limited to objects whose field is this node.
    fn selects(&self, field: &str) -> bool {
        // Read as the list reads it: a comma that is escaped does not begin another term.
        FieldSelector::parse(self.a.field_selector)
            .is_ok_and(|selector| selector.required_value(field) == Some(self.node))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::node_rules;
    use serde_json::json;

    fn check(verb: &str, what: &str, place: &str, expected: &str) {
        check_serving(false, verb, what, place, expected);
    }

    /// With what is off by default, or without.
    fn check_serving(serves: bool, verb: &str, what: &str, place: &str, expected: &str) {
        let graph = Graph::default();
        graph.set_node(Sort::PodCertificateRequest, "ns", "req-mine", "n");
        graph.set_node(Sort::PodCertificateRequest, "ns", "req-theirs", "m");
        graph.add_pod(&json!({"metadata": {"namespace": "ns", "name": "p"}, "spec": {"nodeName": "n", "serviceAccountName": "sa",
            "imagePullSecrets": [{"name": "s"}], "volumes": [{"configMap": {"name": "c"}}, {"persistentVolumeClaim": {"claimName": "v"}}]}}));
        let (path, subresource) = what.split_once(':').unwrap_or((what, ""));
        let (group, resource) = path.split_once('/').unwrap_or(("", path));
        let (place, field_selector) = place.split_once('?').unwrap_or((place, ""));
        let (namespace, name) = place.split_once('/').unwrap_or(("", place));
        let wanted = Attributes {
            verb,
            is_resource: true,
            group,
            resource,
            subresource,
            namespace,
            name,
            field_selector,
            ..Attributes::default()
        };
        let user = UserInfo::new("system:node:n", ["system:nodes"]);
        let said = match authorize(&graph, &node_rules(|_, _, _| serves), &user, &wanted) {
            None => "not a node".to_owned(),
            Some(Allowed) => "yes".to_owned(),
            Some(Opinion::None(why)) => why,
        };
        assert_eq!(said, expected, "{verb} {what} {place}");
    }

    #[test]
    fn a_kubelet_reads_what_its_pods_name() {
        let unrelated = "no relationship found between node 'n' and this object";
        check("get", "secrets", "ns/s", "yes");
        check("watch", "secrets", "ns/s", "yes");
        check("get", "secrets", "ns/other", unrelated);
        check("get", "secrets", "other/s", unrelated);
        check("list", "secrets", "ns/", "No Object name found");
        check(
            "list",
            "secrets",
            "",
            "can only read namespaced object of this type",
        );
        check(
            "update",
            "secrets",
            "ns/s",
            "can only read resources of this type",
        );
        check("get", "configmaps", "ns/c", "yes");
        check("get", "persistentvolumeclaims", "ns/v", "yes");
        check("patch", "persistentvolumeclaims:status", "ns/v", "yes");
        check(
            "list",
            "persistentvolumeclaims",
            "ns/",
            "can only get individual resources of this type",
        );
        check("create", "serviceaccounts:token", "ns/sa", "yes");
        check("get", "serviceaccounts", "ns/sa", "yes");
        check("create", "serviceaccounts:token", "ns/default", unrelated);
        check(
            "create",
            "serviceaccounts",
            "ns/",
            "can only create tokens for individual service accounts",
        );
        check(
            "create",
            "serviceaccounts:other",
            "ns/sa",
            "can only create token subresource of serviceaccount",
        );
        check(
            "get",
            "persistentvolumeclaims:other",
            "ns/v",
            "cannot get subresource",
        );
        check("get", "secrets:other", "ns/s", "cannot read subresource");
        check("get", "secrets", "ns/", "No Object name found");
        check("create", "resource.k8s.io/resourceslices", "", "yes");
        check("get", "resource.k8s.io/resourceslices", "s", unrelated);
        check(
            "get",
            "resource.k8s.io/resourceslices:status",
            "s",
            "cannot authorize ResourceSlice subresources",
        );
        check(
            "list",
            "resource.k8s.io/resourceslices",
            "?spec.nodeName=n",
            "yes",
        );
        for selector in ["", "?spec.nodeName=m", "?spec.driver=n"] {
            check(
                "deletecollection",
                "resource.k8s.io/resourceslices",
                selector,
                "can only list/watch/deletecollection resourceslices with nodeName field selector",
            );
        }
    }

    #[test]
    fn a_kubelet_asks_for_certificates_of_its_pods() {
        let requests = "certificates.k8s.io/podcertificaterequests";
        let status = "certificates.k8s.io/podcertificaterequests:status";
        let check = |verb: &str, what: &str, place: &str, expected: &str| {
            check_serving(true, verb, what, place, expected);
            // Where the API is off nothing is allowed.
            check_serving(false, verb, what, place, "");
        };
        check("create", requests, "ns/", "yes");
        check("get", requests, "ns/req-mine", "yes");
        let unrelated = "no relationship found between node 'n' and this object";
        check("get", requests, "ns/req-theirs", unrelated);
        check("get", requests, "other/req-mine", unrelated);
        check("watch", requests, "?spec.nodeName=n", "yes");
        let unselected = "can only list/watch podcertificaterequests with nodeName field selector";
        check("list", requests, "?spec.nodeName=m", unselected);
        check("list", requests, "ns/", unselected);
        check(
            "delete",
            requests,
            "ns/req-mine",
            "nodes may not delete podcertificaterequests",
        );
        check(
            "update",
            status,
            "ns/req-mine",
            "nodes may not access the status subresource of PodCertificateRequests",
        );
    }

    #[test]
    fn a_kubelet_touches_what_is_its_own() {
        check("get", "nodes", "n", "yes");
        check(
            "get",
            "nodes",
            "m",
            "node 'n' cannot read 'm', only its own Node object",
        );
        check(
            "list",
            "nodes",
            "",
            "node 'n' cannot read all nodes, only its own Node object",
        );
        check("patch", "nodes:status", "n", "yes");
        check("delete", "nodes", "n", "");
        check("update", "coordination.k8s.io/leases", "kube-node-lease/n", "yes");
        check("create", "coordination.k8s.io/leases", "kube-node-lease/", "yes");
        check(
            "update",
            "coordination.k8s.io/leases",
            "kube-node-lease/m",
            "can only access node lease with the same name as the requesting node",
        );
        check(
            "update",
            "coordination.k8s.io/leases",
            "default/n",
            "can only access leases in the \"kube-node-lease\" system namespace",
        );
        check(
            "list",
            "coordination.k8s.io/leases",
            "kube-node-lease/",
            "can only get, create, update, patch, or delete a node lease",
        );
        check("get", "storage.k8s.io/csinodes", "n", "yes");
        check("get", "pods", "ns/p", "yes");
        check("list", "pods", "?spec.nodeName=n", "yes");
        check("watch", "pods", "?spec.nodeName==n,a=b", "yes");
        check(
            "watch",
            "pods",
            "?metadata.name!=x\\,spec.nodeName=n",
            "can only list/watch pods with spec.nodeName field selector",
        );
        check(
            "watch",
            "pods",
            "?spec.nodeName!=n",
            "can only list/watch pods with spec.nodeName field selector",
        );
        check(
            "watch",
            "pods",
            "?spec.nodeName=m",
            "can only list/watch pods with spec.nodeName field selector",
        );
        check("patch", "pods:status", "ns/p", "yes");
        check("create", "pods:binding", "ns/p", "");
        check("list", "services", "", "yes");
        check("create", "apps/deployments", "ns/", "");
    }

    #[test]
    fn others_are_none_of_its_business() {
        let graph = Graph::default();
        for (name, group) in [("system:node:n", "others"), ("someone", "system:nodes")] {
            let user = UserInfo::new(name, [group]);
            assert!(authorize(&graph, &[], &user, &Attributes::default()).is_none());
        }
    }
}
