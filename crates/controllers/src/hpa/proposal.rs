//! What each metric of an autoscaler proposes: asks for the metric, has the replicas calculated, and says it in
//! upstream's words.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::autoscaling::v2::{
    ContainerResourceMetricStatus, CrossVersionObjectReference, ExternalMetricSource, ExternalMetricStatus,
    HorizontalPodAutoscalerBehavior, MetricIdentifier, MetricSpec, MetricStatus, MetricTarget,
    MetricValueStatus, ObjectMetricSource, ObjectMetricStatus, PodsMetricSource, PodsMetricStatus,
    ResourceMetricStatus,
};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as QuantityText;
use kube::Client;
use skiff_meta::quantity::Quantity;

use super::calculate::{self, Timing, Tolerances, Usage};
use super::metrics;
use crate::selector::go_text;

/// The target of an autoscaler, and where its metrics come from.
pub(super) struct Workload<'a> {
    pub(super) client: &'a Client,
    pub(super) namespace: &'a str,
    /// The target's selector, and the pods that it selects.
    pub(super) selector: &'a str,
    pub(super) pods: &'a [Arc<Pod>],
    pub(super) spec_replicas: i32,
    pub(super) status_replicas: i32,
    pub(super) tolerances: Tolerances,
    pub(super) timing: Timing,
}

pub(super) struct Proposal {
    pub(super) replicas: i32,
    /// The metric in the words of events and conditions.
    pub(super) name: String,
    pub(super) status: MetricStatus,
}

/// Why a metric proposes nothing.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) reason: &'static str,
    /// What the event and the condition say.
    pub(super) told: String,
    /// What the error of all metrics quotes.
    pub(super) error: String,
}

/// The tolerances of an autoscaler; `default` where its behavior names none.
pub(super) fn tolerances(behavior: Option<&HorizontalPodAutoscalerBehavior>, default: f64) -> Tolerances {
    let read = |given: Option<&QuantityText>| {
        let given = given.and_then(|given| Quantity::parse(&given.0).ok());
        given.map_or(default, |given| given.milli_value() as f64 / 1000.0)
    };
    let (up, down) = behavior.map_or((None, None), |behavior| {
        (behavior.scale_up.as_ref(), behavior.scale_down.as_ref())
    });
    Tolerances {
        up: read(up.and_then(|rules| rules.tolerance.as_ref())),
        down: read(down.and_then(|rules| rules.tolerance.as_ref())),
    }
}

pub(super) fn timing(
    cpu_initialization: std::time::Duration,
    readiness: std::time::Duration,
    now: Timestamp,
) -> Timing {
    let signed = |duration| SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX);
    Timing {
        cpu_initialization: signed(cpu_initialization),
        initial_readiness: signed(readiness),
        now,
    }
}

fn milli(quantity: &QuantityText) -> i64 {
    Quantity::parse(&quantity.0).map_or(0, |quantity| quantity.milli_value())
}

fn decimal(millis: i64) -> QuantityText {
    QuantityText(Quantity::from_millis(millis).to_string())
}

/// Memory is printed in powers of two.
fn amount(resource: &str, millis: i64) -> QuantityText {
    if resource == "memory" && millis % 1000 == 0 {
        QuantityText(Quantity::from_bytes(millis / 1000).to_string())
    } else {
        decimal(millis)
    }
}

