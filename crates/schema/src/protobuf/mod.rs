//! Kubernetes' protobuf, by the type tables: no message has a Rust type. Objects go from JSON (a parsed
//! value, or bytes) to upstream's bytes and back. Upstream's rules are those of its generated code: fields
//! that are no pointers are always written, pointers, lists and maps when they are set.

mod decode;
mod encode;
pub(crate) mod layout;
mod sink;
mod source;
mod special;
mod wire;

pub use decode::{decode, decode_json};
pub use encode::{
    Header, encode, encode_json, encode_json_message, encode_message, envelope_around, put_item, watch_frame,
};

use wire::{Wire, fields};

pub const MEDIA_TYPE: &str = "application/vnd.kubernetes.protobuf";
/// What every enveloped object begins with, on the wire and in the store.
pub const MAGIC: &[u8] = b"k8s\0";
/// How deep messages may nest.
const MAX_DEPTH: usize = 100;

/// What every body is wrapped in.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Envelope<'a> {
    pub api_version: &'a str,
    pub kind: &'a str,
    pub raw: &'a [u8],
}

/// The reason why bytes cannot be read, or an object cannot be written.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ProtobufError {
    #[error("empty data")]
    Empty,
    #[error("empty body")]
    EmptyBody,
    #[error("provided data does not appear to be a protobuf message, expected prefix [107 56 115 0]")]
    NoMagic,
    #[error("unexpected EOF")]
    Truncated,
    #[error("proto: illegal wireType {0}")]
    WireType(u64),
    #[error("proto: illegal tag {number} (wire type {wire})")]
    Tag { number: i32, wire: u64 },
    #[error("proto: wiretype end group for non-group")]
    EndGroup,
    #[error("proto: message nests too deep")]
    TooDeep,
    #[error("proto: wrong wireType = {wire} for field {field}")]
    Mismatch { wire: u64, field: String },
    #[error("proto: field {0} cannot be read in this form")]
    NotBuilt(String),
    #[error(
        "object *{0} does not implement the protobuf marshalling interface and cannot be encoded to a protobuf message"
    )]
    NotEncodable(String),
    #[error("{0}")]
    Value(String),
}

type Result<T> = std::result::Result<T, ProtobufError>;

impl ProtobufError {
    /// The mistake as it is told of a message of a type: the innermost is named.
    fn of(self, go_type: &str) -> ProtobufError {
        let name = go_type.rsplit('.').next().unwrap_or(go_type);
        match self {
            ProtobufError::Tag { .. } | ProtobufError::EndGroup => {
                let told = self.to_string();
                let what = told.trim_start_matches("proto: ");
                ProtobufError::Value(format!("proto: {name}: {what}"))
            }
            other => other,
        }
    }
}

/// Opens an envelope.
pub fn envelope(body: &[u8]) -> Result<Envelope<'_>> {
    if body.is_empty() {
        return Err(ProtobufError::Empty);
    }
    let body = body.strip_prefix(MAGIC).ok_or(ProtobufError::NoMagic)?;
    if body.is_empty() {
        return Err(ProtobufError::EmptyBody);
    }
    let mut found = Envelope::default();
    for field in fields(body) {
        match field.map_err(|error| error.of("Unknown"))? {
            (1, Wire::Bytes(type_meta)) => {
                for field in fields(type_meta) {
                    match field? {
                        (1, Wire::Bytes(text)) => found.api_version = utf8(text)?,
                        (2, Wire::Bytes(text)) => found.kind = utf8(text)?,
                        _ => {}
                    }
                }
            }
            (2, Wire::Bytes(raw)) => found.raw = raw,
            _ => {}
        }
    }
    Ok(found)
}

fn utf8(bytes: &[u8]) -> Result<&str> {
    std::str::from_utf8(bytes)
        .map_err(|_| ProtobufError::Value("proto: string field contains invalid UTF-8".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_name_their_message() {
        let check = |body: &[u8], expected: &str| {
            let told = envelope(&[MAGIC, body].concat())
                .map_or_else(|error| error.to_string(), |_| "fine".to_owned());
            assert_eq!(told, expected, "{body:?}");
        };
        check(b"\x00\x00", "proto: Unknown: illegal tag 0 (wire type 0)");
        check(b"\x0c", "proto: Unknown: wiretype end group for non-group");
        check(b"\x0a\x7f", "unexpected EOF");
        check(
            b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            "proto: negative length found during unmarshaling",
        );
        assert_eq!(
            ProtobufError::EndGroup.of("v1.ConfigMap").to_string(),
            "proto: ConfigMap: wiretype end group for non-group"
        );
    }
}
