//! The approving controller: a request for a kubelet's client certificate is approved if a SubjectAccessReview allows
//! its requester to create one, for itself or for any node. For a node that is Ready only the node itself gets one.

use std::sync::Arc;

use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::PostParams;
use skiff_client::{Action, Informer, Key, Reconcile};

use super::request::{Request, check_kubelet_client};
use super::{KUBELET_CLIENT, add_condition, is_issued, write};
use crate::{Context, Error};

/// The subresource that the requester must be allowed to create, and what the approval then says.
type Permission = (&'static str, &'static str);

const SELF: Permission = (
    "selfnodeclient",
    "Auto approving self kubelet client certificate after SubjectAccessReview.",
);
const ANY: Permission = (
    "nodeclient",
    "Auto approving kubelet client certificate after SubjectAccessReview.",
);

/// The permissions of which one is enough, in their order; none if the request is not for this controller.
fn permissions(object: &CertificateSigningRequest, request: &Request) -> Vec<Permission> {
    let usages = object.spec.usages.as_deref().unwrap_or_default();
    if object.spec.signer_name != KUBELET_CLIENT || check_kubelet_client(request, usages).is_err() {
        return Vec::new();
    }
    if object.spec.username.as_deref().unwrap_or_default() == request.common_name() {
        vec![SELF, ANY]
    } else {
        vec![ANY]
    }
}

pub(super) fn is_decided(object: &CertificateSigningRequest) -> bool {
    let conditions = object
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    is_issued(object)
        || conditions
            .into_iter()
            .any(|one| ["Approved", "Denied"].contains(&one.type_.as_str()))
}

fn review(object: &CertificateSigningRequest, subresource: &str) -> SubjectAccessReview {
    SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: object.spec.username.clone(),
            uid: object.spec.uid.clone(),
            groups: object.spec.groups.clone(),
            extra: object.spec.extra.clone(),
            resource_attributes: Some(ResourceAttributes {
                group: Some("certificates.k8s.io".into()),
                resource: Some("certificatesigningrequests".into()),
                verb: Some("create".into()),
                subresource: Some(subresource.into()),
                version: Some("*".into()),
                ..Default::default()
            }),
            ..Default::default()
        },
        ..Default::default()
    }
}

fn is_ready(node: &Node) -> bool {
    let conditions = node
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|one| one.type_ == "Ready" && one.status == "True")
}

struct Approver {
    context: Context,
    requests: Informer<CertificateSigningRequest>,
    nodes: Informer<Node>,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(Approver {
        requests: context.informers.informer(),
        nodes: context.informers.informer(),
        context: context.clone(),
    });
    context
        .controller("certificate", reconciler)
        .workers(5)
        .owns(|r| &r.requests)
        .reads(|r| &r.nodes)
        .run()
        .await;
}

impl Reconcile for Approver {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(object) = self.requests.get("", &key.name) else {
            return Ok(Action::Done);
        };
        if is_decided(&object) || object.spec.signer_name != KUBELET_CLIENT {
            return Ok(Action::Done);
        }
        let request = Request::parse(&object.spec.request.0)
            .map_err(|error| Error::Other(format!("unable to parse csr {:?}: {error}", key.name)))?;
        let permissions = permissions(&object, &request);
        if permissions.is_empty() {
            return Ok(Action::Done);
        }
        let requested = request.common_name();
        if object.spec.username.as_deref() != Some(requested)
            && let Some(node) = requested.strip_prefix("system:node:")
            && self.nodes.get("", node).is_some_and(|node| is_ready(&node))
        {
            // Beyond upstream: who has a bootstrap token could become any node that is at work.
            return Err(Error::Other(format!(
                "csr {:?} is for node {node:?}, which is Ready and renews its own certificate",
                key.name
            )));
        }
        let reviews: Api<SubjectAccessReview> = Api::all(self.context.client.clone());
        for (subresource, message) in &permissions {
            let answer = reviews
                .create(&PostParams::default(), &review(&object, subresource))
                .await?;
            if answer.status.is_some_and(|status| status.allowed) {
                return approve(&self.context, &object, message).await;
            }
        }
        let tried: Vec<&str> = permissions.iter().map(|(name, _)| *name).collect();
        Err(Error::Other(format!(
            "recognized csr {:?} as [{}] but subject access review was not approved",
            key.name,
            tried.join(" ")
        )))
    }
}

/// Writes the approval; a request that is gone needs none.
pub(super) async fn approve(
    context: &Context,
    object: &CertificateSigningRequest,
    message: &str,
) -> Result<Action, Error> {
    let mut approved = object.clone();
    add_condition(&mut approved, "Approved", "AutoApproved", message);
    write(context, "approval", &approved).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn object(spec: Value, status: Value) -> CertificateSigningRequest {
        let mut spec = spec;
        spec["request"] = json!("");
        serde_json::from_value(json!({"metadata": {"name": "r"}, "spec": spec, "status": status})).unwrap()
    }

    #[test]
    fn who_must_be_allowed_what() {
        let request = Request {
            subject: vec![(10, "system:nodes".into()), (3, "system:node:n".into())],
            ..Request::default()
        };
        let check = |spec: Value, expected: &[Permission]| {
            assert_eq!(permissions(&object(spec, json!({})), &request), expected);
        };
        let usages = json!(["digital signature", "client auth"]);
        check(
            json!({"signerName": KUBELET_CLIENT, "usages": usages, "username": "system:node:n"}),
            &[SELF, ANY],
        );
        check(
            json!({"signerName": KUBELET_CLIENT, "usages": usages, "username": "system:bootstrap:x"}),
            &[ANY],
        );
        check(
            json!({"signerName": KUBELET_CLIENT, "usages": ["server auth"], "username": "system:node:n"}),
            &[],
        );
        check(
            json!({"signerName": "kubernetes.io/kubelet-serving", "usages": usages, "username": "system:node:n"}),
            &[],
        );
        let review = review(
            &object(
                json!({"signerName": "s", "username": "u", "groups": ["g"]}),
                json!({}),
            ),
            "nodeclient",
        );
        assert_eq!(review.spec.user.as_deref(), Some("u"));
        assert_eq!(
            review.spec.resource_attributes.unwrap().subresource.as_deref(),
            Some("nodeclient")
        );
    }

    #[test]
    fn what_was_decided_stays() {
        let check = |status: Value, expected: bool| {
            let object = object(json!({"signerName": "s"}), status);
            assert_eq!(is_decided(&object), expected);
        };
        check(json!({}), false);
        check(
            json!({"conditions": [{"type": "Failed", "status": "True"}]}),
            false,
        );
        check(
            json!({"conditions": [{"type": "Denied", "status": "True"}]}),
            true,
        );
        check(json!({"certificate": "AAAA"}), true);
        let approved = object(
            json!({"signerName": "s"}),
            json!({"conditions": [{"type": "Approved", "status": ""}]}),
        );
        assert_eq!(super::super::condition(&approved, "Approved"), Some(true));
    }
}
