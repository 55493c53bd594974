//! How many replicas a metric asks for, without I/O. Values are in thousandths.
//!
//! Pods whose metrics are missing or mean nothing yet damp the result: they count as what moves it least.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod};
use skiff_meta::quantity::Quantity;
use skiff_pods::requests::pod_requests;

use crate::pods;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct PodMetric {
    pub(super) at: Timestamp,
    /// Over how long before that it was measured.
    pub(super) window: SignedDuration,
    pub(super) value: i64,
}

pub(super) type PodMetrics = BTreeMap<String, PodMetric>;

/// How far from its target a metric may be without any change, in each direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Tolerances {
    pub(super) down: f64,
    pub(super) up: f64,
}

impl Tolerances {
    fn covers(&self, ratio: f64) -> bool {
        1.0 - self.down <= ratio && ratio <= 1.0 + self.up
    }
}

/// When the CPU metric of a young pod counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    pub(super) cpu_initialization: SignedDuration,
    pub(super) initial_readiness: SignedDuration,
    pub(super) now: Timestamp,
}

#[derive(Debug, Default, PartialEq)]
struct Groups {
    ready: usize,
    unready: BTreeSet<String>,
    missing: BTreeSet<String>,
    ignored: BTreeSet<String>,
}

fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

fn group(pods: &[Arc<Pod>], metrics: &PodMetrics, is_cpu: bool, timing: &Timing) -> Groups {
    let mut groups = Groups::default();
    for pod in pods {
        let name = name(pod).to_owned();
        if pod.metadata.deletion_timestamp.is_some() || pods::phase(pod) == "Failed" {
            groups.ignored.insert(name);
        } else if pods::phase(pod) == "Pending" {
            groups.unready.insert(name);
        } else if let Some(metric) = metrics.get(&name) {
            if is_cpu && is_warming_up(pod, metric, timing) {
                groups.unready.insert(name);
            } else {
                groups.ready += 1;
            }
        } else {
            groups.missing.insert(name);
        }
    }
    groups
}

/// Whether a pod's CPU metric tells of its start, or of a time before it was ready.
fn is_warming_up(pod: &Pod, metric: &PodMetric, timing: &Timing) -> bool {
    let started = pod.status.as_ref().and_then(|status| status.start_time.as_ref());
    let (Some(ready), Some(started)) = (pods::condition(pod, "Ready"), started) else {
        return true;
    };
    let changed = ready
        .last_transition_time
        .as_ref()
        .map_or(Timestamp::MIN, |time| time.0);
    let after = |time: Timestamp, by: SignedDuration| time.saturating_add(by).unwrap_or(Timestamp::MAX);
    let not_ready = ready.status == "False";
    if after(started.0, timing.cpu_initialization) > timing.now {
        not_ready || metric.at < after(changed, metric.window)
    } else {
        // Never ready since it started.
        not_ready && after(started.0, timing.initial_readiness) > changed
    }
}

fn drop_metrics(metrics: &mut PodMetrics, pods: &BTreeSet<String>) {
    metrics.retain(|name, _| !pods.contains(name));
}

/// The wanted replicas, by the ratio that `ratio` calculates from the metrics. `assumed` is the value of a pod whose
/// metric is missing where the load is low.
fn settle(
    current: i32,
    tolerances: Tolerances,
    groups: &Groups,
    mut metrics: PodMetrics,
    ratio: impl Fn(&PodMetrics) -> Result<f64, String>,
    assumed: impl Fn(&str) -> i64,
) -> Result<i32, String> {
    let usage = ratio(&metrics)?;
    let with_unready = !groups.unready.is_empty() && usage > 1.0;
    if !with_unready && groups.missing.is_empty() {
        return Ok(if tolerances.covers(usage) {
            current
        } else {
            (usage * groups.ready as f64).ceil() as i32
        });
    }
    let mut assume = |name: &str, value: i64| {
        let metric = PodMetric {
            at: Timestamp::UNIX_EPOCH,
            window: SignedDuration::ZERO,
            value,
        };
        metrics.insert(name.to_owned(), metric);
    };
    for name in &groups.missing {
        if usage < 1.0 {
            assume(name, assumed(name));
        } else if usage > 1.0 {
            assume(name, 0);
        }
    }
    if with_unready {
        groups.unready.iter().for_each(|name| assume(name, 0));
    }
    let damped = ratio(&metrics)?;
    let turned = (usage < 1.0 && damped > 1.0) || (usage > 1.0 && damped < 1.0);
    if tolerances.covers(damped) || turned {
        return Ok(current);
    }
    let wanted = (damped * metrics.len() as f64).ceil() as i32;
    let against = (damped < 1.0 && wanted > current) || (damped > 1.0 && wanted < current);
    Ok(if against { current } else { wanted })
}

