//! From a manifest to the pods it describes: decoded, defaulted, validated and named as upstream's kubelet does it.
//! Pure; `source.rs` reads the manifests.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use skiff_api::core::references;
use skiff_api::facts;
use skiff_meta::{GroupVersionKind, field};
use skiff_schema::decode::{self, Document, Format};

use super::annotations::{HASH, SOURCE};

/// Where a manifest is from.
#[derive(Clone, Copy, Debug)]
pub struct Origin<'a> {
    pub node_name: &'a str,
    /// The path of the file, or the URL.
    pub location: &'a str,
    pub is_file: bool,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Not a pod, and perhaps something else.
    #[error("{0}")]
    Unreadable(String),
    #[error("invalid pod: name is needed for the pod")]
    Nameless,
    #[error("invalid pod: {0}")]
    Invalid(String),
    #[error("static pods may not reference {0}")]
    Reference(&'static str),
    #[error("{0}")]
    UnknownReference(String),
}

/// A pod of a manifest, and the fields of the manifest that no pod has.
#[derive(Debug)]
pub struct Parsed {
    pub pod: Pod,
    pub unknown_fields: Vec<String>,
}

fn gvk(kind: &str) -> GroupVersionKind {
    GroupVersionKind::new("", "v1", kind)
}

/// One pod, in YAML or JSON.
pub fn pod(data: &[u8], origin: &Origin<'_>) -> Result<Parsed, Error> {
    let (value, unknown_fields) = decoded(data, "Pod")?;
    Ok(Parsed {
        pod: completed(value, origin)?,
        unknown_fields,
    })
}

/// One pod, or a list of them.
pub fn pods(data: &[u8], origin: &Origin<'_>) -> Result<Vec<Parsed>, Error> {
    let single = match pod(data, origin) {
        Err(Error::Unreadable(why)) => why,
        other => return other.map(|pod| vec![pod]),
    };
    let (list, mut unknown_fields) = decoded(data, "PodList").map_err(|multiple| {
        Error::Unreadable(format!(
            "couldn't parse as single ({single}) or multiple pods ({multiple})"
        ))
    })?;
    let items = list["items"].as_array().cloned().unwrap_or_default();
    let parsed = items.into_iter().map(|mut item| {
        item["apiVersion"] = json!("v1");
        item["kind"] = json!("Pod");
        Ok(Parsed {
            pod: completed(item, origin)?,
            unknown_fields: std::mem::take(&mut unknown_fields),
        })
    });
    parsed.collect()
}

fn decoded(data: &[u8], kind: &str) -> Result<(Value, Vec<String>), Error> {
    let unreadable = |why: String| Error::Unreadable(why);
    let document = Document::parse(data, Format::Yaml).map_err(|error| unreadable(error.to_string()))?;
    let found = decode::type_meta(&document.node).map_err(unreadable)?;
    if found.kind.is_empty() {
        return Err(unreadable("Object 'Kind' is missing".to_owned()));
    }
    if (found.group.as_str(), found.version.as_str(), found.kind.as_str()) != ("", "v1", kind) {
        return Err(unreadable(format!(
            "it is a {} of {}, not a {kind} of v1",
            found.kind,
            found.api_version()
        )));
    }
    let decoded =
        decode::decode_object(facts::schema(), data, Format::Yaml, &gvk(kind)).map_err(unreadable)?;
    Ok((decoded.checked.value, decoded.checked.strict_errors))
}

