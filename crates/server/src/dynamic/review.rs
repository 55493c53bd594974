//! The AdmissionReview: what is asked of a webhook, and its answer, checked.

use base64::Engine;
use serde_json::{Value, json};
use skiff_meta::Status;
use skiff_meta::field::quote;
use skiff_registry::object;

use super::request::Versioned;

/// The versions of the review that are spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    V1,
    V1beta1,
}

impl Version {
    /// The first that both sides know.
    pub fn choose(offered: &Value) -> Option<Version> {
        let offered = offered.as_array().into_iter().flatten();
        offered.filter_map(Value::as_str).find_map(|text| match text {
            "v1" => Some(Version::V1),
            "v1beta1" => Some(Version::V1beta1),
            _ => None,
        })
    }

    fn api_version(self) -> &'static str {
        match self {
            Version::V1 => "admission.k8s.io/v1",
            Version::V1beta1 => "admission.k8s.io/v1beta1",
        }
    }
}

/// The question.
pub fn question(version: Version, uid: &str, request: &Value, versioned: &Versioned) -> Value {
    let mut request = request.clone();
    object::put(&mut request, &["uid"], json!(uid));
    for (key, value) in [("object", &versioned.object), ("oldObject", &versioned.old)] {
        object::put(&mut request, &[key], value.clone().unwrap_or(Value::Null));
    }
    json!({"kind": "AdmissionReview", "apiVersion": version.api_version(), "request": request})
}

/// What cannot be read as a review of the version at all, as upstream's decoder tells it.
pub fn foreign(version: Version, review: &Value) -> Option<String> {
    let (api_version, kind) = (
        object::at_str(review, &["apiVersion"]),
        object::at_str(review, &["kind"]),
    );
    if api_version.is_empty() && kind.is_empty() {
        return None;
    }
    let known = [Version::V1, Version::V1beta1];
    if kind != "AdmissionReview" || known.iter().all(|known| known.api_version() != api_version) {
        return Some(format!(
            "no kind {} is registered for version {} in scheme \"pkg/runtime/scheme.go:111\"",
            quote(kind),
            quote(api_version)
        ));
    }
    let short = |text: &str| text.rsplit('/').next().unwrap_or(text).to_owned();
    (api_version != version.api_version()).then(|| {
        format!(
            "converting ({}.AdmissionReview) to ({}.AdmissionReview): unknown conversion",
            short(api_version),
            short(version.api_version())
        )
    })
}

/// What a webhook answered.
#[derive(Debug, PartialEq)]
pub struct Answer {
    pub allowed: bool,
    /// A JSON patch, as it was sent.
    pub patch: Vec<u8>,
    pub patch_type: String,
    pub result: Value,
    pub warnings: Vec<String>,
    pub audit_annotations: Vec<(String, String)>,
}

/// Reads an answer. What is wrong with it is told in upstream's words.
pub fn answer(version: Version, uid: &str, mutating: bool, review: &Value) -> Result<Answer, String> {
    let response = object::at(review, &["response"]).ok_or("webhook response was absent")?;
    let patch = match response.get("patch") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::String(text)) => base64::engine::general_purpose::STANDARD
            .decode(text)
            .map_err(|error| format!("illegal base64 data: {error}"))?,
        Some(_) => return Err("response.patch is no string".to_owned()),
    };
    let mut patch_type = response
        .get("patchType")
        .and_then(Value::as_str)
        .map(str::to_owned);
    if version == Version::V1 {
        let given = object::at_str(response, &["uid"]);
        if given != uid {
            return Err(format!(
                "expected response.uid={}, got {}",
                quote(uid),
                quote(given)
            ));
        }
        let (api_version, kind) = (
            object::at_str(review, &["apiVersion"]),
            object::at_str(review, &["kind"]),
        );
        if api_version != version.api_version() || kind != "AdmissionReview" {
            let api_version = if api_version.is_empty() { "/" } else { api_version };
            return Err(format!(
                "expected webhook response of {}, Kind=AdmissionReview, got {api_version}, Kind={kind}",
                version.api_version()
            ));
        }
        match (mutating, patch.is_empty(), &patch_type) {
            (false, false, _) => return Err("validating webhook may not return response.patch".to_owned()),
            (false, _, Some(_)) => {
                return Err("validating webhook may not return response.patchType".to_owned());
            }
            (true, false, None) => {
                return Err("webhook returned response.patch but not response.patchType".to_owned());
            }
            (true, true, Some(_)) => {
                return Err("webhook returned response.patchType but not response.patch".to_owned());
            }
            (true, false, Some(text)) if text.is_empty() => {
                return Err("webhook returned invalid response.patchType of \"\"".to_owned());
            }
            _ => {}
        }
    } else {
        patch_type = Some("JSONPatch".to_owned());
    }
    let warnings = response.get("warnings").and_then(Value::as_array);
    let annotations = response.get("auditAnnotations").and_then(Value::as_object);
    Ok(Answer {
        audit_annotations: annotations
            .into_iter()
            .flatten()
            .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
            .collect(),
        allowed: response["allowed"] == true,
        patch,
        patch_type: patch_type.unwrap_or_default(),
        result: response.get("status").cloned().unwrap_or(Value::Null),
        warnings: warnings
            .into_iter()
            .flatten()
            .filter_map(|text| text.as_str().map(str::to_owned))
            .collect(),
    })
}

