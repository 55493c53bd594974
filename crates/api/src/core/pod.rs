//! Pods.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skiff_meta::field::ErrorType;
use skiff_meta::{field, names};

use super::{
    container, label_keys, pod_annotations, pod_defaults, pod_gates, pod_resize, pod_row, pod_spec,
    pod_status, pod_warnings, scheduling, volume,
};
use crate::errors::Errors;
use crate::internal;
use crate::kind::{AGE, Again, BASE, Graceful, Kind, NAME, Part, text as column, unsupported_field, wide};
use crate::net;
use crate::node::{Node, at, by_text, list, number, same, text};
use crate::{strategy, walk};

pub static POD: Kind = Kind {
    kind: "Pod",
    default: |_, object| {
        if let Some(spec) = walk::object(object, "spec") {
            pod_defaults::pod_only(spec);
            pod_defaults::pod_spec(spec);
            // What no node could wait for is a second; templates keep what they say.
            if number(spec, "terminationGracePeriodSeconds") < 0 {
                walk::put(spec, "terminationGracePeriodSeconds", json!(1));
            }
        }
        walk::each(object, "status", &mut |status| {
            sync_addresses(status);
            for name in [
                "containerStatuses",
                "initContainerStatuses",
                "ephemeralContainerStatuses",
            ] {
                walk::each(
                    status,
                    &format!("{name}[].allocatedResources"),
                    &mut pod_defaults::resource_list,
                );
            }
        });
    },
    prepare_create,
    prepare_update: |new, old| {
        walk::each(new, "spec", &mut pod_defaults::sync_service_account);
        strategy::update_spec(new, old);
    },
    prepare_status_update,
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        metadata_and_spec(&root, None, &mut errors);
        let ephemeral = root.field("spec.ephemeralContainers");
        if !ephemeral.is_empty() {
            errors.forbidden(&ephemeral, "cannot be set on create");
        }
        let node = root.field("spec.nodeName");
        if !node.is_empty() && !root.field("spec.schedulingGates").is_empty() {
            errors.forbidden(&node, "cannot be set until all schedulingGates have been cleared");
        }
        pod_annotations::agree(
            at(object, "metadata.annotations"),
            &root.field("spec"),
            &mut errors,
        );
        errors.into_vec()
    },
    validate_update,
    validate_status_update,
    selectable: |object| {
        let text = |path| text(object, path).to_owned();
        let pod_ip = list(object, "status.podIPs")
            .first()
            .map_or("", |ip| self::text(ip, "ip"))
            .to_owned();
        vec![
            ("spec.nodeName", text("spec.nodeName")),
            ("spec.restartPolicy", text("spec.restartPolicy")),
            ("spec.schedulerName", text("spec.schedulerName")),
            ("spec.serviceAccountName", text("spec.serviceAccountName")),
            (
                "spec.hostNetwork",
                at(object, "spec.hostNetwork")
                    .as_bool()
                    .unwrap_or(false)
                    .to_string(),
            ),
            ("status.phase", text("status.phase")),
            ("status.podIP", pod_ip.clone()),
            ("status.podIPs", pod_ip),
            ("status.nominatedNodeName", text("status.nominatedNodeName")),
        ]
    },
    columns: &[
        NAME,
        column("Ready"),
        column("Status"),
        column("Restarts"),
        AGE,
        wide("IP"),
        wide("Node"),
        wide("Nominated Node"),
        wide("Readiness Gates"),
    ],
    row: pod_row::row,
    pod_spec: "spec",
    graceful,
    has_status: true,
    warnings: |new, old| {
        if old.is_some() {
            return Vec::new();
        }
        let mut warnings = Vec::new();
        let complaints = names::dns1123_label(text(new, "metadata.name"));
        if !complaints.is_empty() {
            warnings.push(format!(
                "metadata.name: this is used in the Pod's hostname, which can result in surprising behavior; a DNS label is recommended: [{}]",
                complaints.join(" ")
            ));
        }
        warnings.extend(pod_warnings::pod(&Node::root(new)));
        warnings
    },
    update_again: Again::ChangeObject,
    reset_fields: &[(
        "status",
        &[
            &["spec"],
            &["metadata", "deletionTimestamp"],
            &["metadata", "ownerReferences"],
        ],
    )],
    parts: &[
        Part {
            name: "ephemeralcontainers",
            prepare: prepare_ephemeral_containers_update,
            validate: validate_ephemeral_containers_update,
        },
        Part {
            name: "resize",
            prepare: pod_resize::prepare,
            validate: pod_resize::validate,
        },
    ],
    // A node asks for its own pods only, and all the time.
    indexed_fields: &["spec.nodeName"],
    unknown_field: unsupported_field,
    ..BASE
};

