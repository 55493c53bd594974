//! The horizontal pod autoscaler: reads metrics every 15 seconds, calculates how many replicas they ask for, and writes
//! that number to the scale subresource of the target, whatever its kind.
//!
//! What it recommended and did before is kept in memory; after a restart the present number counts as the first
//! recommendation.

mod behavior;
mod calculate;
mod metrics;
mod proposal;
mod status;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use jiff::Timestamp;
use k8s_openapi::api::autoscaling::v1::Scale;
use k8s_openapi::api::autoscaling::v2::{HorizontalPodAutoscaler, HorizontalPodAutoscalerSpec, MetricStatus};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::PostParams;
use parking_lot::Mutex;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile, reference};
use skiff_meta::selector::LabelSelector;

use crate::metrics::AutoscalerMetrics;
use crate::scale::{ScaleError, ScaleTarget, parse_group_version};
use crate::{Context, Error, error_message};
use behavior::{Bounds, History};
use proposal::Workload;
use status::{ABLE_TO_SCALE, Draft, SCALED_TO_ZERO, SCALING_ACTIVE, SCALING_LIMITED};

/// How often a scale is written again after a conflict.
const ATTEMPTS: usize = 5;

/// What is known of an autoscaler from its runs before.
#[derive(Default)]
struct Memory {
    history: History,
    /// Of its target; `None` before it was read.
    selector: Option<LabelSelector>,
}

struct Autoscalers {
    context: Context,
    autoscalers: Informer<HorizontalPodAutoscaler>,
    pods: Informer<Pod>,
    /// Leaf lock: never held over an await.
    memory: Mutex<HashMap<Key, Memory>>,
    measured: AutoscalerMetrics,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(Autoscalers {
        autoscalers: context.informers.informer(),
        pods: context.informers.informer(),
        memory: Mutex::default(),
        measured: AutoscalerMetrics::new(context.metrics()),
        context: context.clone(),
    });
    context
        .controller("horizontalpodautoscaler", reconciler)
        .workers(context.workers())
        .watches(|r| &r.autoscalers, |_, change| woken(change))
        .reads(|r| &r.pods)
        .run()
        .await;
}

/// Its own status writes must not bring an autoscaler back before its period is over.
fn woken(change: &Change<HorizontalPodAutoscaler>) -> Option<Key> {
    let same = matches!(change, Change::Applied { old: Some(old), new } if old.spec == new.spec
        && old.metadata.annotations == new.metadata.annotations);
    (!same).then(|| Key::of(&**change.object()))
}

impl Reconcile for Autoscalers {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(autoscaler) = self.autoscalers.get(&key.namespace, &key.name) else {
            self.memory.lock().remove(&key);
            return Ok(Action::Done);
        };
        let now = Timestamp::now();
        let mut draft = Draft::new(autoscaler.status.as_ref(), now);
        let (started, spec) = (Instant::now(), &autoscaler.spec);
        let autoscaled = self.autoscale(&key, &autoscaler, spec, &mut draft, now).await;
        let (action, mut error) = match autoscaled {
            Ok(action) => (action, "none"),
            Err(error) => {
                tracing::debug!(%key, error, "cannot autoscale");
                let target = spec.scale_target_ref.api_version.as_deref();
                let is_wrong = parse_group_version(target.unwrap_or_default()).is_err();
                ("none", if is_wrong { "spec" } else { "internal" })
            }
        };
        if !self.write(&autoscaler, draft).await && error == "none" {
            error = "internal";
        }
        self.measured.reconciled(action, error, started.elapsed());
        // What fails is tried again with the next period, as everything is.
        Ok(Action::RequeueAfter(self.context.config.hpa_sync_period))
    }
}

/// A number of replicas, and why.
struct Wanted {
    replicas: i32,
    reason: String,
    metrics: Vec<MetricStatus>,
}

impl Autoscalers {
    fn event(&self, autoscaler: &HorizontalPodAutoscaler, type_: &str, reason: &str, message: &str) {
        let about = reference(autoscaler);
        self.context
            .events
            .event(&about, type_, reason, message.to_owned());
    }

