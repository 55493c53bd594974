//! What controllers meet in the wild and must survive: admission that changes what they write, templates that nobody
//! takes, crowds of dependents, scales that lie. Each ends in upstream's event or condition, and in bounded work.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::{Value, json};
use skiff_testkit::Webhook;

use crate::cluster::{Cluster, check};
use crate::rollout::deployment;

fn replica_set(name: &str, replicas: i32, spec: Value) -> Value {
    let mut template = json!({"containers": [{"name": "c", "image": "i"}]});
    for (key, value) in spec.as_object().unwrap() {
        template[key] = value.clone();
    }
    json!({"metadata": {"name": name}, "spec": {"replicas": replicas,
        "selector": {"matchLabels": {"app": "web"}},
        "template": {"metadata": {"labels": {"app": "web"}}, "spec": template}}})
}

/// Requests of a controller that create something in a collection.
fn creations(cluster: &Cluster, account: &str, collection: &str) -> usize {
    let user = format!("system:serviceaccount:kube-system:{account}");
    cluster
        .door
        .count_of(|asked| asked.user == user && asked.method == "POST" && asked.path.ends_with(collection))
}

async fn replica_failure(cluster: &Cluster, name: &str, part: &str) -> Result<(), String> {
    let set = cluster.api::<ReplicaSet>().get(name).await.unwrap();
    let conditions = set
        .status
        .and_then(|status| status.conditions)
        .unwrap_or_default();
    let good = conditions.iter().any(|one| {
        one.type_ == "ReplicaFailure"
            && one.status == "True"
            && one.reason.as_deref() == Some("FailedCreate")
            && one.message.as_deref().is_some_and(|text| text.contains(part))
    });
    check(good, conditions)
}

