//! The Node authorizer: what a kubelet may do is the rules of `system:node`, for users `system:node:NAME` in
//! group `system:nodes`.
//!
//! Thin: it does not yet limit Secrets, ConfigMaps and volumes to those of the node's own pods.

use crate::bootstrap::node_rules;
use crate::{Attributes, Decision, UserInfo};

pub fn authorize(user: &UserInfo, attributes: &Attributes<'_>) -> Option<Decision> {
    if !user.name.starts_with("system:node:") || !user.in_group("system:nodes") {
        return None;
    }
    let allowed = node_rules().iter().any(|rule| rule.allows(attributes));
    allowed.then_some(Decision {
        allowed: true,
        reason: String::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubelet_may_do_its_work_and_no_more() {
        let kubelet = UserInfo::new("system:node:a", ["system:nodes"]);
        let may = |user: &UserInfo, verb, resource, subresource| {
            let wanted = Attributes {
                verb,
                is_resource: true,
                resource,
                subresource,
                namespace: "x",
                ..Attributes::default()
            };
            authorize(user, &wanted).is_some_and(|d| d.allowed)
        };
        assert!(may(&kubelet, "patch", "pods", "status"));
        assert!(!may(&kubelet, "create", "deployments", ""));
        assert!(!may(
            &UserInfo::new("system:node:a", ["others"]),
            "patch",
            "pods",
            "status"
        ));
    }
}
