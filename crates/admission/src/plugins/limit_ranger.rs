//! LimitRanger: containers without requests and limits get the namespace's, and none may leave its bounds.

use std::collections::BTreeMap;

use async_trait::async_trait;
use serde_json::{Value, json};
use skiff_api::core::pod_defaults::aggregate;
use skiff_api::core::resources::quantity;
use skiff_api::node::{at, list, text};
use skiff_api::walk;
use skiff_meta::Status;
use skiff_meta::quantity::Quantity;

use crate::{Attributes, Lister, Operation, Plugin};

type Amounts = BTreeMap<String, Quantity>;

pub struct LimitRanger;

fn concerns(a: &Attributes<'_>) -> bool {
    let deleted = a
        .old_object
        .is_some_and(|o| !at(o, "metadata.deletionTimestamp").is_null());
    let pod = a.is("", "pods") && a.operation == Operation::Create;
    a.object.is_some() && !deleted && (pod || a.is("", "persistentvolumeclaims"))
}

#[async_trait]
impl Plugin for LimitRanger {
    fn name(&self) -> &'static str {
        "LimitRanger"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn admit(&self, a: &mut Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        if !concerns(a) || a.resource != "pods" {
            return Ok(());
        }
        let ranges = lister.list("", "limitranges", a.namespace).await?;
        if let Some(pod) = a.object.as_deref_mut() {
            ranges.iter().for_each(|range| defaults(range, pod));
        }
        Ok(())
    }

    async fn validate(&self, a: &Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        if !concerns(a) {
            return Ok(());
        }
        let Some(object) = a.object.as_deref() else {
            return Ok(());
        };
        for range in lister.list("", "limitranges", a.namespace).await? {
            let mut broken = Vec::new();
            for limit in list(&range, "spec.limits") {
                bounds(limit, a.resource, object, &mut broken);
            }
            match &broken[..] {
                [] => {}
                [one] => return Err(a.forbidden(one)),
                many => return Err(a.forbidden(format_args!("[{}]", many.join(", ")))),
            }
        }
        Ok(())
    }
}

fn defaults(range: &Value, pod: &mut Value) {
    let container_limits: Vec<&Value> = list(range, "spec.limits")
        .iter()
        .filter(|l| text(l, "type") == "Container")
        .collect();
    let mut notes = Vec::new();
    for (field, word) in [
        ("spec.containers[]", "container"),
        ("spec.initContainers[]", "init container"),
    ] {
        walk::each(pod, field, &mut |container| {
            let name = text(container, "name").to_owned();
            for (from, to, says) in [
                ("defaultRequest", "requests", "request"),
                ("default", "limits", "limit"),
            ] {
                let mut set = Vec::new();
                for limit in &container_limits {
                    for (resource, amount) in at(limit, from).as_object().into_iter().flatten() {
                        let Some(amounts) =
                            walk::object(container, "resources").and_then(|r| walk::object(r, to))
                        else {
                            continue;
                        };
                        if amounts.get(resource).is_none() {
                            walk::put(amounts, resource, amount.clone());
                            set.push(resource.clone());
                        }
                    }
                }
                if !set.is_empty() {
                    set.sort();
                    notes.push(format!("{} {says} for {word} {name}", set.join(", ")));
                }
            }
        });
    }
    if !notes.is_empty()
        && let Some(annotations) = walk::object(pod, "metadata").and_then(|m| walk::object(m, "annotations"))
    {
        let note = format!("LimitRanger plugin set: {}", notes.join("; "));
        walk::put(annotations, "kubernetes.io/limit-ranger", json!(note));
    }
}

fn amounts(value: &Value) -> Amounts {
    value
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(k, v)| Some((k.clone(), quantity(v)?)))
        .collect()
}

