//! Priority and fairness: each request is classified by the FlowSchemas, and executes when its priority level has a
//! seat. Long connections that are no watches pass by.

mod levels;
mod objects;
mod schema;

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use http::{HeaderValue, StatusCode, header};
use parking_lot::Mutex;
use serde_json::{Value, json};
use skiff_auth::UserInfo;
use skiff_meta::Status;
use skiff_registry::{EventKind, encode, object};
use tokio::sync::Notify;

use crate::body::{self, Answer};
use crate::hooks::follow::{Follower, follow};
use crate::hooks::loopback::Loopback;
use crate::request_info::RequestInfo;
use crate::server::Inner;
use levels::{Admission, Levels};
use schema::Schema;

pub use levels::Seat;

/// The owner of the conditions.
const FIELD_MANAGER: &str = "api-priority-and-fairness-config-consumer-v1";

const GROUP: &str = "flowcontrol.apiserver.k8s.io";
const SCHEMAS: &str = "flowschemas";
const LEVELS: &str = "prioritylevelconfigurations";
/// A quarter of the longest time that a request may take.
const WAIT_LIMIT: Duration = Duration::from_secs(15);

#[derive(Default)]
pub struct FlowControl {
    /// Read on every request, so it is swapped, not locked.
    rules: ArcSwap<Rules>,
    levels: Arc<Levels>,
    /// What `rules` is made of. Leaf lock.
    known: Mutex<Known>,
    /// Conditions may have to be written.
    changed: Notify,
    /// An object was deleted, perhaps one that every cluster has.
    deleted: Notify,
}

#[derive(Default)]
struct Known {
    schemas: HashMap<String, Arc<Schema>>,
    /// The uid by the name.
    levels: HashMap<String, String>,
}

/// The schemas whose level exists, in the order in which they are tried.
#[derive(Default)]
struct Rules(Vec<(Arc<Schema>, Classified)>);

/// What a request was found to be, as the headers of its answer say it.
#[derive(Clone)]
pub struct Classified {
    schema_uid: HeaderValue,
    level_uid: HeaderValue,
}

impl Classified {
    pub fn mark(&self, answer: &mut Answer) {
        let headers = answer.headers_mut();
        headers.insert("x-kubernetes-pf-flowschema-uid", self.schema_uid.clone());
        headers.insert("x-kubernetes-pf-prioritylevel-uid", self.level_uid.clone());
    }
}

impl FlowControl {
    /// Classifies a request and waits for its seat. `Err` is the answer to who must come back later.
    pub async fn admit(
        &self,
        user: &UserInfo,
        info: &RequestInfo,
        classified: &mut Option<Classified>,
    ) -> Result<Option<Seat>, Answer> {
        let (level, flow) = {
            let rules = self.rules.load();
            let Some((schema, uids)) = rules.0.iter().find(|(schema, _)| schema.matches(user, info)) else {
                return Ok(None);
            };
            *classified = Some(uids.clone());
            let mut hasher = DefaultHasher::new();
            (&schema.name, schema.flow(user, info)).hash(&mut hasher);
            (schema.level.clone(), hasher.finish())
        };
        match self.levels.admit(&level, flow) {
            None => Ok(None),
            Some(Admission::Seated(seat)) => Ok(Some(seat)),
            Some(Admission::Waiting(turn)) => match tokio::time::timeout(WAIT_LIMIT, turn).await {
                Ok(Ok(seat)) => Ok(Some(seat)),
                _ => Err(come_back()),
            },
            Some(Admission::Refused) => Err(come_back()),
        }
    }

    /// The metrics of the priority levels that exist, in the Prometheus text format.
    pub fn metrics(&self) -> String {
        let name = "apiserver_flowcontrol_nominal_limit_seats";
        let mut text = format!(
            "# HELP {name} [BETA] Nominal number of execution seats configured for each priority level\n# TYPE {name} gauge\n"
        );
        let mut levels: Vec<String> = self.known.lock().levels.keys().cloned().collect();
        levels.sort();
        for level in levels {
            let seats = self.levels.nominal_seats(&level);
            text.push_str(&format!("{name}{{priority_level=\"{level}\"}} {seats}\n"));
        }
        text
    }

    fn change(&self, change: impl FnOnce(&mut Known)) {
        let mut known = self.known.lock();
        change(&mut known);
        let ready = |schema: &Arc<Schema>| {
            let uids = Classified {
                schema_uid: HeaderValue::from_str(&schema.uid).ok()?,
                level_uid: HeaderValue::from_str(known.levels.get(schema.level.as_ref())?).ok()?,
            };
            Some((schema.clone(), uids))
        };
        let mut rules: Vec<(Arc<Schema>, Classified)> = known.schemas.values().filter_map(ready).collect();
        rules.sort_by(|(a, _), (b, _)| (a.precedence, &a.name).cmp(&(b.precedence, &b.name)));
        self.rules.store(Arc::new(Rules(rules)));
        self.changed.notify_one();
    }

