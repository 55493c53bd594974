//! Which certificates a projection of ClusterTrustBundles shows: those of the bundles that it selects, each once. Pure.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use k8s_openapi::api::certificates::v1beta1::ClusterTrustBundle;
use k8s_openapi::api::core::v1::ClusterTrustBundleProjection;
use skiff_api::certificates::pem;
use skiff_meta::selector::LabelSelector;

/// The order of the certificates is the same while the node runs, and another after a restart, as upstream has it: nobody shall
/// rely on it.
static ORDER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The file of a projection; the error is a sentence for the user.
pub(crate) fn anchors(
    projection: &ClusterTrustBundleProjection,
    bundles: &[ClusterTrustBundle],
) -> Result<Vec<u8>, String> {
    let optional = projection.optional == Some(true);
    let selected: Vec<&ClusterTrustBundle> = if let Some(name) = &projection.name {
        let has_name = |bundle: &&ClusterTrustBundle| bundle.metadata.name.as_ref() == Some(name);
        let found: Vec<_> = bundles.iter().filter(has_name).collect();
        if found.is_empty() && !optional {
            return Err(format!(
                "while getting ClusterTrustBundle: clustertrustbundle.certificates.k8s.io {name:?} not found"
            ));
        }
        found
    } else if let Some(signer) = &projection.signer_name {
        let found = of_signer(projection, signer, bundles)?;
        if found.is_empty() && !optional {
            return Err(
                "combination of signerName and labelSelector matched zero ClusterTrustBundles".to_owned(),
            );
        }
        found
    } else {
        return Err("ClusterTrustBundle projection requires either name or signerName to be set".to_owned());
    };
    let certificates: BTreeSet<Vec<u8>> = selected
        .iter()
        .flat_map(|bundle| pem::blocks(&bundle.spec.trust_bundle))
        .map(|block| block.bytes)
        .collect();
    let mut certificates: Vec<Vec<u8>> = certificates.into_iter().collect();
    certificates.sort_by_cached_key(|bytes| ORDER.hash_one(bytes));
    let text: String = certificates.iter().map(|bytes| pem::certificate(bytes)).collect();
    Ok(text.into_bytes())
}

/// The bundles of a signer that the selector matches. No selector matches nothing, an empty one everything.
fn of_signer<'a>(
    projection: &ClusterTrustBundleProjection,
    signer: &str,
    bundles: &'a [ClusterTrustBundle],
) -> Result<Vec<&'a ClusterTrustBundle>, String> {
    let Some(selector) = &projection.label_selector else {
        return Ok(Vec::new());
    };
    let selector = serde_json::to_value(selector)
        .map_err(|error| error.to_string())
        .and_then(|selector| LabelSelector::from_value(&selector))
        .map_err(|error| format!("while parsing label selector: {error}"))?;
    let matches = |bundle: &&ClusterTrustBundle| {
        let labels = bundle.metadata.labels.as_ref();
        selector.matches(|key| labels.and_then(|all| all.get(key)).map(String::as_str))
    };
    let of_signer = bundles
        .iter()
        .filter(|bundle| bundle.spec.signer_name.as_deref() == Some(signer));
    Ok(of_signer.filter(matches).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn bundles() -> Vec<ClusterTrustBundle> {
        let of = |name: &str, signer: Option<&str>, label: &str, certificates: &[&[u8]]| {
            let text: String = certificates.iter().map(|bytes| pem::certificate(bytes)).collect();
            serde_json::from_value(json!({"metadata": {"name": name, "labels": {"tier": label}},
                "spec": {"signerName": signer, "trustBundle": format!("words\n{text}")}}))
            .unwrap()
        };
        vec![
            of("plain", None, "live", &[b"a"]),
            of("x.io:s:1", Some("x.io/s"), "live", &[b"b", b"c"]),
            of("x.io:s:2", Some("x.io/s"), "live", &[b"c", b"d"]),
            of("x.io:s:3", Some("x.io/s"), "canary", &[b"e"]),
            of("x.io:t:1", Some("x.io/t"), "live", &[b"f"]),
        ]
    }

    fn check(projection: Value, expected: Result<&str, &str>) {
        let mut sent = projection.clone();
        sent["path"] = json!("p");
        let found = anchors(&serde_json::from_value(sent).unwrap(), &bundles()).map(|file| {
            let blocks = pem::blocks(std::str::from_utf8(&file).unwrap());
            assert!(blocks.iter().all(|block| block.kind == "CERTIFICATE"));
            let mut letters: Vec<String> = blocks
                .into_iter()
                .map(|block| String::from_utf8(block.bytes).unwrap())
                .collect();
            letters.sort_unstable();
            letters.concat()
        });
        let expected = expected.map(str::to_owned).map_err(str::to_owned);
        assert_eq!(found, expected, "{projection}");
    }

    #[test]
    fn selected_bundles_are_merged() {
        check(json!({"name": "plain"}), Ok("a"));
        check(json!({"signerName": "x.io/s", "labelSelector": {}}), Ok("bcde"));
        let live = json!({"matchLabels": {"tier": "live"}});
        check(json!({"signerName": "x.io/s", "labelSelector": live}), Ok("bcd"));
        let others = json!({"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["live"]}]});
        check(json!({"signerName": "x.io/s", "labelSelector": others}), Ok("e"));
        let zero = "combination of signerName and labelSelector matched zero ClusterTrustBundles";
        check(json!({"signerName": "x.io/s"}), Err(zero));
        check(json!({"signerName": "x.io/u", "labelSelector": {}}), Err(zero));
        check(
            json!({"signerName": "x.io/u", "labelSelector": {}, "optional": true}),
            Ok(""),
        );
        check(
            json!({"name": "gone"}),
            Err(
                "while getting ClusterTrustBundle: clustertrustbundle.certificates.k8s.io \"gone\" not found",
            ),
        );
        check(json!({"name": "gone", "optional": true}), Ok(""));
    }

    #[test]
    fn the_order_stays() {
        let projection =
            serde_json::from_value(json!({"signerName": "x.io/s", "labelSelector": {}, "path": "p"}));
        let projection: ClusterTrustBundleProjection = projection.unwrap();
        let mut turned = bundles();
        turned.reverse();
        assert_eq!(anchors(&projection, &bundles()), anchors(&projection, &turned));
    }
}
