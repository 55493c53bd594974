//! ClusterTrustBundles: root certificates that workloads may trust. The API is off by default. Who may write the bundles of a
//! signer is for admission to say (ClusterTrustBundleAttest).

use std::collections::BTreeMap;

use serde_json::Value;
use skiff_meta::field;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use super::pem;
use super::rules::signer_name;
use crate::errors::Errors;
use crate::kind::{Again, BASE, Kind, NAME, text as column, unsupported_field};
use crate::node::{Node, at, same, text};
use crate::{object_meta, row};

const SIZE_MAX: usize = 1024 * 1024;
const OMITTED: &str = "<value omitted>";

pub static CLUSTER_TRUST_BUNDLE: Kind = Kind {
    group: "certificates.k8s.io",
    kind: "ClusterTrustBundle",
    version: "v1beta1",
    // It depends on the signer, so it is among the other rules.
    name_rule: |_, _| Vec::new(),
    validate: |object| rules(object, true),
    validate_update: |new, old| {
        // COMPAT: a bundle that was accepted once stays acceptable.
        let parse = !same(at(new, "spec.trustBundle"), at(old, "spec.trustBundle"));
        let mut errors = Errors::new();
        errors.extend(rules(new, parse));
        let root = Node::root(new);
        errors.immutable(&root.field("spec.signerName"), at(old, "spec.signerName"));
        errors.into_vec()
    },
    selectable: |object| vec![("spec.signerName", text(object, "spec.signerName").to_owned())],
    columns: &[NAME, column("SignerName")],
    row: |object, _| {
        let signer = text(object, "spec.signerName");
        vec![row::name(object), row::or_none(signer)]
    },
    update_again: Again::ObjectFirst,
    allow_unconditional_update: false,
    unknown_field: unsupported_field,
    ..BASE
};

/// What is wrong with the name of a bundle of this signer, which may be empty.
pub(crate) fn name_rule(signer: &str, name: &str, prefix: bool) -> Vec<String> {
    if signer.is_empty() {
        if name.contains(':') {
            return vec!["ClusterTrustBundle without signer name must not have \":\" in its name".to_owned()];
        }
        return object_meta::dns_subdomain(name, prefix);
    }
    let required = format!("{}:", signer.replace('/', ":"));
    match name.strip_prefix(&required) {
        Some(rest) => object_meta::dns_subdomain(rest, prefix),
        None => vec![format!(
            "ClusterTrustBundle for signerName {signer} must be named with prefix {required}"
        )],
    }
}

/// The signer whose bundle has this name; empty for a bundle without one.
pub(crate) fn signer_of_name(name: &str) -> String {
    let signer = name.rsplit_once(':').map_or("", |(signer, _)| signer);
    signer.replace(':', "/")
}

fn rules(object: &Value, parse: bool) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(object);
    let signer = root.field("spec.signerName");
    let (generated, name) = (root.field("metadata.generateName"), root.field("metadata.name"));
    if !generated.is_empty() {
        errors.rule(&generated, name_rule(signer.str(), generated.str(), true));
    }
    if !name.is_empty() {
        errors.rule(&name, name_rule(signer.str(), name.str(), false));
    }
    if !signer.is_empty() {
        signer_name(&signer, &mut errors);
    }
    if parse {
        trust_bundle(&root.field("spec.trustBundle"), &mut errors);
    }
    errors.into_vec()
}

/// Certificates of authorities, each once, and at least one.
fn trust_bundle(bundle: &Node, errors: &mut Errors) {
    if bundle.str().len() > SIZE_MAX {
        errors.too_long(bundle, SIZE_MAX);
        return;
    }
    let blocks = pem::blocks(bundle.str());
    let mut all_good = true;
    for (index, block) in blocks.iter().enumerate() {
        if let Some(why) = complaint(block) {
            errors.invalid_value(bundle, OMITTED, format!("entry {index} {why}"));
            all_good = false;
        }
    }
    if !all_good {
        return;
    }
    if blocks.is_empty() {
        errors.invalid_value(bundle, OMITTED, "at least one trust anchor must be provided");
    }
    let mut places: BTreeMap<&[u8], Vec<String>> = BTreeMap::new();
    for (index, block) in blocks.iter().enumerate() {
        places.entry(&block.bytes).or_default().push(index.to_string());
    }
    for indices in places.values().filter(|indices| indices.len() > 1) {
        let detail = format!("duplicate trust anchor (indices [{}])", indices.join(" "));
        errors.invalid_value(bundle, OMITTED, detail);
    }
}

