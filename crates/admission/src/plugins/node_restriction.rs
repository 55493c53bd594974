//! NodeRestriction: a kubelet writes its own node, its own pods' status, and little else. The Node authorizer has seen
//! who asks for what by name; here the content of what is written is looked at.

use async_trait::async_trait;
use serde_json::Value;
use skiff_api::core::references;
use skiff_api::node::{at, list, same, text};
use skiff_meta::field::quote;
use skiff_meta::{GroupResource, Status};

use super::certificate_subject_restriction::common_name;
use crate::{Attributes, Lister, Operation, Plugin};

const NODE_LEASES: &str = "kube-node-lease";
const MIRROR: &str = "kubernetes.io/config.mirror";

pub struct NodeRestriction;

/// The name of the node that the user is.
fn node_of<'a>(a: &Attributes<'a>) -> Option<&'a str> {
    let name = a.user.name.strip_prefix("system:node:")?;
    a.user
        .groups
        .iter()
        .any(|group| group == "system:nodes")
        .then_some(name)
}

#[async_trait]
impl Plugin for NodeRestriction {
    fn name(&self) -> &'static str {
        "NodeRestriction"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation != Operation::Connect
    }

    fn concerns(&self, a: &Attributes<'_>) -> bool {
        node_of(a).is_some()
    }

    async fn admit(&self, a: &mut Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        let Some(node) = node_of(a) else {
            return Ok(());
        };
        if node.is_empty() {
            let user = quote(&a.user.name);
            return Err(a.forbidden(format_args!("could not determine node from user {user}")));
        }
        match (a.group, a.resource, a.subresource) {
            ("", "pods", "") => pod(a, node, lister).await,
            ("", "pods", "status") => pod_status(a, node),
            ("", "pods", "eviction") => pod_eviction(a, node, lister).await,
            ("", "pods", other) => Err(a.forbidden(format_args!(
                "unexpected pod subresource {}, only 'status' and 'eviction' are allowed",
                quote(other)
            ))),
            ("", "nodes", _) => own_node(a, node),
            ("", "persistentvolumeclaims", "status") => claim_status(a, node),
            ("", "persistentvolumeclaims", _) => Err(a.forbidden("may only update PVC status")),
            ("", "serviceaccounts", "token") if a.operation == Operation::Create => {
                token(a, node, lister).await
            }
            ("certificates.k8s.io", "podcertificaterequests", _) => {
                pod_certificate_request(a, node, lister).await
            }
            ("coordination.k8s.io", "leases", _) => {
                if a.namespace != NODE_LEASES {
                    let why = format!("can only access leases in the \"{NODE_LEASES}\" system namespace");
                    return Err(a.forbidden(why));
                }
                own_name(a, node, "node lease")
            }
            ("storage.k8s.io", "csinodes", _) => own_name(a, node, "CSINode"),
            ("resource.k8s.io", "resourceslices", _) => resource_slice(a, node),
            ("certificates.k8s.io", "certificatesigningrequests", _) => signing_request(a, node),
            _ => Ok(()),
        }
    }
}

fn unexpected(a: &Attributes<'_>) -> Status {
    a.forbidden(format_args!(
        "unexpected operation {}",
        quote(a.operation.as_str())
    ))
}

/// A pod of the request's namespace, which must be there.
async fn existing(a: &Attributes<'_>, name: &str, lister: &dyn Lister) -> Result<Value, Status> {
    let found = lister.get("", "pods", a.namespace, name).await?;
    // COMPAT: upstream's listers speak of one.
    found.ok_or_else(|| Status::not_found(&GroupResource::new("", "pod"), name))
}

async fn pod(a: &Attributes<'_>, node: &str, lister: &dyn Lister) -> Result<(), Status> {
    match a.operation {
        Operation::Create => mirror_pod(a, node, lister).await,
        Operation::Delete => {
            let pod = existing(a, a.name, lister).await?;
            if text(&pod, "spec.nodeName") != node {
                return Err(a.forbidden(format_args!(
                    "node {} can only delete pods with spec.nodeName set to itself",
                    quote(node)
                )));
            }
            Ok(())
        }
        other => Err(a.forbidden(format_args!(
            "unexpected operation {}, node {} can only create and delete mirror pods",
            quote(other.as_str()),
            quote(node)
        ))),
    }
}