impl Workload<'_> {
    pub(super) async fn propose(&self, spec: &MetricSpec) -> Result<Proposal, Failure> {
        match (spec.type_.as_str(), spec) {
            (
                "Resource",
                MetricSpec {
                    resource: Some(source),
                    ..
                },
            ) => {
                let usage = Usage {
                    resource: &source.name,
                    container: None,
                };
                let found = self.by_resource(usage, &source.target).await;
                let (replicas, name, current) = found.map_err(|told| Failure {
                    reason: "FailedGetResourceMetric",
                    error: format!("failed to get {} resource metric value: {told}", source.name),
                    told,
                })?;
                let status = ResourceMetricStatus {
                    name: source.name.clone(),
                    current,
                };
                Ok(proposal(replicas, name, "Resource", |all| {
                    all.resource = Some(status)
                }))
            }
            (
                "ContainerResource",
                MetricSpec {
                    container_resource: Some(source),
                    ..
                },
            ) => {
                let usage = Usage {
                    resource: &source.name,
                    container: Some(&source.container),
                };
                let found = self.by_resource(usage, &source.target).await;
                let (replicas, name, current) = found.map_err(|told| Failure {
                    reason: "FailedGetContainerResourceMetric",
                    error: format!(
                        "failed to get {} container metric value: {told}",
                        source.container
                    ),
                    told,
                })?;
                let status = ContainerResourceMetricStatus {
                    name: source.name.clone(),
                    container: source.container.clone(),
                    current,
                };
                Ok(proposal(replicas, name, "ContainerResource", |all| {
                    all.container_resource = Some(status)
                }))
            }
            (
                "Pods",
                MetricSpec {
                    pods: Some(source), ..
                },
            ) => self.by_pods(source).await,
            (
                "Object",
                MetricSpec {
                    object: Some(source), ..
                },
            ) => self.by_object(source).await,
            (
                "External",
                MetricSpec {
                    external: Some(source),
                    ..
                },
            ) => self.by_external(source).await,
            (unknown, _) => {
                let told = format!("unknown metric source type {unknown:?}");
                Err(Failure {
                    reason: "InvalidMetricSourceType",
                    error: told.clone(),
                    told,
                })
            }
        }
    }

    async fn by_resource(
        &self,
        usage: Usage<'_>,
        target: &MetricTarget,
    ) -> Result<(i32, String, MetricValueStatus), String> {
        let resource = usage.resource;
        let fetch = async {
            let fetched = metrics::resource(self.client, self.namespace, self.selector, usage).await;
            fetched.map_err(|error| format!("unable to get metrics for resource {resource}: {error}"))
        };
        if let Some(average) = &target.average_value {
            let calculated = fetch.await.and_then(|metrics| {
                let (target, resource) = (milli(average), Some(resource));
                let current = self.spec_replicas;
                calculate::by_average(
                    current,
                    target,
                    resource,
                    self.tolerances,
                    self.pods,
                    metrics,
                    &self.timing,
                )
            });
            let (replicas, now) =
                calculated.map_err(|error| format!("failed to get {resource} usage: {error}"))?;
            let current = MetricValueStatus {
                average_value: Some(amount(resource, now)),
                ..Default::default()
            };
            return Ok((replicas, format!("{resource} resource"), current));
        }
        let Some(target) = target.average_utilization else {
            return Err("invalid resource metric source: neither an average utilization target nor an average value (usage) target was set".into());
        };
        let calculated = fetch.await.and_then(|metrics| {
            let current = self.spec_replicas;
            calculate::by_utilization(
                current,
                target,
                usage,
                self.tolerances,
                self.pods,
                metrics,
                &self.timing,
            )
        });
        let (replicas, percent, now) =
            calculated.map_err(|error| format!("failed to get {resource} utilization: {error}"))?;
        let of = if usage.container.is_some() {
            "container resource"
        } else {
            "resource"
        };
        let current = MetricValueStatus {
            average_utilization: Some(percent),
            average_value: Some(amount(resource, now)),
            ..Default::default()
        };
        Ok((
            replicas,
            format!("{resource} {of} utilization (percentage of request)"),
            current,
        ))
    }

    async fn by_pods(&self, source: &PodsMetricSource) -> Result<Proposal, Failure> {
        let metric = &source.metric;
        let selector = metrics::query(metric.selector.as_ref());
        let fetched = metrics::pods(
            self.client,
            self.namespace,
            self.selector,
            &metric.name,
            &selector,
        )
        .await;
        let calculated = fetched
            .map_err(|error| format!("unable to get metric {}: {error}", metric.name))
            .and_then(|metrics| {
                let target = source.target.average_value.as_ref().map_or(0, milli);
                let current = self.spec_replicas;
                calculate::by_average(
                    current,
                    target,
                    None,
                    self.tolerances,
                    self.pods,
                    metrics,
                    &self.timing,
                )
            });
        let (replicas, now) = calculated.map_err(|told| Failure {
            reason: "FailedGetPodsMetric",
            error: format!("failed to get pods metric value: {told}"),
            told,
        })?;
        let status = PodsMetricStatus {
            metric: metric.clone(),
            current: MetricValueStatus {
                average_value: Some(decimal(now)),
                ..Default::default()
            },
        };
        let name = format!("pods metric {}", metric.name);
        Ok(proposal(replicas, name, "Pods", |all| all.pods = Some(status)))
    }

    async fn object_value(
        &self,
        described: &CrossVersionObjectReference,
        metric: &MetricIdentifier,
    ) -> Result<i64, String> {
        let selector = metrics::query(metric.selector.as_ref());
        let fetched = metrics::object(self.client, self.namespace, described, &metric.name, &selector).await;
        fetched.map_err(|error| {
            // COMPAT: upstream has the words in this order.
            let (metric, kind, namespace) = (&metric.name, &described.kind, self.namespace);
            format!(
                "unable to get metric {metric}: {kind} on {namespace} {}/{error}",
                described.name
            )
        })
    }

    async fn by_object(&self, source: &ObjectMetricSource) -> Result<Proposal, Failure> {
        let (metric, target) = (&source.metric, &source.target);
        let failure = |told: String, error: String| Failure {
            reason: "FailedGetObjectMetric",
            error: format!("failed to get object metric value: {error}"),
            told,
        };
        let (replicas, name, current) = match (target.type_.as_str(), &target.value, &target.average_value) {
            ("Value", Some(value), _) => {
                let calculated = self
                    .object_value(&source.described_object, metric)
                    .await
                    .and_then(|usage| {
                        let current = self.spec_replicas;
                        let replicas =
                            calculate::by_value(current, usage, milli(value), self.tolerances, self.pods)?;
                        Ok((replicas, usage))
                    });
                let (replicas, usage) = calculated.map_err(|told| failure(told.clone(), told))?;
                let current = MetricValueStatus {
                    value: Some(decimal(usage)),
                    ..Default::default()
                };
                let name = format!("{} metric {}", source.described_object.kind, metric.name);
                (replicas, name, current)
            }
            ("AverageValue", _, Some(average)) => {
                let usage = self.object_value(&source.described_object, metric).await;
                let usage = usage.map_err(|told| {
                    let error = format!("failed to get {} object metric: {told}", metric.name);
                    failure(told, error)
                })?;
                let (replicas, share) =
                    calculate::by_share(self.status_replicas, usage, milli(average), self.tolerances);
                let current = MetricValueStatus {
                    average_value: Some(decimal(share)),
                    ..Default::default()
                };
                (replicas, external_name(metric), current)
            }
            _ => {
                let told = "invalid object metric source: neither a value target nor an average value target was set";
                return Err(failure(told.into(), told.into()));
            }
        };
        let status = ObjectMetricStatus {
            described_object: source.described_object.clone(),
            metric: metric.clone(),
            current,
        };
        Ok(proposal(replicas, name, "Object", |all| {
            all.object = Some(status)
        }))
    }

    async fn external_value(&self, metric: &MetricIdentifier) -> Result<i64, String> {
        let selector = metrics::query(metric.selector.as_ref());
        let values = metrics::external(self.client, self.namespace, &metric.name, &selector).await;
        let values = values.map_err(|error| {
            let (name, namespace, selector) =
                (&metric.name, self.namespace, go_text(metric.selector.as_ref()));
            format!("unable to get external metric {namespace}/{name}/{selector}: {error}")
        })?;
        Ok(values.into_iter().fold(0, i64::saturating_add))
    }

    async fn by_external(&self, source: &ExternalMetricSource) -> Result<Proposal, Failure> {
        let (metric, target) = (&source.metric, &source.target);
        let failure = |told: String, error: String| Failure {
            reason: "FailedGetExternalMetric",
            error: format!("failed to get {} external metric value: {error}", metric.name),
            told,
        };
        let (replicas, current) = if let Some(average) = &target.average_value {
            let usage = self.external_value(metric).await;
            let usage = usage.map_err(|told| {
                let error = format!("failed to get {} external metric: {told}", metric.name);
                failure(told, error)
            })?;
            let (replicas, share) =
                calculate::by_share(self.status_replicas, usage, milli(average), self.tolerances);
            let current = MetricValueStatus {
                average_value: Some(decimal(share)),
                ..Default::default()
            };
            (replicas, current)
        } else if let Some(value) = &target.value {
            let calculated = self.external_value(metric).await.and_then(|usage| {
                let current = self.spec_replicas;
                let replicas = calculate::by_value(current, usage, milli(value), self.tolerances, self.pods)?;
                Ok((replicas, usage))
            });
            let (replicas, usage) = calculated.map_err(|told| {
                let error = format!("failed to get external metric {}: {told}", metric.name);
                failure(told, error)
            })?;
            let current = MetricValueStatus {
                value: Some(decimal(usage)),
                ..Default::default()
            };
            (replicas, current)
        } else {
            let told =
                "invalid external metric source: neither a value target nor an average value target was set";
            return Err(failure(told.into(), told.into()));
        };
        let status = ExternalMetricStatus {
            metric: metric.clone(),
            current,
        };
        Ok(proposal(replicas, external_name(metric), "External", |all| {
            all.external = Some(status)
        }))
    }
}