fn prepare_create(object: &mut Value) {
    strategy::set_generation(object, 1);
    walk::each(object, "spec", &mut pod_defaults::sync_service_account);
    // COMPAT: a class that came with the pod is believed.
    let class = match text(object, "status.qosClass") {
        "" => json!(super::qos::class(object)),
        given => json!(given),
    };
    let mut status = json!({ "phase": "Pending", "qosClass": class });
    if !list(object, "spec.schedulingGates").is_empty() {
        // A pod of this moment: its creation is the condition's last change.
        let now = at(object, "metadata.creationTimestamp").clone();
        status["conditions"] = json!([{
            "type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
            "message": "Scheduling is blocked due to non-empty scheduling gates",
            "lastProbeTime": null, "lastTransitionTime": now,
        }]);
    }
    walk::put(object, "status", status);
    label_keys::merge(object);
}

fn prepare_status_update(new: &mut Value, old: &Value) {
    strategy::status_only(new, old);
    if let Some(metadata) = new.get_mut("metadata") {
        walk::copy(metadata, at(old, "metadata"), "ownerReferences");
    }
    let Some(status) = walk::object(new, "status") else {
        return;
    };
    pod_gates::drop_disabled_status(status, at(old, "status"));
    if text(status, "qosClass").is_empty() {
        walk::copy(status, at(old, "status"), "qosClass");
    }
    if number(status, "observedGeneration") == 0 {
        walk::copy(status, at(old, "status"), "observedGeneration");
    }
    // A writer that does not know condition generations must not erase them.
    let conditions = by_text(list(old, "status.conditions"), "type");
    walk::each(status, "conditions[]", &mut |condition| {
        if number(condition, "observedGeneration") == 0
            && let Some(before) = conditions.get(text(condition, "type"))
        {
            walk::copy(condition, before, "observedGeneration");
        }
    });
}

/// A write of the subresource `ephemeralcontainers` may change nothing but these.
pub fn prepare_ephemeral_containers_update(new: &mut Value, old: &Value) {
    let wanted = at(new, "spec.ephemeralContainers").clone();
    let version = at(new, "metadata.resourceVersion").clone();
    strategy::keep_all_but(new, old, &["apiVersion", "kind"]);
    if let Some(metadata) = walk::object(new, "metadata") {
        walk::put(metadata, "resourceVersion", version);
    }
    if let Some(spec) = walk::object(new, "spec") {
        walk::put(spec, "ephemeralContainers", wanted);
        walk::each(spec, "ephemeralContainers[]", &mut pod_defaults::container);
    }
    strategy::bump_generation_if(new, old, &["spec"]);
}

/// Ephemeral containers come and stay.
pub fn validate_ephemeral_containers_update(new: &Value, old: &Value) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(new);
    metadata_and_spec(&root, Some(old), &mut errors);
    changed_annotations(&root, old, &mut errors);
    let now = root.field("spec.ephemeralContainers");
    let named = by_text(list(new, "spec.ephemeralContainers"), "name");
    for before in list(old, "spec.ephemeralContainers") {
        let name = field::quote(text(before, "name"));
        match named.get(text(before, "name")) {
            None => errors.forbidden(
                &now,
                format!("existing ephemeral containers {name} may not be removed\n"),
            ),
            Some(after) if !internal::equal("core.EphemeralContainer", after, before) => {
                let changes = internal::difference("core.EphemeralContainer", before, after);
                errors.forbidden(
                    &now,
                    format!("existing ephemeral containers {name} may not be changed\n{changes}"),
                );
            }
            Some(_) => {}
        }
    }
    errors.into_vec()
}

fn graceful(object: &Value, requested: Option<i64>) -> Graceful {
    let period = requested.unwrap_or_else(|| number(object, "spec.terminationGracePeriodSeconds"));
    let done = ["Failed", "Succeeded"].contains(&text(object, "status.phase"));
    if text(object, "spec.nodeName").is_empty() || done {
        return Graceful::After(0);
    }
    Graceful::After(if period < 0 { 1 } else { period })
}

