//! Decoding and normalising against the committed tables of the built-in kinds, and against upstream's
//! golden objects where a checkout of them is at hand.

use std::path::PathBuf;

use serde_json::Value;
use skiff_meta::GroupVersionKind;
use skiff_schema::decode::{Document, Format, decode_object, strict_decoding_message};
use skiff_schema::patch::strategic_merge;
use skiff_schema::{Schema, normalise, normalise_sent, put_back};

fn schema() -> &'static Schema {
    static SCHEMA: std::sync::OnceLock<Schema> = std::sync::OnceLock::new();
    SCHEMA.get_or_init(|| Schema::parse(include_str!("../../api/data/types.txt")).expect("the table reads"))
}

fn upstream_data() -> Option<PathBuf> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder =
        std::env::var_os("SKIFF_UPSTREAM_DATA").map_or(root.join("../shared/kubernetes"), PathBuf::from);
    folder.is_dir().then_some(folder)
}

fn gvk(group: &str, version: &str, kind: &str) -> GroupVersionKind {
    GroupVersionKind::new(group, version, kind)
}

/// Decodes as a kind, and gives the normalised object or the message.
fn decode(expected: &GroupVersionKind, body: &str) -> Result<(Value, Vec<String>), String> {
    let object = decode_object(schema(), body.as_bytes(), Format::Json, expected)?;
    let id = schema()
        .by_gvk(&object.gvk.group, &object.gvk.version, &object.gvk.kind)
        .expect("known");
    let mut value = object.checked.value;
    normalise(schema(), id, &mut value);
    Ok((value, object.checked.strict_errors))
}

#[test]
fn goldens_pass_unchanged() {
    let Some(folder) = upstream_data() else {
        eprintln!("skipped: no upstream data");
        return;
    };
    let mut count = 0;
    for entry in std::fs::read_dir(folder.join("testdata/HEAD")).expect("a folder") {
        let path = entry.expect("an entry").path();
        let (format, text) = match path.extension().and_then(|e| e.to_str()) {
            Some("json") => (Format::Json, std::fs::read(&path).expect("a file")),
            Some("yaml") => (Format::Yaml, std::fs::read(&path).expect("a file")),
            _ => continue,
        };
        let document = Document::parse(&text, format).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let golden = document.node.clone().into_value();
        let (api_version, kind) = (
            golden["apiVersion"].as_str().unwrap_or(""),
            golden["kind"].as_str().unwrap_or(""),
        );
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let Some(id) = schema().by_gvk(group, version, kind) else {
            continue;
        };
        let checked = document
            .check(schema(), id)
            .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert!(
            checked.strict_errors.is_empty(),
            "{}: {:?}",
            path.display(),
            checked.strict_errors
        );
        let mut value = checked.value;
        normalise(schema(), id, &mut value);
        assert_eq!(value, golden, "{}", path.display());
        count += 1;
    }
    assert!(count > 100, "only {count} goldens were of a known kind");
}

/// The rows of a table of cases: `group/version Kind`, then the columns.
fn rows(table: &'static str) -> impl Iterator<Item = (skiff_schema::TypeId, Vec<&'static str>)> {
    table.lines().filter(|line| !line.starts_with('#')).map(|line| {
        let mut columns: Vec<&str> = line.split('\t').collect();
        let (api_version, kind) = columns.remove(0).split_once(' ').expect("a kind");
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        (
            schema().by_gvk(group, version, kind).expect("a known kind"),
            columns,
        )
    })
}

/// Only validation tells what was sent empty from what was not sent.
#[test]
fn empty_lists_and_maps_come_back() {
    let id = schema().by_gvk("", "v1", "Pod").expect("a known kind");
    let text = r#"{"metadata":{"labels":{}},"spec":{"containers":[{"name":"a"},{"command":[],"env":[{"name":"e"}],"resources":{"limits":{}}}],"nodeSelector":{},"volumes":[{"name":"v","projected":{"sources":[]}}]}}"#;
    let sent: Value = serde_json::from_str(text).expect("JSON");
    let mut value = sent.clone();
    let left_out = normalise_sent(schema(), id, &mut value);
    assert!(value["spec"]["containers"][1].get("command").is_none());
    assert!(value["spec"].get("nodeSelector").is_none());
    put_back(&mut value, &left_out);
    for way in [
        "/metadata/labels",
        "/spec/containers/1/command",
        "/spec/containers/1/resources/limits",
        "/spec/nodeSelector",
    ] {
        assert_eq!(value.pointer(way), sent.pointer(way), "{way}");
    }
    assert!(value["spec"]["containers"][0].get("command").is_none());
    // A place that is gone meanwhile stays so.
    value["spec"]["containers"] = Value::Array(Vec::new());
    put_back(&mut value, &left_out);
    assert_eq!(value["spec"]["containers"], Value::Array(Vec::new()));
}