/// Waits for two seconds, in which a controller that backs off asks a few times.
async fn creations_in_two_seconds(cluster: &Cluster, account: &str, collection: &str) -> usize {
    let before = creations(cluster, account, collection);
    tokio::time::sleep(Duration::from_secs(2)).await;
    creations(cluster, account, collection) - before
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_admission_takes_away_are_not_made_without_end() {
    let cluster = Cluster::start().await;
    let hook = Webhook::start(&cluster.server, |_| {
        vec![json!({"op": "replace", "path": "/metadata/labels/app", "value": "stolen"})]
    });
    let hook = hook.await.unwrap();
    hook.register(&cluster.client, "", &["pods"], &["CREATE"])
        .await
        .unwrap();
    cluster
        .create::<ReplicaSet>(replica_set("web", 3, json!({})))
        .await;
    cluster
        .until_event("FailedCreate", "admission changed its labels")
        .await;
    cluster
        .until_idle("condition", async || {
            replica_failure(&cluster, "web", "admission changed its labels").await
        })
        .await;
    let attempts = creations_in_two_seconds(&cluster, "replicaset-controller", "/pods").await;
    // 5 ms doubled, one pod each.
    assert!(attempts <= 12, "{attempts}: {:?}", cluster.door.most());
    let left = cluster.list::<Pod>().await;
    assert!(left.len() <= 1, "nothing is left behind: {left:?}");
    assert!(hook.reviews() > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_set_that_admission_changes_is_told() {
    let cluster = Cluster::start().await;
    let hook = Webhook::start(&cluster.server, |_| {
        vec![
            json!({"op": "add", "path": "/spec/template/metadata/annotations", "value": {"injected": "yes"}}),
        ]
    });
    let hook = hook.await.unwrap();
    hook.register(&cluster.client, "apps", &["replicasets"], &["CREATE"])
        .await
        .unwrap();
    cluster.create::<Deployment>(deployment("v1", 2)).await;
    cluster
        .until_event("ReplicaSetCreateError", "Failed to create new replica set")
        .await;
    let attempts = creations_in_two_seconds(&cluster, "deployment-controller", "/replicasets").await;
    assert!(attempts <= 12, "{attempts}: {:?}", cluster.door.most());
    cluster
        .until_idle("condition", async || {
            let status = cluster
                .api::<Deployment>()
                .get("web")
                .await
                .unwrap()
                .status
                .unwrap();
            let conditions = status.conditions.clone().unwrap_or_default();
            let told = conditions.iter().any(|one| {
                one.type_ == "Progressing"
                    && one.status == "False"
                    && one.reason.as_deref() == Some("ReplicaSetCreateError")
            });
            check(told && status.collision_count.unwrap_or(0) == 0, conditions)
        })
        .await;
    let left = cluster.list::<ReplicaSet>().await;
    assert!(left.len() <= 1, "{left:?}");
}

fn service() -> Value {
    json!({"metadata": {"name": "web"}, "spec": {"selector": {"app": "web"}, "ports": [{"port": 80}]}})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slices_that_admission_changes_each_time_are_written_slowly() {
    let cluster = Cluster::start().await;
    let count = Arc::new(AtomicUsize::new(0));
    let hook = Webhook::start(&cluster.server, move |_| {
        let number = count.fetch_add(1, Ordering::SeqCst).to_string();
        vec![json!({"op": "add", "path": "/metadata/labels/changed", "value": number})]
    });
    let hook = hook.await.unwrap();
    hook.register(
        &cluster.client,
        "discovery.k8s.io",
        &["endpointslices"],
        &["CREATE", "UPDATE"],
    )
    .await
    .unwrap();
    cluster.create::<Service>(service()).await;
    let writes = || {
        cluster.door.count_of(|asked| {
            asked.user.ends_with(":endpointslice-controller") && asked.is_write() && !asked.is_about_events()
        })
    };
    // Each write is changed, and wakes the next.
    cluster
        .until_idle("the burst", async || check(writes() >= 100, writes()))
        .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = writes();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let after = writes() - before;
    assert!(
        (1..=60).contains(&after),
        "{after} writes in five seconds: {:?}",
        cluster.door.most()
    );
    // Other Services are served meanwhile.
    let mut other = service();
    other["metadata"]["name"] = json!("other");
    cluster.create::<Service>(other).await;
    cluster
        .until_idle("the other's slice", async || {
            let slices = cluster.list::<EndpointSlice>().await;
            let found = slices.iter().any(|slice| {
                let labels = slice.metadata.labels.as_ref();
                labels.is_some_and(|labels| labels["kubernetes.io/service-name"] == "other")
            });
            check(found, slices)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slices_that_admission_takes_away_are_not_made_without_end() {
    let cluster = Cluster::start().await;
    let hook = Webhook::start(&cluster.server, |_| {
        vec![
            json!({"op": "replace", "path": "/metadata/labels/kubernetes.io~1service-name", "value": "stolen"}),
        ]
    });
    let hook = hook.await.unwrap();
    hook.register(
        &cluster.client,
        "discovery.k8s.io",
        &["endpointslices"],
        &["CREATE"],
    )
    .await
    .unwrap();
    cluster.create::<Service>(service()).await;
    cluster
        .until_event(
            "FailedToUpdateEndpointSlices",
            "admission changes the labels of EndpointSlice",
        )
        .await;
    let attempts = creations_in_two_seconds(&cluster, "endpointslice-controller", "/endpointslices").await;
    assert!(attempts <= 12, "{attempts}: {:?}", cluster.door.most());
    let left = cluster.list::<EndpointSlice>().await;
    assert!(left.len() <= 2, "{left:?}");
}

/// A template that admission refuses, and a quota that is full.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_template_that_is_refused_is_told() {
    let cluster = Cluster::start().await;
    cluster
        .create::<ReplicaSet>(replica_set("web", 5, json!({"priorityClassName": "nobody"})))
        .await;
    let text = "no PriorityClass with name nobody was found";
    cluster.until_event("FailedCreate", text).await;
    cluster
        .until_idle("condition", async || replica_failure(&cluster, "web", text).await)
        .await;
    let attempts = creations_in_two_seconds(&cluster, "replicaset-controller", "/pods").await;
    assert!(attempts <= 12, "{attempts}: {:?}", cluster.door.most());
}

/// Two ReplicaSets that select the same pods: each keeps its own, and an orphan has one of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_controllers_share_no_pod() {
    let cluster = Cluster::start().await;
    let pod = |owners: Value| {
        json!({"metadata": {"generateName": "p-", "labels": {"app": "web"}, "ownerReferences": owners},
            "spec": {"containers": [{"name": "c", "image": "i"}]}})
    };
    let owner = |name: &str| json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": name, "uid": name, "controller": true});
    let both: Pod = serde_json::from_value(pod(json!([owner("a"), owner("b")]))).unwrap();
    let refused = cluster.api::<Pod>().create(&PostParams::default(), &both).await;
    let refused = refused.unwrap_err().to_string();
    assert!(
        refused.contains("Only one reference can have Controller set to true"),
        "{refused}"
    );
    cluster.create::<Pod>(pod(json!([]))).await;
    for name in ["a", "b"] {
        cluster
            .create::<ReplicaSet>(replica_set(name, 2, json!({})))
            .await;
    }
    cluster
        .until("two each", async || {
            let pods = cluster.list::<Pod>().await;
            let of = |name: &str| {
                let owned = pods.iter().filter(|pod| {
                    let owners = pod.metadata.owner_references.iter().flatten();
                    owners.map(|owner| owner.name.as_str()).collect::<Vec<_>>() == [name]
                });
                owned.count()
            };
            check((of("a"), of("b"), pods.len()) == (2, 2, 4), &pods)
        })
        .await;
    let mark = |cluster: &Cluster| {
        cluster
            .door
            .count_of(|asked| asked.is_write() && asked.path.contains("/pods"))
    };
    tokio::time::sleep(Duration::from_millis(500)).await;
    let before = mark(&cluster);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(mark(&cluster), before, "{:?}", cluster.door.most());
}

/// A schedule that was missed half a million times starts one Job.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cron_job_that_slept_for_a_year_starts_one_job() {
    let cluster = Cluster::start().await;
    let template = json!({"spec": {"template": {"spec": {"restartPolicy": "Never",
        "containers": [{"name": "c", "image": "i"}]}}}});
    let cron = json!({"metadata": {"name": "c"}, "spec": {"schedule": "* * * * *", "suspend": true,
        "jobTemplate": template}});
    cluster.create::<CronJob>(cron).await;
    let year_ago = k8s_openapi::jiff::Timestamp::now() - Duration::from_secs(365 * 24 * 3600);
    let status =
        Patch::Merge(json!({"status": {"lastScheduleTime": skiff_meta::time::format_seconds(year_ago)}}));
    let crons = cluster.api::<CronJob>();
    crons
        .patch_status("c", &PatchParams::default(), &status)
        .await
        .unwrap();
    cluster
        .patch::<CronJob>("c", json!({"spec": {"suspend": false}}))
        .await;
    cluster
        .until_event("TooManyMissedTimes", "too many missed start times")
        .await;
    cluster
        .until_idle("one job", async || {
            let jobs = cluster.list::<Job>().await.len();
            // A minute may pass meanwhile, and have a Job of its own.
            check((1..=2).contains(&jobs), jobs)
        })
        .await;
}

const DEPENDENTS: usize = 10_000;

/// Each dependent costs a look at itself, one at its owner and its deletion; the owner is looked at when it starts to go
/// and when the last one is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_dependents_go_with_their_owner() {
    let cluster = Cluster::start().await;
    let maps = cluster.api::<ConfigMap>();
    let owner = cluster
        .create::<ConfigMap>(json!({"metadata": {"name": "owner"}}))
        .await;
    let reference = json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner.metadata.uid,
        "blockOwnerDeletion": true}]);
    let create = |n: usize| {
        let map = json!({"metadata": {"name": format!("d{n}"), "labels": {"crowd": "yes"},
            "ownerReferences": reference}});
        let (maps, map) = (maps.clone(), serde_json::from_value(map).unwrap());
        async move {
            maps.create(&PostParams::default(), &map).await.unwrap();
        }
    };
    futures::stream::iter(0..DEPENDENTS)
        .map(create)
        .buffer_unordered(16)
        .collect::<()>()
        .await;
    cluster.door.clear();
    maps.delete("owner", &DeleteParams::foreground()).await.unwrap();
    // However slow the machine is: what counts is the work.
    let gone = async {
        while maps.get_opt("owner").await.unwrap().is_some() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(600), gone)
        .await
        .unwrap();
    let crowd = kube::api::ListParams::default().labels("crowd=yes").limit(1);
    let left = maps.list_metadata(&crowd).await.unwrap().items;
    assert!(left.is_empty(), "the owner went before its dependents");
    let collector = |wanted: &dyn Fn(&crate::door::Asked) -> bool| {
        cluster
            .door
            .count_of(|asked| asked.user.ends_with(":generic-garbage-collector") && wanted(asked))
    };
    let all = collector(&|_| true);
    assert!(
        all <= 3 * DEPENDENTS + DEPENDENTS / 10,
        "{all}: {:?}",
        cluster.door.most()
    );
    let patches = collector(&|asked| asked.method == "PATCH");
    assert_eq!(patches, 1, "the finalizer of the owner");
}