fn bounds(limit: &Value, resource: &str, object: &Value, broken: &mut Vec<String>) {
    let kind = text(limit, "type");
    match (kind, resource) {
        ("Container", "pods") => {
            for container in list(object, "spec.containers")
                .iter()
                .chain(list(object, "spec.initContainers"))
            {
                let resources = at(container, "resources");
                all_bounds(
                    limit,
                    kind,
                    &amounts(at(resources, "requests")),
                    &amounts(at(resources, "limits")),
                    broken,
                );
            }
        }
        ("Pod", "pods") => {
            let of = |which: &str| {
                let mut total = aggregate(at(object, "spec"), which);
                let own = amounts(at(at(object, "spec.resources"), which));
                total.extend(own.into_iter().filter(|(k, _)| k == "cpu" || k == "memory"));
                total
            };
            all_bounds(limit, kind, &of("requests"), &of("limits"), broken);
        }
        ("PersistentVolumeClaim", "persistentvolumeclaims") => {
            let requests = amounts(at(object, "spec.resources.requests"));
            for (name, least) in amounts(at(limit, "min")) {
                minimum(kind, &name, &least, &requests, &Amounts::new(), broken);
            }
            for (name, most) in amounts(at(limit, "max")) {
                match requests.get(&name) {
                    None => broken.push(format!(
                        "maximum {name} usage per {kind} is {most}.  No request is specified"
                    )),
                    Some(r) if *r > most => {
                        broken.push(format!(
                            "maximum {name} usage per {kind} is {most}, but request is {r}"
                        ));
                    }
                    Some(_) => {}
                }
            }
        }
        _ => {}
    }
}

fn all_bounds(limit: &Value, kind: &str, requests: &Amounts, limits: &Amounts, broken: &mut Vec<String>) {
    for (name, least) in amounts(at(limit, "min")) {
        minimum(kind, &name, &least, requests, limits, broken);
    }
    for (name, most) in amounts(at(limit, "max")) {
        let usage = format!("maximum {name} usage per {kind} is {most}");
        match (limits.get(&name), requests.get(&name)) {
            (None, _) => broken.push(format!("{usage}.  No limit is specified")),
            (Some(l), _) if *l > most => broken.push(format!("{usage}, but limit is {l}")),
            (_, Some(r)) if *r > most => broken.push(format!("{usage}, but request is {r}")),
            _ => {}
        }
    }
    for (name, most) in amounts(at(limit, "maxLimitRequestRatio")) {
        let rule = format!("{name} max limit to request ratio per {kind} is {most}");
        let request = requests.get(&name).filter(|q| !q.is_zero());
        let given = limits.get(&name).filter(|q| !q.is_zero());
        match (request, given) {
            (None, _) => broken.push(format!("{rule}, but no request is specified or request is 0")),
            (_, None) => broken.push(format!("{rule}, but no limit is specified or limit is 0")),
            (Some(r), Some(l)) => {
                let ratio = l.milli_value() as f64 / r.milli_value() as f64;
                if ratio * 1000.0 > most.milli_value() as f64 {
                    broken.push(format!("{rule}, but provided ratio is {ratio:.6}"));
                }
            }
        }
    }
}