/// The refusal of a webhook as the client gets it.
pub fn refusal(webhook: &str, result: &Value) -> Status {
    let mut status = Status::from_value(result);
    status.success = false;
    if status.code < 400 {
        status.code = 400;
    }
    let denied = format!("admission webhook {} denied the request", quote(webhook));
    status.message = match (status.message.as_str(), status.reason.as_ref()) {
        ("", "") => format!("{denied} without explanation"),
        ("", why) | (why, _) => format!("{denied}: {why}"),
    };
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_checked() {
        let check = |mutating: bool, response: Value, expected: &str| {
            let review =
                json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response});
            let found = answer(Version::V1, "u", mutating, &review);
            let shown = found.map_or_else(|why| why, |answer| format!("allowed {}", answer.allowed));
            assert_eq!(shown, expected);
        };
        check(true, json!({"uid": "u", "allowed": true}), "allowed true");
        check(true, json!({"uid": "u"}), "allowed false");
        check(true, Value::Null, "webhook response was absent");
        check(
            true,
            json!({"uid": "x"}),
            "expected response.uid=\"u\", got \"x\"",
        );
        check(
            true,
            json!({"uid": "u", "patch": "W10="}),
            "webhook returned response.patch but not response.patchType",
        );
        check(
            true,
            json!({"uid": "u", "patchType": "JSONPatch"}),
            "webhook returned response.patchType but not response.patch",
        );
        check(
            false,
            json!({"uid": "u", "patch": "W10="}),
            "validating webhook may not return response.patch",
        );
        let bare = json!({"response": {"uid": "u"}});
        assert_eq!(
            answer(Version::V1, "u", true, &bare),
            Err(
                "expected webhook response of admission.k8s.io/v1, Kind=AdmissionReview, got /, Kind="
                    .to_owned()
            )
        );
        assert!(answer(Version::V1beta1, "u", true, &bare).is_ok());
    }

    #[test]
    fn other_documents_are_foreign() {
        let check = |api_version: &str, kind: &str, expected: Option<&str>| {
            let review = json!({"apiVersion": api_version, "kind": kind});
            assert_eq!(foreign(Version::V1, &review).as_deref(), expected);
        };
        check("admission.k8s.io/v1", "AdmissionReview", None);
        check("", "", None);
        check(
            "admission.k8s.io/v1beta1",
            "AdmissionReview",
            Some("converting (v1beta1.AdmissionReview) to (v1.AdmissionReview): unknown conversion"),
        );
        check(
            "admission.k8s.io/v1",
            "Other",
            Some(
                "no kind \"Other\" is registered for version \"admission.k8s.io/v1\" in scheme \"pkg/runtime/scheme.go:111\"",
            ),
        );
    }

    #[test]
    fn refusals_say_who_and_why() {
        let check = |result: Value, code: u16, message: &str| {
            let status = refusal("w.example.com", &result);
            assert_eq!((status.code, status.message.as_str()), (code, message));
        };
        check(
            Value::Null,
            400,
            "admission webhook \"w.example.com\" denied the request without explanation",
        );
        check(
            json!({"message": "no", "code": 200}),
            400,
            "admission webhook \"w.example.com\" denied the request: no",
        );
        check(
            json!({"reason": "Invalid", "code": 422}),
            422,
            "admission webhook \"w.example.com\" denied the request: Invalid",
        );
    }
}
