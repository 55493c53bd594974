//! The controllers of the cluster over the real server: budgets, aggregated roles, certificates, tokens, autoscalers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::authentication::v1::TokenReview;
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, Secret, ServiceAccount};
use k8s_openapi::api::networking::v1::ServiceCIDR;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::ClusterRole;
use kube::api::{DeleteParams, EvictParams, Patch, PatchParams, PostParams};
use kube::client::Body;
use kube::{Api, Client};
use serde_json::{Value, json};
use skiff_auth::UserInfo;
use skiff_controllers::{
    CertificateOrder, CertificateSigner, ControllerSelection, ControllersConfig, SignError,
};

use crate::cluster::{Cluster, check};

fn deployment(name: &str, replicas: i32) -> Value {
    json!({"metadata": {"name": name}, "spec": {"replicas": replicas,
        "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": {"containers": [
            {"name": "c", "image": "i", "resources": {"requests": {"cpu": "1"}}}]}}}})
}

async fn start_with(change: impl FnOnce(&mut ControllersConfig)) -> Cluster {
    let cluster = Cluster::without_controllers().await;
    cluster.run_controllers(change);
    cluster.add_node("n").await;
    let accounts = cluster.api::<ServiceAccount>();
    cluster
        .until("service account", async || {
            check(accounts.get_opt("default").await.unwrap().is_some(), ())
        })
        .await;
    cluster
}

