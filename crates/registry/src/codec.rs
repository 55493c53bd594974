//! The form of an object in the store: upstream's protobuf envelope for kinds that have one, else JSON.
//! Reading takes both, in any version that the tables know, and gives the JSON that the cache keeps. What an older
//! server wrote is completed with the defaults of fields that it did not know.

use std::sync::atomic::{AtomicI64, Ordering};

use bytes::Bytes;
use serde_json::Value;
use skiff_api::facts;
use skiff_meta::{GroupVersion, Status};
use skiff_schema::protobuf::{self, Header, MAGIC};
use skiff_schema::{TypeId, normalise};

use crate::{encode, object};

pub struct Codec {
    kind: String,
    /// Of the storage version.
    api_version: String,
    /// The first bytes of the JSON form.
    opening: String,
    /// `None`: the tables do not know the kind, and it is kept as JSON.
    id: Option<TypeId>,
    protobuf: bool,
    /// The last revision that may be another server's. What is written later has its defaults.
    foreign: AtomicI64,
}

/// What JSON says of its version.
#[derive(serde::Deserialize)]
struct Head<'a> {
    #[serde(borrow, rename = "apiVersion")]
    api_version: std::borrow::Cow<'a, str>,
}

impl Codec {
    /// For a kind of the tables. Without `protobuf` it is written as JSON.
    pub fn typed(api_version: &str, kind: &str, id: TypeId, protobuf: bool) -> Codec {
        Codec {
            id: Some(id),
            protobuf,
            ..Codec::json(api_version, kind)
        }
    }

    /// Completes what was written up to this revision with defaults when it is read.
    pub fn complete_up_to(&self, revision: i64) {
        self.foreign.store(revision, Ordering::Relaxed);
    }

    fn is_foreign(&self, revision: i64) -> bool {
        self.id.is_some() && revision <= self.foreign.load(Ordering::Relaxed)
    }

    /// For a kind that is JSON everywhere.
    pub fn json(api_version: &str, kind: &str) -> Codec {
        Codec {
            kind: kind.to_owned(),
            api_version: api_version.to_owned(),
            opening: encode::opening(api_version, kind),
            id: None,
            protobuf: false,
            foreign: AtomicI64::new(0),
        }
    }

    /// The value to be stored: without a resourceVersion.
    pub fn encode(&self, object: &Value) -> Result<Bytes, Status> {
        match self.id {
            Some(id) if self.protobuf => {
                let header = Header {
                    api_version: &self.api_version,
                    kind: &self.kind,
                    unversioned: true,
                };
                protobuf::encode(facts::schema(), id, header, object)
                    .map(Bytes::from)
                    .map_err(|error| Status::internal(format_args!("cannot encode an object: {error}")))
            }
            _ => encode::stored(object, &self.opening),
        }
    }

    /// Whether a stored value has the form in which this server writes: the storage version, in its encoding. A value
    /// of another form is written again by an update that changes nothing else, as upstream does it.
    pub fn is_current(&self, value: &[u8]) -> bool {
        match (self.protobuf, value.starts_with(MAGIC)) {
            (true, true) => {
                protobuf::envelope(value).is_ok_and(|envelope| envelope.api_version == self.api_version)
            }
            (false, false) => {
                value.starts_with(self.opening.as_bytes())
                    || serde_json::from_slice::<Head>(value)
                        .is_ok_and(|head| head.api_version == self.api_version)
            }
            _ => false,
        }
    }

    /// A value stored at a revision as the JSON that the cache keeps.
    pub fn to_json(&self, value: Bytes, revision: i64) -> Result<Bytes, String> {
        if let Some(why) = skiff_store::unreadable(&value) {
            return Err(why);
        }
        if self.is_foreign(revision) {
            let mut object = self.read(&value)?;
            self.complete(&mut object);
            return encode::stored(&object, &self.opening).map_err(|status| status.message);
        }
        if !value.starts_with(MAGIC) {
            if value.starts_with(self.opening.as_bytes()) {
                // COMPAT: upstream's JSON ends in a newline.
                return Ok(value.slice(..value.trim_ascii_end().len()));
            }
            return self.renew(&value);
        }
        let envelope = protobuf::envelope(&value).map_err(|error| error.to_string())?;
        if let (Some(id), true) = (self.id, envelope.api_version == self.api_version) {
            self.check_kind(envelope.kind)?;
            return protobuf::decode_json(facts::schema(), id, &self.opening, envelope.raw)
                .map(Bytes::from)
                .map_err(|error| error.to_string());
        }
        self.renew(&value)
    }