#[test]
fn bodies_decode_as_upstream_decodes_them() {
    for (id, columns) in rows(include_str!("data/decode.tsv")) {
        let document = Document::parse(columns[0].as_bytes(), Format::Json).expect("json");
        match (document.check(schema(), id), &columns[1..]) {
            (Ok(checked), ["OK", strict, object]) => {
                let mut value = checked.value;
                normalise(schema(), id, &mut value);
                assert_eq!(checked.strict_errors.join("; "), *strict, "{}", columns[0]);
                assert_eq!(value.to_string(), *object, "{}", columns[0]);
            }
            (Err(error), ["ERR", message]) => assert_eq!(error.to_string(), *message, "{}", columns[0]),
            (got, wanted) => panic!("{}: {got:?}, not {wanted:?}", columns[0]),
        }
    }
}

#[test]
fn strategic_merges_are_upstreams() {
    for (id, columns) in rows(include_str!("data/strategic.tsv")) {
        let [current, patch, outcome, wanted] = columns[..] else {
            panic!("four columns: {columns:?}")
        };
        let json = |text: &str| serde_json::from_str::<Value>(text).expect("json");
        match (
            strategic_merge(schema(), id, &json(current), &json(patch)),
            outcome,
        ) {
            (Ok(value), "OK") => assert_eq!(value.to_string(), wanted, "{patch}"),
            (Err(error), "ERR") => assert_eq!(error.to_string().replace('\n', "\\n"), wanted, "{patch}"),
            (got, _) => panic!("{patch}: {got:?}, not {wanted}"),
        }
    }
}

#[test]
fn empty_objects_look_as_upstream_prints_them() {
    let check = |gvk: &GroupVersionKind, body: &str, expected: &str| {
        let (value, _) = decode(gvk, body).unwrap_or_else(|e| panic!("{body}: {e}"));
        let expected: Value = serde_json::from_str(expected).expect("json");
        assert_eq!(value, expected, "{body}");
    };
    let pod = gvk("", "v1", "Pod");
    check(
        &pod,
        "{}",
        r#"{"metadata":{},"spec":{"containers":null},"status":{}}"#,
    );
    check(
        &pod,
        r#"{"metadata":{"labels":{},"creationTimestamp":null},"spec":{"containers":[{"name":"a","env":[]}],"hostNetwork":false}}"#,
        r#"{"metadata":{},"spec":{"containers":[{"name":"a","resources":{}}]},"status":{}}"#,
    );
    check(
        &pod,
        r#"{"spec":{"volumes":[{"name":"v","emptyDir":{}}]},"status":{"conditions":[{"type":"Ready","status":"True"}]}}"#,
        r#"{"metadata":{},"spec":{"containers":null,"volumes":[{"name":"v","emptyDir":{}}]},
            "status":{"conditions":[{"type":"Ready","status":"True","lastProbeTime":null,"lastTransitionTime":null}]}}"#,
    );
    check(
        &gvk("", "v1", "Service"),
        "{}",
        r#"{"metadata":{},"spec":{},"status":{"loadBalancer":{}}}"#,
    );
    check(
        &gvk("apps", "v1", "Deployment"),
        "{}",
        r#"{"metadata":{},"status":{},
        "spec":{"selector":null,"strategy":{},"template":{"metadata":{},"spec":{"containers":null}}}}"#,
    );
    check(
        &gvk("rbac.authorization.k8s.io", "v1", "Role"),
        "{}",
        r#"{"metadata":{},"rules":null}"#,
    );
    check(
        &gvk("", "v1", "Secret"),
        r#"{"data":{"a":"","b":null}}"#,
        r#"{"metadata":{},"data":{"a":"","b":""}}"#,
    );
    check(
        &gvk("", "v1", "ResourceQuota"),
        r#"{"spec":{"hard":{"cpu":"1000m","pods":10}}}"#,
        r#"{"metadata":{},"spec":{"hard":{"cpu":"1","pods":"10"}},"status":{}}"#,
    );
}