/// The pods' metrics without those that do not count.
fn counted(
    pods: &[Arc<Pod>],
    mut metrics: PodMetrics,
    is_cpu: bool,
    timing: &Timing,
) -> Result<(Groups, PodMetrics), String> {
    if pods.is_empty() {
        return Err("no pods returned by selector while calculating replica count".into());
    }
    let groups = group(pods, &metrics, is_cpu, timing);
    drop_metrics(&mut metrics, &groups.ignored);
    drop_metrics(&mut metrics, &groups.unready);
    if metrics.is_empty() {
        return Err("did not receive metrics for targeted pods (pods might be unready)".into());
    }
    Ok((groups, metrics))
}

/// A resource and, if only one container counts, that one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Usage<'a> {
    pub(super) resource: &'a str,
    pub(super) container: Option<&'a str>,
}

/// By the percentage of what the pods request: the wanted replicas, the percentage now, and the average use.
pub(super) fn by_utilization(
    current: i32,
    target: i32,
    usage: Usage<'_>,
    tolerances: Tolerances,
    pods: &[Arc<Pod>],
    metrics: PodMetrics,
    timing: &Timing,
) -> Result<(i32, i32, i64), String> {
    let (groups, metrics) = counted(pods, metrics, usage.resource == "cpu", timing)?;
    let requests = requests(pods, usage)?;
    let utilization = |metrics: &PodMetrics| {
        let known = metrics
            .iter()
            .filter_map(|(name, metric)| Some((metric.value, *requests.get(name)?)));
        let (mut used, mut requested, mut count) = (0i64, 0i64, 0i64);
        for (value, request) in known {
            used = used.saturating_add(value);
            requested = requested.saturating_add(request);
            count += 1;
        }
        if requested == 0 {
            return Err("no metrics returned matched known pods".to_owned());
        }
        let percent = i32::try_from(used.saturating_mul(100) / requested).unwrap_or(i32::MAX);
        Ok((percent, used / count))
    };
    let (percent, average) = utilization(&metrics)?;
    let ratio = |metrics: &PodMetrics| {
        let (percent, _) = utilization(metrics)?;
        Ok(f64::from(percent) / f64::from(target))
    };
    // A pod without a metric counts as one that uses all that it requests, or the target if that is more.
    let assumed = |name: &str| {
        let request = requests.get(name).copied().unwrap_or(0);
        request.saturating_mul(i64::from(target.max(100))) / 100
    };
    let replicas = settle(current, tolerances, &groups, metrics, ratio, assumed)?;
    Ok((replicas, percent, average))
}

/// By the pods' average: the wanted replicas and the average now.
pub(super) fn by_average(
    current: i32,
    target: i64,
    resource: Option<&str>,
    tolerances: Tolerances,
    pods: &[Arc<Pod>],
    metrics: PodMetrics,
    timing: &Timing,
) -> Result<(i32, i64), String> {
    let (groups, metrics) = counted(pods, metrics, resource == Some("cpu"), timing)?;
    let average = |metrics: &PodMetrics| {
        let sum = metrics
            .values()
            .fold(0i64, |sum, metric| sum.saturating_add(metric.value));
        sum / i64::try_from(metrics.len()).unwrap_or(i64::MAX)
    };
    let now = average(&metrics);
    let ratio = |metrics: &PodMetrics| Ok(average(metrics) as f64 / target as f64);
    let replicas = settle(current, tolerances, &groups, metrics, ratio, |_| target)?;
    Ok((replicas, now))
}

