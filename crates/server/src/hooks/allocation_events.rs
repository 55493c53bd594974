//! Tells of services and IPAddresses whose allocation is not as it should be: in the log, and in an event.

use std::sync::Arc;

use serde_json::{Value, json};
use skiff_meta::time;

use super::loopback::Loopback;
use crate::server::Inner;

const CONTROLLER: &str = "ipallocator-repair-controller";

/// What an event is about.
pub struct About {
    api_version: &'static str,
    kind: &'static str,
    namespace: String,
    name: String,
    uid: String,
}

impl About {
    pub fn service(namespace: &str, name: &str, uid: &str) -> About {
        About {
            api_version: "v1",
            kind: "Service",
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: uid.to_owned(),
        }
    }

    pub fn ip_address(name: &str, uid: &str) -> About {
        About {
            api_version: "networking.k8s.io/v1",
            kind: "IPAddress",
            namespace: String::new(),
            name: name.to_owned(),
            uid: uid.to_owned(),
        }
    }

    fn reference(&self) -> Value {
        json!({"apiVersion": self.api_version, "kind": self.kind, "namespace": self.namespace,
            "name": self.name, "uid": self.uid})
    }
}

/// An event that cannot be written is no reason not to repair.
pub async fn report(
    inner: &Arc<Inner>,
    about: About,
    reason: &'static str,
    action: &'static str,
    message: &str,
) {
    tracing::warn!(
        namespace = about.namespace,
        name = about.name,
        reason,
        "{message}"
    );
    let namespace = match &*about.namespace {
        "" => "default",
        namespace => namespace,
    };
    let now = jiff::Timestamp::now();
    let event = json!({"apiVersion": "events.k8s.io/v1", "kind": "Event",
        "metadata": {"namespace": namespace,
            "name": format!("{}.{:x}", about.name.replace(':', "-"), now.as_nanosecond())},
        "eventTime": time::format_micros(now),
        "reportingController": CONTROLLER, "reportingInstance": CONTROLLER,
        "type": "Warning", "reason": reason, "action": action, "note": message,
        "regarding": about.reference()});
    let path = format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events");
    if let Err(status) = Loopback::new(inner).create(&path, &event).await {
        tracing::debug!(%status, reason, "an event cannot be written");
    }
}