/// A pod that a node makes mirrors a file of its own: it is the node's, and names nothing else.
async fn mirror_pod(a: &Attributes<'_>, node: &str, lister: &dyn Lister) -> Result<(), Status> {
    let quoted = quote(node);
    let Some(pod) = a.object.as_deref() else {
        return Ok(());
    };
    let refuse = |why: String| Err(a.forbidden(why));
    if !a.is_mirror_pod() {
        return refuse(format!(
            "pod does not have \"{MIRROR}\" annotation, node {quoted} can only create mirror pods"
        ));
    }
    if text(pod, "spec.nodeName") != node {
        return refuse(format!(
            "node {quoted} can only create pods with spec.nodeName set to itself"
        ));
    }
    let owner = match list(pod, "metadata.ownerReferences") {
        [owner] => owner,
        [] => {
            return refuse(format!(
                "node {quoted} can only create pods with an owner reference set to itself"
            ));
        }
        _ => {
            return refuse(format!(
                "node {quoted} can only create pods with a single owner reference set to itself"
            ));
        }
    };
    let of = |field| text(owner, field);
    if of("apiVersion") != "v1" || of("kind") != "Node" || of("name") != node {
        return refuse(format!(
            "node {quoted} can only create pods with an owner reference set to itself"
        ));
    }
    if at(owner, "controller") != true {
        return refuse(format!(
            "node {quoted} can only create pods with a controller owner reference set to itself"
        ));
    }
    if at(owner, "blockOwnerDeletion") == true {
        return refuse(format!(
            "node {quoted} must not set blockOwnerDeletion on an owner reference"
        ));
    }
    let Some(found) = lister.get("", "nodes", "", node).await? else {
        return Err(Status::not_found(&GroupResource::new("", "node"), node));
    };
    if of("uid") != text(&found, "metadata.uid") {
        return refuse(format!(
            "node {node} UID mismatch: expected {} got {}",
            of("uid"),
            text(&found, "metadata.uid")
        ));
    }
    match references::api_object(pod) {
        Ok(None) => Ok(()),
        Ok(Some(what)) => refuse(format!("node {quoted} can not create pods that reference {what}")),
        Err(why) => refuse(format!("error checking mirror pod for API references: {why}")),
    }
}

fn pod_status(a: &Attributes<'_>, node: &str) -> Result<(), Status> {
    let (Operation::Update, Some(new), Some(old)) = (a.operation, a.object.as_deref(), a.old_object) else {
        return Err(unexpected(a));
    };
    let node_quoted = quote(node);
    let kept = |path: &str| same(at(new, path), at(old, path));
    let why = if text(old, "spec.nodeName") != node {
        format!("node {node_quoted} can only update pod status for pods with spec.nodeName set to itself")
    } else if !kept("metadata.labels") {
        format!("node {node_quoted} cannot update labels through pod status")
    } else if !kept("status.resourceClaimStatuses") {
        format!("node {node_quoted} cannot update resource claim statues")
    } else if !kept("status.extendedResourceClaimStatus") {
        format!("node {node_quoted} cannot update extended resource claim status")
    } else {
        return Ok(());
    };
    Err(a.forbidden(why))
}

async fn pod_eviction(a: &Attributes<'_>, node: &str, lister: &dyn Lister) -> Result<(), Status> {
    if a.operation != Operation::Create {
        return Err(a.forbidden(format_args!("unexpected operation {}", a.operation.as_str())));
    }
    let name = match a.name {
        "" => a.text("metadata.name"),
        name => name,
    };
    if name.is_empty() {
        return Err(a.forbidden("could not determine pod from request data"));
    }
    let pod = existing(a, name, lister).await?;
    if text(&pod, "spec.nodeName") != node {
        return Err(a.forbidden(format_args!(
            "node {node} can only evict pods with spec.nodeName set to itself"
        )));
    }
    Ok(())
}

fn claim_status(a: &Attributes<'_>, node: &str) -> Result<(), Status> {
    let (Operation::Update, Some(new), Some(old)) = (a.operation, a.object.as_deref(), a.old_object) else {
        return Err(unexpected(a));
    };
    let rest = |claim: &Value| {
        let mut claim = claim.clone();
        if let Some(metadata) = claim.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("resourceVersion");
            metadata.remove("managedFields");
        }
        if let Some(status) = claim.get_mut("status").and_then(Value::as_object_mut) {
            for field in [
                "capacity",
                "conditions",
                "allocatedResources",
                "allocatedResourceStatuses",
            ] {
                status.remove(field);
            }
        }
        claim
    };
    if same(&rest(new), &rest(old)) {
        return Ok(());
    }
    Err(a.forbidden(format_args!(
        "node {} is not allowed to update fields other than status.quantity and status.conditions",
        quote(node)
    )))
}