/// By one value for all replicas together.
pub(super) fn by_value(
    current: i32,
    usage: i64,
    target: i64,
    tolerances: Tolerances,
    pods: &[Arc<Pod>],
) -> Result<i32, String> {
    let ratio = usage as f64 / target as f64;
    if current == 0 {
        return Ok(ratio.ceil() as i32);
    }
    if tolerances.covers(ratio) {
        return Ok(current);
    }
    if pods.is_empty() {
        let why = "no pods returned by selector while calculating replica count";
        return Err(format!("unable to calculate ready pods: {why}"));
    }
    let ready = pods
        .iter()
        .filter(|pod| pods::phase(pod) == "Running" && pods::is_ready(pod));
    Ok((ratio * ready.count() as f64).ceil() as i32)
}

/// By one value that is shared out among the replicas: their number, and each one's share now.
pub(super) fn by_share(replicas: i32, usage: i64, target: i64, tolerances: Tolerances) -> (i32, i64) {
    let ratio = usage as f64 / (target as f64 * f64::from(replicas));
    let wanted = if tolerances.covers(ratio) {
        replicas
    } else {
        (usage as f64 / target as f64).ceil() as i32
    };
    let share = if usage == i64::MAX {
        usage
    } else {
        (usage as f64 / f64::from(replicas)).ceil() as i64
    };
    (wanted, share)
}

fn requests(pods: &[Arc<Pod>], usage: Usage<'_>) -> Result<BTreeMap<String, i64>, String> {
    let mut requests = BTreeMap::new();
    for pod in pods {
        let of_pod = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
        let of_pod = of_pod.and_then(|resources| resources.requests.as_ref());
        let request = if usage.container.is_none() && of_pod.is_some_and(|requests| !requests.is_empty()) {
            pod_level(pod, usage.resource)?
        } else {
            container_level(pod, usage)?
        };
        requests.insert(name(pod).to_owned(), request);
    }
    Ok(requests)
}

fn pod_level(pod: &Pod, resource: &str) -> Result<i64, String> {
    let amount = pod_requests(pod).get(resource);
    if amount == 0 {
        return Err(format!(
            "missing pod-level request for {resource} in Pod {}",
            name(pod)
        ));
    }
    // CPU is counted in thousandths already.
    Ok(if resource == "cpu" {
        amount
    } else {
        amount.saturating_mul(1000)
    })
}