    /// Whether the status is what it should be.
    async fn write(&self, autoscaler: &HorizontalPodAutoscaler, draft: Draft) -> bool {
        if autoscaler.status.as_ref() == Some(&draft.status) {
            return true;
        }
        let namespace = autoscaler.metadata.namespace.as_deref().unwrap_or_default();
        let api: Api<HorizontalPodAutoscaler> = Api::namespaced(self.context.client.clone(), namespace);
        let mut updated = autoscaler.clone();
        updated.status = Some(draft.status);
        let name = autoscaler.metadata.name.as_deref().unwrap_or_default();
        match api.replace_status(name, &PostParams::default(), &updated).await {
            Err(error) if !error.is_not_found() => {
                self.event(
                    autoscaler,
                    "Warning",
                    "FailedUpdateStatus",
                    &error_message(&error),
                );
                false
            }
            _ => true,
        }
    }

    /// What it did, as metrics name it.
    async fn autoscale(
        &self,
        key: &Key,
        autoscaler: &HorizontalPodAutoscaler,
        spec: &HorizontalPodAutoscalerSpec,
        draft: &mut Draft,
        now: Timestamp,
    ) -> Result<&'static str, String> {
        let (target, scale) = match self.target(key, spec).await {
            Ok(found) => found,
            Err(error) => {
                let error = error.to_string();
                self.event(autoscaler, "Warning", "FailedGetScale", &error);
                let message =
                    format!("the HPA controller was unable to get the target's current scale: {error}");
                draft.set(ABLE_TO_SCALE, false, "FailedGetScale", &message);
                return Err(error);
            }
        };
        let message = "the HPA controller was able to get the target's current scale";
        draft.set(ABLE_TO_SCALE, true, "SucceededGetScale", message);
        let current = replicas(&scale);
        self.remember(key, |memory| memory.history.begin(current, now));
        let bounds = Bounds {
            min: spec.min_replicas.unwrap_or(1),
            max: spec.max_replicas,
        };
        let wanted = if current == 0 {
            let message = "scaling is disabled since the replica count of the target is zero";
            draft.set(SCALING_ACTIVE, false, "ScalingDisabled", message);
            draft.remove(SCALED_TO_ZERO);
            None
        } else if current > bounds.max {
            Some(Wanted {
                replicas: bounds.max,
                reason: "Current number of replicas above Spec.MaxReplicas".into(),
                metrics: Vec::new(),
            })
        } else if current < bounds.min {
            Some(Wanted {
                replicas: bounds.min,
                reason: "Current number of replicas below Spec.MinReplicas".into(),
                metrics: Vec::new(),
            })
        } else {
            let wanted = self
                .by_metrics(key, autoscaler, spec, &scale, &bounds, draft, now)
                .await?;
            Some(wanted)
        };
        let Some(wanted) = wanted else {
            draft.set_counts(current, current, Vec::new(), false);
            return Ok("none");
        };
        let action = match wanted.replicas.cmp(&current) {
            std::cmp::Ordering::Greater => "scale_up",
            std::cmp::Ordering::Less => "scale_down",
            std::cmp::Ordering::Equal => {
                draft.set_counts(current, current, wanted.metrics, false);
                return Ok("none");
            }
        };
        self.rescale(key, autoscaler, spec, target, scale, wanted, draft, now)
            .await?;
        Ok(action)
    }

    async fn target(
        &self,
        key: &Key,
        spec: &HorizontalPodAutoscalerSpec,
    ) -> Result<(ScaleTarget, Scale), ScaleError> {
        let wanted = &spec.scale_target_ref;
        let (group, _) = parse_group_version(wanted.api_version.as_deref().unwrap_or_default())?;
        let client = &self.context.client;
        let target = ScaleTarget::find_any(client, group, &wanted.kind).await?;
        let scale = target.get(client, &key.namespace, &wanted.name).await?;
        Ok((target, scale))
    }

    fn remember<T>(&self, key: &Key, change: impl FnOnce(&mut Memory) -> T) -> T {
        change(self.memory.lock().entry(key.clone()).or_default())
    }

    #[allow(clippy::too_many_arguments, reason = "one step of autoscale")]
    async fn by_metrics(
        &self,
        key: &Key,
        autoscaler: &HorizontalPodAutoscaler,
        spec: &HorizontalPodAutoscalerSpec,
        scale: &Scale,
        bounds: &Bounds,
        draft: &mut Draft,
        now: Timestamp,
    ) -> Result<Wanted, String> {
        let (current, desired) = (replicas(scale), autoscaler.status.as_ref());
        let desired = desired.map_or(0, |status| status.desired_replicas);
        let failed = |draft: &mut Draft, error: String, metrics: Vec<MetricStatus>| {
            draft.set_counts(current, desired, metrics, false);
            self.event(autoscaler, "Warning", "FailedComputeMetricsReplicas", &error);
            Err(error)
        };
        let selector = scale
            .status
            .as_ref()
            .and_then(|status| status.selector.clone())
            .unwrap_or_default();
        let pods = match self.select(key, &selector) {
            Ok(pods) => pods,
            Err((event, condition, error, message)) => {
                self.event(autoscaler, "Warning", event, &error);
                draft.set(SCALING_ACTIVE, false, condition, &message);
                return failed(draft, error, Vec::new());
            }
        };
        let config = &self.context.config;
        let workload = Workload {
            client: &self.context.client,
            namespace: &key.namespace,
            selector: &selector,
            pods: &pods,
            spec_replicas: current,
            status_replicas: scale.status.as_ref().map_or(0, |status| status.replicas),
            tolerances: proposal::tolerances(spec.behavior.as_ref(), config.hpa_tolerance),
            timing: proposal::timing(
                config.hpa_cpu_initialization_period,
                config.hpa_initial_readiness_delay,
                now,
            ),
        };
        let specs = spec.metrics.as_deref().unwrap_or_default();
        let (mut best, mut statuses, mut failures) = (None::<(i32, String)>, Vec::new(), Vec::new());
        for metric in specs {
            match workload.propose(metric).await {
                Ok(proposal) => {
                    if best
                        .as_ref()
                        .is_none_or(|(most, _)| *most == 0 || proposal.replicas > *most)
                    {
                        best = Some((proposal.replicas, proposal.name));
                    }
                    statuses.push(proposal.status);
                }
                Err(failure) => {
                    self.event(autoscaler, "Warning", failure.reason, &failure.told);
                    statuses.push(MetricStatus::default());
                    failures.push(failure);
                }
            }
        }
        // With a metric unknown it may grow by the others, but not shrink.
        let best = match (best, failures.first()) {
            (Some(best), None) => best,
            (Some(best), Some(_)) if best.0 >= current => best,
            (_, first) => {
                let (reason, told, error) = first.map_or(("", "", ""), |first| {
                    (first.reason, first.told.as_str(), first.error.as_str())
                });
                let message = format!("the HPA was unable to compute the replica count: {told}");
                draft.set(SCALING_ACTIVE, false, reason, &message);
                let (invalid, all) = (failures.len(), specs.len());
                let error =
                    format!("invalid metrics ({invalid} invalid out of {all}), first error is: {error}");
                return failed(draft, error, statuses);
            }
        };
        let (proposed, name) = best;
        let message = format!("the HPA was able to successfully calculate a replica count from {name}");
        draft.set(SCALING_ACTIVE, true, "ValidMetricFound", &message);
        let window = i32::try_from(config.hpa_downscale_stabilization.as_secs()).unwrap_or(i32::MAX);
        let decision = self.remember(key, |memory| {
            let history = &mut memory.history;
            behavior::decide(
                spec.behavior.as_ref(),
                history,
                current,
                proposed,
                bounds,
                window,
                now,
            )
        });
        draft.set(ABLE_TO_SCALE, true, decision.able.0, decision.able.1);
        draft.set(
            SCALING_LIMITED,
            decision.limited,
            decision.limit.0,
            decision.limit.1,
        );
        let reason = match proposed.cmp(&current) {
            std::cmp::Ordering::Greater => format!("{name} above target"),
            std::cmp::Ordering::Less => "All metrics below target".into(),
            std::cmp::Ordering::Equal => String::new(),
        };
        Ok(Wanted {
            replicas: decision.replicas,
            reason,
            metrics: statuses,
        })
    }

    /// The pods of the target, which must be no other autoscaler's. The error: reason of the event, reason of the
    /// condition, message of the event, message of the condition.
    fn select(
        &self,
        key: &Key,
        selector: &str,
    ) -> Result<Vec<Arc<Pod>>, (&'static str, &'static str, String, String)> {
        if selector.is_empty() {
            let message = "the HPA target's scale is missing a selector";
            return Err((
                "SelectorRequired",
                "InvalidSelector",
                "selector is required".into(),
                message.into(),
            ));
        }
        let parsed = LabelSelector::parse(selector).map_err(|error| {
            let message =
                format!("couldn't convert selector into a corresponding internal selector object: {error}");
            ("InvalidSelector", "InvalidSelector", message.clone(), message)
        })?;
        let matches = |selector: &LabelSelector, labels: Option<&BTreeMap<String, String>>| {
            selector.matches(|name| labels.and_then(|labels| labels.get(name)).map(String::as_str))
        };
        let pods = self
            .pods
            .list_labelled(&key.namespace, |labels| matches(&parsed, labels));
        let mut memory = self.memory.lock();
        memory.entry(key.clone()).or_default().selector = Some(parsed);
        let mut owners: Vec<&Key> = memory
            .iter()
            .filter(|(other, memory)| {
                other.namespace == key.namespace
                    && memory.selector.as_ref().is_some_and(|selector| {
                        pods.iter()
                            .any(|pod| matches(selector, pod.metadata.labels.as_ref()))
                    })
            })
            .map(|(other, _)| other)
            .collect();
        if owners.len() > 1 {
            owners.sort();
            let names: Vec<String> = owners
                .iter()
                .map(|owner| format!("{{{} {}}}", owner.name, owner.namespace))
                .collect();
            let message = format!(
                "pods by selector {selector} are controlled by multiple HPAs: [{}]",
                names.join(" ")
            );
            return Err(("AmbiguousSelector", "AmbiguousSelector", message.clone(), message));
        }
        Ok(pods)
    }

    #[allow(clippy::too_many_arguments, reason = "one step of autoscale")]
    async fn rescale(
        &self,
        key: &Key,
        autoscaler: &HorizontalPodAutoscaler,
        spec: &HorizontalPodAutoscalerSpec,
        target: ScaleTarget,
        mut scale: Scale,
        wanted: Wanted,
        draft: &mut Draft,
        now: Timestamp,
    ) -> Result<(), String> {
        let client = &self.context.client;
        let (current, size) = (replicas(&scale), wanted.replicas);
        let mut outcome = Ok(());
        for _ in 0..ATTEMPTS {
            scale.spec.get_or_insert_default().replicas = Some(size);
            outcome = target.update(client, &scale).await.map(drop);
            match &outcome {
                Err(error) if error.is_conflict() => {
                    if let Ok(latest) = target
                        .get(client, &key.namespace, &spec.scale_target_ref.name)
                        .await
                    {
                        scale = latest;
                    }
                }
                _ => break,
            }
        }
        if let Err(error) = outcome {
            let error = error.to_string();
            let message = format!("New size: {size}; reason: {}; error: {error}", wanted.reason);
            self.event(autoscaler, "Warning", "FailedRescale", &message);
            let message = format!("the HPA controller was unable to update the target scale: {error}");
            draft.set(ABLE_TO_SCALE, false, "FailedUpdateScale", &message);
            let desired = draft.status.desired_replicas;
            draft.set_counts(current, desired, wanted.metrics, false);
            return Err(error);
        }
        let message = format!("the HPA controller was able to update the target scale to {size}");
        draft.set(ABLE_TO_SCALE, true, "SucceededRescale", &message);
        let message = format!("New size: {size}; reason: {}", wanted.reason);
        self.event(autoscaler, "Normal", "SuccessfulRescale", &message);
        self.remember(key, |memory| {
            memory.history.record(spec.behavior.as_ref(), current, size, now)
        });
        draft.remove(SCALED_TO_ZERO);
        draft.set_counts(current, size, wanted.metrics, true);
        Ok(())
    }
}

fn replicas(scale: &Scale) -> i32 {
    scale.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(0)
}
