//! The protobuf codec against the committed tables: goldens of our own, upstream's goldens where a
//! checkout of them is at hand, and bytes that nobody should send.

use std::path::PathBuf;
use std::sync::OnceLock;

use proptest::prelude::*;
use serde_json::{Value, json};
use skiff_schema::protobuf::{self, Header, MAGIC};
use skiff_schema::{Schema, TypeId, decode, normalise};

fn schema() -> &'static Schema {
    static SCHEMA: OnceLock<Schema> = OnceLock::new();
    SCHEMA.get_or_init(|| Schema::parse(include_str!("../../api/data/types.txt")).expect("the table reads"))
}

fn upstream_data() -> Option<PathBuf> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder =
        std::env::var_os("SKIFF_UPSTREAM_DATA").map_or(root.join("../shared/kubernetes"), PathBuf::from);
    folder.is_dir().then_some(folder)
}

fn type_of(api_version: &str, kind: &str) -> Option<TypeId> {
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    schema().by_gvk(group, version, kind)
}

fn header<'a>(api_version: &'a str, kind: &'a str) -> Header<'a> {
    Header {
        api_version,
        kind,
        unversioned: false,
    }
}

/// An object of the kind as its JSON reads, in the shape that Go gives it, without its kind.
fn normal(id: TypeId, value: Value) -> Value {
    let mut value = decode::check(schema(), id, value).expect("fits its type").value;
    let map = value.as_object_mut().expect("an object");
    map.remove("kind");
    map.remove("apiVersion");
    normalise(schema(), id, &mut value);
    // Upstream's codec leaves these bare, and its conversion to the served version names them on every read.
    let claims = value.pointer_mut("/spec/volumeClaimTemplates");
    for claim in claims.and_then(Value::as_array_mut).into_iter().flatten() {
        claim["apiVersion"] = "v1".into();
        claim["kind"] = "PersistentVolumeClaim".into();
    }
    value
}

/// One object through every way of the codec; what is wrong with it, if anything.
fn round_trip(value: &Value, pb: &[u8]) -> Result<(), String> {
    let text = |error: protobuf::ProtobufError| error.to_string();
    let found = protobuf::envelope(pb).map_err(text)?;
    let id = type_of(found.api_version, found.kind).ok_or("no such type")?;
    let header = header(found.api_version, found.kind);
    let ours = protobuf::encode(schema(), id, header, value).map_err(text)?;
    if ours != pb {
        let at = ours.iter().zip(pb).take_while(|(a, b)| a == b).count();
        return Err(format!(
            "encodes differently at byte {at}: {:?} and not {:?}",
            String::from_utf8_lossy(&ours[at.saturating_sub(20)..(at + 20).min(ours.len())]),
            String::from_utf8_lossy(&pb[at.saturating_sub(20)..(at + 20).min(pb.len())]),
        ));
    }
    let bytes = value.to_string();
    let from_bytes = protobuf::encode_json(schema(), id, header, bytes.as_bytes()).map_err(text)?;
    if from_bytes != pb {
        return Err("encodes differently from bytes".to_string());
    }
    let expected = normal(id, value.clone());
    let decoded = protobuf::decode(schema(), id, found.raw).map_err(text)?;
    if decoded != expected {
        return Err(format!("decodes to {decoded} and not {expected}"));
    }
    let json = protobuf::decode_json(schema(), id, "{", found.raw).map_err(text)?;
    // The same bytes that serialising the value gives: the order of keys is part of the form.
    if json != expected.to_string().into_bytes() {
        let json = String::from_utf8_lossy(&json);
        return Err(format!("transcodes to {json} and not {expected}"));
    }
    Ok(())
}