pub(super) fn metadata_and_spec(root: &Node, old: Option<&Value>, errors: &mut Errors) {
    let annotations = root.field("metadata.annotations");
    let before = old.map(|old| at(old, "metadata.annotations"));
    pod_annotations::validate(&annotations, at(root.value, "spec"), before, errors);
    volume::claims_have_names(root, errors);
    let spec = root.field("spec");
    pod_spec::validate(&spec, old.map(|old| at(old, "spec")), true, errors);
    if spec.field("serviceAccountName").is_empty() {
        let volumes = spec.field("volumes");
        for volume in volumes.items() {
            let projected = volume.field("projected");
            let sources = projected.field("sources");
            for source in sources.items() {
                let token = source.field("serviceAccountToken");
                if token.is_set() {
                    errors.forbidden(&token, "must not be specified when serviceAccountName is not set");
                }
            }
        }
    }
    for name in ["containers", "initContainers"] {
        let containers = spec.field(name);
        for container in containers.items() {
            container::image_without_blanks(&container, errors);
        }
    }
}

fn changed_annotations(root: &Node, old: &Value, errors: &mut Errors) {
    let (annotations, before) = (
        root.field("metadata.annotations"),
        at(old, "metadata.annotations"),
    );
    pod_annotations::validate_update(&annotations, at(root.value, "spec"), before, errors);
}

const UPDATABLE: &str = "`spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";

fn validate_update(new: &Value, old: &Value) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(new);
    metadata_and_spec(&root, Some(old), &mut errors);
    changed_annotations(&root, old, &mut errors);
    let spec = root.field("spec");
    for name in ["containers", "initContainers"] {
        let containers = spec.field(name);
        if containers.len() != list(at(old, "spec"), name).len() {
            errors.forbidden(&containers, "pod updates may not add or remove containers");
            return errors.into_vec();
        }
        // COMPAT: upstream looks at the images once more.
        for container in containers.items() {
            errors.require(&container.field("image"));
            super::container::image_without_blanks(&container, &mut errors);
        }
    }
    let (deadline, before) = (
        spec.field("activeDeadlineSeconds"),
        at(old, "spec.activeDeadlineSeconds").as_i64(),
    );
    match (deadline.int(), before) {
        (Some(after), _) if !(0..=i64::from(i32::MAX)).contains(&after) => {
            errors.invalid(&deadline, "must be between 0 and 2147483647, inclusive");
            return errors.into_vec();
        }
        (Some(after), Some(before)) if before < after => {
            errors.invalid(&deadline, "must be less than or equal to previous value");
            return errors.into_vec();
        }
        (None, Some(_)) => errors.push(
            ErrorType::Invalid,
            &deadline,
            Some(Value::Null),
            "must not update from a positive integer to nil value",
        ),
        _ => {}
    }
    tolerations_only_added(&spec, old, &mut errors);
    let gates = spec.field("schedulingGates");
    for gate in gates.items() {
        let name = gate.field("name");
        if !list(old, "spec.schedulingGates")
            .iter()
            .any(|g| text(g, "name") == name.str())
        {
            let detail = format!(
                "only deletion is allowed, but found new scheduling gate '{}'",
                name.str()
            );
            errors.forbidden(&name, detail);
        }
    }
    forbidden_change(&spec, at(old, "spec"), &mut errors);
    errors.into_vec()
}

/// A toleration but for its seconds.
fn tolerated(toleration: &Value) -> [&str; 4] {
    ["key", "operator", "value", "effect"].map(|name| text(toleration, name))
}

fn tolerations_only_added(spec: &Node, old: &Value, errors: &mut Errors) {
    let tolerations = spec.field("tolerations");
    let now: BTreeSet<[&str; 4]> = list(spec.value, "tolerations").iter().map(tolerated).collect();
    if list(old, "spec.tolerations")
        .iter()
        .any(|before| !now.contains(&tolerated(before)))
    {
        errors.forbidden(
            &tolerations,
            "existing toleration can not be modified except its tolerationSeconds",
        );
    } else {
        scheduling::tolerations(&tolerations, errors);
    }
}