    fn put_schema(&self, value: &Value) {
        let schema = Arc::new(Schema::read(value));
        self.change(|known| drop(known.schemas.insert(schema.name.clone(), schema)));
    }

    fn put_level(&self, value: &Value) {
        let name = object::name(value).to_string();
        self.levels.configure(&name, &value["spec"]);
        self.change(|known| drop(known.levels.insert(name, object::uid(value).to_string())));
    }

    fn take(&self, plural: &str, name: &str) {
        if plural == LEVELS {
            self.levels.forget(name);
        }
        self.change(|known| {
            if plural == LEVELS {
                known.levels.remove(name);
            } else {
                known.schemas.remove(name);
            }
        });
    }
}

/// COMPAT: upstream refuses before anything that would make a Status.
pub fn come_back() -> Answer {
    let mut answer = body::text(
        StatusCode::TOO_MANY_REQUESTS,
        "Too many requests, please try again later.\n",
    );
    answer
        .headers_mut()
        .insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    answer
}

/// Lets what is stored take effect before the first request, and follows both resources.
pub async fn start(inner: &Arc<Inner>) -> Result<(), Status> {
    for plural in [LEVELS, SCHEMAS] {
        let Some(resource) = inner.registry.resources.get(GROUP, "v1", plural).cloned() else {
            continue;
        };
        let listed = inner.registry.list_readable(&resource).await?;
        for entry in &listed.items {
            take_over(inner, plural, &encode::decode(&entry.bytes)?);
        }
        let (own, follower) = (inner.clone(), Follower::new(inner, resource));
        follow(&inner.shutdown, "flow-control", follower, move |event| {
            if event.kind == EventKind::Deleted {
                own.flow.take(plural, &event.entry.head.name);
                own.flow.deleted.notify_one();
            } else if let Ok(value) = encode::decode(&event.entry.bytes) {
                take_over(&own, plural, &value);
            }
        });
    }
    write_conditions(inner).await;
    let own = inner.clone();
    skiff_supervise::keep("flow-control-objects", &inner.shutdown, move || {
        let inner = own.clone();
        async move {
            // What a run that failed was about to do is done now.
            inner.flow.deleted.notify_one();
            inner.flow.changed.notify_one();
            loop {
                tokio::select! {
                    () = inner.flow.changed.notified() => write_conditions(&inner).await,
                    // Those that every cluster has come back.
                    () = inner.flow.deleted.notified() => if let Err(status) = ensure(&inner).await {
                        tracing::warn!(%status, "cannot restore the objects of priority and fairness");
                    },
                }
            }
        }
    });
    Ok(())
}

fn take_over(inner: &Inner, plural: &str, value: &Value) {
    if plural == LEVELS {
        inner.flow.put_level(value);
    } else {
        inner.flow.put_schema(value);
    }
}

/// Makes the objects that every cluster has.
pub async fn ensure(inner: &Arc<Inner>) -> Result<(), Status> {
    let writes = objects::all()
        .into_iter()
        .map(|object| inner.registry.ensure_merged(object, objects::reconcile));
    for result in futures::future::join_all(writes).await {
        result?;
    }
    Ok(())
}

/// Says in each FlowSchema whether its priority level exists.
async fn write_conditions(inner: &Arc<Inner>) {
    let Some(resource) = inner.registry.resources.get(GROUP, "v1", SCHEMAS).cloned() else {
        return;
    };
    let wanted: Vec<(String, String, bool)> = {
        let known = inner.flow.known.lock();
        let of = |schema: &Arc<Schema>| {
            let dangling = !known.levels.contains_key(schema.level.as_ref());
            (schema.name.clone(), schema.level.to_string(), dangling)
        };
        known.schemas.values().map(of).collect()
    };
    let now = skiff_meta::time::format_seconds(inner.registry.now());
    let writes = wanted.iter().map(|(name, level, dangling)| {
        let (now, resource) = (&now, &resource);
        async move {
            let present = inner
                .registry
                .get(resource, "", name, skiff_registry::ReadAt::Any)
                .await;
            let Ok(Some(present)) = present else { return };
            if !set_dangling(&mut present.clone(), level, *dangling, now) {
                return;
            }
            let mut wanted = present;
            set_dangling(&mut wanted, level, *dangling, now);
            let path = format!("/apis/{GROUP}/v1/{SCHEMAS}/{name}/status");
            let written = Loopback::new(inner)
                .apply(&path, FIELD_MANAGER, &condition_alone(&wanted))
                .await;
            if let Err(status) = written
                && status.code != 404
            {
                tracing::warn!(%status, name, "the condition of a FlowSchema cannot be written");
            }
        }
    });
    skiff_registry::together(futures::future::join_all(writes)).await;
}