/// A definition whose objects have a scale, and its objects.
async fn widgets(cluster: &Cluster) -> Api<DynamicObject> {
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client.clone());
    let definition = json!({"metadata": {"name": "widgets.example.com"}, "spec": {"group": "example.com",
        "scope": "Namespaced", "names": {"plural": "widgets", "kind": "Widget"}, "versions": [{"name": "v1",
            "served": true, "storage": true,
            "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
            "subresources": {"status": {}, "scale": {"specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas", "labelSelectorPath": ".status.selector"}}}]}});
    let definition = serde_json::from_value(definition).unwrap();
    definitions
        .create(&PostParams::default(), &definition)
        .await
        .unwrap();
    let kind = GroupVersionKind::gvk("example.com", "v1", "Widget");
    let resource = ApiResource::from_gvk_with_plural(&kind, "widgets");
    let api = Api::namespaced_with(cluster.client.clone(), "default", &resource);
    cluster
        .until_idle("served", async || {
            let listed = api.list(&Default::default()).await;
            check(listed.is_ok(), listed)
        })
        .await;
    api
}

async fn widget(api: &Api<DynamicObject>, name: &str, spec: Value, status: Value) -> String {
    let made = create_widget(api, name, spec).await.unwrap();
    let patch = Patch::Merge(json!({"status": status}));
    api.patch_status(name, &PatchParams::default(), &patch)
        .await
        .unwrap();
    made
}