/// What of the spec changed that may not change, shown as a difference.
fn forbidden_change(spec: &Node, before: &Value, errors: &mut Errors) {
    if internal::equal("core.PodSpec", spec.value, before) {
        return;
    }
    let mut after = spec.value.clone();
    for name in ["containers", "initContainers"] {
        let images: Vec<Value> = list(before, name)
            .iter()
            .map(|c| at(c, "image").clone())
            .collect();
        if let Some(Value::Array(containers)) = after.get_mut(name) {
            for (container, image) in containers.iter_mut().zip(images) {
                walk::put(container, "image", image);
            }
        }
    }
    for name in ["activeDeadlineSeconds", "schedulingGates", "tolerations"] {
        walk::copy(&mut after, before, name);
    }
    if number(before, "terminationGracePeriodSeconds") < 0
        && number(&after, "terminationGracePeriodSeconds") == 1
    {
        walk::copy(&mut after, before, "terminationGracePeriodSeconds");
    }
    if !list(before, "schedulingGates").is_empty() {
        gated_change(spec, before, &mut after, errors);
    }
    if !internal::equal("core.PodSpec", &after, before) {
        let difference = internal::difference("core.PodSpec", before, &after);
        let detail = format!("pod updates may not change fields other than {UPDATABLE}\n{difference}");
        errors.forbidden(spec, detail);
    }
}

/// A pod that waits at a gate may still narrow down where it runs. What it may is taken out of `after`.
fn gated_change(spec: &Node, before: &Value, after: &mut Value, errors: &mut Errors) {
    let selector = spec.field("nodeSelector");
    if !same(selector.value, at(before, "nodeSelector")) {
        let mut kept = at(before, "nodeSelector").as_object().into_iter().flatten();
        if !kept.all(|(k, v)| selector.value.get(k) == Some(v)) {
            errors.invalid(
                &selector,
                "only additions to spec.nodeSelector are allowed (no mutations or deletions)",
            );
        }
        walk::copy(after, before, "nodeSelector");
    }
    let affinity = spec.field("affinity");
    let node = affinity.field("nodeAffinity");
    let node_before = at(before, "affinity.nodeAffinity");
    if node.value.is_null() == node_before.is_null()
        && internal::equal("core.NodeAffinity", node.value, node_before)
    {
        return;
    }
    let terms = node.field("requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms");
    let terms_before = list(
        node_before,
        "requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms",
    );
    if !terms_before.is_empty() && terms.len() != terms_before.len() {
        let shown = terms.value.clone();
        errors.invalid_value(
            &terms,
            shown,
            "no additions/deletions to non-empty NodeSelectorTerms list are allowed",
        );
    } else {
        for (term, old) in terms.items().zip(terms_before) {
            let grew = |name: &str| {
                let (now, then) = (list(term.value, name), list(old, name));
                now.len() >= then.len() && now.iter().zip(then).all(|(a, b)| same(a, b))
            };
            let empty = |term: &Value| {
                list(term, "matchExpressions").is_empty() && list(term, "matchFields").is_empty()
            };
            let filled = empty(old) && !empty(term.value);
            if filled || !grew("matchExpressions") || !grew("matchFields") {
                errors.invalid(&term, "only additions are allowed (no mutations or deletions)");
            }
        }
    }
    let alone = ["podAffinity", "podAntiAffinity"]
        .iter()
        .all(|name| at(affinity.value, name).is_null());
    if at(before, "affinity").is_null() && alone {
        walk::remove(after, "affinity");
    } else if let Some(affinity) = walk::object(after, "affinity") {
        walk::put(affinity, "nodeAffinity", node_before.clone());
    }
}

