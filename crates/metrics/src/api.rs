//! The Metrics API: nodes and pods, get and list, from what the last scrapes left. Who may ask was decided before a
//! request gets here.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderValue, Method, Response, StatusCode, header};
use http_body_util::Full;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::core::PartialObjectMeta;
use parking_lot::{Mutex, RwLock};
use serde_json::{Value, json};
use skiff_client::Informer;
use skiff_meta::quantity::Quantity;
use skiff_meta::selector::{FieldSelector, LabelSelector};
use skiff_meta::{GroupResource, Status, duration, time};

use crate::documents;
use crate::points::{PodName, Points, Usage};
use crate::table::{Include, table};
use crate::{GROUP, VERSION};

const JSON: &str = "application/json";
const DISCOVERY: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
const PROTOBUF: &str = "application/com.github.proto-openapi.spec.v3@v1.0+protobuf";

pub(crate) type Answer = Response<Full<Bytes>>;
type Labels = BTreeMap<String, String>;

/// Which nodes and pods there are, with their labels.
pub(crate) struct Listers {
    pub(crate) nodes: Informer<Node>,
    pub(crate) pods: Informer<PartialObjectMeta<Pod>>,
}

/// The state behind the API.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) points: RwLock<Points>,
    /// None until the component runs. Leaf lock.
    pub(crate) listers: Mutex<Option<std::sync::Arc<Listers>>>,
}

/// What a list is restricted to.
struct Selection {
    labels: LabelSelector,
    fields: FieldSelector,
}

/// What the client wants to see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Object,
    Table(&'static str, Include),
}

impl State {
    pub(crate) fn answer(&self, parts: &Parts) -> Answer {
        let path: Vec<&str> = parts
            .uri
            .path()
            .split('/')
            .filter(|part| !part.is_empty())
            .collect();
        let answered = match path.as_slice() {
            ["apis"] => Ok(text(DISCOVERY, documents::groups().to_string())),
            ["apis", group, version] if (*group, *version) == (GROUP, VERSION) => {
                Ok(text(JSON, documents::resource_list().to_string()))
            }
            ["openapi", "v3"] => Ok(text(JSON, documents::openapi().v3_index.clone())),
            ["openapi", "v3", "apis", group, version] if (*group, *version) == (GROUP, VERSION) => {
                Ok(openapi(parts))
            }
            ["apis", group, version, rest @ ..] if (*group, *version) == (GROUP, VERSION) => {
                self.resource(parts, rest)
            }
            _ => Ok(not_found()),
        };
        answered.unwrap_or_else(|status| failure(&status))
    }

    fn resource(&self, parts: &Parts, path: &[&str]) -> Result<Answer, Status> {
        let query = Query::of(parts);
        let list = |resource: &str| {
            if query.flag("watch") {
                let resource = GroupResource::new(GROUP, resource);
                return Err(Status::method_not_supported(&resource, "watch"));
            }
            query.selection()
        };
        if parts.method != Method::GET && parts.method != Method::HEAD {
            return Err(Status::method_not_allowed());
        }
        let form = form(parts, &query)?;
        let listers = self.listers.lock().clone();
        let listers =
            listers.ok_or_else(|| Status::service_unavailable("the metrics component is starting"))?;
        let now = Timestamp::now();
        let one = |item: Value, kind: &str| match form {
            Form::Object => headed(item, kind),
            Form::Table(version, include) => table(&[headed(item, kind)], version, include),
        };
        let all = |items: Vec<Value>, kind: &str| match form {
            Form::Object => headed(json!({"metadata": {}, "items": items}), &format!("{kind}List")),
            Form::Table(version, include) => {
                let items: Vec<Value> = items.into_iter().map(|item| headed(item, kind)).collect();
                table(&items, version, include)
            }
        };
        let document = match path {
            ["nodes"] => all(self.nodes(&listers, &list("nodes")?, now), "NodeMetrics"),
            ["nodes", name] => one(self.node(&listers, name, now)?, "NodeMetrics"),
            ["pods"] => all(self.pods(&listers, "", &list("pods")?, now), "PodMetrics"),
            ["namespaces", namespace, "pods"] => {
                all(self.pods(&listers, namespace, &list("pods")?, now), "PodMetrics")
            }
            ["namespaces", namespace, "pods", name] => {
                one(self.pod(&listers, namespace, name, now)?, "PodMetrics")
            }
            _ => return Err(Status::resource_not_found()),
        };
        Ok(text(JSON, document.to_string()))
    }

