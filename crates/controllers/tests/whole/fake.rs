//! An API server in a hash map, just true enough for controllers: create with generateName, update with a
//! version check, merge and strategic patches, finalizers, watches. It checks no schema and no rights.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::StreamExt;
use http::{Request, Response};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;

/// Group and version, plural, kind, namespaced.
const RESOURCES: &[(&str, &str, &str, bool)] = &[
    ("v1", "nodes", "Node", false),
    ("v1", "pods", "Pod", true),
    ("v1", "services", "Service", true),
    ("v1", "endpoints", "Endpoints", true),
    ("v1", "configmaps", "ConfigMap", true),
    ("v1", "serviceaccounts", "ServiceAccount", true),
    ("v1", "events", "Event", true),
    ("v1", "replicationcontrollers", "ReplicationController", true),
    ("v1", "persistentvolumeclaims", "PersistentVolumeClaim", true),
    ("v1", "persistentvolumes", "PersistentVolume", false),
    (
        "storage.k8s.io/v1",
        "volumeattributesclasses",
        "VolumeAttributesClass",
        false,
    ),
    (
        "admissionregistration.k8s.io/v1",
        "validatingadmissionpolicies",
        "ValidatingAdmissionPolicy",
        false,
    ),
    ("apps/v1", "deployments", "Deployment", true),
    ("apps/v1", "replicasets", "ReplicaSet", true),
    ("discovery.k8s.io/v1", "endpointslices", "EndpointSlice", true),
    ("coordination.k8s.io/v1", "leases", "Lease", true),
    // Last: the paths of all others begin like its own.
    ("v1", "namespaces", "Namespace", false),
];

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Value>,
    version: u64,
    /// Version, type, key, object.
    log: Vec<(u64, &'static str, String, Value)>,
}

#[derive(Clone)]
pub struct Fake {
    /// Whether there is a group whose server does not answer.
    pub dead_group: Arc<AtomicBool>,
    state: Arc<Mutex<State>>,
    moved: Arc<watch::Sender<u64>>,
}

type Answer = Response<UnsyncBoxBody<bytes::Bytes, Infallible>>;

fn answer(code: u16, value: &Value) -> Answer {
    let body = Full::new(bytes::Bytes::from(value.to_string()));
    Response::builder()
        .status(code)
        .body(body.boxed_unsync())
        .unwrap()
}

fn failure(code: u16, reason: &str) -> Answer {
    answer(
        code,
        &json!({"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": reason}),
    )
}

/// Merges as RFC 7386 says, and lists of owners and conditions by their keys when `strategic`.
fn merge(target: &mut Value, patch: &Value, strategic: bool) {
    let Some(fields) = patch.as_object() else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (name, value) in fields {
        let list_key = match name.as_str() {
            "ownerReferences" => "uid",
            "conditions" => "type",
            _ => "",
        };
        if strategic && !list_key.is_empty() && value.is_array() {
            let mut merged = target[name].as_array().cloned().unwrap_or_default();
            for item in value.as_array().unwrap() {
                let at = merged.iter().position(|one| one[list_key] == item[list_key]);
                match (at, item["$patch"] == "delete") {
                    (Some(at), true) => {
                        merged.remove(at);
                    }
                    (Some(at), false) => merge(&mut merged[at], item, true),
                    (None, true) => {}
                    (None, false) => merged.push(item.clone()),
                }
            }
            target[name] = json!(merged);
        } else if value.is_null() {
            target.as_object_mut().unwrap().remove(name);
        } else {
            merge(&mut target[name], value, strategic);
        }
    }
}

struct Route {
    prefix: String,
    namespace: String,
    name: String,
    subresource: String,
    kind: &'static str,
    api_version: &'static str,
}