    /// A stored value, decoded, as it was written.
    pub fn decode(&self, value: &[u8]) -> Result<Value, Status> {
        self.read(value)
            .map_err(|error| Status::internal(format_args!("a stored object cannot be read: {error}")))
    }

    /// A value stored at a revision, with that as its version.
    pub fn decode_at(&self, value: &[u8], revision: i64) -> Result<Value, String> {
        let mut object = self.read(value)?;
        if self.is_foreign(revision) {
            self.complete(&mut object);
        }
        object::set(&mut object, "resourceVersion", revision.to_string());
        Ok(object)
    }

    /// A stored object in the storage version.
    fn read(&self, value: &[u8]) -> Result<Value, String> {
        if let Some(why) = skiff_store::unreadable(value) {
            return Err(why);
        }
        let mut object = if value.starts_with(MAGIC) {
            let envelope = protobuf::envelope(value).map_err(|error| error.to_string())?;
            self.open(&envelope)?
        } else {
            serde_json::from_slice(value).map_err(|error| error.to_string())?
        };
        if !object.is_object() {
            return Err("it is no object".to_owned());
        }
        self.convert(&mut object);
        Ok(object)
    }

    /// Fills in what the one who wrote an object did not know of.
    fn complete(&self, object: &mut Value) {
        let Some(id) = self.id else { return };
        if let Ok(gv) = GroupVersion::parse(&self.api_version) {
            (skiff_api::kind::kind(&gv.group, &self.kind).default)(&gv.version, object);
        }
        normalise(facts::schema(), id, object);
    }

    fn check_kind(&self, kind: &str) -> Result<(), String> {
        if kind == self.kind {
            return Ok(());
        }
        Err(format!("it is a {kind:?} and not a {:?}", self.kind))
    }

    /// The object of an envelope, in the version that it has.
    fn open(&self, envelope: &protobuf::Envelope<'_>) -> Result<Value, String> {
        self.check_kind(envelope.kind)?;
        let gv = GroupVersion::parse(envelope.api_version)?;
        let found = facts::schema().by_gvk(&gv.group, &gv.version, envelope.kind);
        // A version that is not served has, as far as it goes, the fields of the one that is: upstream
        // keeps new kinds in their beta version for a release.
        let id = found.or(self.id).ok_or("the tables do not know its kind")?;
        let mut object =
            protobuf::decode(facts::schema(), id, envelope.raw).map_err(|error| error.to_string())?;
        object::put(&mut object, &["kind"], envelope.kind.into());
        object::put(&mut object, &["apiVersion"], envelope.api_version.into());
        Ok(object)
    }

    /// Brings an object of another version into the storage version.
    fn convert(&self, object: &mut Value) {
        let api_version = object::at_str(object, &["apiVersion"]);
        if api_version == self.api_version {
            return;
        }
        if let Ok(gv) = GroupVersion::parse(api_version)
            && let Some(converter) = skiff_api::kind::kind(&gv.group, &self.kind).converter(&gv.version)
        {
            (converter.to_stored)(object);
        }
        object::put(object, &["kind"], self.kind.as_str().into());
        object::put(object, &["apiVersion"], self.api_version.as_str().into());
        if let Some(id) = self.id {
            normalise(facts::schema(), id, object);
        }
    }