fn minimum(
    kind: &str,
    name: &str,
    least: &Quantity,
    requests: &Amounts,
    limits: &Amounts,
    broken: &mut Vec<String>,
) {
    let usage = format!("minimum {name} usage per {kind} is {least}");
    match (requests.get(name), limits.get(name)) {
        (None, _) => broken.push(format!("{usage}.  No request is specified")),
        (Some(r), _) if r < least => broken.push(format!("{usage}, but request is {r}")),
        (_, Some(l)) if l < least => broken.push(format!("{usage}, but limit is {l}")),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{Objects, create};

    #[tokio::test]
    async fn defaults_then_bounds() {
        let lister = Objects(vec![(
            "limitranges",
            json!({"metadata": {"name": "l", "namespace": "ns"}, "spec": {"limits": [{"type": "Container",
                "default": {"cpu": "500m"}, "defaultRequest": {"cpu": "100m"}, "max": {"cpu": "1"}}]}}),
        )]);
        let mut pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c"}]}});
        let mut a = create("", "pods", "Pod", &mut pod);
        LimitRanger.admit(&mut a, &lister).await.unwrap();
        LimitRanger.validate(&a, &lister).await.unwrap();
        assert_eq!(
            pod["spec"]["containers"][0]["resources"],
            json!({"limits": {"cpu": "500m"}, "requests": {"cpu": "100m"}})
        );
        assert_eq!(
            pod["metadata"]["annotations"]["kubernetes.io/limit-ranger"],
            "LimitRanger plugin set: cpu request for container c; cpu limit for container c"
        );
        pod["spec"]["containers"][0]["resources"]["limits"]["cpu"] = json!("2");
        let error = LimitRanger
            .validate(&create("", "pods", "Pod", &mut pod), &lister)
            .await
            .unwrap_err();
        assert_eq!(
            error.message,
            "pods \"p\" is forbidden: maximum cpu usage per Container is 1, but limit is 2"
        );
    }

    /// What a range says about a pod or a claim as it is; empty: nothing.
    async fn refusal(limit: Value, resource: &'static str, spec: Value) -> String {
        let lister = Objects(vec![(
            "limitranges",
            json!({"metadata": {"name": "l", "namespace": "ns"}, "spec": {"limits": [limit]}}),
        )]);
        let mut object = json!({"metadata": {"name": "p"}, "spec": spec});
        let result = LimitRanger
            .validate(&create("", resource, "", &mut object), &lister)
            .await;
        let message = result.err().map(|status| status.message).unwrap_or_default();
        let (_, why) = message.split_once("forbidden: ").unwrap_or_default();
        why.to_owned()
    }

    #[tokio::test]
    async fn containers_and_pods_stay_within_bounds() {
        let check = async |limit: Value, spec: Value, expected: &str| {
            assert_eq!(refusal(limit, "pods", spec).await, expected);
        };
        let of = |request: &str, limit: &str| {
            let mut resources = json!({});
            if !request.is_empty() {
                resources["requests"] = json!({"cpu": request});
            }
            if !limit.is_empty() {
                resources["limits"] = json!({"cpu": limit});
            }
            json!({"containers": [{"name": "c", "resources": resources}]})
        };
        let min = json!({"type": "Container", "min": {"cpu": "1"}});
        check(min.clone(), of("1", "1"), "").await;
        check(
            min.clone(),
            of("", "1"),
            "minimum cpu usage per Container is 1.  No request is specified",
        )
        .await;
        check(
            min.clone(),
            of("500m", ""),
            "minimum cpu usage per Container is 1, but request is 500m",
        )
        .await;
        check(
            min,
            of("1", "500m"),
            "minimum cpu usage per Container is 1, but limit is 500m",
        )
        .await;
        let max = json!({"type": "Container", "max": {"cpu": "1"}});
        check(
            max.clone(),
            of("1", ""),
            "maximum cpu usage per Container is 1.  No limit is specified",
        )
        .await;
        check(
            max.clone(),
            of("2", "1"),
            "maximum cpu usage per Container is 1, but request is 2",
        )
        .await;
        let init = json!({"initContainers": [{"name": "i", "resources": {"limits": {"cpu": "2"}}}]});
        check(max, init, "maximum cpu usage per Container is 1, but limit is 2").await;
        let ratio = json!({"type": "Container", "maxLimitRequestRatio": {"cpu": "2"}});
        check(ratio.clone(), of("1", "2"), "").await;
        let rule = "cpu max limit to request ratio per Container is 2";
        check(
            ratio.clone(),
            of("1", "3"),
            &format!("{rule}, but provided ratio is 3.000000"),
        )
        .await;
        check(
            ratio.clone(),
            of("0", "3"),
            &format!("{rule}, but no request is specified or request is 0"),
        )
        .await;
        check(
            ratio,
            of("1", ""),
            &format!("{rule}, but no limit is specified or limit is 0"),
        )
        .await;
        let both = json!({"type": "Container", "min": {"cpu": "1", "memory": "1Gi"}});
        check(
            both,
            of("500m", ""),
            "[minimum cpu usage per Container is 1, but request is 500m, minimum memory usage per Container is 1Gi.  No request is specified]",
        )
        .await;
        let pod = json!({"type": "Pod", "max": {"cpu": "1"}});
        let two = json!({"containers": [
            {"name": "a", "resources": {"limits": {"cpu": "600m"}}}, {"name": "b", "resources": {"limits": {"cpu": "600m"}}}]});
        check(
            pod.clone(),
            two.clone(),
            "maximum cpu usage per Pod is 1, but limit is 1200m",
        )
        .await;
        // What the pod says of itself counts instead.
        let mut whole = two;
        whole["resources"] = json!({"limits": {"cpu": "1"}});
        check(pod, whole, "").await;
    }

    #[tokio::test]
    async fn claims_stay_within_bounds() {
        let check = async |limit: Value, size: &str, expected: &str| {
            let mut spec = json!({"resources": {}});
            if !size.is_empty() {
                spec["resources"] = json!({"requests": {"storage": size}});
            }
            assert_eq!(refusal(limit, "persistentvolumeclaims", spec).await, expected);
        };
        let limit =
            json!({"type": "PersistentVolumeClaim", "min": {"storage": "1Gi"}, "max": {"storage": "2Gi"}});
        let usage =
            |word: &str, size: &str| format!("{word} storage usage per PersistentVolumeClaim is {size}");
        check(limit.clone(), "2Gi", "").await;
        check(
            limit.clone(),
            "3Gi",
            &format!("{}, but request is 3Gi", usage("maximum", "2Gi")),
        )
        .await;
        check(
            limit.clone(),
            "1Mi",
            &format!("{}, but request is 1Mi", usage("minimum", "1Gi")),
        )
        .await;
        let none = "  No request is specified";
        let both = format!(
            "[{}.{none}, {}.{none}]",
            usage("minimum", "1Gi"),
            usage("maximum", "2Gi")
        );
        check(limit, "", &both).await;
    }

    #[tokio::test]
    async fn what_is_said_or_on_its_way_out_is_left_alone() {
        let lister = Objects(vec![(
            "limitranges",
            json!({"metadata": {"name": "l", "namespace": "ns"}, "spec": {"limits": [
                {"type": "Container", "default": {"cpu": "500m"}, "max": {"cpu": "1"}}]}}),
        )]);
        let spec = json!({"containers": [{"name": "c", "resources": {"limits": {"cpu": "2"}}}]});
        let mut pod = json!({"metadata": {"name": "p"}, "spec": spec});
        let mut a = create("", "pods", "Pod", &mut pod);
        LimitRanger.admit(&mut a, &lister).await.unwrap();
        assert!(LimitRanger.validate(&a, &lister).await.is_err());
        a.operation = Operation::Update;
        assert!(
            LimitRanger.validate(&a, &lister).await.is_ok(),
            "a pod is looked at once"
        );
        assert_eq!(pod["spec"], spec);
        let lister = Objects(vec![(
            "limitranges",
            json!({"metadata": {"name": "l", "namespace": "ns"}, "spec": {"limits": [
                {"type": "PersistentVolumeClaim", "max": {"storage": "1"}}]}}),
        )]);
        let mut claim = json!({"spec": {"resources": {"requests": {"storage": "2"}}}});
        let leaving = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
        let mut a = create("", "persistentvolumeclaims", "", &mut claim);
        a.operation = Operation::Update;
        assert!(LimitRanger.validate(&a, &lister).await.is_err());
        a.old_object = Some(&leaving);
        assert!(LimitRanger.validate(&a, &lister).await.is_ok());
    }
}