fn complaint(block: &pem::Block) -> Option<String> {
    if block.kind != "CERTIFICATE" {
        return Some(format!("has bad block type: {}", block.kind));
    }
    if block.has_headers {
        return Some("has PEM block headers".to_owned());
    }
    let parsed = X509Certificate::from_der(&block.bytes).ok();
    let whole = parsed.filter(|(rest, _)| rest.is_empty());
    let Some(Ok(constraints)) = whole.as_ref().map(|(_, found)| found.basic_constraints()) else {
        return Some("does not parse as X.509".to_owned());
    };
    let is_authority = constraints.is_some_and(|extension| extension.value.ca);
    (!is_authority).then(|| "does not have the CA bit set".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::Kind;
    use serde_json::json;

    const AUTHORITY: &str = "\
-----BEGIN CERTIFICATE-----\n\
MIIBcDCCARWgAwIBAgIUCTFdng6y5KNVeg/MW39DXCW/6zUwCgYIKoZIzj0EAwIw\n\
DDEKMAgGA1UEAwwBYTAgFw0yNjExMTgxNDIyMDNaGA8yMTI2MTAyNTE0MjIwM1ow\n\
DDEKMAgGA1UEAwwBYTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABLGtCOE5aBUE\n\
k4YB5t2Il7JFdU0uxegHXwjyJzhhEE2yeI6vNHimdZMWqf/qqn6/wr4044ccAkCB\n\
4Ya9gP59WfujUzBRMB0GA1UdDgQWBBRY9UkoLA4iTKrT6XIcgFZwAZIeNjAfBgNV\n\
HSMEGDAWgBRY9UkoLA4iTKrT6XIcgFZwAZIeNjAPBgNVHRMBAf8EBTADAQH/MAoG\n\
CCqGSM49BAMCA0kAMEYCIQCCEXvy8DVNmAW4CM2QeieRBBIDzGLmEGJAv6LYTTAC\n\
7wIhAPlelBGI+Kbp7cEAACVsE5nwU6x2jUexdN72YPiExYLy\n\
-----END CERTIFICATE-----\n";
    const LEAF: &str = "\
-----BEGIN CERTIFICATE-----\n\
MIIBbTCCARKgAwIBAgIUYKxG0yBDz+kUgVWd1j/9ZhACGJAwCgYIKoZIzj0EAwIw\n\
DDEKMAgGA1UEAwwBbDAgFw0yNjExMTgxNDIyMDNaGA8yMTI2MTAyNTE0MjIwM1ow\n\
DDEKMAgGA1UEAwwBbDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABLGtCOE5aBUE\n\
k4YB5t2Il7JFdU0uxegHXwjyJzhhEE2yeI6vNHimdZMWqf/qqn6/wr4044ccAkCB\n\
4Ya9gP59WfujUDBOMB0GA1UdDgQWBBRY9UkoLA4iTKrT6XIcgFZwAZIeNjAfBgNV\n\
HSMEGDAWgBRY9UkoLA4iTKrT6XIcgFZwAZIeNjAMBgNVHRMBAf8EAjAAMAoGCCqG\n\
SM49BAMCA0kAMEYCIQD3Dge7WsAMieOIK6a+ZnORejTpWyExbI9qpR9TOQYvZAIh\n\
ANloOjpZl7mn6rm1+2Bz9xBDnn6asFNLqk3AV5NWt1G0\n\
-----END CERTIFICATE-----\n";

    static KIND: &Kind = &CLUSTER_TRUST_BUNDLE;

    fn bundle(name: &str, signer: &str, trust_bundle: &str) -> Value {
        json!({"metadata": {"name": name, "resourceVersion": "1"}, "spec": {"signerName": signer, "trustBundle": trust_bundle}})
    }

    fn check(found: Vec<field::Error>, expected: &[&str]) {
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found, expected);
    }

    fn created(name: &str, signer: &str, trust_bundle: &str, expected: &[&str]) {
        let object = bundle(name, signer, trust_bundle);
        check(KIND.check_create(&object, false), expected);
    }

    #[test]
    fn names_follow_the_signer() {
        created("a.b", "", AUTHORITY, &[]);
        created("example.com:s:a", "example.com/s", AUTHORITY, &[]);
        created(
            "a:b",
            "",
            AUTHORITY,
            &[
                "metadata.name: Invalid value: \"a:b\": ClusterTrustBundle without signer name must not have \":\" in its name",
            ],
        );
        created(
            "a",
            "example.com/s",
            AUTHORITY,
            &[
                "metadata.name: Invalid value: \"a\": ClusterTrustBundle for signerName example.com/s must be named with prefix example.com:s:",
            ],
        );
        created(
            "example:a",
            "example",
            AUTHORITY,
            &[
                "spec.signerName: Invalid value: \"example\": must be a fully qualified domain and path of the form 'example.com/signer-name'",
            ],
        );
        assert_eq!(signer_of_name("example.com:s:a"), "example.com/s");
        assert_eq!(signer_of_name("a"), "");
    }

    #[test]
    fn bundles_hold_authorities() {
        let invalid =
            |detail: &str| format!("spec.trustBundle: Invalid value: \"<value omitted>\": {detail}");
        let broken = "-----BEGIN CERTIFICATE-----\nYQ==\n-----END CERTIFICATE-----\n";
        let key = "-----BEGIN PRIVATE KEY-----\nYQ==\n-----END PRIVATE KEY-----\n";
        let headers = AUTHORITY.replace("CERTIFICATE-----\nMII", "CERTIFICATE-----\nA: b\n\nMII");
        for (text, detail) in [
            (String::new(), "at least one trust anchor must be provided"),
            ("words".to_owned(), "at least one trust anchor must be provided"),
            (format!("{AUTHORITY}{broken}"), "entry 1 does not parse as X.509"),
            (key.to_owned(), "entry 0 has bad block type: PRIVATE KEY"),
            (headers, "entry 0 has PEM block headers"),
            (LEAF.to_owned(), "entry 0 does not have the CA bit set"),
            (
                format!("{AUTHORITY}{AUTHORITY}"),
                "duplicate trust anchor (indices [0 1])",
            ),
        ] {
            created("a", "", &text, &[&invalid(detail)]);
        }
        let long = "x".repeat(SIZE_MAX + 1);
        created(
            "a",
            "",
            &long,
            &["spec.trustBundle: Too long: may not be more than 1048576 bytes"],
        );
    }

    #[test]
    fn a_signer_stays() {
        let old = bundle("a", "", "accepted once");
        check(KIND.check_update(&old, &old, false), &[]);
        let new = bundle("example.com:s:a", "example.com/s", AUTHORITY);
        let found = KIND.check_update(
            &new,
            &bundle("example.com:s:a", "example.com/t", AUTHORITY),
            false,
        );
        check(
            found,
            &["spec.signerName: Invalid value: \"example.com/s\": field is immutable"],
        );
    }
}