#[test]
fn strict_findings_are_upstreams() {
    let check = |gvk: &GroupVersionKind, body: &str, expected: &str| {
        let (_, errors) = decode(gvk, body).unwrap_or_else(|e| panic!("{body}: {e}"));
        assert_eq!(
            strict_decoding_message(&errors),
            format!("strict decoding error: {expected}"),
            "{body}"
        );
    };
    let deployment = gvk("apps", "v1", "Deployment");
    check(
        &deployment,
        r#"{"spec":{"foo":1}}"#,
        r#"unknown field "spec.foo""#,
    );
    check(
        &deployment,
        r#"{"spec":{"Replicas":1},"x":{"y":1,"y":2}}"#,
        r#"unknown field "spec.Replicas", unknown field "x""#,
    );
    check(
        &deployment,
        r#"{"spec":{"template":{"spec":{"containers":[{"name":"a"},{"nam":"b","name":"b","name":"c"}]}}}}"#,
        r#"unknown field "spec.template.spec.containers[1].nam", duplicate field "spec.template.spec.containers[1].name""#,
    );
    check(
        &deployment,
        r#"{"metadata":{"labels":{"a":"1","a":"2"}},"metadata":{}}"#,
        r#"duplicate field "metadata.labels.a", duplicate field "metadata""#,
    );
}

#[test]
fn refusals_are_upstreams() {
    let check = |gvk: &GroupVersionKind, body: &str, expected: &str| {
        assert_eq!(decode(gvk, body).expect_err(body), expected, "{body}");
    };
    let deployment = gvk("apps", "v1", "Deployment");
    let as_deployment =
        |error: &str| format!("Deployment in version \"v1\" cannot be handled as a Deployment: {error}");
    check(
        &deployment,
        r#"{"spec":{"replicas":"x"}}"#,
        &as_deployment(
            "json: cannot unmarshal string into Go struct field DeploymentSpec.spec.replicas of type int32",
        ),
    );
    check(
        &deployment,
        r#"{"spec":{"replicas":1.0}}"#,
        &as_deployment(
            "json: cannot unmarshal number 1.0 into Go struct field DeploymentSpec.spec.replicas of type int32",
        ),
    );
    check(
        &deployment,
        r#"{"spec":{"template":{"spec":{"containers":{}}}}}"#,
        &as_deployment(
            "json: cannot unmarshal object into Go struct field PodSpec.spec.template.spec.containers of type []v1.Container",
        ),
    );
    check(
        &deployment,
        r#"{"metadata":{"labels":{"a":1}}}"#,
        &as_deployment(
            "json: cannot unmarshal number into Go struct field ObjectMeta.metadata.labels of type string",
        ),
    );
    check(
        &deployment,
        r#"{"spec":{"template":{"spec":{"volumes":[{"name":"v","emptyDir":[]}]}}}}"#,
        &as_deployment(
            "json: cannot unmarshal array into Go struct field Volume.spec.template.spec.volumes.VolumeSource.emptyDir of type v1.EmptyDirVolumeSource",
        ),
    );
    check(
        &deployment,
        r#"{"spec":"x","metadata":{"creationTimestamp":"y"}}"#,
        &as_deployment(r#"parsing time "y" as "2006-01-02T15:04:05Z07:00": cannot parse "y" as "2006""#),
    );
    check(
        &deployment,
        r#"{"kind":"Pod","apiVersion":"v1"}"#,
        "Pod in version \"v1\" cannot be handled as a Deployment: converting (v1.Pod) to (apps.Deployment): unknown conversion",
    );
    check(
        &deployment,
        "nope",
        "the object provided is unrecognized (must be of type Deployment): \
        couldn't get version/kind; json parse error: invalid character 'o' in literal null (expecting 'u') (6e6f7065)",
    );
    check(
        &deployment,
        "",
        "the object provided is unrecognized (must be of type Deployment): \
        couldn't get version/kind; json parse error: unexpected end of JSON input (<empty>)",
    );
    check(
        &deployment,
        r#"{"kind":1}"#,
        "the object provided is unrecognized (must be of type Deployment): \
        couldn't get version/kind; json parse error: json: cannot unmarshal number into Go struct field .kind of type string ({\"kind\":1})",
    );
}