    fn nodes(&self, listers: &Listers, selection: &Selection, now: Timestamp) -> Vec<Value> {
        let points = self.points.read();
        let mut shown: Vec<(String, Value)> = listers
            .nodes
            .list()
            .iter()
            .filter_map(|node| {
                let name = node.metadata.name.clone()?;
                let labels = node.metadata.labels.clone().unwrap_or_default();
                if !selection.matches(&labels, &name, None) {
                    return None;
                }
                let value = node_metrics(&name, &labels, &points.node(&name)?, now);
                Some((name, value))
            })
            .collect();
        shown.sort_by(|a, b| a.0.cmp(&b.0));
        shown.into_iter().map(|(_, value)| value).collect()
    }

    fn node(&self, listers: &Listers, name: &str, now: Timestamp) -> Result<Value, Status> {
        let node = listers.nodes.get("", name);
        // COMPAT: these are the words of the lister that metrics-server asks.
        let node = node.ok_or_else(|| Status::not_found(&GroupResource::new("", "node"), name))?;
        let usage = self.points.read().node(name);
        let usage =
            usage.ok_or_else(|| Status::not_found(&GroupResource::new(GROUP, "nodemetrics"), name))?;
        let labels = node.metadata.labels.clone().unwrap_or_default();
        Ok(node_metrics(name, &labels, &usage, now))
    }

    /// `namespace` is empty for all of them.
    fn pods(&self, listers: &Listers, namespace: &str, selection: &Selection, now: Timestamp) -> Vec<Value> {
        let points = self.points.read();
        let wanted = |name: &&PodName| namespace.is_empty() || name.0 == namespace;
        let mut names: Vec<&PodName> = points.pods().filter(wanted).collect();
        names.sort();
        let one = |key: &PodName| {
            let pod = listers.pods.get(&key.0, &key.1)?;
            let labels = pod.metadata.labels.clone().unwrap_or_default();
            if !selection.matches(&labels, &key.1, Some(&key.0)) {
                return None;
            }
            pod_metrics(&points, key, &labels, now)
        };
        names.into_iter().filter_map(one).collect()
    }

    fn pod(&self, listers: &Listers, namespace: &str, name: &str, now: Timestamp) -> Result<Value, Status> {
        let pod = listers.pods.get(namespace, name);
        let pod = pod.ok_or_else(|| Status::not_found(&GroupResource::new("", "pods"), name))?;
        let labels = pod.metadata.labels.clone().unwrap_or_default();
        let key = (namespace.to_owned(), name.to_owned());
        pod_metrics(&self.points.read(), &key, &labels, now).ok_or_else(|| {
            let resource = GroupResource::new(GROUP, "podmetrics");
            Status::not_found(&resource, &format!("{namespace}/{name}"))
        })
    }
}

impl Selection {
    fn matches(&self, labels: &Labels, name: &str, namespace: Option<&str>) -> bool {
        self.labels.matches(|key| labels.get(key).map(String::as_str))
            && self.fields.matches(|field| match field {
                "metadata.name" => Some(name),
                "metadata.namespace" => namespace,
                _ => None,
            })
    }
}

fn headed(mut object: Value, kind: &str) -> Value {
    object["kind"] = json!(kind);
    object["apiVersion"] = json!(format!("{GROUP}/{VERSION}"));
    object
}

fn metadata(name: &str, namespace: Option<&str>, labels: &Labels, now: Timestamp) -> Value {
    let mut metadata = json!({"name": name, "creationTimestamp": time::format_seconds(now)});
    if let Some(namespace) = namespace {
        metadata["namespace"] = json!(namespace);
    }
    if !labels.is_empty() {
        metadata["labels"] = json!(labels);
    }
    metadata
}

fn timestamp(nanos: i64) -> String {
    Timestamp::from_nanosecond(i128::from(nanos)).map_or_else(|_| String::new(), time::format_seconds)
}

fn resources(usage: &Usage) -> Value {
    let cpu = Quantity::parse(&format!("{}n", usage.nano_cores));
    let cpu = cpu.map_or_else(|_| "0".to_owned(), |cpu| cpu.to_string());
    let memory = Quantity::from_bytes(i64::try_from(usage.memory).unwrap_or(i64::MAX));
    json!({"cpu": cpu, "memory": memory.to_string()})
}

