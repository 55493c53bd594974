//! Writes who asks into the kinds that keep it: a CertificateSigningRequest is judged by the identity of
//! its requester, which therefore comes from the request and never from the body.

use serde_json::{Value, json};
use skiff_auth::UserInfo;
use skiff_registry::{Resource, object};

pub fn fill(resource: &Resource, user: &UserInfo, value: &mut Value) {
    if !resource.strategy.keeps_requester() {
        return;
    }
    if let Some(spec) = value.get_mut("spec").and_then(Value::as_object_mut) {
        for field in ["username", "uid", "groups", "extra"] {
            spec.remove(field);
        }
    }
    object::put(value, &["spec", "username"], json!(user.name));
    if !user.uid.is_empty() {
        object::put(value, &["spec", "uid"], json!(user.uid));
    }
    if !user.groups.is_empty() {
        object::put(value, &["spec", "groups"], json!(user.groups));
    }
    if !user.extra.is_empty() {
        object::put(value, &["spec", "extra"], json!(user.extra));
    }
}