/// What a v1.36 server answered, and what it had in its store.
#[test]
fn goldens() {
    use base64::Engine as _;
    let lines: Vec<&str> = include_str!("../../server/tests/data/registry.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .collect();
    let mut compared = 0;
    for four in lines.chunks_exact(4) {
        let stored = base64::engine::general_purpose::STANDARD
            .decode(four[2])
            .expect("base64");
        if !stored.starts_with(MAGIC) {
            continue;
        }
        let found = protobuf::envelope(&stored).expect("an envelope");
        let mut value: Value = serde_json::from_str(four[3]).expect("JSON");
        if value["apiVersion"] != found.api_version {
            continue;
        }
        compared += 1;
        let id = type_of(found.api_version, found.kind).expect("a type");
        // From the bytes, because those keep the order of managed fields.
        let header = Header {
            unversioned: true,
            ..header(found.api_version, found.kind)
        };
        let ours = protobuf::encode_json(schema(), id, header, four[3].as_bytes()).expect("encodes");
        // A raw extension keeps the spaces that a client put there, in the store and not in an answer.
        if !stored.windows(3).any(|window| window == b"\": ") {
            assert_eq!(ours, stored, "{}", four[0]);
        }
        value["metadata"]
            .as_object_mut()
            .expect("metadata")
            .remove("resourceVersion");
        let decoded = protobuf::decode(schema(), id, found.raw).expect("decodes");
        assert_eq!(decoded, normal(id, value), "{}", four[0]);
    }
    assert!(compared > 45, "{compared}");
}

/// Every golden of upstream in a version that is served, byte for byte.
#[test]
fn upstreams_goldens() {
    let Some(folder) = upstream_data() else {
        eprintln!("skipped: no upstream data");
        return;
    };
    let (mut compared, mut wrong, mut unknown) = (0, Vec::new(), 0);
    for entry in std::fs::read_dir(folder.join("testdata/HEAD"))
        .expect("the folder")
        .flatten()
    {
        let path = entry.path();
        if path.extension().is_none_or(|extension| extension != "pb") {
            continue;
        }
        let pb = std::fs::read(&path).expect("a file");
        let json = std::fs::read(path.with_extension("json")).expect("a file");
        let value: Value = serde_json::from_slice(&json).expect("JSON");
        let found = protobuf::envelope(&pb).expect("an envelope");
        if type_of(found.api_version, found.kind).is_none() {
            unknown += 1;
            continue;
        }
        compared += 1;
        if let Err(error) = round_trip(&value, &pb) {
            wrong.push(format!("{}: {error}", path.display()));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {compared}:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(compared > 80, "{compared} compared, {unknown} unknown");
}

#[test]
fn objects_within_objects_keep_their_kind() {
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"}});
    let set = json!({"metadata": {"name": "s"}, "spec": {"volumeClaimTemplates": [claim]}});
    let list = json!({"metadata": {}, "items": [{"metadata": {"name": "data"}}]});
    let check = |api_version, kind, value: &Value, place: &str, expected: Value| {
        let id = type_of(api_version, kind).expect("a type");
        let pb = protobuf::encode(schema(), id, header(api_version, kind), value).expect("encodes");
        let raw = protobuf::envelope(&pb).expect("an envelope").raw;
        let decoded = protobuf::decode(schema(), id, raw).expect("decodes");
        let found = decoded.pointer(place).expect("an object within");
        assert_eq!(json!([found["apiVersion"], found["kind"]]), expected, "{kind}");
        let json = protobuf::decode_json(schema(), id, "{", raw).expect("transcodes");
        assert_eq!(String::from_utf8_lossy(&json), decoded.to_string());
    };
    let named = json!(["v1", "PersistentVolumeClaim"]);
    check(
        "apps/v1",
        "StatefulSet",
        &set,
        "/spec/volumeClaimTemplates/0",
        named,
    );
    // The items of a list are what the list says.
    check(
        "v1",
        "PersistentVolumeClaimList",
        &list,
        "/items/0",
        json!([null, null]),
    );
}

#[test]
fn what_is_stored_has_no_version() {
    let id = type_of("v1", "ConfigMap").expect("a type");
    let with = json!({"metadata": {"name": "x", "resourceVersion": "7"}, "data": {"resourceVersion": "7"}});
    let without = json!({"metadata": {"name": "x"}, "data": {"resourceVersion": "7"}});
    let header = Header {
        unversioned: true,
        ..header("v1", "ConfigMap")
    };
    let bytes = protobuf::encode(schema(), id, header, &with).expect("encodes");
    let found = protobuf::envelope(&bytes).expect("an envelope");
    assert_eq!(protobuf::decode(schema(), id, found.raw), Ok(without));
}

#[test]
fn what_has_no_protobuf_form_says_so() {
    let id = schema()
        .by_name("io.k8s.apimachinery.pkg.apis.meta.v1.Table")
        .expect("a type");
    let error = protobuf::encode(schema(), id, header("meta.k8s.io/v1", "Table"), &json!({}));
    assert_eq!(
        error.expect_err("refused").to_string(),
        "object *v1.Table does not implement the protobuf marshalling interface and cannot be encoded to a protobuf message"
    );
}

#[test]
fn readers_take_what_writers_may_send() {
    let check = |kind: &str, message: &[u8], expected: Result<Value, &str>| {
        let id = type_of("v1", kind).expect("a type");
        let got = protobuf::decode(schema(), id, message).map_err(|error| error.to_string());
        assert_eq!(got, expected.map_err(str::to_owned), "{message:?}");
    };
    // Fields out of order, unknown ones, a singular message in two pieces, map keys twice and unsorted.
    check(
        "ConfigMap",
        b"\x12\x06\x0a\x01b\x12\x01x\x12\x06\x0a\x01a\x12\x01y\x12\x06\x0a\x01b\x12\x01z\
          \x0a\x03\x1a\x01n\xfa\x01\x01?\x0a\x03\x0a\x01m",
        Ok(json!({"metadata": {"name": "m", "namespace": "n"}, "data": {"a": "y", "b": "z"}})),
    );
    // A map entry without a value, and text that is not UTF-8.
    check(
        "ConfigMap",
        b"\x0a\x00\x12\x03\x0a\x01\xff",
        Ok(json!({"metadata": {}, "data": {"\u{fffd}": ""}})),
    );
    check("ConfigMap", b"\x0a\x05x", Err("unexpected EOF"));
    check(
        "ConfigMap",
        b"\x08\x05",
        Err("proto: wrong wireType = 0 for field ObjectMeta"),
    );
    // Numbers in a list, packed.
    let id = schema()
        .by_name("io.k8s.api.core.v1.PodSecurityContext")
        .expect("a type");
    let decoded = protobuf::decode(schema(), id, &[0x22, 3, 1, 0xac, 2]).expect("decodes");
    assert_eq!(decoded, json!({"supplementalGroups": [1, 300]}));
}

#[test]
fn nesting_is_bounded() {
    let id = schema()
        .by_name("io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps")
        .expect("a type");
    // `not` is number 26... each level is a message inside the one before.
    let mut value = json!({});
    for _ in 0..300 {
        value = json!({"not": value});
    }
    let error = protobuf::encode_message(schema(), id, &value).expect_err("too deep");
    assert_eq!(error.to_string(), "proto: message nests too deep");
    let tag = {
        let one = protobuf::encode_message(schema(), id, &json!({"not": {}})).expect("encodes");
        let none = protobuf::encode_message(schema(), id, &json!({})).expect("encodes");
        let at = one.iter().zip(&none).take_while(|(a, b)| a == b).count();
        one[at..at + 2].to_vec()
    };
    let mut message = Vec::new();
    for _ in 0..300 {
        let mut outer = tag.clone();
        let mut length = message.len();
        while length >= 0x80 {
            outer.push(length as u8 | 0x80);
            length >>= 7;
        }
        outer.push(length as u8);
        outer.extend_from_slice(&message);
        message = outer;
    }
    let error = protobuf::decode(schema(), id, &message).expect_err("too deep");
    assert_eq!(error.to_string(), "proto: message nests too deep");
}

fn some_types() -> Vec<TypeId> {
    [
        "Pod",
        "Secret",
        "Node",
        "Event",
        "Service",
        "List",
        "DeleteOptions",
    ]
    .iter()
    .filter_map(|kind| type_of("v1", kind))
    .chain(type_of("apiextensions.k8s.io/v1", "CustomResourceDefinition"))
    .chain(type_of("apps/v1", "Deployment"))
    .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = protobuf::envelope(&[MAGIC, &bytes].concat());
        for id in some_types() {
            let _ = protobuf::decode(schema(), id, &bytes);
            let _ = protobuf::encode_json(schema(), id, header("v1", "x"), &bytes);
            if let Ok(json) = protobuf::decode_json(schema(), id, "{", &bytes) {
                let value: Value = serde_json::from_slice(&json).expect("what is written is JSON");
                prop_assert_eq!(protobuf::decode(schema(), id, &bytes).expect("decodes"), value);
            }
        }
    }

    /// A damaged pod: either refused, or read and written again without loss.
    #[test]
    fn damage_never_panics(place in 0usize..4096, byte: u8, cut in 0usize..4096) {
        let id = type_of("v1", "Pod").expect("a type");
        let mut bytes = protobuf::encode_message(schema(), id, &pod()).expect("encodes");
        let place = place % bytes.len();
        bytes[place] = byte;
        bytes.truncate(bytes.len() - cut % bytes.len() / 64);
        if let Ok(json) = protobuf::decode_json(schema(), id, "{", &bytes) {
            let value: Value = serde_json::from_slice(&json).expect("what is written is JSON");
            let again = protobuf::encode_message(schema(), id, &value).expect("encodes");
            let again = protobuf::decode_json(schema(), id, "{", &again).expect("decodes");
            // As values: damage may change the order of the keys in `fieldsV1`, whose JSON is passed on as it is.
            let again: Value = serde_json::from_slice(&again).expect("what is written is JSON");
            prop_assert_eq!(value, again);
        }
    }
}

fn pod() -> Value {
    json!({
        "metadata": {"name": "web-6d4b75cb6d-hs7xq", "generateName": "web-6d4b75cb6d-", "namespace": "default",
            "uid": "1ff1bd2e-6f5b-4d3e-9b3c-6d9f6f1d2c11", "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"app": "web", "pod-template-hash": "6d4b75cb6d"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-6d4b75cb6d",
                "uid": "aa", "controller": true, "blockOwnerDeletion": true}],
            "managedFields": [{"manager": "m", "operation": "Update", "apiVersion": "v1",
                "time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1",
                "fieldsV1": {"f:metadata": {"f:labels": {".": {}, "f:app": {}}}}}]},
        "spec": {"containers": [{"name": "web", "image": "nginx", "ports": [{"containerPort": 80, "protocol": "TCP"}],
                "resources": {"limits": {"cpu": "500m", "memory": "128Mi"}, "requests": {"cpu": "100m"}},
                "livenessProbe": {"httpGet": {"path": "/", "port": "http", "scheme": "HTTP"}, "periodSeconds": 10},
                "volumeMounts": [{"name": "t", "readOnly": true, "mountPath": "/var/run/secrets"}],
                "terminationMessagePath": "/dev/termination-log", "imagePullPolicy": "Always"}],
            "volumes": [{"name": "t", "projected": {"sources": [{"serviceAccountToken":
                {"expirationSeconds": 3607, "path": "token"}}], "defaultMode": 420}}],
            "restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "dnsPolicy": "ClusterFirst",
            "serviceAccountName": "default", "nodeName": "n1", "securityContext": {}, "priority": 0,
            "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists",
                "effect": "NoExecute", "tolerationSeconds": 300}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True",
            "lastTransitionTime": "2026-01-01T00:00:03Z"}], "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}],
            "startTime": "2026-01-01T00:00:00Z", "qosClass": "Burstable"}
    })
}
