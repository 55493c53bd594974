//! Who a request comes from, and what it may do. Authenticators and authorizers, one file each.
//!
//! The chain of authenticators is [`Authenticator`]: the first that recognises a credential decides, and a
//! credential that is present but bad is refused. Authorizers answer allow or no opinion; the first that allows
//! wins. Nothing here reads the store: the server feeds RBAC objects in and answers look-ups.

mod account_key;
mod authenticator;
mod authorization;
mod bootstrap;
mod bootstrap_token;
mod escalation;
mod expiring;
mod impersonation;
mod jwt;
mod legacy_token;
pub mod node;
mod rbac;
mod reconcile;
pub mod request_header;
mod rule;
mod service_account;
mod token_file;
mod token_notes;
mod token_webhook;
mod tokens;
mod x509;

pub use authenticator::{AuthError, Authenticator, Peer, space_before_token};
pub use authorization::{
    Abac, AuthorizationConfiguration, AuthorizationWebhook, Authorizer, BadConfiguration, BadPolicy,
    Decision, Mode, OnError, WebhookOptions,
};
pub use bootstrap::{bootstrap_objects, fill_aggregated};
pub use bootstrap_token::{BootstrapTokens, SystemSecrets};
pub use escalation::{covers, missing_rules};
pub use impersonation::{Impersonated, Impersonation, Impersonations, requested_impersonation};
pub use jwt::{Anonymous, AuthenticationConfiguration, JwtAuthenticator, JwtAuthenticators, OidcFlags};
pub use legacy_token::{LegacySecrets, LegacyTokens};
pub use rbac::Rbac;
pub use reconcile::reconcile;
pub use request_header::RequestHeader;
pub use rule::Rule;
pub use service_account::{
    BoundObject, Lookup, TokenIssuer, TokenRequest, TokenSpec, TokenVerifier, audiences_of,
};
pub use token_file::{BadTokenFile, TokenFile};
pub use token_notes::TokenNote;
pub use token_webhook::TokenWebhook;
pub use tokens::{Authenticated, TokenAuthenticator, Tokens};

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
        let name = name.into();
        let mut groups: Vec<String> = groups.into_iter().map(Into::into).collect();
        // Who is said to be unauthenticated stays it.
        let told = |g: &String| g == AUTHENTICATED_GROUP || g == UNAUTHENTICATED_GROUP;
        if name != ANONYMOUS && !groups.iter().any(told) {
            groups.push(AUTHENTICATED_GROUP.to_owned());
        }
        Self {
            name,
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
    pub label_selector: &'a str,
}

/// The same, to be kept.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnedAttributes {
    is_resource: bool,
    texts: [String; 10],
}

impl OwnedAttributes {
    pub fn view(&self) -> Attributes<'_> {
        let [
            verb,
            group,
            version,
            resource,
            subresource,
            namespace,
            name,
            path,
            fields,
            labels,
        ] = &self.texts;
        Attributes {
            verb,
            is_resource: self.is_resource,
            group,
            version,
            resource,
            subresource,
            namespace,
            name,
            path,
            field_selector: fields,
            label_selector: labels,
        }
    }
}

impl Attributes<'_> {
    pub fn to_owned(&self) -> OwnedAttributes {
        let texts = [
            self.verb,
            self.group,
            self.version,
            self.resource,
            self.subresource,
            self.namespace,
            self.name,
            self.path,
            self.field_selector,
            self.label_selector,
        ];
        OwnedAttributes {
            is_resource: self.is_resource,
            texts: texts.map(str::to_owned),
        }
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_can_be_kept() {
        let list = Attributes {
            verb: "a",
            is_resource: true,
            group: "b",
            version: "c",
            resource: "d",
            subresource: "e",
            namespace: "f",
            name: "g",
            path: "h",
            field_selector: "i",
            label_selector: "j",
        };
        assert_eq!(list.to_owned().view(), list);
    }

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