/// Defaults, the node's own facts, and the rules.
fn completed(mut value: Value, origin: &Origin<'_>) -> Result<Pod, Error> {
    if text(&value["metadata"]["name"]).is_empty() {
        return Err(Error::Nameless);
    }
    if text(&value["metadata"]["uid"]).is_empty() {
        value["metadata"]["uid"] = json!(hash(&value, origin));
    }
    let kind = skiff_api::kind("", "Pod");
    (kind.default)("v1", &mut value);
    let metadata = &mut value["metadata"];
    let name = format!("{}-{}", text(&metadata["name"]), origin.node_name.to_lowercase());
    metadata["name"] = json!(name);
    if text(&metadata["namespace"]).is_empty() {
        metadata["namespace"] = json!("default");
    }
    metadata["annotations"][HASH] = metadata["uid"].clone();
    value["spec"]["nodeName"] = json!(origin.node_name);
    value["status"] = json!({"phase": "Pending"});
    if origin.is_file {
        tolerate_everything(&mut value["spec"]);
    }
    let errors = kind.check_create(&value, true);
    if !errors.is_empty() {
        return Err(Error::Invalid(listed(&errors)));
    }
    match references::api_object(&value) {
        Ok(None) => {}
        Ok(Some(what)) => return Err(Error::Reference(what)),
        Err(why) => return Err(Error::UnknownReference(why)),
    }
    let source = if origin.is_file { "file" } else { "http" };
    value["metadata"]["annotations"][SOURCE] = json!(source);
    serde_json::from_value(value).map_err(|error| Error::Unreadable(error.to_string()))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn listed(errors: &[field::Error]) -> String {
    let all: Vec<String> = errors.iter().map(ToString::to_string).collect();
    match all.as_slice() {
        [one] => one.clone(),
        _ => format!("[{}]", all.join(", ")),
    }
}

/// A pod of a file stays when the node has problems.
fn tolerate_everything(spec: &mut Value) {
    let toleration = json!({"operator": "Exists", "effect": "NoExecute"});
    match spec["tolerations"].as_array_mut() {
        Some(list) if list.contains(&toleration) => {}
        Some(list) => list.push(toleration),
        None => spec["tolerations"] = json!([toleration]),
    }
}

/// The uid of a pod that has none: another one for whatever is changed in it, and the same one after a restart.
// COMPAT: as upstream of 128 bits by FNV-1a; what is hashed is the manifest as JSON, upstream's is the text of Go's types.
fn hash(value: &Value, origin: &Origin<'_>) -> String {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let place = if origin.is_file {
        format!("host:{}file:{}", origin.node_name, origin.location)
    } else {
        format!("url:{}", origin.location)
    };
    // Keys are sorted, so that their order in the file does not matter.
    let content = value.to_string();
    let hash = content
        .bytes()
        .chain(place.bytes())
        .fold(OFFSET, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME));
    format!("{hash:032x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: Origin<'_> = Origin {
        node_name: "node-a",
        location: "/etc/kubernetes/manifests/web.yaml",
        is_file: true,
    };

    const WEB: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n  containers:\n  - {name: c, image: 'app:1'}\n";

    #[test]
    fn a_pod_is_completed() {
        let made = pod(WEB.as_bytes(), &FILE).unwrap().pod;
        let uid = made.metadata.uid.clone().unwrap();
        assert_eq!(uid.len(), 32);
        let value = serde_json::to_value(&made).unwrap();
        assert_eq!(value["metadata"]["name"], "web-node-a");
        assert_eq!(value["metadata"]["namespace"], "default");
        assert_eq!(value["spec"]["nodeName"], "node-a");
        assert_eq!(value["spec"]["restartPolicy"], "Always");
        assert_eq!(value["status"]["phase"], "Pending");
        assert_eq!(value["metadata"]["annotations"][HASH], uid);
        assert_eq!(value["metadata"]["annotations"][SOURCE], "file");
        assert_eq!(
            value["spec"]["tolerations"],
            json!([{"operator": "Exists", "effect": "NoExecute"}])
        );
        let url = Origin {
            is_file: false,
            ..FILE
        };
        let by_url = pod(WEB.as_bytes(), &url).unwrap().pod;
        assert_ne!(by_url.metadata.uid, made.metadata.uid);
        assert_eq!(by_url.spec.unwrap().tolerations, None);
    }

    #[test]
    fn the_uid_follows_the_content() {
        let uid = |text: &str| pod(text.as_bytes(), &FILE).unwrap().pod.metadata.uid.unwrap();
        let json = r#"{"spec": {"containers": [{"image": "app:1", "name": "c"}]}, "kind": "Pod",
            "apiVersion": "v1", "metadata": {"name": "web"}}"#;
        assert_eq!(uid(json), uid(WEB));
        assert_ne!(uid(&WEB.replace("app:1", "app:2")), uid(WEB));
        assert_eq!(uid(&WEB.replace("name: web", "name: web, uid: mine")), "mine");
    }

    #[test]
    fn what_a_node_does_not_take() {
        let check = |text: &str, expected: &str| {
            let error = pod(text.as_bytes(), &FILE).unwrap_err().to_string();
            assert!(error.contains(expected), "{error} is not {expected}");
        };
        check("{", "");
        check(
            "kind: Service\napiVersion: v1\n",
            "it is a Service of v1, not a Pod of v1",
        );
        check("metadata: {name: x}\n", "Kind");
        check(
            &WEB.replace("name: web", "labels: {a: b}"),
            "name is needed for the pod",
        );
        check(
            &WEB.replace("name: c", "name: C"),
            "invalid pod: spec.containers[0].name: Invalid value",
        );
        let reference = |field: &str| format!("{WEB}  {field}\n");
        for (field, expected) in [
            ("serviceAccountName: x", "serviceaccounts"),
            ("imagePullSecrets: [{name: x}]", "secrets"),
            ("volumes: [{name: v, configMap: {name: x}}]", "configmaps"),
            (
                "volumes: [{name: v, persistentVolumeClaim: {claimName: x}}]",
                "persistentvolumeclaims",
            ),
        ] {
            check(
                &reference(field),
                &format!("static pods may not reference {expected}"),
            );
        }
    }

    #[test]
    fn lists_and_unknown_fields() {
        let list = r#"{"apiVersion": "v1", "kind": "PodList", "items": [
            {"metadata": {"name": "a"}, "spec": {"containers": [{"name": "c", "image": "i"}], "colour": "red"}},
            {"metadata": {"name": "b"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}]}"#;
        let parsed = pods(list.as_bytes(), &FILE).unwrap();
        let names: Vec<_> = parsed
            .iter()
            .map(|p| p.pod.metadata.name.clone().unwrap())
            .collect();
        assert_eq!(names, ["a-node-a", "b-node-a"]);
        assert_eq!(
            parsed[0].unknown_fields.len(),
            1,
            "{:?}",
            parsed[0].unknown_fields
        );
        assert_eq!(pods(WEB.as_bytes(), &FILE).unwrap().len(), 1);
        let error = pods(b"[]", &FILE).unwrap_err().to_string();
        assert!(error.starts_with("couldn't parse as single ("), "{error}");
    }
}