fn own_node(a: &Attributes<'_>, node: &str) -> Result<(), Status> {
    let quoted = quote(node);
    let refuse = |why: String| Err(a.forbidden(why));
    if a.name != node {
        return refuse(format!(
            "node {quoted} is not allowed to modify node {}",
            quote(a.name)
        ));
    }
    let Some(new) = a.object.as_deref() else {
        return Ok(());
    };
    let source = at(new, "spec.configSource");
    if a.operation == Operation::Create {
        if !source.is_null() {
            return refuse(format!(
                "node {quoted} is not allowed to create pods with a non-nil configSource"
            ));
        }
        let labels = forbidden_labels(new, &Value::Null);
        if !labels.is_empty() {
            return refuse(format!(
                "node {quoted} is not allowed to set the following labels: {}",
                labels.join(", ")
            ));
        }
    }
    let Some(old) = a.old_object.filter(|_| a.operation == Operation::Update) else {
        return Ok(());
    };
    let kept = |path: &str| same(at(new, path), at(old, path));
    if !source.is_null() && !kept("spec.configSource") {
        return refuse(format!(
            "node {quoted} is not allowed to update configSource to a new non-nil configSource"
        ));
    }
    if !kept("spec.taints") {
        return refuse(format!("node {quoted} is not allowed to modify taints"));
    }
    if !kept("metadata.ownerReferences") {
        return refuse(format!("node {quoted} is not allowed to modify ownerReferences"));
    }
    let labels = forbidden_labels(new, old);
    if !labels.is_empty() {
        return refuse(format!("is not allowed to modify labels: {}", labels.join(", ")));
    }
    Ok(())
}

/// The labels that differ and that steer workloads: not for a node to choose.
fn forbidden_labels<'a>(new: &'a Value, old: &'a Value) -> Vec<&'a str> {
    let (new, old) = (at(new, "metadata.labels"), at(old, "metadata.labels"));
    let keys = |labels: &'a Value| {
        labels
            .as_object()
            .into_iter()
            .flatten()
            .map(|(key, _)| key.as_str())
    };
    let mut forbidden: Vec<&str> = keys(new)
        .chain(keys(old))
        .filter(|key| new.get(key) != old.get(key))
        .filter(|key| is_forbidden(key))
        .collect();
    forbidden.sort_unstable();
    forbidden.dedup();
    forbidden
}

fn is_forbidden(label: &str) -> bool {
    const KUBELETS: [&str; 11] = [
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
        "topology.kubernetes.io/region",
        "failure-domain.beta.kubernetes.io/zone",
        "failure-domain.beta.kubernetes.io/region",
        "beta.kubernetes.io/instance-type",
        "node.kubernetes.io/instance-type",
        "kubernetes.io/os",
        "kubernetes.io/arch",
        "beta.kubernetes.io/os",
        "beta.kubernetes.io/arch",
    ];
    let domain = label.split_once('/').map_or("", |(domain, _)| domain);
    let within = |parent: &str| {
        domain == parent
            || domain
                .strip_suffix(parent)
                .is_some_and(|rest| rest.ends_with('.'))
    };
    if within("node-restriction.kubernetes.io") {
        return true;
    }
    let ours = within("kubernetes.io") || within("k8s.io");
    let kubelets =
        KUBELETS.contains(&label) || within("kubelet.kubernetes.io") || within("node.kubernetes.io");
    ours && !kubelets
}