fn container_level(pod: &Pod, usage: Usage<'_>) -> Result<i64, String> {
    let (resource, pod_name) = (usage.resource, name(pod));
    let request = |container: &Container| {
        let requests = container
            .resources
            .as_ref()
            .and_then(|resources| resources.requests.as_ref());
        let amount = requests.and_then(|requests| requests.get(resource));
        let amount = amount.and_then(|amount| Quantity::parse(&amount.0).ok());
        amount.map(|amount| amount.milli_value()).ok_or_else(|| {
            let container = &container.name;
            format!("missing request for {resource} in container {container} of Pod {pod_name}")
        })
    };
    let Some(spec) = &pod.spec else { return Ok(0) };
    let sidecars = spec.init_containers.iter().flatten();
    let sidecars = sidecars.filter(|container| container.restart_policy.as_deref() == Some("Always"));
    let mut containers = spec.containers.iter().chain(sidecars);
    match usage.container {
        None => containers.try_fold(0i64, |sum, container| Ok(sum.saturating_add(request(container)?))),
        Some(wanted) => match containers.find(|container| container.name == wanted) {
            Some(container) => request(container),
            None => Err(format!("container {wanted} not found in Pod {pod_name}")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const TENTH: Tolerances = Tolerances { down: 0.1, up: 0.1 };

    fn timing() -> Timing {
        Timing {
            cpu_initialization: SignedDuration::from_mins(5),
            initial_readiness: SignedDuration::from_secs(30),
            now: "2026-01-01T01:00:00Z".parse().unwrap(),
        }
    }

    /// Pods that are long ready and request one CPU.
    fn pod(name: &str, patch: Value) -> Arc<Pod> {
        let mut value = json!({"metadata": {"name": name},
            "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "1", "memory": "1Ki"}}}]},
            "status": {"phase": "Running", "startTime": "2026-01-01T00:00:00Z", "conditions": [
                {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
        for (pointer, change) in patch.as_object().unwrap() {
            let (parent, last) = pointer.rsplit_once('/').unwrap();
            value.pointer_mut(parent).unwrap()[last] = change.clone();
        }
        Arc::new(serde_json::from_value(value).unwrap())
    }

    fn metrics(values: &[i64]) -> PodMetrics {
        let metric = |value: &i64| PodMetric {
            at: "2026-01-01T00:59:50Z".parse().unwrap(),
            window: SignedDuration::from_secs(30),
            value: *value,
        };
        values
            .iter()
            .enumerate()
            .map(|(index, value)| (format!("p{index}"), metric(value)))
            .collect()
    }

    fn pods(count: usize) -> Vec<Arc<Pod>> {
        (0..count)
            .map(|index| pod(&format!("p{index}"), json!({})))
            .collect()
    }

    const CPU: Usage<'_> = Usage {
        resource: "cpu",
        container: None,
    };

    #[test]
    fn utilization() {
        let check =
            |pods: &[Arc<Pod>], values: &[i64], target: i32, expected: Result<(i32, i32, i64), &str>| {
                let current = i32::try_from(pods.len()).unwrap();
                let seen = by_utilization(current, target, CPU, TENTH, pods, metrics(values), &timing());
                assert_eq!(
                    seen.as_ref().map_err(String::as_str),
                    expected.as_ref().map_err(|e| *e),
                    "{values:?}"
                );
            };
        check(&pods(3), &[300, 500, 700], 30, Ok((5, 50, 500)));
        check(&pods(4), &[500; 4], 50, Ok((4, 50, 500)));
        check(&pods(4), &[540; 4], 50, Ok((4, 54, 540)));
        check(&pods(5), &[100, 300, 500, 250, 250], 50, Ok((3, 28, 280)));
        // A metric is missing: for scaling up its pod uses nothing, for scaling down all that it requests.
        check(&pods(3), &[900, 900], 50, Ok((4, 90, 900)));
        check(&pods(4), &[100, 100, 100], 50, Ok((3, 10, 100)));
        check(&pods(2), &[900], 50, Ok((2, 90, 900)));
        check(
            &pods(2),
            &[],
            50,
            Err("did not receive metrics for targeted pods (pods might be unready)"),
        );
        check(
            &[],
            &[1],
            50,
            Err("no pods returned by selector while calculating replica count"),
        );
    }

    #[test]
    fn pods_that_do_not_count() {
        let check = |patch: Value, values: &[i64], expected: i32| {
            let mut pods = pods(2);
            pods.push(pod("p2", patch.clone()));
            let (replicas, _, _) =
                by_utilization(3, 50, CPU, TENTH, &pods, metrics(values), &timing()).unwrap();
            assert_eq!(replicas, expected, "{patch}");
        };
        let all = [900, 900, 900];
        check(json!({}), &all, 6);
        check(json!({"/status/phase": "Failed"}), &all, 4);
        check(
            json!({"/metadata/deletionTimestamp": "2026-01-01T00:00:00Z"}),
            &all,
            4,
        );
        check(json!({"/status/phase": "Pending"}), &all, 4);
        // It started two minutes ago, and its metric tells of the time before it was ready.
        check(
            json!({"/status/startTime": "2026-01-01T00:58:00Z",
            "/status/conditions/0/lastTransitionTime": "2026-01-01T00:59:45Z"}),
            &all,
            4,
        );
        check(
            json!({"/status/startTime": "2026-01-01T00:58:00Z",
            "/status/conditions/0/lastTransitionTime": "2026-01-01T00:59:00Z"}),
            &all,
            6,
        );
        // It was never ready.
        check(
            json!({"/status/conditions/0/status": "False",
            "/status/conditions/0/lastTransitionTime": "2026-01-01T00:00:10Z"}),
            &all,
            4,
        );
        // It was, and is not any more.
        check(
            json!({"/status/conditions/0/status": "False",
            "/status/conditions/0/lastTransitionTime": "2026-01-01T00:30:00Z"}),
            &all,
            6,
        );
    }

    #[test]
    fn requests_of_containers() {
        let check = |patch: Value, container: Option<&str>, expected: Result<i64, &str>| {
            let pods = [pod("p0", patch.clone())];
            let usage = Usage {
                resource: "cpu",
                container,
            };
            let seen = requests(&pods, usage).map(|requests| requests["p0"]);
            assert_eq!(
                seen.as_ref().map_err(String::as_str),
                expected.as_ref().map_err(|e| *e),
                "{patch}"
            );
        };
        check(json!({}), None, Ok(1000));
        check(json!({}), Some("c"), Ok(1000));
        check(json!({}), Some("x"), Err("container x not found in Pod p0"));
        check(
            json!({"/spec/containers/0/resources": {}}),
            None,
            Err("missing request for cpu in container c of Pod p0"),
        );
        let sidecar = json!({"/spec/initContainers": [
            {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "500m"}}},
            {"name": "i", "resources": {"requests": {"cpu": "5"}}}]});
        check(sidecar.clone(), None, Ok(1500));
        check(sidecar, Some("s"), Ok(500));
        check(
            json!({"/spec/resources": {"requests": {"cpu": "3"}}}),
            None,
            Ok(3000),
        );
        check(
            json!({"/spec/resources": {"requests": {"cpu": "3"}}}),
            Some("c"),
            Ok(1000),
        );
    }

    #[test]
    fn averages() {
        let check = |pods: usize, values: &[i64], target: i64, expected: (i32, i64)| {
            let current = i32::try_from(pods).unwrap();
            let pods = self::pods(pods);
            let seen = by_average(current, target, None, TENTH, &pods, metrics(values), &timing());
            assert_eq!(seen, Ok(expected), "{values:?}");
        };
        check(3, &[20_000, 10_000, 30_000], 15_000, (4, 20_000));
        check(4, &[20_000, 10_000], 15_000, (4, 15_000));
        check(3, &[10_000, 10_000, 10_000], 20_000, (2, 10_000));
        check(3, &[10_500, 10_500, 10_500], 10_000, (3, 10_500));
        // Two of three are known, and low: the third counts as the target.
        check(3, &[5_000, 5_000], 20_000, (2, 5_000));
    }

    #[test]
    fn one_value_for_all() {
        let check = |current: i32, usage: i64, target: i64, expected: i32| {
            assert_eq!(
                by_value(current, usage, target, TENTH, &pods(3)),
                Ok(expected),
                "{usage}/{target}"
            );
        };
        check(3, 20_000, 10_000, 6);
        check(3, 10_900, 10_000, 3);
        check(3, 5_000, 10_000, 2);
        check(0, 25_000, 10_000, 3);
        assert!(by_value(3, 20_000, 10_000, TENTH, &[]).is_err());
        assert_eq!(by_share(3, 40_000, 10_000, TENTH), (4, 13_334));
        assert_eq!(by_share(4, 40_000, 10_000, TENTH), (4, 10_000));
        assert_eq!(by_share(4, i64::MAX, 1, TENTH), (i32::MAX, i64::MAX));
        let uneven = Tolerances { down: 0.5, up: 0.0 };
        assert_eq!(by_value(3, 6_000, 10_000, uneven, &pods(3)), Ok(3));
        assert_eq!(by_value(3, 10_100, 10_000, uneven, &pods(3)), Ok(4));
    }
}
