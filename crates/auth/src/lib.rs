//! Who a request comes from, and what it may do. Authenticators and authorizers, one file each.
//!
//! The chain of authenticators is [`Authenticator`]: the first that recognises a credential decides, and a
//! credential that is present but bad is refused. Authorizers answer allow or no opinion; the first that allows
//! wins. Nothing here reads the store: the server feeds RBAC objects in and answers look-ups.

mod authenticator;
mod bootstrap;
mod escalation;
mod impersonation;
pub mod node;
mod rbac;
mod reconcile;
pub mod request_header;
mod rule;
mod service_account;
mod x509;

pub use authenticator::{AuthError, Authenticator, Peer};
pub use bootstrap::{bootstrap_objects, fill_aggregated};
pub use escalation::{covers, missing_rules};
pub use impersonation::{Impersonated, Impersonation, Impersonations, requested_impersonation};
pub use rbac::Rbac;
pub use reconcile::reconcile;
pub use request_header::RequestHeader;
pub use rule::Rule;
pub use service_account::{
    BoundObject, Lookup, TokenIssuer, TokenRequest, TokenSpec, TokenVerifier, audiences_of,
};

use std::collections::BTreeMap;

pub const ANONYMOUS: &str = "system:anonymous";
pub const UNAUTHENTICATED_GROUP: &str = "system:unauthenticated";
pub const AUTHENTICATED_GROUP: &str = "system:authenticated";
pub const MASTERS_GROUP: &str = "system:masters";
pub const NODES_GROUP: &str = "system:nodes";
/// The extra field of a service account's token that names the node of its pod.
pub const NODE_NAME_KEY: &str = "authentication.kubernetes.io/node-name";

/// An authenticated identity.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UserInfo {
    pub name: String,
    pub uid: String,
    pub groups: Vec<String>,
    pub extra: BTreeMap<String, Vec<String>>,
}

impl UserInfo {
    /// A user known by certificate or configuration; `system:authenticated` is added.
    pub fn new(name: impl Into<String>, groups: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let mut groups: Vec<String> = groups.into_iter().map(Into::into).collect();
        if !groups.iter().any(|g| g == AUTHENTICATED_GROUP) {
            groups.push(AUTHENTICATED_GROUP.to_owned());
        }
        Self {
            name: name.into(),
            groups,
            ..Self::default()
        }
    }

    pub fn anonymous() -> Self {
        Self {
            name: ANONYMOUS.to_owned(),
            groups: vec![UNAUTHENTICATED_GROUP.to_owned()],
            ..Self::default()
        }
    }

    /// The identity of a service account.
    pub fn service_account(namespace: &str, name: &str) -> Self {
        let groups = [
            "system:serviceaccounts".to_owned(),
            format!("system:serviceaccounts:{namespace}"),
        ];
        Self::new(format!("system:serviceaccount:{namespace}:{name}"), groups)
    }

    pub fn in_group(&self, group: &str) -> bool {
        self.groups.iter().any(|g| g == group)
    }
}

/// What a request wants to do, as authorizers see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Attributes<'a> {
    pub verb: &'a str,
    /// False for paths such as `/healthz`; then only `verb` and `path` count.
    pub is_resource: bool,
    pub group: &'a str,
    pub version: &'a str,
    pub resource: &'a str,
    pub subresource: &'a str,
    pub namespace: &'a str,
    pub name: &'a str,
    pub path: &'a str,
    /// Of a list, a watch or a deletion of many, as the client wrote it.
    pub field_selector: &'a str,
}

impl Attributes<'_> {
    /// The clause of a 403 that says what was missing, in upstream's words.
    pub fn denied(&self, user: &UserInfo) -> String {
        let user = skiff_meta::field::quote(&user.name);
        let quote = skiff_meta::field::quote;
        if !self.is_resource {
            return format!("User {user} cannot {} path {}", self.verb, quote(self.path));
        }
        let resource = match self.subresource {
            "" => self.resource.to_owned(),
            sub => format!("{}/{sub}", self.resource),
        };
        let scope = match self.namespace {
            "" => "at the cluster scope".to_owned(),
            namespace => format!("in the namespace {}", quote(namespace)),
        };
        format!(
            "User {user} cannot {} resource {} in API group {} {scope}",
            self.verb,
            quote(&resource),
            quote(self.group)
        )
    }
}

/// The answer of an authorizer. `reason` is shown to the user when nothing allows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Decision {
    pub allowed: bool,
    pub reason: String,
}

/// Authorizers in a row: `system:masters`, Node, RBAC.
#[derive(Debug, Default)]
pub struct Authorizer {
    pub rbac: Rbac,
    /// What belongs to which node.
    pub nodes: node::Graph,
}

impl Authorizer {
    pub fn authorize(&self, user: &UserInfo, attributes: &Attributes<'_>) -> Decision {
        self.decide(user, attributes, |rbac| rbac.authorize(user, attributes))
    }

    /// The same, with the reason of RBAC why something is allowed: for those who ask for it.
    pub fn explain(&self, user: &UserInfo, attributes: &Attributes<'_>) -> Decision {
        self.decide(user, attributes, |rbac| rbac.explain(user, attributes))
    }

    fn decide(
        &self,
        user: &UserInfo,
        attributes: &Attributes<'_>,
        rbac: impl FnOnce(&Rbac) -> Decision,
    ) -> Decision {
        let allowed = Decision {
            allowed: true,
            reason: String::new(),
        };
        if user.in_group(MASTERS_GROUP) {
            return allowed;
        }
        let why = match node::authorize(&self.nodes, user, attributes) {
            None => String::new(),
            Some(node::Opinion::Allowed) => return allowed,
            Some(node::Opinion::None(why)) => why,
        };
        let mut decision = rbac(&self.rbac);
        // A refusal has the reasons of all who were asked.
        if !decision.allowed && !why.is_empty() {
            if !decision.reason.is_empty() {
                decision.reason.insert(0, '\n');
            }
            decision.reason.insert_str(0, &why);
        }
        decision
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_was_missing() {
        let user = UserInfo::anonymous();
        let list = Attributes {
            verb: "list",
            is_resource: true,
            resource: "pods",
            namespace: "default",
            ..Attributes::default()
        };
        assert_eq!(
            list.denied(&user),
            "User \"system:anonymous\" cannot list resource \"pods\" in API group \"\" in the namespace \"default\""
        );
        let path = Attributes {
            verb: "get",
            path: "/metrics",
            ..Attributes::default()
        };
        assert_eq!(
            path.denied(&user),
            "User \"system:anonymous\" cannot get path \"/metrics\""
        );
    }
}