/// A token is for a pod on this node, and for an audience that the pod asks for.
async fn token(a: &Attributes<'_>, node: &str, lister: &dyn Lister) -> Result<(), Status> {
    let reference = a
        .object
        .as_deref()
        .map(|object| at(object, "spec.boundObjectRef"));
    let reference = reference.unwrap_or(&Value::Null);
    let of = |field| text(reference, field);
    if of("apiVersion") != "v1" || of("kind") != "Pod" || of("name").is_empty() {
        return Err(a.forbidden("node requested token not bound to a pod"));
    }
    if of("uid").is_empty() {
        return Err(a.forbidden("node requested token with a pod binding without a uid"));
    }
    let pod = existing(a, of("name"), lister).await?;
    if of("uid") != text(&pod, "metadata.uid") {
        return Err(a.forbidden(format_args!(
            "the UID in the bound object reference ({}) does not match the UID in record. The object might have been deleted and then recreated",
            of("uid")
        )));
    }
    if text(&pod, "spec.nodeName") != node {
        return Err(a.forbidden("node requested token bound to a pod scheduled on a different node"));
    }
    let audiences = a
        .object
        .as_deref()
        .map_or(&[][..], |object| list(object, "spec.audiences"));
    let audience = match audiences {
        [] => "",
        [one] => one.as_str().unwrap_or(""),
        _ => return Err(a.forbidden("node may only request 0 or 1 audiences")),
    };
    let asks = match asks_for_audience(a, &pod, audience, lister).await? {
        Ok(asks) => asks,
        Err(why) => {
            return Err(a.forbidden(format_args!(
                "error validating audience {}: {why}",
                quote(audience)
            )));
        }
    };
    let verb = "request-serviceaccounts-token-audience";
    if asks || a.access.may(verb, "", audience, a.namespace, a.name) {
        return Ok(());
    }
    Err(a.forbidden(format_args!(
        "audience {} not found in pod spec volume, {} is not authorized to request tokens for this audience",
        quote(audience),
        a.user.name
    )))
}

/// Whether a volume of the pod, or the CSI driver behind one, wants tokens for an audience. The inner error says what
/// could not be found out.
async fn asks_for_audience(
    a: &Attributes<'_>,
    pod: &Value,
    audience: &str,
    lister: &dyn Lister,
) -> Result<Result<bool, String>, Status> {
    let mut missing = Vec::new();
    for volume in list(pod, "spec.volumes") {
        let projected = list(volume, "projected.sources").iter().any(|source| {
            at(source, "serviceAccountToken").is_object()
                && text(source, "serviceAccountToken.audience") == audience
        });
        if projected {
            return Ok(Ok(true));
        }
        let claim = match text(volume, "persistentVolumeClaim.claimName") {
            "" if at(volume, "ephemeral").is_object() => {
                format!("{}-{}", text(pod, "metadata.name"), text(volume, "name"))
            }
            name => name.to_owned(),
        };
        let driver = if claim.is_empty() {
            text(volume, "csi.driver").to_owned()
        } else {
            let found = lister
                .get("", "persistentvolumeclaims", a.namespace, &claim)
                .await?;
            let Some(found) = found else {
                missing.push(format!("persistentvolumeclaim {} not found", quote(&claim)));
                continue;
            };
            let name = text(&found, "spec.volumeName");
            let Some(found) = lister.get("", "persistentvolumes", "", name).await? else {
                missing.push(format!("persistentvolume {} not found", quote(name)));
                continue;
            };
            text(&found, "spec.csi.driver").to_owned()
        };
        if driver.is_empty() {
            continue;
        }
        let Some(found) = lister.get("storage.k8s.io", "csidrivers", "", &driver).await? else {
            missing.push(format!("csidriver.storage.k8s.io {} not found", quote(&driver)));
            continue;
        };
        let requests = list(&found, "spec.tokenRequests");
        if requests
            .iter()
            .any(|request| text(request, "audience") == audience)
        {
            return Ok(Ok(true));
        }
    }
    Ok(match missing.as_slice() {
        [] => Ok(false),
        [one] => Err(one.clone()),
        all => Err(format!("[{}]", all.join(", "))),
    })
}

