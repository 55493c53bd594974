//! An audit event as it is written: `audit.k8s.io/v1`, in the order of upstream's fields.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::value::RawValue;
use skiff_auth::UserInfo;
use skiff_meta::Status;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Event<'a> {
    pub kind: &'static str,
    pub api_version: &'static str,
    pub level: &'static str,
    #[serde(rename = "auditID")]
    pub audit_id: &'a str,
    pub stage: &'static str,
    #[serde(rename = "requestURI")]
    pub request_uri: &'a str,
    pub verb: &'a str,
    pub user: User<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub impersonated_user: Option<User<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub authentication_metadata: Option<AuthenticationMetadata>,
    #[serde(rename = "sourceIPs", skip_serializing_if = "<[String]>::is_empty")]
    pub source_ips: &'a [String],
    #[serde(skip_serializing_if = "str::is_empty")]
    pub user_agent: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object_ref: Option<&'a ObjectReference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_status: Option<&'a ResponseStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_object: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_object: Option<&'a RawValue>,
    pub request_received_timestamp: String,
    pub stage_timestamp: String,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: &'a BTreeMap<String, String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AuthenticationMetadata {
    /// The verb that allowed a constrained impersonation.
    pub impersonation_constraint: &'static str,
}

#[derive(Serialize)]
pub struct User<'a> {
    #[serde(skip_serializing_if = "str::is_empty")]
    username: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    uid: &'a str,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    groups: &'a [String],
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    extra: &'a BTreeMap<String, Vec<String>>,
}

impl<'a> User<'a> {
    pub fn of(user: &'a UserInfo) -> User<'a> {
        User {
            username: &user.name,
            uid: &user.uid,
            groups: &user.groups,
            extra: &user.extra,
        }
    }
}

#[derive(Serialize, Clone, Default)]
#[serde(rename_all = "camelCase")]
pub struct ObjectReference {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub resource: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uid: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub api_group: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub api_version: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub resource_version: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub subresource: String,
}

#[derive(Serialize, Default)]
pub struct ResponseStatus {
    pub(super) metadata: Empty,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub status: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<serde_json::Value>,
    #[serde(skip_serializing_if = "is_zero")]
    pub code: u16,
}

#[derive(Serialize, Default)]
pub(super) struct Empty {}

fn is_zero(code: &u16) -> bool {
    *code == 0
}

impl ResponseStatus {
    pub fn code(code: u16) -> ResponseStatus {
        ResponseStatus {
            code,
            ..ResponseStatus::default()
        }
    }

    /// A `Status` that was answered.
    pub fn of(status: &serde_json::Value, code: u16) -> ResponseStatus {
        let text = |field: &str| {
            let value = status.get(field).and_then(serde_json::Value::as_str);
            value.unwrap_or("").to_owned()
        };
        ResponseStatus {
            metadata: Empty {},
            status: text("status"),
            message: text("message"),
            reason: text("reason"),
            details: status
                .get("details")
                .filter(|details| details.is_object())
                .cloned(),
            code,
        }
    }

    pub fn failure(status: &Status) -> ResponseStatus {
        ResponseStatus::of(&status.to_value(), status.http_code())
    }
}
