//! `Status`: the only error that leaves the front door. Every constructor speaks upstream's words.

use crate::field;
use crate::gvk::{GroupKind, GroupResource};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

/// An API error (or, for some deletions, a success) as it goes over the wire.
#[derive(Debug, Clone, PartialEq)]
pub struct Status {
    pub success: bool,
    pub code: u16,
    pub reason: Cow<'static, str>,
    pub message: String,
    pub details: Option<Box<Details>>,
}

/// What a `Status` is about.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Details {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub group: String,
    /// COMPAT: upstream puts the resource here for most errors and the kind for `Invalid`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kind: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uid: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub causes: Vec<Cause>,
    #[serde(skip_serializing_if = "is_zero")]
    pub retry_after_seconds: u32,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Cause {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub field: String,
}

fn is_zero(value: &u32) -> bool {
    *value == 0
}

impl Status {
    /// A failure with no details.
    pub fn failure(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            success: false,
            code,
            reason: Cow::Borrowed(reason),
            message: message.into(),
            details: None,
        }
    }

    fn about(code: u16, reason: &'static str, resource: &GroupResource, name: &str, message: String) -> Self {
        let details = Details {
            name: name.to_owned(),
            group: resource.group.clone(),
            kind: resource.resource.clone(),
            ..Details::default()
        };
        Self {
            details: Some(Box::new(details)),
            ..Self::failure(code, reason, message)
        }
    }

    pub fn not_found(resource: &GroupResource, name: &str) -> Self {
        Self::about(
            404,
            "NotFound",
            resource,
            name,
            format!("{resource} {} not found", field::quote(name)),
        )
    }

    /// The answer for a path that no API serves.
    pub fn resource_not_found() -> Self {
        let mut status = Self::failure(
            404,
            "NotFound",
            "the server could not find the requested resource",
        );
        status.details = Some(Box::default());
        status
    }

    pub fn already_exists(resource: &GroupResource, name: &str) -> Self {
        let message = format!("{resource} {} already exists", field::quote(name));
        Self::about(409, "AlreadyExists", resource, name, message)
    }

    pub fn conflict(resource: &GroupResource, name: &str, why: impl fmt::Display) -> Self {
        let message = format!(
            "Operation cannot be fulfilled on {resource} {}: {why}",
            field::quote(name)
        );
        Self::about(409, "Conflict", resource, name, message)
    }

    /// The conflict of an apply with other managers; causes are `(reason, message, field)`.
    pub fn apply_conflict(
        message: String,
        causes: impl Iterator<Item = (&'static str, String, String)>,
    ) -> Self {
        let causes = causes
            .map(|(reason, message, field)| Cause {
                reason: reason.to_owned(),
                message,
                field,
            })
            .collect();
        Self {
            details: Some(Box::new(Details {
                causes,
                ..Details::default()
            })),
            ..Self::failure(409, "Conflict", message)
        }
    }

    /// The conflict of a stale resourceVersion.
    pub fn modified(resource: &GroupResource, name: &str) -> Self {
        let why =
            "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(resource, name, why)
    }

    pub fn forbidden(resource: &GroupResource, name: &str, why: impl fmt::Display) -> Self {
        let message = if resource.resource.is_empty() {
            format!("forbidden: {why}")
        } else if name.is_empty() {
            format!("{resource} is forbidden: {why}")
        } else {
            format!("{resource} {} is forbidden: {why}", field::quote(name))
        };
        Self::about(403, "Forbidden", resource, name, message)
    }

    pub fn unauthorized() -> Self {
        Self::failure(401, "Unauthorized", "Unauthorized")
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::failure(400, "BadRequest", message)
    }

    pub fn invalid(kind: &GroupKind, name: &str, errors: &[field::Error]) -> Self {
        let causes = errors
            .iter()
            .map(|error| Cause {
                reason: error.kind.reason().to_owned(),
                message: error.body(),
                field: error.path.clone(),
            })
            .collect();
        let details = Details {
            name: name.to_owned(),
            group: kind.group.clone(),
            kind: kind.kind.clone(),
            causes,
            ..Details::default()
        };
        let quoted = field::quote(name);
        let message = match aggregate(errors) {
            text if text.is_empty() => format!("{kind} {quoted} is invalid"),
            text => format!("{kind} {quoted} is invalid: {text}"),
        };
        Self {
            details: Some(Box::new(details)),
            ..Self::failure(422, "Invalid", message)
        }
    }

    pub fn method_not_supported(resource: &GroupResource, action: &str) -> Self {
        let message = format!(
            "{action} is not supported on resources of kind {}",
            field::quote(&resource.to_string())
        );
        Self::about(405, "MethodNotAllowed", resource, "", message)
    }

    pub fn method_not_allowed() -> Self {
        Self::failure(
            405,
            "MethodNotAllowed",
            "the server does not allow this method on the requested resource",
        )
    }

    /// 410: a resourceVersion or continue token that history no longer covers.
    pub fn expired(message: impl Into<String>) -> Self {
        Self::failure(410, "Expired", message)
    }

    pub fn timeout(message: impl Into<String>, retry_after_seconds: u32) -> Self {
        Self::failure(504, "Timeout", format!("Timeout: {}", message.into())).retry_after(retry_after_seconds)
    }

    pub fn too_many_requests(message: impl Into<String>, retry_after_seconds: u32) -> Self {
        Self::failure(429, "TooManyRequests", message).retry_after(retry_after_seconds)
    }

    /// 504 with cause `ResourceVersionTooLarge`: the client has seen a newer revision than this server.
    pub fn resource_version_too_large(asked: i64, current: i64) -> Self {
        let message = format!("Too large resource version: {asked}, current: {current}");
        let mut status = Self::timeout(&message, 1);
        if let Some(details) = status.details.as_mut() {
            details.causes.push(Cause {
                reason: "ResourceVersionTooLarge".into(),
                message: "Too large resource version".into(),
                field: String::new(),
            });
        }
        status
    }

    pub fn internal(why: impl fmt::Display) -> Self {
        let details = Details {
            causes: vec![Cause {
                message: why.to_string(),
                ..Cause::default()
            }],
            ..Details::default()
        };
        let message = format!("Internal error occurred: {why}");
        Self {
            details: Some(Box::new(details)),
            ..Self::failure(500, "InternalError", message)
        }
    }

    pub fn service_unavailable(message: impl Into<String>) -> Self {
        Self::failure(503, "ServiceUnavailable", message)
    }

    pub fn too_large(why: impl fmt::Display) -> Self {
        Self::failure(
            413,
            "RequestEntityTooLarge",
            format!("Request entity too large: {why}"),
        )
    }

    pub fn unsupported_media_type(message: impl Into<String>) -> Self {
        Self::failure(415, "UnsupportedMediaType", message)
    }

    pub fn not_acceptable(message: impl Into<String>) -> Self {
        Self::failure(406, "NotAcceptable", message)
    }

    /// What skiff does not do yet is refused with this, never answered wrongly.
    pub fn not_built(what: impl fmt::Display) -> Self {
        Self::failure(
            501,
            "NotImplemented",
            format!("skiff does not support {what} yet"),
        )
    }

    /// The answer to a deletion that removed the object at once.
    pub fn deleted(resource: &GroupResource, name: &str, uid: &str) -> Self {
        let mut status = Self::about(0, "", resource, name, String::new());
        status.success = true;
        if let Some(details) = status.details.as_mut() {
            uid.clone_into(&mut details.uid);
        }
        status
    }

    #[must_use]
    pub fn retry_after(mut self, seconds: u32) -> Self {
        self.details.get_or_insert_default().retry_after_seconds = seconds;
        self
    }

    /// The HTTP status code of the answer that carries this.
    pub fn http_code(&self) -> u16 {
        if self.code == 0 { 200 } else { self.code }
    }

    pub fn to_value(&self) -> Value {
        let mut object = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {},
            "status": if self.success { "Success" } else { "Failure" },
        });
        if !self.message.is_empty() {
            object["message"] = self.message.as_str().into();
        }
        if !self.reason.is_empty() {
            object["reason"] = self.reason.as_ref().into();
        }
        if let Some(details) = &self.details {
            object["details"] = serde_json::to_value(details).unwrap_or_default();
        }
        if self.code != 0 {
            object["code"] = self.code.into();
        }
        object
    }

    /// Reads a `Status` object; fields that are missing get their empty value.
    pub fn from_value(object: &Value) -> Self {
        let text = |key: &str| {
            object
                .get(key)
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned()
        };
        Self {
            success: object.get("status").and_then(Value::as_str) == Some("Success"),
            code: object
                .get("code")
                .and_then(Value::as_u64)
                .and_then(|c| u16::try_from(c).ok())
                .unwrap_or(0),
            reason: Cow::Owned(text("reason")),
            message: text("message"),
            details: object
                .get("details")
                .and_then(|d| serde_json::from_value(d.clone()).ok())
                .map(Box::new),
        }
    }
}