/// A certificate is asked for a pod that runs on this node, by what the pod, its service account and the node are.
///
/// COMPAT: what upstream may see too late, it does not forbid: such an error is one of the server, and worth another try.
async fn pod_certificate_request(a: &Attributes<'_>, node: &str, lister: &dyn Lister) -> Result<(), Status> {
    let refuse = |why: String| Err(a.forbidden(why));
    let later = |why: String| Err(Status::failure(500, "", why));
    if a.operation != Operation::Create {
        return refuse(format!("unexpected operation {}", a.operation.as_str()));
    }
    if !a.subresource.is_empty() {
        return refuse(format!("unexpected subresource {}", a.subresource));
    }
    let Some(request) = a.object.as_deref() else {
        return Ok(());
    };
    let of = |field: &str| {
        at(request, "spec")
            .get(field)
            .and_then(Value::as_str)
            .unwrap_or("")
    };
    let missing = |what: &str, place: &str, kind: &str, name: &str| {
        later(format!(
            "while retrieving {what} {} named in the PodCertificateRequest: {kind} {} not found",
            quote(place),
            quote(name)
        ))
    };
    let place = |name: &str| format!("{}/{name}", a.namespace);
    let named_node = of("nodeName");
    if named_node != node {
        return refuse(format!(
            "PodCertificateRequest.Spec.NodeName={}, which is not the requesting node {}",
            quote(named_node),
            quote(node)
        ));
    }
    let Some(found) = with_uid(lister, "nodes", "", node, of("nodeUID")).await? else {
        return missing("node", node, "node", node);
    };
    let pod_place = place(of("podName"));
    let shown = quote(&pod_place);
    if text(&found, "metadata.uid") != of("nodeUID") {
        return later(format!(
            "PodCertificateRequest for pod {shown} names node UID {}, inconsistent with the running node ({})",
            quote(of("nodeUID")),
            quote(text(&found, "metadata.uid"))
        ));
    }
    let Some(pod) = with_uid(lister, "pods", a.namespace, of("podName"), of("podUID")).await? else {
        return missing("pod", &pod_place, "pod", of("podName"));
    };
    if text(&pod, "metadata.uid") != of("podUID") {
        return later(format!(
            "PodCertificateRequest for pod {shown} contains pod UID ({}) which differs from running pod {}",
            quote(of("podUID")),
            quote(text(&pod, "metadata.uid"))
        ));
    }
    if text(&pod, "spec.nodeName") != node {
        return refuse(format!(
            "pod {shown} is not running on node {} named in the PodCertificateRequest",
            quote(node)
        ));
    }
    if at(&pod, "metadata.annotations").get(MIRROR).is_some() {
        return refuse(format!("pod {shown} is a mirror pod"));
    }
    let (account, of_pod) = (of("serviceAccountName"), text(&pod, "spec.serviceAccountName"));
    if account != of_pod {
        return refuse(format!(
            "PodCertificateRequest for pod {shown} contains serviceAccountName ({}) that differs from running pod ({})",
            quote(account),
            quote(of_pod)
        ));
    }
    let uid = of("serviceAccountUID");
    let Some(found) = with_uid(lister, "serviceaccounts", a.namespace, account, uid).await? else {
        return missing("service account", &place(account), "serviceaccount", account);
    };
    if text(&found, "metadata.uid") != of("serviceAccountUID") {
        return later(format!(
            "PodCertificateRequest for pod {shown} names service account UID {}, which differs from the running service account ({})",
            quote(of("serviceAccountUID")),
            quote(text(&found, "metadata.uid"))
        ));
    }
    Ok(())
}

/// The object of this name: that of the cache if it has this uid, else the newest one.
async fn with_uid(
    lister: &dyn Lister,
    resource: &str,
    namespace: &str,
    name: &str,
    uid: &str,
) -> Result<Option<Value>, Status> {
    match lister.get("", resource, namespace, name).await? {
        Some(found) if text(&found, "metadata.uid") == uid => Ok(Some(found)),
        _ => lister.get_latest("", resource, namespace, name).await,
    }
}

/// Objects that have the name of their node.
fn own_name(a: &Attributes<'_>, node: &str, what: &str) -> Result<(), Status> {
    let name = match a.operation {
        Operation::Create => a.text("metadata.name"),
        _ => a.name,
    };
    if name == node {
        return Ok(());
    }
    Err(a.forbidden(format_args!(
        "can only access {what} with the same name as the requesting node"
    )))
}

fn resource_slice(a: &Attributes<'_>, node: &str) -> Result<(), Status> {
    let (slice, verb) = match a.operation {
        Operation::Create => (a.object.as_deref(), "create"),
        Operation::Delete => (a.old_object, "delete"),
        _ => return Ok(()),
    };
    if slice.is_some_and(|slice| text(slice, "spec.nodeName") == node) {
        return Ok(());
    }
    Err(a.forbidden(format_args!(
        "can only {verb} ResourceSlice with the same NodeName as the requesting node"
    )))
}

fn signing_request(a: &Attributes<'_>, node: &str) -> Result<(), Status> {
    const SIGNERS: [&str; 2] = [
        "kubernetes.io/kubelet-serving",
        "kubernetes.io/kube-apiserver-client-kubelet",
    ];
    if a.operation != Operation::Create || !SIGNERS.contains(&a.text("spec.signerName")) {
        return Ok(());
    }
    match common_name(a.text("spec.request")) {
        Err(why) => Err(a.forbidden(format_args!("unable to parse csr: {why}"))),
        Ok(name) if name.strip_prefix("system:node:") == Some(node) => Ok(()),
        Ok(_) => Err(a.forbidden(format_args!(
            "can only create a node CSR with CN=system:node:{node}"
        ))),
    }
}

#[cfg(test)]
mod tests;
