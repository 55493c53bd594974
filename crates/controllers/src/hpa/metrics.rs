//! The client of the three metrics APIs. What they answer is others' data: it is read strictly, and an answer that is
//! none is an error with upstream's words.

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{APIGroup, LabelSelector, Time};
use kube::Client;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use skiff_meta::quantity::Quantity;

use super::calculate::{PodMetric, PodMetrics, Usage};
use crate::scale::{ScaleTarget, is_absent, parse_group_version, path, request};

const CUSTOM: &str = "custom.metrics.k8s.io";
/// The window of a custom metric that tells none.
const DEFAULT_WINDOW: SignedDuration = SignedDuration::from_mins(1);

#[derive(Deserialize)]
struct List<T> {
    #[serde(default = "Vec::new")]
    items: Vec<T>,
}

#[derive(Deserialize)]
struct PodUsage {
    metadata: Name,
    timestamp: Time,
    window: String,
    #[serde(default)]
    containers: Vec<ContainerUsage>,
}

#[derive(Deserialize)]
struct Name {
    #[serde(default)]
    name: String,
}

#[derive(Deserialize)]
struct ContainerUsage {
    name: String,
    #[serde(default)]
    usage: std::collections::BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MetricValue {
    described_object: Name,
    timestamp: Time,
    window_seconds: Option<i64>,
    value: String,
}

#[derive(Deserialize)]
struct ExternalValue {
    value: String,
}

fn milli(text: &str) -> Result<i64, String> {
    Ok(Quantity::parse(text)?.milli_value())
}

/// A duration as Go prints it, such as `1m30.5s`.
fn go_duration(text: &str) -> Option<SignedDuration> {
    let (mut rest, mut nanos) = (text, 0f64);
    if rest == "0" {
        return Some(SignedDuration::ZERO);
    }
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..end].parse().ok()?;
        rest = &rest[end..];
        let end = rest
            .find(|c: char| c.is_ascii_digit() || c == '.')
            .unwrap_or(rest.len());
        nanos += number
            * match &rest[..end] {
                "h" => 3_600e9,
                "m" => 60e9,
                "s" => 1e9,
                "ms" => 1e6,
                "us" | "µs" => 1e3,
                "ns" => 1.0,
                _ => return None,
            };
        rest = &rest[end..];
    }
    (!text.is_empty()).then(|| SignedDuration::from_nanos(nanos as i64))
}

/// A selector as a query has it.
pub(super) fn query(selector: Option<&LabelSelector>) -> String {
    let Some(selector) = selector else {
        return String::new();
    };
    let labels = selector.match_labels.iter().flatten();
    let mut terms: Vec<(String, String)> = labels
        .map(|(key, value)| (key.clone(), format!("{key}={value}")))
        .collect();
    for one in selector.match_expressions.iter().flatten() {
        let key = &one.key;
        let mut values = one.values.clone().unwrap_or_default();
        values.sort();
        let values = values.join(",");
        let term = match one.operator.as_str() {
            "In" => format!("{key} in ({values})"),
            "NotIn" => format!("{key} notin ({values})"),
            "DoesNotExist" => format!("!{key}"),
            _ => key.clone(),
        };
        terms.push((key.clone(), term));
    }
    terms.sort();
    let terms: Vec<String> = terms.into_iter().map(|(_, term)| term).collect();
    terms.join(",")
}

fn with_query(path: String, parameters: &[(&str, &str)]) -> String {
    let mut serializer = String::new();
    for (key, value) in parameters.iter().filter(|(_, value)| !value.is_empty()) {
        serializer.push(if serializer.is_empty() { '?' } else { '&' });
        serializer.push_str(key);
        serializer.push('=');
        for byte in value.bytes() {
            if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
                serializer.push(char::from(byte));
            } else {
                serializer.push_str(&format!("%{byte:02X}"));
            }
        }
    }
    path + &serializer
}

/// `resource` is what upstream's client says was asked for, should nobody serve it.
async fn get<T: DeserializeOwned>(client: &Client, path: &str, resource: &str) -> Result<T, String> {
    let request = request(http::Method::GET, path, Vec::new()).map_err(|error| error.to_string())?;
    client.request(request).await.map_err(|error: kube::Error| {
        if is_absent(&error) {
            format!("the server could not find the requested resource (get {resource})")
        } else {
            crate::error_message(&error)
        }
    })
}