fn validate_status_update(new: &Value, old: &Value) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(new);
    changed_annotations(&root, old, &mut errors);
    let status = root.field("status");
    let conditions = status.field("conditions");
    for condition in conditions.items() {
        let observed = condition.field("observedGeneration");
        if observed.int().is_some_and(|n| n < 0) {
            errors.invalid(&observed, "must be a non-negative integer");
        }
        let kind = at(condition.value, "type").as_str().unwrap_or("");
        if !matches!(kind, "PodScheduled" | "Ready" | "Initialized") {
            // COMPAT: the field is called as in upstream's own type.
            let shown = condition.field("Type");
            for complaint in names::qualified_name(kind) {
                errors.invalid_value(&shown, kind, complaint);
            }
        }
    }
    let nominated = status.field("nominatedNodeName");
    if !nominated.is_empty() && nominated.str() != text(old, "status.nominatedNodeName") {
        errors.rule(&nominated, names::dns1123_subdomain(nominated.str()));
        if !text(old, "spec.nodeName").is_empty() {
            errors.forbidden(
                &nominated,
                "may not be set on pods that are already bound to a node",
            );
        }
    }
    let observed = status.field("observedGeneration");
    if observed.int().is_some_and(|n| n < 0) {
        errors.invalid(&observed, "must be a non-negative integer");
    }
    let qos = status.field("qosClass");
    if qos.str() != text(old, "status.qosClass") {
        errors.invalid(&qos, crate::errors::IMMUTABLE);
    }
    terminated_stays_terminated(&status, "containerStatuses", old, &mut errors);
    pod_status::claims(
        &status.field("resourceClaimStatuses"),
        at(new, "spec"),
        &mut errors,
    );
    pod_status::extended_resources(
        &status.field("extendedResourceClaimStatus"),
        at(new, "spec"),
        &mut errors,
    );
    for name in ["podIPs", "hostIPs"] {
        let addresses = status.field(name);
        let first = addresses.index(0);
        let first = first.field("ip");
        if name == "hostIPs" && !addresses.is_empty() && first.str() != text(new, "status.hostIP") {
            errors.invalid(&first, "must be equal to `hostIP`");
        }
        // What is stored already may stay.
        let known = list(at(old, "status"), name);
        let mut families = Vec::new();
        for address in addresses.items() {
            let value = address.field("ip");
            // COMPAT: the path is that of the element.
            let shown = address.with_value(value.value);
            if known.iter().all(|known| text(known, "ip") != value.str()) {
                net::ip(&shown, &mut errors);
            }
            families.push(value.str().contains(':'));
        }
        let mut found = addresses.items();
        let bad = found.position(|address| net::sloppy_ip(text(address.value, "ip")).is_none());
        if let Some(bad) = bad
            && families.len() > 1
        {
            let text = text(addresses.index(bad).value, "ip");
            let detail = format!("failed to check for dual stack with error:invalid IP[{bad}]: {text}");
            errors.push(field::ErrorType::Internal, &addresses, None, detail);
        }
        let dual = bad.is_none() && families.contains(&true) && families.contains(&false);
        if families.len() > 2 || families.len() > 1 && !dual {
            errors.invalid(&addresses, "may specify no more than one IP for each IP family");
        }
    }
    for name in [
        "containerStatuses",
        "initContainerStatuses",
        "ephemeralContainerStatuses",
    ] {
        let windows = text(new, "spec.os.name") == "windows";
        pod_status::users(&status.field(name), windows, &mut errors);
    }
    for (statuses, containers) in [
        ("containerStatuses", "spec.containers"),
        ("initContainerStatuses", "spec.initContainers"),
    ] {
        pod_status::allocated(&status.field(statuses), list(new, containers), &mut errors);
    }
    let ephemeral = status.field("ephemeralContainerStatuses");
    for container in ephemeral.items() {
        let allocated = container.field("allocatedResourcesStatus");
        if !allocated.is_empty() {
            errors.forbidden(&allocated, "must not be specified in container status");
        }
    }
    errors.into_vec()
}

/// COMPAT: upstream keeps a list only; the first address of a served pod is that of the list, and one that a client
/// gives alone, or that differs, makes the list.
fn sync_addresses(status: &mut Value) {
    let alone = text(status, "podIP").to_owned();
    let first = list(status, "podIPs").first().map(|ip| text(ip, "ip").to_owned());
    match first {
        Some(first) if alone.is_empty() => walk::put(status, "podIP", json!(first)),
        first if !alone.is_empty() && first.as_ref() != Some(&alone) => {
            walk::put(status, "podIPs", json!([{"ip": alone}]));
        }
        _ => {}
    }
}