async fn create_widget(api: &Api<DynamicObject>, name: &str, spec: Value) -> Result<String, kube::Error> {
    let object =
        json!({"apiVersion": "example.com/v1", "kind": "Widget", "metadata": {"name": name}, "spec": spec});
    let object: DynamicObject = serde_json::from_value(object).unwrap();
    let made = api.create(&PostParams::default(), &object).await?;
    Ok(made.metadata.uid.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_autoscaler_survives_scales_that_lie() {
    let cluster = Cluster::start_idle().await;
    cluster.run_controllers(|config| config.hpa_sync_period = Duration::from_millis(100));
    cluster.furnished().await;
    let api = widgets(&cluster).await;
    let selecting = |selector: &str| json!({"replicas": 1000, "selector": selector});
    // What it says is not what is there, or there is nothing at all.
    widget(&api, "bare", json!({"replicas": 2}), json!({})).await;
    widget(&api, "broken", json!({"replicas": 2}), selecting("a in (")).await;
    let negative = create_widget(&api, "negative", json!({"replicas": -3})).await;
    let refused = negative.unwrap_err().to_string();
    assert!(refused.contains("should be a non-negative integer"), "{refused}");
    widget(&api, "greedy", json!({"replicas": 2}), selecting("app=web")).await;
    widget(
        &api,
        "greedier",
        json!({"replicas": 2}),
        selecting("app in (web)"),
    )
    .await;
    widget(&api, "stubborn", json!({"replicas": 9}), selecting("app=none")).await;
    cluster
        .create::<ReplicaSet>(replica_set("web", 1, json!({})))
        .await;
    let autoscaler = async |name: &str| {
        let spec = json!({"scaleTargetRef": {"apiVersion": "example.com/v1", "kind": "Widget", "name": name},
            "minReplicas": 2, "maxReplicas": 4});
        let object = json!({"metadata": {"name": name}, "spec": spec});
        cluster.create::<HorizontalPodAutoscaler>(object).await;
    };
    // Whoever is scaled forgets it at once: the number never follows.
    let hook = Webhook::start(&cluster.server, |_| {
        vec![json!({"op": "replace", "path": "/spec/replicas", "value": 9})]
    });
    let hook = hook.await.unwrap();
    hook.register(
        &cluster.client,
        "example.com",
        &["widgets", "widgets/scale"],
        &["UPDATE"],
    )
    .await
    .unwrap();
    for name in ["bare", "broken", "greedy", "greedier", "stubborn"] {
        autoscaler(name).await;
    }
    let condition = async |name: &str, type_: &str, reasons: &[&str]| {
        let found = cluster.api::<HorizontalPodAutoscaler>().get(name).await.unwrap();
        let conditions = found.status.unwrap_or_default().conditions.unwrap_or_default();
        let told = conditions.iter().any(|one| {
            one.type_ == type_
                && one
                    .reason
                    .as_deref()
                    .is_some_and(|reason| reasons.contains(&reason))
        });
        check(told, (name, conditions))
    };
    cluster
        .until("conditions", async || {
            condition("bare", "ScalingActive", &["InvalidSelector"]).await?;
            condition("broken", "ScalingActive", &["InvalidSelector"]).await?;
            condition("greedy", "ScalingActive", &["AmbiguousSelector"]).await?;
            condition("greedier", "ScalingActive", &["AmbiguousSelector"]).await?;
            condition(
                "stubborn",
                "AbleToScale",
                &["SucceededRescale", "FailedUpdateScale"],
            )
            .await
        })
        .await;
    // One try a period, whatever comes of it.
    let writes = |name: &str| {
        let path = format!("/widgets/{name}/scale");
        cluster
            .door
            .count_of(|asked| asked.is_write() && asked.path.ends_with(&path))
    };
    let (before, began) = (writes("stubborn"), tokio::time::Instant::now());
    tokio::time::sleep(Duration::from_secs(2)).await;
    let periods = began.elapsed().as_millis() / 100 + 2;
    let after = writes("stubborn") - before;
    assert!(
        after > 0 && after as u128 <= periods,
        "{after} writes in {periods} periods"
    );
    let found = cluster
        .api::<HorizontalPodAutoscaler>()
        .get("stubborn")
        .await
        .unwrap();
    assert_eq!(found.status.unwrap().desired_replicas, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_budget_survives_scales_that_lie() {
    let cluster = Cluster::start().await;
    let api = widgets(&cluster).await;
    let text = create_widget(&api, "text", json!({"replicas": "many"})).await;
    assert!(text.is_err(), "the server takes no such scale");
    for (name, spec) in [("missing", json!({})), ("huge", json!({"replicas": i32::MAX}))] {
        let uid = widget(&api, name, spec, json!({})).await;
        let owner = json!([{"apiVersion": "example.com/v1", "kind": "Widget", "name": name, "uid": uid,
            "controller": true}]);
        cluster
            .create::<Pod>(
                json!({"metadata": {"name": name, "labels": {"app": name}, "ownerReferences": owner},
                "spec": {"containers": [{"name": "c", "image": "i"}]}}),
            )
            .await;
        let spec = json!({"maxUnavailable": "50%", "selector": {"matchLabels": {"app": name}}});
        cluster
            .create::<PodDisruptionBudget>(json!({"metadata": {"name": name}, "spec": spec}))
            .await;
    }
    cluster
        .until("told", async || {
            for name in ["missing", "huge"] {
                let budget = cluster.api::<PodDisruptionBudget>().get(name).await.unwrap();
                let status = budget.status.unwrap_or_default();
                let conditions = status.conditions.clone().unwrap_or_default();
                let allowed = conditions.iter().find(|one| one.type_ == "DisruptionAllowed");
                let reason = allowed.map(|one| one.reason.as_str());
                let good = status.disruptions_allowed == Some(0)
                    && matches!(reason, Some("SyncFailed" | "InsufficientPods"));
                check(good, (name, &status))?;
            }
            Ok(())
        })
        .await;
    let writes = || {
        cluster
            .door
            .count_of(|asked| asked.is_write() && asked.path.contains("/poddisruptionbudgets/"))
    };
    tokio::time::sleep(Duration::from_millis(500)).await;
    let before = writes();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(writes(), before, "{:?}", cluster.door.most());
}
