//! What an admission plugin may know of a request.

use serde_json::Value;

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
}

/// One request on its way through the chain. `resource` is the plural name, `kind` the object's kind.
pub struct Attributes<'a> {
    pub user: &'a User,
    pub operation: Operation,
    pub group: &'a str,
    pub version: &'a str,
    pub resource: &'a str,
    /// Empty for the main resource.
    pub subresource: &'a str,
    pub kind: &'a str,
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
}

impl Attributes<'_> {
    /// Whether this is the main resource `resource` of `group`.
    pub fn is(&self, group: &str, resource: &str) -> bool {
        self.subresource.is_empty() && self.group == group && self.resource == resource
    }

    /// `pods` or `deployments.apps`, as messages name a resource.
    pub fn group_resource(&self) -> String {
        if self.group.is_empty() {
            self.resource.to_owned()
        } else {
            format!("{}.{}", self.resource, self.group)
        }
    }
}