impl Route {
    /// `/api/v1/namespaces/x/pods/y/status` and the like.
    fn parse(path: &str) -> Option<Route> {
        let rest = path
            .strip_prefix("/api/")
            .or_else(|| path.strip_prefix("/apis/"))?;
        let (api_version, kind, prefix, tail) =
            RESOURCES.iter().find_map(|(gv, plural, kind, namespaced)| {
                let tail = rest.strip_prefix(gv)?.strip_prefix('/')?;
                if *namespaced && tail.starts_with("namespaces/") {
                    let (namespace, tail) = tail.strip_prefix("namespaces/")?.split_once('/')?;
                    let tail = tail.strip_prefix(plural)?;
                    (tail.is_empty() || tail.starts_with('/')).then_some(())?;
                    return Some((*gv, *kind, format!("{gv}/{plural}"), format!("{namespace}{tail}")));
                }
                let tail = tail.strip_prefix(plural)?;
                (tail.is_empty() || tail.starts_with('/')).then_some(())?;
                if *namespaced && !tail.is_empty() {
                    return None;
                }
                Some((*gv, *kind, format!("{gv}/{plural}"), tail.to_owned()))
            })?;
        let mut parts = tail.split('/');
        let part = |text: Option<&str>| text.unwrap_or_default().to_owned();
        let (namespace, name) = (part(parts.next()), part(parts.next()));
        Some(Route {
            prefix,
            namespace,
            name,
            subresource: part(parts.next()),
            kind,
            api_version,
        })
    }

    fn key(&self, namespace: &str, name: &str) -> String {
        format!("{}|{namespace}|{name}", self.prefix)
    }
}

impl Fake {
    pub fn new() -> Self {
        Fake {
            dead_group: Arc::default(),
            state: Arc::default(),
            moved: Arc::new(watch::Sender::new(0)),
        }
    }

