//! Decodes the body of a create or update: finds out the kind, decodes into it, and words the refusal as
//! upstream's handlers do.

use skiff_meta::{GroupVersion, GroupVersionKind};

use super::{Checked, Document, Format, MAX_DEPTH, Node, depth};
use crate::protobuf;
use crate::types::{Schema, TypeId};

/// The scheme's name is part of upstream's message for unknown kinds.
const SCHEME: &str = "pkg/runtime/scheme.go:111";

#[derive(Debug)]
pub struct DecodedObject {
    /// What the body says it is, completed from what was expected.
    pub gvk: GroupVersionKind,
    pub checked: Checked,
}

/// Decodes a body that should be `expected`. The error is the text of a 400. A body of another version
/// of the group, or of no such kind, is refused; that the version fits the URL is the caller's to check.
pub fn decode_object(
    schema: &Schema,
    body: &[u8],
    format: Format,
    expected: &GroupVersionKind,
) -> Result<DecodedObject, String> {
    let unrecognized = |error: &str| {
        let kind = &expected.kind;
        format!(
            "the object provided is unrecognized (must be of type {kind}): {error} ({})",
            summary(body)
        )
    };
    let document = Document::parse(body, format).map_err(|error| {
        let error = error.to_string();
        unrecognized(&match format {
            Format::Json => format!("couldn't get version/kind; json parse error: {error}"),
            Format::Yaml => error,
        })
    })?;
    let gvk = type_meta(&document.node).map_err(|error| unrecognized(&error))?;
    let gvk = with_defaults(gvk, expected);
    let (id, refused) = match resolve(schema, &gvk, expected) {
        Ok(id) => (id, None),
        Err((Some(id), message)) => (id, Some(message)),
        Err((None, message)) => return Err(message),
    };
    // What is something else must still be readable as that.
    match (document.check(schema, id), refused) {
        (Err(error), _) => Err(not_handled_message(&gvk, &expected.kind, &error.to_string())),
        (Ok(_), Some(message)) => Err(message),
        (Ok(checked), None) => Ok(DecodedObject { gvk, checked }),
    }
}

/// The same for a body in protobuf.
pub fn decode_protobuf_object(
    schema: &Schema,
    body: &[u8],
    expected: &GroupVersionKind,
) -> Result<DecodedObject, String> {
    let envelope = protobuf::envelope(body).map_err(|error| {
        format!(
            "the object provided is unrecognized (must be of type {}): {error} ({})",
            expected.kind,
            summary(body)
        )
    })?;
    let gv = match envelope.api_version {
        "" => GroupVersion::default(),
        text => GroupVersion::parse(text)?,
    };
    let gvk = GroupVersionKind {
        group: gv.group,
        version: gv.version,
        kind: envelope.kind.to_string(),
    };
    let gvk = with_defaults(gvk, expected);
    let id = resolve(schema, &gvk, expected).map_err(|(_, message)| message)?;
    // What the codec reads fits the type: there is nothing to check.
    match protobuf::decode(schema, id, envelope.raw) {
        Ok(value) if depth(&value) > MAX_DEPTH => Err(not_handled_message(
            &gvk,
            &expected.kind,
            "proto: message nests too deep",
        )),
        Ok(value) => Ok(DecodedObject {
            gvk,
            checked: Checked {
                value,
                strict_errors: Vec::new(),
            },
        }),
        Err(error) => Err(not_handled_message(&gvk, &expected.kind, &error.to_string())),
    }
}

/// The type of a body's kind, or why it cannot be what was expected.
/// The type of a body; else why it is refused, and what type it is of then.
fn resolve(
    schema: &Schema,
    gvk: &GroupVersionKind,
    expected: &GroupVersionKind,
) -> Result<TypeId, (Option<TypeId>, String)> {
    let unregistered = || {
        format!(
            "no kind {:?} is registered for version {:?} in scheme {SCHEME:?}",
            gvk.kind,
            gvk.api_version()
        )
    };
    let mut found = schema.by_gvk(&gvk.group, &gvk.version, &gvk.kind);
    // COMPAT: upstream's aggregator knows no kinds but its own.
    if expected.group == "apiregistration.k8s.io" && gvk.group != expected.group {
        found = None;
    }
    let error = match found {
        None => unregistered(),
        Some(id) if gvk.group == expected.group && gvk.kind == expected.kind => return Ok(id),
        Some(id) => {
            // Events are one type inside, whichever group they are called by.
            let into = if matches!(expected.group.as_str(), "" | "events.k8s.io") {
                "core"
            } else {
                expected.group.split('.').next().unwrap_or("")
            };
            let from = schema.get(id).go_type();
            format!(
                "converting ({from}) to ({into}.{}): unknown conversion",
                expected.kind
            )
        }
    };
    Err((found, not_handled_message(gvk, &expected.kind, &error)))
}

/// `Deployment in version "v1" cannot be handled as a Deployment: …`
pub fn not_handled_message(gvk: &GroupVersionKind, expected_kind: &str, error: &str) -> String {
    format!(
        "{} in version {:?} cannot be handled as a {expected_kind}: {error}",
        gvk.kind, gvk.version
    )
}

/// What a strict decode that found something is called as a whole.
pub fn strict_decoding_message(errors: &[String]) -> String {
    format!("strict decoding error: {}", errors.join(", "))
}

/// What a document says it is; what it leaves out is empty.
pub fn type_meta(node: &Node) -> Result<GroupVersionKind, String> {
    let prefix = "couldn't get version/kind; json parse error: json: cannot unmarshal";
    match node {
        Node::Object(_) | Node::Null => {}
        other => {
            let found = super::specials::go_value(other);
            return Err(format!(
                "{prefix} {found} into Go value of type struct {{ APIVersion string \"json:\\\"apiVersion,omitempty\\\"\"; \
                 Kind string \"json:\\\"kind,omitempty\\\"\" }}"
            ));
        }
    }
    let text = |key: &str| match node.get(key) {
        None | Some(Node::Null) => Ok(""),
        Some(Node::String(text)) => Ok(text.as_str()),
        Some(other) => {
            let found = super::specials::go_value(other);
            Err(format!(
                "{prefix} {found} into Go struct field .{key} of type string"
            ))
        }
    };
    let (api_version, kind) = (text("apiVersion")?, text("kind")?);
    let gv = if api_version.is_empty() {
        GroupVersion::default()
    } else {
        GroupVersion::parse(api_version)?
    };
    Ok(GroupVersionKind {
        group: gv.group,
        version: gv.version,
        kind: kind.to_string(),
    })
}

/// What the body leaves out comes from what was expected.
fn with_defaults(mut gvk: GroupVersionKind, expected: &GroupVersionKind) -> GroupVersionKind {
    if gvk.kind.is_empty() {
        gvk.kind.clone_from(&expected.kind);
    }
    if gvk.version.is_empty() && gvk.group.is_empty() {
        gvk.group.clone_from(&expected.group);
        gvk.version.clone_from(&expected.version);
    }
    if gvk.version.is_empty() && gvk.group == expected.group {
        gvk.version.clone_from(&expected.version);
    }
    gvk
}

/// The first bytes of a body, as upstream quotes them.
pub fn summary(body: &[u8]) -> String {
    let cut = &body[..body.len().min(30)];
    let more = if body.len() > 30 { " ..." } else { "" };
    match body.first() {
        None => "<empty>".to_string(),
        Some(b'{') => format!("{}{more}", String::from_utf8_lossy(cut)),
        Some(_) => format!(
            "{}{more}",
            cut.iter().map(|b| format!("{b:02x}")).collect::<String>()
        ),
    }
}