fn pod_value(pod: &PodUsage, usage: Usage<'_>) -> Result<Option<i64>, String> {
    let value = |container: &ContainerUsage| {
        container
            .usage
            .get(usage.resource)
            .map(|text| milli(text))
            .transpose()
    };
    if let Some(wanted) = usage.container {
        let found = pod.containers.iter().find(|container| container.name == wanted);
        return found.map_or(Ok(None), value);
    }
    let mut sum = None;
    for container in &pod.containers {
        match value(container)? {
            Some(one) => sum = Some(sum.unwrap_or(0i64).saturating_add(one)),
            None => return Ok(None),
        }
    }
    Ok(sum)
}

/// What the pods use of a resource. A pod is missing if one of its containers is.
pub(super) async fn resource(
    client: &Client,
    namespace: &str,
    selector: &str,
    usage: Usage<'_>,
) -> Result<PodMetrics, String> {
    let fetch = async {
        let path = path(&[
            "apis",
            "metrics.k8s.io",
            "v1beta1",
            "namespaces",
            namespace,
            "pods",
        ]);
        let path = with_query(
            path.map_err(|error| error.to_string())?,
            &[("labelSelector", selector)],
        );
        get::<List<PodUsage>>(client, &path, "pods.metrics.k8s.io").await
    };
    let list = fetch
        .await
        .map_err(|error| format!("unable to fetch metrics from resource metrics API: {error}"))?;
    if list.items.is_empty() {
        return Err("no metrics returned from resource metrics API".into());
    }
    let mut metrics = PodMetrics::new();
    for pod in list.items {
        if let Some(value) = pod_value(&pod, usage)? {
            let metric = PodMetric {
                at: pod.timestamp.0,
                window: go_duration(&pod.window)
                    .ok_or_else(|| format!("time: invalid duration {:?}", pod.window))?,
                value,
            };
            metrics.insert(pod.metadata.name, metric);
        }
    }
    Ok(metrics)
}

/// The newest version of the custom metrics API that is served and known.
async fn custom_version(client: &Client) -> Result<&'static str, String> {
    let group: Result<APIGroup, String> = get(client, &format!("/apis/{CUSTOM}"), CUSTOM).await;
    let served = group.map(|group| group.versions).unwrap_or_default();
    let mut known = ["v1beta2", "v1beta1"].into_iter();
    known
        .find(|known| served.iter().any(|version| version.version == *known))
        .ok_or_else(|| format!("no custom metrics API ({CUSTOM}) registered"))
}

async fn custom(
    client: &Client,
    segments: &[&str],
    parameters: &[(&str, &str)],
) -> Result<Vec<MetricValue>, String> {
    let fetch = async {
        let version = custom_version(client).await?;
        let mut all = vec!["apis", CUSTOM, version];
        all.extend(segments);
        let path = path(&all).map_err(|error| error.to_string())?;
        let resource = format!("{}.{CUSTOM}", segments.get(2).unwrap_or(&"metrics"));
        let list: List<MetricValue> = get(client, &with_query(path, parameters), &resource).await?;
        Ok(list.items)
    };
    let answer: Result<Vec<MetricValue>, String> = fetch.await;
    answer.map_err(|error| format!("unable to fetch metrics from custom metrics API: {error}"))
}

/// A metric of each pod.
pub(super) async fn pods(
    client: &Client,
    namespace: &str,
    selector: &str,
    metric: &str,
    metric_selector: &str,
) -> Result<PodMetrics, String> {
    let parameters = [
        ("labelSelector", selector),
        ("metricLabelSelector", metric_selector),
    ];
    let items = custom(
        client,
        &["namespaces", namespace, "pods", "*", metric],
        &parameters,
    )
    .await?;
    if items.is_empty() {
        return Err("no metrics returned from custom metrics API".into());
    }
    let mut metrics = PodMetrics::new();
    for item in items {
        let metric = PodMetric {
            at: item.timestamp.0,
            window: item
                .window_seconds
                .map_or(DEFAULT_WINDOW, SignedDuration::from_secs),
            value: milli(&item.value)?,
        };
        metrics.insert(item.described_object.name, metric);
    }
    Ok(metrics)
}