    pub fn client(&self) -> kube::Client {
        let fake = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let fake = fake.clone();
            async move { Ok::<_, Infallible>(fake.handle(request).await) }
        });
        skiff_client::in_process(service, "default")
    }

    fn write(&self, state: &mut State, type_: &'static str, key: &str, mut object: Value) -> Value {
        state.version += 1;
        object["metadata"]["resourceVersion"] = json!(state.version.to_string());
        if type_ == "DELETED" {
            state.objects.remove(key);
        } else {
            state.objects.insert(key.to_owned(), object.clone());
        }
        state
            .log
            .push((state.version, type_, key.to_owned(), object.clone()));
        self.moved.send_replace(state.version);
        object
    }

    async fn handle(&self, request: Request<Body>) -> Answer {
        let (parts, body) = request.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let body: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let path = parts.uri.path();
        if let Some(mut found) = discovery(path) {
            if path == "/apis" && self.dead_group.load(Ordering::Relaxed) {
                let version = json!({"groupVersion": "dead.example/v1", "version": "v1"});
                let group =
                    json!({"name": "dead.example", "versions": [version], "preferredVersion": version});
                found["groups"].as_array_mut().unwrap().push(group);
            }
            return answer(200, &found);
        }
        if path.starts_with("/apis/dead.example/") {
            return failure(503, "ServiceUnavailable");
        }
        let Some(mut route) = Route::parse(path) else {
            return failure(404, "NotFound");
        };
        if route.kind == "Namespace" || route.kind == "Node" {
            // `/name/subresource`, after an empty namespace.
            route.namespace = String::new();
        }
        let query = parts.uri.query().unwrap_or_default();
        match parts.method.as_str() {
            "GET" if query.contains("watch=true") => self.watch(&route, query),
            "GET" if route.name.is_empty() => self.list(&route, query),
            // One whose stored value is damaged: nobody can say whether it is the owner that is looked for.
            "GET" if route.name.starts_with("unreadable") => failure(500, "InternalError"),
            "GET" => match self
                .state
                .lock()
                .objects
                .get(&route.key(&route.namespace, &route.name))
            {
                Some(object) => answer(200, object),
                None => failure(404, "NotFound"),
            },
            "POST" => self.create(&route, body),
            "PUT" | "PATCH" => {
                let content = parts
                    .headers
                    .get("content-type")
                    .and_then(|v| v.to_str().ok())
                    .unwrap_or_default();
                self.update(
                    &route,
                    &body,
                    parts.method == "PATCH",
                    content.contains("strategic"),
                )
            }
            "DELETE" if route.name.is_empty() => {
                let wanted = format!("{}|{}|", route.prefix, route.namespace);
                let mut state = self.state.lock();
                let keys: Vec<String> = state
                    .objects
                    .keys()
                    .filter(|key| key.starts_with(&wanted))
                    .cloned()
                    .collect();
                for key in keys {
                    self.delete(&mut state, &key, &body);
                }
                answer(200, &json!({"kind": "Status", "status": "Success"}))
            }
            "DELETE" => {
                let mut state = self.state.lock();
                let key = route.key(&route.namespace, &route.name);
                let Some(present) = state.objects.get(&key).cloned() else {
                    return failure(404, "NotFound");
                };
                for field in ["uid", "resourceVersion"] {
                    let wanted = &body["preconditions"][field];
                    if wanted.is_string() && *wanted != present["metadata"][field] {
                        return failure(409, "Conflict");
                    }
                }
                self.delete(&mut state, &key, &body);
                answer(200, &present)
            }
            _ => failure(405, "MethodNotAllowed"),
        }
    }

    fn delete(&self, state: &mut State, key: &str, options: &Value) {
        let Some(mut object) = state.objects.get(key).cloned() else {
            return;
        };
        let finalizer = match options["propagationPolicy"].as_str() {
            Some("Foreground") => Some("foregroundDeletion"),
            Some("Orphan") => Some("orphan"),
            _ => None,
        };
        if let Some(finalizer) = finalizer {
            let mut all = object["metadata"]["finalizers"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            all.push(json!(finalizer));
            object["metadata"]["finalizers"] = json!(all);
        }
        object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        if object["kind"] == "Namespace" {
            object["status"]["phase"] = json!("Terminating");
        }
        self.write_or_finish(state, key, object);
    }

    /// An object that is being deleted goes with its last finalizer.
    fn write_or_finish(&self, state: &mut State, key: &str, object: Value) -> Value {
        let list = |value: &Value| value.as_array().is_none_or(Vec::is_empty);
        let held = !list(&object["metadata"]["finalizers"])
            || (object["kind"] == "Namespace" && !list(&object["spec"]["finalizers"]));
        let type_ = if object["metadata"]["deletionTimestamp"].is_string() && !held {
            "DELETED"
        } else {
            "MODIFIED"
        };
        self.write(state, type_, key, object)
    }

    fn create(&self, route: &Route, mut object: Value) -> Answer {
        let mut state = self.state.lock();
        let number = state.version + 1;
        if object["metadata"]["name"].as_str().is_none_or(str::is_empty) {
            let prefix = object["metadata"]["generateName"]
                .as_str()
                .unwrap_or_default()
                .to_owned();
            object["metadata"]["name"] = json!(format!("{prefix}{number:05}"));
        }
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let key = route.key(&route.namespace, &name);
        if state.objects.contains_key(&key) {
            return failure(409, "AlreadyExists");
        }
        if !route.namespace.is_empty() {
            object["metadata"]["namespace"] = json!(route.namespace);
        }
        object["apiVersion"] = json!(route.api_version);
        object["kind"] = json!(route.kind);
        object["metadata"]["uid"] = json!(format!("uid-{number}"));
        object["metadata"]["generation"] = json!(1);
        object["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
        if route.kind == "Namespace" {
            object["spec"]["finalizers"] = json!(["kubernetes"]);
        }
        answer(201, &self.write(&mut state, "ADDED", &key, object))
    }

    fn update(&self, route: &Route, body: &Value, patch: bool, strategic: bool) -> Answer {
        let mut state = self.state.lock();
        let key = route.key(&route.namespace, &route.name);
        let Some(present) = state.objects.get(&key).cloned() else {
            return failure(404, "NotFound");
        };
        let given = &body["metadata"]["resourceVersion"];
        if given.is_string() && *given != present["metadata"]["resourceVersion"] {
            return failure(409, "Conflict");
        }
        let mut object = present.clone();
        if patch {
            merge(&mut object, body, strategic);
        } else {
            object = body.clone();
            object["apiVersion"] = present["apiVersion"].clone();
            object["kind"] = present["kind"].clone();
        }
        match route.subresource.as_str() {
            "status" => object["spec"] = present["spec"].clone(),
            "finalize" => {}
            _ => object["status"] = present["status"].clone(),
        }
        for field in ["uid", "creationTimestamp", "deletionTimestamp", "generation"] {
            object["metadata"][field] = present["metadata"][field].clone();
        }
        if object["spec"] != present["spec"] {
            let generation = present["metadata"]["generation"].as_i64().unwrap_or(0);
            object["metadata"]["generation"] = json!(generation + 1);
        }
        if object == present {
            return answer(200, &present);
        }
        answer(200, &self.write_or_finish(&mut state, &key, object))
    }

    fn selects(route: &Route, query: &str, key: &str) -> bool {
        let wanted = if route.namespace.is_empty() {
            format!("{}|", route.prefix)
        } else {
            format!("{}|{}|", route.prefix, route.namespace)
        };
        let name = query
            .split('&')
            .find_map(|pair| pair.strip_prefix("fieldSelector=metadata.name%3D"));
        key.starts_with(&wanted) && name.is_none_or(|name| key.ends_with(&format!("|{name}")))
    }

    fn list(&self, route: &Route, query: &str) -> Answer {
        let state = self.state.lock();
        let items: Vec<&Value> = state
            .objects
            .iter()
            .filter(|(key, _)| Self::selects(route, query, key))
            .map(|(_, object)| object)
            .collect();
        let version = state.version.to_string();
        answer(
            200,
            &json!({"kind": format!("{}List", route.kind), "apiVersion": route.api_version,
            "metadata": {"resourceVersion": version}, "items": items}),
        )
    }

    fn watch(&self, route: &Route, query: &str) -> Answer {
        let from = query
            .split('&')
            .find_map(|pair| pair.strip_prefix("resourceVersion="));
        let mut seen: u64 = from.and_then(|text| text.parse().ok()).unwrap_or(0);
        let (state, mut moved) = (self.state.clone(), self.moved.subscribe());
        let query = query.to_owned();
        let route = Route {
            prefix: route.prefix.clone(),
            namespace: route.namespace.clone(),
            name: String::new(),
            subresource: String::new(),
            ..*route
        };
        let (sender, receiver) = tokio::sync::mpsc::channel(64);
        tokio::spawn(async move {
            loop {
                let mut lines = String::new();
                {
                    let state = state.lock();
                    for (version, type_, key, object) in &state.log {
                        if *version > seen && Self::selects(&route, &query, key) {
                            lines.push_str(&format!("{}\n", json!({"type": type_, "object": object})));
                        }
                    }
                    seen = state.version;
                }
                if !lines.is_empty() && sender.send(lines).await.is_err() {
                    return;
                }
                if moved.changed().await.is_err() {
                    return;
                }
            }
        });
        let chunks = futures::stream::unfold(receiver, |mut receiver| async move {
            receiver.recv().await.map(|lines| (lines, receiver))
        });
        let frames = chunks.map(|lines| Ok(http_body::Frame::data(bytes::Bytes::from(lines))));
        Response::new(StreamBody::new(frames).boxed_unsync())
    }
}

fn discovery(path: &str) -> Option<Value> {
    let verbs = [
        "create",
        "delete",
        "deletecollection",
        "get",
        "list",
        "patch",
        "update",
        "watch",
    ];
    let resources = |group_version: &str| {
        let all: Vec<Value> = RESOURCES
            .iter()
            .filter(|(gv, ..)| *gv == group_version)
            .map(|(_, plural, kind, namespaced)| {
                json!({"name": plural, "singularName": "", "kind": kind,
                "namespaced": namespaced, "verbs": verbs})
            })
            .collect();
        json!({"kind": "APIResourceList", "groupVersion": group_version, "resources": all})
    };
    let groups = ["apps/v1", "discovery.k8s.io/v1", "coordination.k8s.io/v1"];
    match path {
        "/api" => Some(json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})),
        "/apis" => {
            let all: Vec<Value> = groups
                .iter()
                .map(|gv| {
                    let version = json!({"groupVersion": gv, "version": "v1"});
                    json!({"name": gv.split('/').next(), "versions": [version], "preferredVersion": version})
                })
                .collect();
            Some(json!({"kind": "APIGroupList", "groups": all}))
        }
        "/api/v1" => Some(resources("v1")),
        other => {
            let group_version = other.strip_prefix("/apis/")?;
            groups.contains(&group_version).then(|| resources(group_version))
        }
    }
}