fn external_name(metric: &MetricIdentifier) -> String {
    format!(
        "external metric {}({})",
        metric.name,
        go_text(metric.selector.as_ref())
    )
}

fn proposal(replicas: i32, name: String, type_: &str, fill: impl FnOnce(&mut MetricStatus)) -> Proposal {
    let mut status = MetricStatus {
        type_: type_.into(),
        ..Default::default()
    };
    fill(&mut status);
    Proposal {
        replicas,
        name,
        status,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tolerances_of_each_direction() {
        let check = |behavior: serde_json::Value, expected: (f64, f64)| {
            let behavior: HorizontalPodAutoscalerBehavior = serde_json::from_value(behavior).unwrap();
            let seen = tolerances(Some(&behavior), 0.1);
            assert_eq!((seen.down, seen.up), expected);
        };
        check(json!({}), (0.1, 0.1));
        check(json!({"scaleUp": {"tolerance": "50m"}}), (0.1, 0.05));
        check(
            json!({"scaleDown": {"tolerance": "0"}, "scaleUp": {}}),
            (0.0, 0.1),
        );
        assert_eq!(tolerances(None, 0.2).up, 0.2);
    }

    #[test]
    fn amounts_are_printed_as_their_resource_is() {
        assert_eq!(amount("cpu", 1500).0, "1500m");
        assert_eq!(amount("memory", 1_073_741_824_000).0, "1Gi");
        assert_eq!(decimal(12_000).0, "12");
    }
}