fn node_metrics(name: &str, labels: &Labels, usage: &Usage, now: Timestamp) -> Value {
    json!({"metadata": metadata(name, None, labels, now), "timestamp": timestamp(usage.time),
        "window": duration::format(usage.window), "usage": resources(usage)})
}

fn pod_metrics(points: &Points, key: &PodName, labels: &Labels, now: Timestamp) -> Option<Value> {
    let usage = points.pod(key)?;
    let containers: Vec<Value> = usage
        .containers
        .iter()
        .map(|(name, usage)| json!({"name": name, "usage": resources(usage)}))
        .collect();
    Some(
        json!({"metadata": metadata(&key.1, Some(&key.0), labels, now), "timestamp": timestamp(usage.time),
        "window": duration::format(usage.window), "containers": containers}),
    )
}

/// The parameters of a request, decoded.
struct Query(Vec<(String, String)>);

impl Query {
    fn of(parts: &Parts) -> Query {
        let text = parts.uri.query().unwrap_or_default();
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        Query(pairs.map(|(name, value)| (decode(name), decode(value))).collect())
    }

    fn get(&self, name: &str) -> &str {
        let found = self.0.iter().find(|(known, _)| known == name);
        found.map_or("", |(_, value)| value)
    }

    fn flag(&self, name: &str) -> bool {
        matches!(self.get(name), "true" | "1")
    }

    fn selection(&self) -> Result<Selection, Status> {
        let labels = LabelSelector::parse(self.get("labelSelector")).map_err(Status::bad_request)?;
        let text = self.get("fieldSelector");
        let fields = FieldSelector::parse(text).map_err(Status::bad_request)?;
        let mut named = fields.terms.iter().map(|term| &term.field);
        if let Some(field) =
            named.find(|field| !matches!(field.as_str(), "metadata.name" | "metadata.namespace"))
        {
            return Err(Status::bad_request(format!(
                "{field:?} is not a known field selector: only \"metadata.name\", \"metadata.namespace\""
            )));
        }
        Ok(Selection { labels, fields })
    }
}

fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let code = (bytes[at] == b'%').then(|| text.get(at + 1..at + 3)).flatten();
        match (bytes[at], code.and_then(|hex| u8::from_str_radix(hex, 16).ok())) {
            (_, Some(byte)) => {
                out.push(byte);
                at += 2;
            }
            (b'+', None) => out.push(b' '),
            (byte, None) => out.push(byte),
        }
        at += 1;
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn accepted(parts: &Parts) -> &str {
    let value = parts.headers.get(header::ACCEPT);
    value.and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// The first form of those that the client accepts.
fn form(parts: &Parts, query: &Query) -> Result<Form, Status> {
    let accept = accepted(parts);
    if accept.is_empty() {
        return Ok(Form::Object);
    }
    for clause in accept.split(',') {
        let mut words = clause.split(';').map(str::trim);
        if !matches!(words.next(), Some("application/json" | "application/*" | "*/*")) {
            continue;
        }
        let parameters: Vec<(&str, &str)> = words.filter_map(|word| word.split_once('=')).collect();
        let get = |name: &str| {
            let found = parameters.iter().find(|(known, _)| *known == name);
            found.map_or("", |(_, value)| *value)
        };
        match (get("as"), get("g"), get("v")) {
            ("", _, _) => return Ok(Form::Object),
            ("Table", "meta.k8s.io", version @ ("v1" | "v1beta1")) => {
                let include = match query.get("includeObject") {
                    "None" => Include::None,
                    "Object" => Include::Object,
                    "" | "Metadata" => Include::Metadata,
                    other => {
                        let why = format!("unrecognized includeObject value: {other:?}");
                        return Err(Status::bad_request(why));
                    }
                };
                let version = if version == "v1" { "v1" } else { "v1beta1" };
                return Ok(Form::Table(version, include));
            }
            _ => {}
        }
    }
    Err(Status::not_acceptable(
        "only the following media types are accepted: application/json",
    ))
}

fn openapi(parts: &Parts) -> Answer {
    if accepted(parts).starts_with(PROTOBUF) {
        return text(PROTOBUF, documents::openapi().v3_protobuf.clone());
    }
    text(JSON, documents::openapi().v3.clone())
}

fn text(content_type: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(
        header::CACHE_CONTROL,
        HeaderValue::from_static("no-cache, private"),
    );
    answer
}

fn not_found() -> Answer {
    let mut answer = text("text/plain; charset=utf-8", "404 page not found\n");
    *answer.status_mut() = StatusCode::NOT_FOUND;
    answer
}

fn failure(status: &Status) -> Answer {
    let mut answer = text(JSON, status.to_value().to_string());
    let code = StatusCode::from_u16(status.http_code());
    *answer.status_mut() = code.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    answer
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn parts(path: &str, accept: &str) -> Parts {
        let request = Request::get(path).header("accept", accept).body(()).unwrap();
        request.into_parts().0
    }

    #[test]
    fn objects() {
        let usage = Usage {
            nano_cores: 12_345_000,
            memory: 3 << 20,
            time: 1_000_000_000,
            window: 15_500_000_000,
        };
        let labels = Labels::from([("a".to_owned(), "b".to_owned())]);
        let now = Timestamp::from_second(5).unwrap();
        assert_eq!(
            node_metrics("n", &labels, &usage, now),
            json!({"metadata": {"name": "n", "creationTimestamp": "1970-01-01T00:00:05Z", "labels": {"a": "b"}},
                "timestamp": "1970-01-01T00:00:01Z", "window": "15.5s", "usage": {"cpu": "12345u", "memory": "3Mi"}})
        );
    }

    #[test]
    fn selections() {
        let check = |query: &str, name: &str, namespace: Option<&str>, expected: bool| {
            let selection = Query::of(&parts(&format!("/x?{query}"), "")).selection().unwrap();
            let labels = Labels::from([("app".to_owned(), "web".to_owned())]);
            assert_eq!(selection.matches(&labels, name, namespace), expected, "{query}");
        };
        check("", "p", Some("ns"), true);
        check("labelSelector=app%3Dweb", "p", Some("ns"), true);
        check("labelSelector=app+in+(db)", "p", Some("ns"), false);
        check("fieldSelector=metadata.name%3Dp", "p", Some("ns"), true);
        check("fieldSelector=metadata.namespace!%3Dns", "p", Some("ns"), false);
        let refused = |query: &str| {
            let refused = Query::of(&parts(&format!("/x?{query}"), "")).selection().err();
            refused
                .map(|status| (status.http_code(), status.message))
                .unwrap()
        };
        let (code, message) = refused("fieldSelector=spec.nodeName%3Dn");
        assert_eq!(
            (code, message.as_str()),
            (
                400,
                "\"spec.nodeName\" is not a known field selector: only \"metadata.name\", \"metadata.namespace\""
            )
        );
        assert_eq!(refused("labelSelector=a%3D%3D%3D").0, 400);
    }

    #[test]
    fn forms() {
        let check = |path: &str, accept: &str, expected: Option<Form>| {
            let parts = parts(path, accept);
            assert_eq!(form(&parts, &Query::of(&parts)).ok(), expected, "{accept}");
        };
        let kubectl = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";
        check("/x", kubectl, Some(Form::Table("v1", Include::Metadata)));
        check(
            "/x?includeObject=Object",
            kubectl,
            Some(Form::Table("v1", Include::Object)),
        );
        check("/x?includeObject=Nothing", kubectl, None);
        check("/x", "application/json", Some(Form::Object));
        check(
            "/x",
            "application/vnd.kubernetes.protobuf, */*",
            Some(Form::Object),
        );
        check("/x", "application/vnd.kubernetes.protobuf", None);
        check("/x", "", Some(Form::Object));
    }

    #[test]
    fn paths() {
        let state = State::default();
        let check = |path: &str, expected: u16| {
            let answer = state.answer(&parts(path, ""));
            assert_eq!(answer.status().as_u16(), expected, "{path}");
        };
        check("/apis", 200);
        check("/apis/metrics.k8s.io/v1beta1", 200);
        check("/openapi/v2", 404);
        check("/openapi/v3/apis/metrics.k8s.io/v1beta1", 200);
        check("/apis/other/v1", 404);
        check("/metrics", 404);
        // Before anything runs.
        check("/apis/metrics.k8s.io/v1beta1/nodes", 503);
        let request = Request::delete("/apis/metrics.k8s.io/v1beta1/nodes")
            .body(())
            .unwrap();
        assert_eq!(state.answer(&request.into_parts().0).status().as_u16(), 405);
    }
}