/// A metric of one object of any kind.
pub(super) async fn object(
    client: &Client,
    namespace: &str,
    described: &k8s_openapi::api::autoscaling::v2::CrossVersionObjectReference,
    metric: &str,
    metric_selector: &str,
) -> Result<i64, String> {
    let api_version = described.api_version.as_deref().unwrap_or_default();
    let failed =
        |error: &dyn std::fmt::Display| format!("unable to fetch metrics from custom metrics API: {error}");
    let (group, _) = parse_group_version(api_version).map_err(|error| failed(&error))?;
    let parameters = [("metricLabelSelector", metric_selector)];
    let items = if group.is_empty() && described.kind == "Namespace" {
        custom(client, &["namespaces", namespace, "metrics", metric], &parameters).await?
    } else {
        let target = ScaleTarget::find_any(client, group, &described.kind).await;
        let resource = target.map_err(|error| failed(&error))?.group_resource();
        let segments = ["namespaces", namespace, &resource, &described.name, metric];
        custom(client, &segments, &parameters).await?
    };
    match items.as_slice() {
        [one] => milli(&one.value),
        many => Err(failed(&format!(
            "the custom metrics API server returned {} results when we asked for exactly one",
            many.len()
        ))),
    }
}

/// The values of a metric of something outside of the cluster.
pub(super) async fn external(
    client: &Client,
    namespace: &str,
    metric: &str,
    selector: &str,
) -> Result<Vec<i64>, String> {
    let fetch = async {
        let path = path(&[
            "apis",
            "external.metrics.k8s.io",
            "v1beta1",
            "namespaces",
            namespace,
            metric,
        ]);
        let path = with_query(
            path.map_err(|error| error.to_string())?,
            &[("labelSelector", selector)],
        );
        get::<List<ExternalValue>>(client, &path, &format!("{metric}.external.metrics.k8s.io")).await
    };
    let list = fetch
        .await
        .map_err(|error| format!("unable to fetch metrics from external metrics API: {error}"))?;
    if list.items.is_empty() {
        return Err("no metrics returned from external metrics API".into());
    }
    list.items.iter().map(|item| milli(&item.value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::client::Body;
    use parking_lot::Mutex;
    use serde_json::{Value, json};
    use std::sync::Arc;

    /// A client whose server answers `answers` by the beginning of the path, and what it was asked.
    fn scripted(answers: Vec<(&'static str, Value)>) -> (Client, Arc<Mutex<Vec<String>>>) {
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let seen = asked.clone();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let uri = request.uri().to_string();
            let path = uri.trim_start_matches("http://localhost").to_owned();
            let answer = answers.iter().rev().find(|(start, _)| path.starts_with(start));
            let (code, body) = match answer {
                Some((_, body)) => (200, body.to_string()),
                None => {
                    let status = json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404,
                        "message": "no"});
                    (404, status.to_string())
                }
            };
            seen.lock().push(path);
            async move {
                let response = http::Response::builder().status(code);
                Ok::<_, std::convert::Infallible>(response.body(Body::from(body.into_bytes())).unwrap())
            }
        });
        (Client::new(service, "default"), asked)
    }

    #[tokio::test]
    async fn resources_of_pods_and_containers() {
        let container = |name: &str, cpu: &str| json!({"name": name, "usage": {"cpu": cpu, "memory": "1Ki"}});
        let pod = |name: &str, containers: Value| {
            json!({"metadata": {"name": name}, "timestamp": "2026-01-01T00:00:00Z",
            "window": "30s", "containers": containers})
        };
        let list = json!({"items": [
            pod("a", json!([container("x", "100m"), container("y", "1")])),
            pod("b", json!([container("x", "1n"), {"name": "y", "usage": {}}])),
            pod("c", json!([]))]});
        let (client, asked) = scripted(vec![("/apis/metrics.k8s.io/v1beta1/namespaces/ns/pods", list)]);
        let usage = |resource: &'static str, container: Option<&'static str>| Usage { resource, container };
        let check = async |usage: Usage<'_>, expected: &[(&str, i64)]| {
            let seen = resource(&client, "ns", "app=a,b in (c)", usage).await.unwrap();
            let seen: Vec<(&str, i64)> = seen
                .iter()
                .map(|(name, metric)| (name.as_str(), metric.value))
                .collect();
            assert_eq!(seen, expected);
        };
        check(usage("cpu", None), &[("a", 1100)]).await;
        check(usage("cpu", Some("x")), &[("a", 100), ("b", 1)]).await;
        check(usage("memory", None), &[("a", 2_048_000)]).await;
        assert_eq!(
            asked.lock()[0],
            "/apis/metrics.k8s.io/v1beta1/namespaces/ns/pods?labelSelector=app%3Da%2Cb%20in%20%28c%29"
        );
        let (client, _) = scripted(vec![]);
        let error = resource(&client, "ns", "a=b", usage("cpu", None))
            .await
            .unwrap_err();
        assert_eq!(
            error,
            "unable to fetch metrics from resource metrics API: the server could not find the requested resource (get pods.metrics.k8s.io)"
        );
    }

    #[tokio::test]
    async fn custom_and_external_metrics() {
        let group = json!({"name": CUSTOM, "versions": [{"groupVersion": format!("{CUSTOM}/v1beta2"), "version": "v1beta2"}]});
        let value = |name: &str, value: &str| json!({"describedObject": {"name": name}, "timestamp": "2026-01-01T00:00:00Z", "value": value});
        let apps = json!({"name": "apps", "versions": [{"groupVersion": "apps/v1", "version": "v1"}]});
        let resources = json!({"groupVersion": "apps/v1", "resources": [{"name": "deployments", "singularName": "", "namespaced": true,
            "kind": "Deployment", "verbs": []}]});
        let (client, asked) = scripted(vec![
            ("/apis/custom.metrics.k8s.io", group),
            ("/apis/apps", apps),
            ("/apis/apps/v1", resources),
            (
                "/apis/custom.metrics.k8s.io/v1beta2/namespaces/ns/pods/*/qps",
                json!({"items": [value("a", "10"), value("b", "2500m")]}),
            ),
            (
                "/apis/custom.metrics.k8s.io/v1beta2/namespaces/ns/deployments.apps/web/qps",
                json!({"items": [value("web", "7")]}),
            ),
            (
                "/apis/custom.metrics.k8s.io/v1beta2/namespaces/ns/metrics/qps",
                json!({"items": []}),
            ),
            (
                "/apis/external.metrics.k8s.io/v1beta1/namespaces/ns/depth",
                json!({"items": [{"value": "1"}, {"value": "3k"}]}),
            ),
        ]);
        let seen = pods(&client, "ns", "a=b", "qps", "x=y").await.unwrap();
        assert_eq!(
            (seen["a"].value, seen["b"].value, seen["b"].window),
            (10_000, 2_500, DEFAULT_WINDOW)
        );
        assert!(
            asked
                .lock()
                .last()
                .unwrap()
                .ends_with("/qps?labelSelector=a%3Db&metricLabelSelector=x%3Dy")
        );
        let described = |kind: &str, api_version: &str| {
            serde_json::from_value(json!({"kind": kind, "name": "web", "apiVersion": api_version})).unwrap()
        };
        assert_eq!(
            object(&client, "ns", &described("Deployment", "apps/v1"), "qps", "").await,
            Ok(7_000)
        );
        let error = object(&client, "ns", &described("Namespace", "v1"), "qps", "")
            .await
            .unwrap_err();
        assert!(
            error.ends_with("returned 0 results when we asked for exactly one"),
            "{error}"
        );
        let error = object(&client, "ns", &described("Widget", "apps/v1"), "qps", "")
            .await
            .unwrap_err();
        assert!(
            error.ends_with("no matches for kind \"Widget\" in group \"apps\""),
            "{error}"
        );
        assert_eq!(
            external(&client, "ns", "depth", "").await,
            Ok(vec![1_000, 3_000_000])
        );
        assert!(external(&client, "ns", "other", "").await.is_err());
        let (client, _) = scripted(vec![]);
        let error = pods(&client, "ns", "a=b", "qps", "").await.unwrap_err();
        assert!(
            error.ends_with("no custom metrics API (custom.metrics.k8s.io) registered"),
            "{error}"
        );
    }

    #[test]
    fn durations_and_selectors() {
        let check = |text: &str, millis: Option<i64>| {
            assert_eq!(go_duration(text).map(|d| d.as_millis() as i64), millis, "{text}");
        };
        check("30s", Some(30_000));
        check("1m30.5s", Some(90_500));
        check("0", Some(0));
        check("15ms", Some(15));
        check("", None);
        check("5", None);
        check("5x", None);
        let selector: LabelSelector =
            serde_json::from_value(json!({"matchLabels": {"b": "c"}, "matchExpressions": [
            {"key": "a", "operator": "In", "values": ["y", "x"]}, {"key": "z", "operator": "DoesNotExist"}]}))
            .unwrap();
        assert_eq!(query(Some(&selector)), "a in (x,y),b=c,!z");
        assert_eq!(query(None), "");
    }
}