/// What the server applies to a FlowSchema: the one condition, and nothing else.
fn condition_alone(schema: &Value) -> Value {
    let conditions = schema["status"]["conditions"].as_array();
    let ours = conditions.and_then(|all| all.iter().find(|condition| condition["type"] == "Dangling"));
    json!({"apiVersion": schema["apiVersion"], "kind": schema["kind"],
        "metadata": {"name": object::name(schema)}, "status": {"conditions": [ours]}})
}

/// Sets the condition; false if it says so already.
fn set_dangling(schema: &mut Value, level: &str, dangling: bool, now: &str) -> bool {
    let (status, reason, exists) = if dangling {
        ("True", "NotFound", "but there is no such object")
    } else {
        ("False", "Found", "and it exists")
    };
    let message =
        format!("This FlowSchema references the PriorityLevelConfiguration object named {level:?} {exists}");
    let mut conditions: Vec<Value> = object::at(schema, &["status", "conditions"])
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    let mut wanted = json!({"type": "Dangling", "status": status, "lastTransitionTime": now, "reason": reason,
        "message": message});
    match conditions
        .iter_mut()
        .find(|condition| condition["type"] == "Dangling")
    {
        Some(present) => {
            if present["status"] == wanted["status"] {
                wanted["lastTransitionTime"] = present["lastTransitionTime"].clone();
            }
            if *present == wanted {
                return false;
            }
            *present = wanted;
        }
        None => conditions.push(wanted),
    }
    object::put(schema, &["status", "conditions"], Value::Array(conditions));
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_name_the_levels_that_exist() {
        let flow = FlowControl::default();
        let level = |name: &str, spec: Value| json!({"metadata": {"name": name, "uid": name}, "spec": spec});
        flow.put_level(&level("b", json!({"limited": {"nominalConcurrencyShares": 10}})));
        flow.put_level(&level("a", json!({"exempt": {}})));
        flow.put_level(&level(
            "gone",
            json!({"limited": {"nominalConcurrencyShares": 10}}),
        ));
        flow.take(LEVELS, "gone");
        let text = flow.metrics();
        let series: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            series,
            [
                "apiserver_flowcontrol_nominal_limit_seats{priority_level=\"a\"} 0",
                "apiserver_flowcontrol_nominal_limit_seats{priority_level=\"b\"} 600",
            ]
        );
    }

    #[tokio::test]
    async fn the_first_schema_with_a_level_takes_a_request() {
        let flow = FlowControl::default();
        let user = UserInfo::new("jane", [] as [&str; 0]);
        let info = RequestInfo::parse(&http::Method::GET, "/api/v1/pods", "").expect("parses");
        let mut classified = None;
        assert!(
            flow.admit(&user, &info, &mut classified)
                .await
                .is_ok_and(|seat| seat.is_none())
        );
        assert!(classified.is_none());
        for (number, mut value) in objects::all().into_iter().enumerate() {
            value["metadata"]["uid"] = json!(format!("u{number}"));
            if value["kind"] == "FlowSchema" {
                flow.put_schema(&value);
            } else {
                flow.put_level(&value);
            }
        }
        let mut dangling = json!({"metadata": {"name": "mine", "uid": "m"}, "spec": {"matchingPrecedence": 1,
            "priorityLevelConfiguration": {"name": "none"}, "rules": [{"subjects": [{"kind": "User", "user": {"name": "jane"}}],
                "resourceRules": [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": true}]}]}});
        flow.put_schema(&dangling);
        let _ = flow.admit(&user, &info, &mut classified).await;
        let uid = |classified: &Option<Classified>| {
            let uid = classified
                .as_ref()
                .and_then(|found| found.schema_uid.to_str().ok());
            uid.unwrap_or("").to_string()
        };
        assert_eq!(uid(&classified), "u18", "global-default");
        dangling["spec"]["priorityLevelConfiguration"]["name"] = json!("exempt");
        flow.put_schema(&dangling);
        assert!(
            flow.admit(&user, &info, &mut classified)
                .await
                .is_ok_and(|seat| seat.is_none())
        );
        assert_eq!(uid(&classified), "m");
        flow.take(LEVELS, "exempt");
        let _ = flow.admit(&user, &info, &mut classified).await;
        assert_eq!(uid(&classified), "u18");
    }

    #[test]
    fn dangling_is_said_once() {
        let mut schema = json!({});
        assert!(set_dangling(&mut schema, "x", true, "1"));
        assert!(!set_dangling(&mut schema, "x", true, "2"));
        assert!(set_dangling(&mut schema, "x", false, "3"));
        let condition = &schema["status"]["conditions"][0];
        assert_eq!(
            (
                condition["reason"].as_str(),
                condition["lastTransitionTime"].as_str()
            ),
            (Some("Found"), Some("3"))
        );
    }
}