    fn renew(&self, value: &[u8]) -> Result<Bytes, String> {
        encode::stored(&self.read(value)?, &self.opening).map_err(|status| status.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn codec(protobuf: bool) -> Codec {
        let id = facts::schema()
            .by_gvk("autoscaling", "v2", "HorizontalPodAutoscaler")
            .expect("a type");
        Codec::typed("autoscaling/v2", "HorizontalPodAutoscaler", id, protobuf)
    }

    fn object() -> Value {
        json!({"kind": "HorizontalPodAutoscaler", "apiVersion": "autoscaling/v2",
            "metadata": {"name": "x", "resourceVersion": "7"},
            "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "d"}, "maxReplicas": 3},
            "status": {"desiredReplicas": 0, "currentMetrics": null}})
    }

    #[test]
    fn both_forms_read_as_the_same() {
        let mut expected = object();
        expected["metadata"]
            .as_object_mut()
            .expect("a map")
            .remove("resourceVersion");
        for written in [codec(false), codec(true)] {
            let bytes = written.encode(&object()).expect("encodes");
            assert_eq!(bytes.starts_with(MAGIC), written.protobuf);
            let read = codec(true);
            assert_eq!(read.decode(&bytes).expect("decodes"), expected);
            assert_eq!(read.decode_at(&bytes, 7).expect("decodes"), object());
            let json = read.to_json(bytes, 7).expect("transcodes");
            assert!(json.starts_with(read.opening.as_bytes()));
            assert_eq!(serde_json::from_slice::<Value>(&json).expect("JSON"), expected);
        }
    }

    #[test]
    fn another_form_is_not_current() {
        let (json, protobuf) = (codec(false), codec(true));
        let values = [
            json.encode(&object()).expect("encodes"),
            protobuf.encode(&object()).expect("encodes"),
        ];
        assert_eq!(
            values.each_ref().map(|value| json.is_current(value)),
            [true, false]
        );
        assert_eq!(
            values.each_ref().map(|value| protobuf.is_current(value)),
            [false, true]
        );
        let custom = Codec::json("example.com/v2", "Foo");
        for (value, expected) in [
            (
                r#"{"apiVersion":"example.com/v2","kind":"Foo","metadata":{}}"#,
                true,
            ),
            (r#"{"kind":"Foo","apiVersion":"example.com/v2"}"#, true),
            (r#"{"apiVersion":"example.com/v1","kind":"Foo"}"#, false),
            ("[]", false),
        ] {
            assert_eq!(custom.is_current(value.as_bytes()), expected, "{value}");
        }
    }

    #[test]
    fn other_versions_are_converted() {
        let old = json!({"kind": "HorizontalPodAutoscaler", "apiVersion": "autoscaling/v1", "metadata": {"name": "x"},
            "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "d"}, "maxReplicas": 3,
                "targetCPUUtilizationPercentage": 80}, "status": {"currentReplicas": 0, "desiredReplicas": 0}});
        let id = facts::schema()
            .by_gvk("autoscaling", "v1", "HorizontalPodAutoscaler")
            .expect("a type");
        let header = Header {
            api_version: "autoscaling/v1",
            kind: "HorizontalPodAutoscaler",
            unversioned: false,
        };
        let pb = protobuf::encode(facts::schema(), id, header, &old).expect("encodes");
        for bytes in [pb, old.to_string().into_bytes()] {
            let json = codec(true).to_json(bytes.clone().into(), 7).expect("transcodes");
            let value: Value = serde_json::from_slice(&json).expect("JSON");
            assert_eq!(value["apiVersion"], "autoscaling/v2");
            assert_eq!(
                value["spec"]["metrics"][0]["resource"]["target"]["averageUtilization"],
                80
            );
            assert_eq!(codec(true).decode(&bytes).expect("decodes"), value);
        }
    }

    #[test]
    fn what_others_wrote_is_completed() {
        let codec = codec(true);
        let bytes = codec.encode(&object()).expect("encodes");
        codec.complete_up_to(7);
        for (revision, completed) in [(7, true), (8, false)] {
            let json = codec.to_json(bytes.clone(), revision).expect("transcodes");
            assert!(json.starts_with(codec.opening.as_bytes()));
            let read: Value = serde_json::from_slice(&json).expect("JSON");
            assert_eq!(read["spec"].get("metrics").is_some(), completed, "{read}");
            assert_eq!(
                codec.decode_at(&bytes, revision).expect("decodes")["spec"],
                read["spec"]
            );
        }
        assert!(
            codec.decode(&bytes).expect("decodes")["spec"]
                .get("metrics")
                .is_none()
        );
    }

    #[test]
    fn what_is_not_the_kind_is_refused() {
        let header = Header {
            api_version: "v1",
            kind: "Pod",
            unversioned: false,
        };
        let id = facts::schema().by_gvk("", "v1", "Pod").expect("a type");
        let pod = protobuf::encode(facts::schema(), id, header, &json!({})).expect("encodes");
        let error = codec(true).to_json(pod.into(), 7).expect_err("another kind");
        assert_eq!(error, "it is a \"Pod\" and not a \"HorizontalPodAutoscaler\"");
        for bad in [&b""[..], b"k8s\0", b"k8s\0\x12\x05x", b"{", b"[]"] {
            assert!(
                codec(true).to_json(Bytes::copy_from_slice(bad), 7).is_err(),
                "{bad:?}"
            );
        }
    }
}