/// Several errors in one line: `[a, b]`, the same words only once.
fn aggregate(errors: &[field::Error]) -> String {
    let all: Vec<String> = errors.iter().map(ToString::to_string).collect();
    let mut seen = HashSet::with_capacity(all.len());
    let texts: Vec<&str> = all
        .iter()
        .map(String::as_str)
        .filter(|text| seen.insert(*text))
        .collect();
    match texts[..] {
        [] => String::new(),
        [only] => only.to_owned(),
        _ => format!("[{}]", texts.join(", ")),
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Status {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::field::{Error, Path};

    #[test]
    fn the_wire_form_is_upstreams() {
        let gr = GroupResource::new("apps", "deployments");
        assert_eq!(
            Status::not_found(&gr, "web").to_value(),
            json!({"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure",
                "message":"deployments.apps \"web\" not found","reason":"NotFound",
                "details":{"name":"web","group":"apps","kind":"deployments"},"code":404})
        );
    }

    #[test]
    fn invalid_lists_each_finding_once() {
        let kind = GroupKind::new("apps", "Deployment");
        let one = Error::required(&Path::new("spec.selector"), "");
        let two = Error::required(&Path::new("spec.template"), "");
        assert_eq!(
            Status::invalid(&kind, "x", std::slice::from_ref(&one)).message,
            "Deployment.apps \"x\" is invalid: spec.selector: Required value"
        );
        assert_eq!(
            Status::invalid(&kind, "x", &[one.clone(), two, one]).message,
            "Deployment.apps \"x\" is invalid: [spec.selector: Required value, spec.template: Required value]"
        );
    }

    #[test]
    fn a_status_survives_its_wire_form() {
        let status = Status::resource_version_too_large(9, 3);
        assert_eq!(Status::from_value(&status.to_value()), status);
    }
}
