//! What an admission plugin may know of a request.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;
use skiff_api::node::{at, text};
use skiff_meta::{GroupResource, Status};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Create,
    Update,
    Delete,
    Connect,
}

impl Operation {
    /// The word of `AdmissionReview` and of webhook rules.
    pub fn as_str(self) -> &'static str {
        match self {
            Operation::Create => "CREATE",
            Operation::Update => "UPDATE",
            Operation::Delete => "DELETE",
            Operation::Connect => "CONNECT",
        }
    }
}

/// Who asks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: String,
    pub groups: Vec<String>,
    pub extra: BTreeMap<String, Vec<String>>,
}

/// Where plugins leave what the client should know, and what the audit log should.
pub trait AdmissionRecorder: Send + Sync {
    /// A `Warning` header.
    fn warn(&self, text: String);

    /// How long a webhook, or several that were asked at once, took to answer.
    fn webhook_took(&self, took: Duration) {
        let _ = took;
    }

    /// Whether annotations have a reader.
    fn audited(&self) -> bool {
        false
    }

    /// Whether what is written may be annotated too.
    fn audits_objects(&self) -> bool {
        false
    }

    /// An annotation of the audit event. The first value of a key stays.
    fn annotate(&self, key: &str, value: String) {
        let _ = (key, value);
    }
}

/// What else the user may do, as the authorizers say.
pub trait Access: Send + Sync {
    fn may(&self, verb: &str, group: &str, resource: &str, namespace: &str, name: &str) -> bool;
}

/// What plugins remember between the two rounds of mutating admission.
#[derive(Debug, Default)]
pub struct Reinvocation {
    /// This is the second round.
    pub again: bool,
    /// Something changed the object in a way that earlier plugins should look at.
    pub wanted: bool,
    /// Webhooks that were called and are willing to be called again.
    pub ran: Vec<String>,
    /// Those of them that have to be.
    pub due: Vec<String>,
    /// The object as the webhooks left it.
    pub last_output: Option<Value>,
}

impl Reinvocation {
    /// The object has changed: who has seen it before shall see it again.
    pub fn require(&mut self) {
        self.due.append(&mut self.ran);
    }
}

/// One request on its way through the chain. `resource` is the plural name.
pub struct Attributes<'a> {
    pub user: &'a User,
    pub operation: Operation,
    pub group: &'a str,
    pub version: &'a str,
    pub resource: &'a str,
    /// Empty for the main resource.
    pub subresource: &'a str,
    /// The kind of the object, which a subresource may have from another group (`autoscaling/v1` Scale).
    pub kind: &'a str,
    pub kind_group: &'a str,
    pub kind_version: &'a str,
    /// Empty for cluster-scoped resources.
    pub namespace: &'a str,
    /// Empty on create with generateName and on deletecollection.
    pub name: &'a str,
    /// The object as it will be stored; absent on delete.
    pub object: Option<&'a mut Value>,
    /// The stored object; there on update and delete.
    pub old_object: Option<&'a Value>,
    pub dry_run: bool,
    /// CreateOptions, UpdateOptions or DeleteOptions.
    pub options: Option<&'a Value>,
    pub recorder: &'a dyn AdmissionRecorder,
    pub access: &'a dyn Access,
    pub reinvocation: Reinvocation,
}

impl Attributes<'_> {
    /// Whether this is the main resource `resource` of `group`.
    pub fn is(&self, group: &str, resource: &str) -> bool {
        self.subresource.is_empty() && self.group == group && self.resource == resource
    }

    pub fn group_resource(&self) -> GroupResource {
        GroupResource::new(self.group, self.resource)
    }

    /// The 403 of a plugin that refuses. An object that has no name yet is named by its prefix.
    pub fn forbidden(&self, why: impl std::fmt::Display) -> Status {
        let own = self
            .object
            .as_deref()
            .map_or("", |o| match text(o, "metadata.name") {
                "" => text(o, "metadata.generateName"),
                name => name,
            });
        let name = match (own, self.name) {
            ("", "") => "Unknown",
            (name, "") | (_, name) => name,
        };
        Status::forbidden(&self.group_resource(), name, why)
    }

    /// A string of the object, empty if there is none.
    pub fn text(&self, path: &str) -> &str {
        self.object.as_deref().map_or("", |o| text(o, path))
    }

    /// Whether the object is a pod that mirrors a static manifest.
    pub fn is_mirror_pod(&self) -> bool {
        let annotations = self.object.as_deref().map(|o| at(o, "metadata.annotations"));
        annotations.is_some_and(|a| a.get("kubernetes.io/config.mirror").is_some())
    }
}