/// A container that ended in a pod that does not restart it stays ended.
fn terminated_stays_terminated(status: &Node, name: &'static str, old: &Value, errors: &mut Errors) {
    let policy = text(old, "spec.restartPolicy");
    if policy == "Always" {
        return;
    }
    let statuses = status.field(name);
    let named = by_text(statuses.value.as_array().into_iter().flatten(), "name");
    let own_policy: BTreeSet<&str> = list(old, "spec.containers")
        .iter()
        .filter(|c| !at(c, "restartPolicy").is_null())
        .map(|c| text(c, "name"))
        .collect();
    for (i, before) in list(at(old, "status"), name).iter().enumerate() {
        let terminated = at(before, "state.terminated");
        if terminated.is_null() || (policy == "OnFailure" && number(terminated, "exitCode") != 0) {
            continue;
        }
        if own_policy.contains(text(before, "name")) {
            continue;
        }
        let after = named.get(text(before, "name"));
        if after.is_some_and(|s| at(s, "state.terminated").is_null()) {
            let at = statuses.index(i);
            errors.forbidden(
                &at.field("state"),
                "may not be transitioned to non-terminated state",
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Value {
        let mut pod = json!({"metadata": {"name": "p", "namespace": "d", "resourceVersion": "1"},
            "spec": {"containers": [{"name": "c", "image": "nginx"}]}});
        (POD.default)("v1", &mut pod);
        POD.begin_create(&mut pod);
        pod
    }

    fn check(change: impl Fn(&mut Value), expected: &[&str]) {
        let mut object = pod();
        change(&mut object);
        let found: Vec<String> = POD
            .check_create(&object, true)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn sysctl_names() {
        for (name, valid) in [
            ("kernel.shmmax", true),
            ("net/ipv4/conf.eth0", true),
            ("safe-and-unsafe", true),
            ("foo-", false),
            ("bar..", false),
            ("-a", false),
            ("A", false),
        ] {
            let message = format!(
                r#"spec.securityContext.sysctls[0].name: Invalid value: "{name}": must have at most 253 characters and match regex ^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$"#
            );
            let expected = if valid { vec![] } else { vec![message.as_str()] };
            check(
                |pod| pod["spec"]["securityContext"] = json!({"sysctls": [{"name": name, "value": "1"}]}),
                &expected,
            );
        }
    }

    #[test]
    fn a_plain_pod_is_valid() {
        check(|_| {}, &[]);
        assert_eq!(
            pod()["status"],
            json!({"phase": "Pending", "qosClass": "BestEffort"})
        );
        assert_eq!(pod()["metadata"]["generation"], 1);
    }

    #[test]
    fn bad_pods() {
        check(
            |p| p["spec"]["containers"] = json!([]),
            &["spec.containers: Required value"],
        );
        check(
            |p| p["spec"]["restartPolicy"] = json!("x"),
            &[
                "spec.restartPolicy: Unsupported value: \"x\": supported values: \"Always\", \"OnFailure\", \"Never\"",
            ],
        );
        check(
            |p| p["spec"]["containers"][0]["image"] = json!(""),
            &["spec.containers[0].image: Required value"],
        );
        check(
            |p| p["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]),
            &["spec.containers[0].volumeMounts[0].name: Not found: \"v\""],
        );
        check(
            |p| p["spec"]["containers"][0]["ports"] = json!([{"containerPort": 70000, "protocol": "TCP"}]),
            &[
                "spec.containers[0].ports[0].containerPort: Invalid value: 70000: must be between 1 and 65535, inclusive",
            ],
        );
        check(
            |p| {
                p["spec"]["containers"][0]["resources"] =
                    json!({"limits": {"cpu": "1"}, "requests": {"cpu": "2"}})
            },
            &[
                "spec.containers[0].resources.requests: Invalid value: \"2\": must be less than or equal to cpu limit of 1",
            ],
        );
        check(
            |p| p["spec"]["containers"][0]["livenessProbe"] = json!({"successThreshold": 2}),
            &[
                "spec.containers[0].livenessProbe: Required value: must specify a handler type",
                "spec.containers[0].livenessProbe.successThreshold: Invalid value: 2: must be 1",
            ],
        );
    }

    #[test]
    fn only_some_fields_may_change() {
        let old = pod();
        let mut new = old.clone();
        new["spec"]["containers"][0]["image"] = json!("other");
        POD.begin_update(&mut new, &old);
        assert_eq!(POD.check_update(&new, &old, true), vec![]);
        assert_eq!(new["metadata"]["generation"], 2);
        new["spec"]["hostname"] = json!("h");
        let found = POD.check_update(&new, &old, true);
        assert_eq!(found.len(), 1);
        let text = found[0].to_string();
        assert!(
            text.starts_with(
                "spec: Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
            ),
            "{text}"
        );
        assert!(
            text.ends_with(
                " \"ImagePullSecrets\": null,\n- \"Hostname\": \"\",\n+ \"Hostname\": \"h\",\n  \"Subdomain\": \"\",\n  \"SetHostnameAsFQDN\": null,\n  \"Affinity\": null,\n"
            ),
            "{text}"
        );
    }

    #[test]
    fn deletion_grace() {
        let mut object = pod();
        assert_eq!(graceful(&object, None), Graceful::After(0));
        object["spec"]["nodeName"] = json!("n");
        assert_eq!(graceful(&object, None), Graceful::After(30));
        assert_eq!(graceful(&object, Some(-5)), Graceful::After(1));
    }
}
