//! What a reconcile has written, so that its key can be held until the local copies show it.
//!
//! The client notes the answer to every write in the task that made it (see `marks`); [`recorded`] collects
//! those notes. Revisions are compared as numbers: a cluster has one sequence of them.

use std::sync::Arc;

use http::Method;
use parking_lot::Mutex;
use serde::Deserialize;

use crate::Key;

tokio::task_local! {
    static WRITES: Arc<Mutex<Vec<Write>>>;
}

/// One write that the API server has acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Write {
    /// Resource and group: `pods`, `deployments.apps`.
    pub(crate) resource: String,
    pub(crate) effect: Effect,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// The object has this resourceVersion now.
    Revision(u64),
    /// The object is gone; the answer to such a deletion names no revision.
    Gone { key: Key, uid: String },
}

/// Runs `work` and answers what was written meanwhile by this task.
pub(crate) async fn recorded<F: Future>(work: F) -> (F::Output, Vec<Write>) {
    let writes = Arc::new(Mutex::new(Vec::new()));
    let output = WRITES.scope(writes.clone(), work).await;
    let written = std::mem::take(&mut *writes.lock());
    (output, written)
}

/// True if the caller's writes are collected and this method is one.
pub(crate) fn wanted(method: &Method) -> bool {
    let writes = [Method::POST, Method::PUT, Method::PATCH, Method::DELETE].contains(method);
    writes && WRITES.try_with(|_| ()).is_ok()
}

/// Notes the answer `body` to a write of `path`.
pub(crate) fn note(path: &str, body: &[u8]) {
    let Some(write) = read(path, body) else { return };
    // Outside of a reconcile nobody asks.
    let _ = WRITES.try_with(|writes| writes.lock().push(write));
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    #[serde(default)]
    kind: String,
    #[serde(default)]
    metadata: AnswerMeta,
    #[serde(default)]
    details: Option<AnswerDetails>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct AnswerMeta {
    #[serde(default)]
    resource_version: String,
}

#[derive(Deserialize)]
struct AnswerDetails {
    #[serde(default)]
    uid: String,
}

fn read(path: &str, body: &[u8]) -> Option<Write> {
    let target = Target::parse(path)?;
    let answer: Answer = serde_json::from_slice(body).ok()?;
    let effect = if answer.kind == "Status" {
        let uid = answer.details?.uid;
        // Bindings and evictions answer a Status too, but what they change is another write's matter.
        if uid.is_empty() || target.name.is_empty() || target.has_subresource {
            return None;
        }
        Effect::Gone {
            key: Key::new(target.namespace, target.name),
            uid,
        }
    } else {
        Effect::Revision(answer.metadata.resource_version.parse().ok()?)
    };
    Some(Write {
        resource: target.resource,
        effect,
    })
}

/// Which object a path of the API names. The name is empty for a collection.
pub(crate) struct Target<'a> {
    pub(crate) resource: String,
    namespace: &'a str,
    name: &'a str,
    has_subresource: bool,
}

impl<'a> Target<'a> {
    pub(crate) fn is_cluster_wide(&self) -> bool {
        self.namespace.is_empty()
    }

    pub(crate) fn parse(path: &'a str) -> Option<Target<'a>> {
        let mut parts = path.trim_matches('/').split('/');
        let group = match parts.next()? {
            "api" => "",
            "apis" => parts.next()?,
            _ => return None,
        };
        let _version = parts.next()?;
        let rest: Vec<&str> = parts.collect();
        // `namespaces/NAME/status` is about the namespace; `namespaces/NAME/pods` about what is in it.
        let (namespace, rest) = match rest[..] {
            ["namespaces", namespace, resource, ..] if !matches!(resource, "status" | "finalize") => {
                (namespace, &rest[2..])
            }
            _ => ("", &rest[..]),
        };
        let resource = rest.first()?;
        Some(Target {
            resource: if group.is_empty() {
                (*resource).to_owned()
            } else {
                format!("{resource}.{group}")
            },
            namespace,
            name: rest.get(1).copied().unwrap_or_default(),
            has_subresource: rest.len() > 2,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn answers_tell_what_to_wait_for() {
        let check = |path: &str, body: Value, expected: Option<(&str, Effect)>| {
            let found = read(path, body.to_string().as_bytes());
            let expected = expected.map(|(resource, effect)| Write {
                resource: resource.to_owned(),
                effect,
            });
            assert_eq!(found, expected, "{path}");
        };
        let object = |version: &str| json!({"kind": "X", "metadata": {"resourceVersion": version}});
        let status = json!({"kind": "Status", "metadata": {}, "details": {"name": "a", "uid": "u"}});
        let gone = |namespace: &str| Effect::Gone {
            key: Key::new(namespace, "a"),
            uid: "u".into(),
        };
        check(
            "/api/v1/namespaces/d/pods",
            object("7"),
            Some(("pods", Effect::Revision(7))),
        );
        check(
            "/apis/apps/v1/namespaces/d/deployments/a/status",
            object("8"),
            Some(("deployments.apps", Effect::Revision(8))),
        );
        check(
            "/api/v1/namespaces/d/pods/a",
            status.clone(),
            Some(("pods", gone("d"))),
        );
        check(
            "/api/v1/namespaces/a",
            status.clone(),
            Some(("namespaces", gone(""))),
        );
        check(
            "/api/v1/namespaces/a/finalize",
            object("9"),
            Some(("namespaces", Effect::Revision(9))),
        );
        check("/api/v1/namespaces/d/pods/a/binding", status, None);
        check("/api/v1/namespaces/d/serviceaccounts/a/token", object(""), None);
        check("/version", object("1"), None);
    }

    #[tokio::test]
    async fn writes_are_collected_inside_of_a_reconcile_only() {
        let body = json!({"metadata": {"resourceVersion": "3"}}).to_string();
        let (wanted_inside, written) = recorded(async {
            note("/api/v1/nodes/a", body.as_bytes());
            wanted(&Method::PUT) && !wanted(&Method::GET)
        })
        .await;
        assert!(wanted_inside && !wanted(&Method::PUT));
        assert_eq!(written.len(), 1);
    }
}