/// Current, desired, expected, allowed.
async fn budget(cluster: &Cluster) -> (i32, i32, i32, i32) {
    let status = cluster
        .api::<PodDisruptionBudget>()
        .get("b")
        .await
        .unwrap()
        .status
        .unwrap_or_default();
    let number = |number: Option<i32>| number.unwrap_or(0);
    (
        number(status.current_healthy),
        number(status.desired_healthy),
        number(status.expected_pods),
        number(status.disruptions_allowed),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_budget_blocks_and_allows_evictions() {
    let cluster = Cluster::start().await;
    let spec = json!({"maxUnavailable": 1, "selector": {"matchLabels": {"app": "web"}}});
    cluster
        .create::<PodDisruptionBudget>(json!({"metadata": {"name": "b"}, "spec": spec}))
        .await;
    cluster.until_event("NoPods", "No matching pods found").await;
    cluster.create::<Deployment>(deployment("web", 3)).await;
    cluster
        .until("one may go", async || {
            check(budget(&cluster).await == (3, 2, 3, 1), budget(&cluster).await)
        })
        .await;
    let status = cluster
        .api::<PodDisruptionBudget>()
        .get("b")
        .await
        .unwrap()
        .status
        .unwrap();
    assert_eq!(status.conditions.unwrap()[0].reason, "SufficientPods");

    // From here nobody plays the kubelet: the evicted pod stays, and its replacement is not ready.
    let names: Vec<String> = cluster
        .list::<Pod>()
        .await
        .into_iter()
        .map(|pod| pod.metadata.name.unwrap())
        .collect();
    let pods = cluster.api::<Pod>();
    pods.evict(&names[0], &EvictParams::default()).await.unwrap();
    let refused = pods.evict(&names[1], &EvictParams::default()).await.unwrap_err();
    let kube::Error::Api(refused) = refused else {
        panic!("{refused}")
    };
    assert_eq!(refused.code, 429);
    let marked = pods.get_opt(&names[0]).await.unwrap();
    if let Some(marked) = marked {
        let conditions = marked.status.unwrap().conditions.unwrap_or_default();
        assert!(
            conditions
                .iter()
                .any(|one| one.type_ == "DisruptionTarget" && one.status == "True")
        );
    }
    cluster
        .until_idle("none may go", async || {
            check(budget(&cluster).await == (2, 2, 3, 0), budget(&cluster).await)
        })
        .await;
    // The replacement becomes ready: one may go again.
    cluster
        .until("one may go again", async || {
            check(budget(&cluster).await == (3, 2, 3, 1), budget(&cluster).await)
        })
        .await;
    cluster
        .until("evicted", async || {
            let evicted = pods.evict(&names[1], &EvictParams::default()).await;
            check(evicted.is_ok(), evicted)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_budget_counts_by_any_scale() {
    let cluster = Cluster::start().await;
    let definitions: Api<
        k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    > = Api::all(cluster.client.clone());
    let definition = json!({"metadata": {"name": "widgets.example.com"}, "spec": {"group": "example.com", "scope": "Namespaced",
        "names": {"plural": "widgets", "kind": "Widget"}, "versions": [{"name": "v1", "served": true, "storage": true,
            "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
            "subresources": {"scale": {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}}}]}});
    let definition = serde_json::from_value(definition).unwrap();
    definitions
        .create(&PostParams::default(), &definition)
        .await
        .unwrap();
    let resource = kube::core::ApiResource::from_gvk_with_plural(
        &kube::core::GroupVersionKind::gvk("example.com", "v1", "Widget"),
        "widgets",
    );
    let widgets: Api<kube::core::DynamicObject> =
        Api::namespaced_with(cluster.client.clone(), "default", &resource);
    let widget: kube::core::DynamicObject =
        serde_json::from_value(json!({"apiVersion": "example.com/v1", "kind": "Widget",
        "metadata": {"name": "w"}, "spec": {"replicas": 4}}))
        .unwrap();
    let made = std::sync::Mutex::new(None);
    cluster
        .until("widget", async || {
            let created = widgets.create(&PostParams::default(), &widget).await;
            let good = created.is_ok();
            let seen = format!("{created:?}");
            if let Ok(created) = created {
                *made.lock().unwrap() = created.metadata.uid;
            }
            check(good, seen)
        })
        .await;
    let uid = made.lock().unwrap().clone().unwrap();
    for name in ["a", "b"] {
        let owner = json!([{"apiVersion": "example.com/v1", "kind": "Widget", "name": "w", "uid": uid, "controller": true}]);
        cluster
            .create::<Pod>(
                json!({"metadata": {"name": name, "labels": {"app": "w"}, "ownerReferences": owner},
                "spec": {"containers": [{"name": "c", "image": "i"}]}}),
            )
            .await;
    }
    let spec = json!({"minAvailable": "50%", "selector": {"matchLabels": {"app": "w"}}});
    cluster
        .create::<PodDisruptionBudget>(json!({"metadata": {"name": "b"}, "spec": spec}))
        .await;
    cluster
        .until("two of four", async || {
            check(budget(&cluster).await == (2, 2, 4, 0), budget(&cluster).await)
        })
        .await;
    // A controller that cannot be scaled.
    let owner =
        json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "m", "uid": "u", "controller": true}]);
    cluster
        .patch::<Pod>("a", json!({"metadata": {"ownerReferences": owner}}))
        .await;
    let failed = async || {
        let status = cluster
            .api::<PodDisruptionBudget>()
            .get("b")
            .await
            .unwrap()
            .status
            .unwrap();
        let condition = status.conditions.unwrap_or_default().remove(0);
        check(
            condition.reason == "SyncFailed"
                && condition.message == "configmaps does not implement the scale subresource",
            condition,
        )
    };
    cluster.until_idle("sync failed", failed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn aggregated_roles_follow_their_parts() {
    let cluster = Cluster::start().await;
    let roles: Api<ClusterRole> = Api::all(cluster.client.clone());
    let create = async |value: Value| {
        let role: ClusterRole = serde_json::from_value(value).unwrap();
        roles.create(&PostParams::default(), &role).await.unwrap();
    };
    let rule = |resource: &str| json!({"apiGroups": ["x"], "resources": [resource], "verbs": ["get"]});
    create(json!({"metadata": {"name": "sum"}, "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"part": "1"}}]}})).await;
    create(json!({"metadata": {"name": "part", "labels": {"part": "1"}}, "rules": [rule("a")]})).await;
    create(json!({"metadata": {"name": "view-x", "labels": {"rbac.authorization.k8s.io/aggregate-to-view": "true"}},
        "rules": [rule("v")]})).await;
    let has = async |role: &str, resource: &str| {
        let rules = roles.get(role).await.unwrap().rules.unwrap_or_default();
        let mut resources = rules.iter().flat_map(|rule| rule.resources.iter().flatten());
        let found = resources.any(|one| one == resource);
        check(found, role)
    };
    cluster
        .until_idle("sum has a", async || has("sum", "a").await)
        .await;
    cluster
        .until_idle("view has v", async || has("view", "v").await)
        .await;
    // view is a part of edit, and edit of admin.
    cluster
        .until_idle("admin has v", async || has("admin", "v").await)
        .await;
    roles.delete("part", &DeleteParams::default()).await.unwrap();
    cluster
        .until_idle("sum is empty", async || {
            let rules = roles.get("sum").await.unwrap().rules.unwrap_or_default();
            check(rules.is_empty(), rules)
        })
        .await;
}

struct Signer(skiff_pki::SigningAuthority);

impl CertificateSigner for Signer {
    fn sign(&self, order: &CertificateOrder, now: i64) -> Result<String, SignError> {
        let order = order.clone();
        let order = skiff_pki::CertificateOrder {
            subject: order.subject,
            dns_names: order.dns_names,
            addresses: order.addresses,
            emails: order.emails,
            uris: order.uris,
            public_key: order.public_key,
            usages: order.usages,
            not_before: order.not_before,
            not_after: order.not_after,
        };
        self.0
            .sign(&order, now)
            .map_err(|error| SignError(error.to_string()))
    }
}

/// A request in PEM. The order of the organizations is that of the names.
fn request(organization: &str, name: &str) -> String {
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params
        .distinguished_name
        .push(rcgen::DnType::OrganizationName, organization);
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    let key = rcgen::KeyPair::generate().unwrap();
    params.serialize_request(&key).unwrap().pem().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kubelet_gets_its_certificate() {
    let dir = tempfile::tempdir().unwrap();
    let pki = skiff_pki::Pki::open(dir.path()).unwrap();
    let signer = Arc::new(Signer(pki.signing_authority()));
    let cluster = start_with(move |config| config.certificate_signer = Some(signer)).await;
    let post = async |user: UserInfo, name: &str, signer: &str, usages: Value, pem: String| {
        let client = cluster.server.client(user);
        let api: Api<CertificateSigningRequest> = Api::all(client);
        let bytes = k8s_openapi::ByteString(pem.into_bytes());
        let object = json!({"metadata": {"name": name}, "spec": {"request": bytes, "signerName": signer, "usages": usages}});
        let object = serde_json::from_value(object).unwrap();
        api.create(&PostParams::default(), &object).await.unwrap();
    };
    let api: Api<CertificateSigningRequest> = Api::all(cluster.client.clone());
    let kubelet = "kubernetes.io/kube-apiserver-client-kubelet";
    let usages = json!(["digital signature", "client auth"]);
    // A node renews its own certificate.
    let bindings: Api<k8s_openapi::api::rbac::v1::ClusterRoleBinding> = Api::all(cluster.client.clone());
    let binding = json!({"metadata": {"name": "renew"}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole",
        "name": "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient"},
        "subjects": [{"kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": "system:nodes"}]});
    let binding = serde_json::from_value(binding).unwrap();
    bindings.create(&PostParams::default(), &binding).await.unwrap();
    let node = UserInfo::new("system:node:n", ["system:nodes", "system:authenticated"]);
    post(
        node,
        "own",
        kubelet,
        usages.clone(),
        request("system:nodes", "system:node:n"),
    )
    .await;
    cluster
        .until_idle("signed", async || {
            let status = api.get("own").await.unwrap().status.unwrap_or_default();
            check(status.certificate.is_some(), status)
        })
        .await;
    let status = api.get("own").await.unwrap().status.unwrap();
    let approved = &status.conditions.unwrap()[0];
    assert_eq!(
        approved.message.as_deref(),
        Some("Auto approving self kubelet client certificate after SubjectAccessReview.")
    );
    let pem = String::from_utf8(status.certificate.unwrap().0).unwrap();
    let chain = skiff_pki::chain(&pem).unwrap();
    let authority = skiff_pki::ClientAuthority::new(pki.ca_certificate()).unwrap();
    authority
        .verify(&chain, rustls::pki_types::UnixTime::now())
        .unwrap();
    let facts = skiff_pki::CertificateFacts::parse(&pem).unwrap();
    assert_eq!(facts.common_name, "system:node:n");
    assert_eq!(facts.organization.as_deref(), Some("system:nodes"));

    // A user's request waits for an approval; one with wrong usages then fails.
    let admin = || UserInfo::new("admin", ["system:masters", "system:authenticated"]);
    let client = "kubernetes.io/kube-apiserver-client";
    post(
        admin(),
        "jane",
        client,
        json!(["client auth"]),
        request("dev", "jane"),
    )
    .await;
    post(
        admin(),
        "bad",
        client,
        json!(["server auth"]),
        request("dev", "jane"),
    )
    .await;
    for name in ["jane", "bad"] {
        let mut object = api.get(name).await.unwrap();
        assert_eq!(
            object
                .status
                .as_ref()
                .and_then(|status| status.certificate.clone()),
            None
        );
        let approval = json!([{"type": "Approved", "status": "True", "reason": "Test"}]);
        object.status.get_or_insert_default().conditions = serde_json::from_value(approval).unwrap();
        api.replace_subresource("approval", name, &PostParams::default(), &object)
            .await
            .unwrap();
    }
    cluster
        .until_idle("jane is signed", async || {
            let status = api.get("jane").await.unwrap().status.unwrap_or_default();
            check(status.certificate.is_some(), status)
        })
        .await;
    cluster
        .until_idle("bad has failed", async || {
            let status = api.get("bad").await.unwrap().status.unwrap_or_default();
            let conditions = status.conditions.unwrap_or_default();
            let failed = conditions.iter().any(|one| {
                one.type_ == "Failed"
                    && one.message.as_deref() == Some("invalid usage for client certificate: server auth")
            });
            check(failed, conditions)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_secret_is_filled_and_goes_with_its_account() {
    let cluster = Cluster::without_controllers().await;
    let (private, public) = &cluster.server.service_account_keys;
    let issuer = skiff_auth::TokenIssuer::new(private, public, "iss".into(), Vec::new()).unwrap();
    cluster.run_controllers(move |config| {
        config.token_signer = Some(Arc::new(move |claims: &Value| {
            issuer.sign(claims).map_err(|error| SignError(error.to_string()))
        }));
    });
    cluster
        .create::<ServiceAccount>(json!({"metadata": {"name": "robot"}}))
        .await;
    let secret = |name: &str, account: &str| {
        json!({"metadata": {"name": name, "annotations": {"kubernetes.io/service-account.name": account}},
            "type": "kubernetes.io/service-account-token"})
    };
    cluster.create::<Secret>(secret("token", "robot")).await;
    let secrets = cluster.api::<Secret>();
    cluster
        .until_idle("filled", async || {
            let data: BTreeMap<_, _> = secrets.get("token").await.unwrap().data.unwrap_or_default();
            let keys: Vec<&String> = data.keys().collect();
            check(keys == ["ca.crt", "namespace", "token"], keys)
        })
        .await;
    let filled = secrets.get("token").await.unwrap();
    let data = filled.data.unwrap();
    assert_eq!(data["ca.crt"].0, b"PEM");
    assert_eq!(data["namespace"].0, b"default");
    // The API server takes it, and no longer when its Secret is gone.
    let reviews: Api<TokenReview> = Api::all(cluster.client.clone());
    let token = String::from_utf8(data["token"].0.clone()).unwrap();
    let review: TokenReview = serde_json::from_value(json!({"spec": {"token": token}})).unwrap();
    let reviewed = async || {
        let answer = reviews.create(&PostParams::default(), &review).await.unwrap();
        let status = answer.status.unwrap();
        (
            status.authenticated == Some(true),
            status.user.and_then(|user| user.username),
        )
    };
    let robot = Some("system:serviceaccount:default:robot".to_owned());
    cluster
        .until_idle("accepted", async || {
            let found = reviewed().await;
            check(found == (true, robot.clone()), found)
        })
        .await;
    let labels = secrets
        .get("token")
        .await
        .unwrap()
        .metadata
        .labels
        .unwrap_or_default();
    assert!(
        labels.contains_key("kubernetes.io/legacy-token-last-used"),
        "{labels:?}"
    );
    // The account names it; when the Secret goes, so does the name.
    let patch = Patch::Merge(json!({"secrets": [{"name": "token"}, {"name": "other"}]}));
    let accounts = cluster.api::<ServiceAccount>();
    accounts
        .patch("robot", &PatchParams::default(), &patch)
        .await
        .unwrap();
    secrets.delete("token", &DeleteParams::default()).await.unwrap();
    cluster
        .until_idle("no longer accepted", async || check(!reviewed().await.0, ()))
        .await;
    cluster
        .until_idle("no reference", async || {
            let left = accounts.get("robot").await.unwrap().secrets.unwrap_or_default();
            check(left.len() == 1 && left[0].name.as_deref() == Some("other"), left)
        })
        .await;
    // A Secret of an account that goes, or that never was.
    cluster.create::<Secret>(secret("second", "robot")).await;
    cluster
        .until_idle("second is filled", async || {
            let data = secrets.get("second").await.unwrap().data.unwrap_or_default();
            check(data.contains_key("token"), ())
        })
        .await;
    accounts.delete("robot", &DeleteParams::default()).await.unwrap();
    cluster.create::<Secret>(secret("stray", "nobody")).await;
    for name in ["second", "stray"] {
        cluster
            .until_idle("deleted", async || {
                check(secrets.get_opt(name).await.unwrap().is_none(), name)
            })
            .await;
    }
}

/// A client that answers what the Metrics API would, and passes on all else.
fn with_metrics(inner: Client, cpu: &'static str) -> Client {
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let inner = inner.clone();
        async move {
            let path = request.uri().path().to_owned();
            if !path.starts_with("/apis/metrics.k8s.io") {
                return inner.send(request).await;
            }
            let pods: Api<Pod> = Api::namespaced(inner.clone(), "default");
            let pods = pods.list(&Default::default()).await.unwrap();
            let now = k8s_openapi::jiff::Timestamp::now().to_string();
            let items: Vec<Value> = pods
                .items
                .iter()
                .map(|pod| {
                    json!({"metadata": {"name": pod.metadata.name}, "timestamp": now, "window": "0s",
                        "containers": [{"name": "c", "usage": {"cpu": cpu}}]})
                })
                .collect();
            let body = json!({"items": items}).to_string();
            Ok(http::Response::new(Body::from(body.into_bytes())))
        }
    });
    Client::new(service, "default")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_autoscaler_follows_its_metrics() {
    let cluster = start_with(|config| {
        let before = config.client_for.clone();
        config.client_for = Arc::new(move |name: &str| match name {
            "horizontal-pod-autoscaler" => with_metrics(before(name), "900m"),
            _ => before(name),
        });
        config.hpa_sync_period = Duration::from_millis(100);
    })
    .await;
    cluster.create::<Deployment>(deployment("web", 1)).await;
    let spec = json!({"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"},
        "minReplicas": 2, "maxReplicas": 5,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}}}]});
    cluster
        .create::<HorizontalPodAutoscaler>(json!({"metadata": {"name": "web"}, "spec": spec}))
        .await;
    // At first by its bounds alone, then by the use of the pods, up to the most there may be.
    cluster
        .until("five replicas", async || {
            let spec = cluster
                .api::<Deployment>()
                .get("web")
                .await
                .unwrap()
                .spec
                .unwrap();
            check(spec.replicas == Some(5), spec.replicas)
        })
        .await;
    cluster
        .until_event(
            "SuccessfulRescale",
            "reason: Current number of replicas below Spec.MinReplicas",
        )
        .await;
    cluster
        .until_event(
            "SuccessfulRescale",
            "reason: cpu resource utilization (percentage of request) above target",
        )
        .await;
    cluster
        .until("limited", async || {
            let found = cluster.api::<HorizontalPodAutoscaler>().get("web").await.unwrap();
            let status = found.status.unwrap_or_default();
            let conditions = status.conditions.clone().unwrap_or_default();
            let reason = |type_: &str| {
                let found = conditions.iter().find(|one| one.type_ == type_);
                found.and_then(|one| one.reason.clone()).unwrap_or_default()
            };
            let metrics = status.current_metrics.clone().unwrap_or_default();
            let percent = metrics
                .first()
                .and_then(|one| one.resource.as_ref()?.current.average_utilization);
            let good = (reason("ScalingLimited"), reason("ScalingActive"), percent)
                == ("TooManyReplicas".into(), "ValidMetricFound".into(), Some(90));
            check(good, status)
        })
        .await;
    for action in ["scale_up", "none"] {
        let labels = format!("{{action=\"{action}\",error=\"none\"}}");
        let line = format!("horizontal_pod_autoscaler_controller_reconciliations_total{labels} ");
        cluster
            .until("counted", async || {
                let text = cluster.metrics.registry.text();
                check(text.contains(&line), text)
            })
            .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_autoscaler_says_what_it_lacks() {
    let cluster = start_with(|config| config.hpa_sync_period = Duration::from_millis(100)).await;
    cluster.create::<Deployment>(deployment("web", 1)).await;
    let spec = |kind: &str| json!({"scaleTargetRef": {"apiVersion": "apps/v1", "kind": kind, "name": "web"}, "maxReplicas": 5});
    let create = async |name: &str, kind: &str| {
        let object = json!({"metadata": {"name": name}, "spec": spec(kind)});
        cluster.create::<HorizontalPodAutoscaler>(object).await;
    };
    create("web", "Deployment").await;
    create("lost", "Nothing").await;
    let nowhere = json!({"metadata": {"name": "nowhere"}, "spec": {"maxReplicas": 2,
        "scaleTargetRef": {"apiVersion": "example.com/v1", "kind": "Widget", "name": "w"}}});
    cluster.create::<HorizontalPodAutoscaler>(nowhere).await;
    let reason = async |name: &str, type_: &str, expected: &str, message: &str| {
        let found = cluster.api::<HorizontalPodAutoscaler>().get(name).await.unwrap();
        let conditions = found.status.unwrap_or_default().conditions.unwrap_or_default();
        let good = conditions.iter().any(|one| {
            one.type_ == type_
                && one.reason.as_deref() == Some(expected)
                && one.message.as_deref().is_some_and(|text| text.contains(message))
        });
        check(good, conditions)
    };
    cluster
        .until("no metrics", async || {
            let message = "unable to fetch metrics from resource metrics API: the server could not find the requested resource (get pods.metrics.k8s.io)";
            reason("web", "ScalingActive", "FailedGetResourceMetric", message).await
        })
        .await;
    cluster
        .until("no target", async || {
            let message = "the HPA controller was unable to get the target's current scale: no matches for kind \"Nothing\" in group \"apps\"";
            reason("lost", "AbleToScale", "FailedGetScale", message).await
        })
        .await;
    cluster
        .until("no group", async || {
            let message = "no matches for kind \"Widget\" in group \"example.com\"";
            reason("nowhere", "AbleToScale", "FailedGetScale", message).await
        })
        .await;
    cluster
        .until_event("FailedComputeMetricsReplicas", "invalid metrics (1 invalid out of 1), first error is: failed to get cpu resource metric value: failed to get cpu utilization: ")
        .await;
    create("second", "Deployment").await;
    cluster
        .until("ambiguous", async || {
            let message =
                "pods by selector app=web are controlled by multiple HPAs: [{second default} {web default}]";
            reason("web", "ScalingActive", "AmbiguousSelector", message).await
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_info_is_signed_while_the_token_lives() {
    let cluster = start_with(|config| {
        let list = ["*", "tokencleaner", "bootstrap-signer-controller"];
        config.controllers = ControllerSelection::parse(&list).unwrap();
    })
    .await;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), "kube-public");
    let map = json!({"metadata": {"name": "cluster-info"}, "data": {"kubeconfig": "content"}});
    let map = serde_json::from_value(map).unwrap();
    maps.create(&PostParams::default(), &map).await.unwrap();
    let secrets: Api<Secret> = Api::namespaced(cluster.client.clone(), "kube-system");
    let end = k8s_openapi::jiff::Timestamp::now() + k8s_openapi::jiff::SignedDuration::from_secs(4);
    let secret = json!({"metadata": {"name": "bootstrap-token-abcdef"}, "type": "bootstrap.kubernetes.io/token",
        "stringData": {"token-id": "abcdef", "token-secret": "0123456789abcdef", "usage-bootstrap-signing": "true",
            "expiration": end.to_string()}});
    let secret = serde_json::from_value(secret).unwrap();
    secrets.create(&PostParams::default(), &secret).await.unwrap();
    let signed = async || {
        let data = maps.get("cluster-info").await.unwrap().data.unwrap();
        data.get("jws-kubeconfig-abcdef").cloned()
    };
    cluster
        .until_idle("signed", async || {
            let seen = signed().await;
            check(seen.as_ref().is_some_and(|text| text.contains("..")), seen)
        })
        .await;
    cluster
        .until_idle("expired", async || {
            let left = secrets.get_opt("bootstrap-token-abcdef").await.unwrap();
            check(left.is_none() && signed().await.is_none(), left)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_and_service_ranges_are_looked_after() {
    let cluster = Cluster::start().await;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    cluster
        .until_idle("TTL", async || {
            let annotations = nodes
                .get("n")
                .await
                .unwrap()
                .metadata
                .annotations
                .unwrap_or_default();
            let ttl = annotations.get("node.alpha.kubernetes.io/ttl");
            check(ttl.is_some_and(|ttl| ttl == "0"), ttl)
        })
        .await;
    let cidrs: Api<ServiceCIDR> = Api::all(cluster.client.clone());
    let other = json!({"metadata": {"name": "other"}, "spec": {"cidrs": ["10.200.0.0/24"]}});
    let other = serde_json::from_value(other).unwrap();
    cidrs.create(&PostParams::default(), &other).await.unwrap();
    for name in ["kubernetes", "other"] {
        cluster
            .until_idle(name, async || {
                let seen = cidrs.get(name).await.unwrap();
                let ready = seen
                    .status
                    .clone()
                    .and_then(|status| status.conditions)
                    .unwrap_or_default();
                let good = ready
                    .iter()
                    .any(|one| one.type_ == "Ready" && one.status == "True");
                check(good && seen.metadata.finalizers.is_some(), seen)
            })
            .await;
    }
    // Nobody has an address of it: it goes after a grace period of ten seconds.
    cidrs.delete("other", &DeleteParams::default()).await.unwrap();
    cluster
        .until_idle("deleted", async || {
            check(cidrs.get_opt("other").await.unwrap().is_none(), ())
        })
        .await;
}
