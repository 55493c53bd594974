//! PodCertificateRequests: a node asks a signer for a certificate of one of its pods. The API is off by default. Who may
//! ask is for admission to say (NodeRestriction), and who may sign for the front door.

use serde_json::{Value, json};
use skiff_meta::{field, time};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;

use super::keys::{PublicKey, Refused, Request};
use super::pem;
use super::rules::signer_name;
use crate::core::config::decode;
use crate::errors::Errors;
use crate::kind::{Again, BASE, Kind, NAME, text as column, unsupported_field};
use crate::node::{Node, at, is_empty, list, same, text};
use crate::{object_meta, row, strategy};

/// The states that end a request, by their conditions.
const STATES: [&str; 3] = ["Issued", "Denied", "Failed"];

pub(crate) const SHORTEST_SECONDS: i64 = 3600;
const LONGEST_SECONDS: i64 = 91 * 24 * 3600;
/// The longest that signers of the project itself may be asked for.
const LONGEST_OF_KUBERNETES_SECONDS: i64 = 24 * 3600;
const DEFAULT_SECONDS: i64 = 24 * 3600;

const UID_MAX: usize = 128;
const PROOF_MAX: usize = 10 * 1024;
const CHAIN_MAX: usize = 100 * 1024;

/// How far the beginning of a certificate may be from now.
const CLOCK_SKEW_SECONDS: i64 = 300;
/// How far a refresh must begin from either end of a certificate's life.
const REFRESH_MARGIN_SECONDS: i64 = 600;

pub static POD_CERTIFICATE_REQUEST: Kind = Kind {
    group: "certificates.k8s.io",
    kind: "PodCertificateRequest",
    version: "v1beta1",
    default: |_, object| {
        if let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
            let seconds = spec.entry("maxExpirationSeconds").or_insert(Value::Null);
            if seconds.is_null() {
                *seconds = json!(DEFAULT_SECONDS);
            }
        }
    },
    prepare_create: strategy::create_without_status,
    prepare_update: strategy::update_keep_status,
    prepare_status_update: strategy::status_only_keep_metadata,
    validate: |object| {
        let mut errors = Errors::new();
        request(&Node::root(object).field("spec"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        errors.immutable(&Node::root(new).field("spec"), at(old, "spec"));
        errors.into_vec()
    },
    validate_status_update: |new, old| {
        let mut errors = Errors::new();
        status(new, old, &mut errors);
        errors.into_vec()
    },
    selectable: |object| {
        ["spec.signerName", "spec.podName", "spec.nodeName"]
            .map(|path| (path, text(object, path).to_owned()))
            .to_vec()
    },
    indexed_fields: &["spec.nodeName"],
    columns: &[
        NAME,
        column("PodName"),
        column("ServiceAccountName"),
        column("NodeName"),
        column("SignerName"),
        column("State"),
        // COMPAT: it is always shown, as upstream declares it.
        column("UnverifiedUserAnnotations"),
    ],
    row: |object, _| {
        let state = list(object, "status.conditions")
            .iter()
            .map(|condition| text(condition, "type"))
            .rfind(|kind| STATES.contains(kind));
        vec![
            row::name(object),
            json!(text(object, "spec.podName")),
            json!(text(object, "spec.serviceAccountName")),
            json!(text(object, "spec.nodeName")),
            json!(text(object, "spec.signerName")),
            json!(state.unwrap_or("Pending")),
            row::label_map(object, "spec.unverifiedUserAnnotations"),
        ]
    },
    has_status: true,
    update_again: Again::Change,
    allow_unconditional_update: false,
    reset_fields: &[("", &[]), ("status", &[&["spec"]])],
    unknown_field: unsupported_field,
    ..BASE
};

/// The longest time for which a certificate of this signer may be asked.
pub(crate) fn longest_seconds(signer: &str) -> i64 {
    let domain = signer.split('/').next().unwrap_or_default();
    match domain == "kubernetes.io" || domain.ends_with(".kubernetes.io") {
        true => LONGEST_OF_KUBERNETES_SECONDS,
        false => LONGEST_SECONDS,
    }
}

/// Annotations that the user hands to the signer: every key has a domain.
pub(crate) fn user_annotations(annotations: &Node, errors: &mut Errors) {
    let mut size = 0;
    for (key, value) in annotations.entries() {
        size += key.len() + value.str().len();
        let key = key.to_lowercase();
        if key.is_empty() {
            errors.required(annotations, "");
            continue;
        }
        let complaints = skiff_meta::names::qualified_name(&key);
        let is_bare = complaints.is_empty() && key.split('/').count() != 2;
        for complaint in complaints {
            errors.invalid_value(annotations, key.as_str(), complaint);
        }
        if is_bare {
            let detail = "must be a domain-prefixed key (such as \"acme.io/foo\")";
            errors.invalid_value(annotations, key, detail);
        }
    }
    if size > object_meta::ANNOTATIONS_MAX {
        errors.too_long(annotations, object_meta::ANNOTATIONS_MAX);
    }
}

/// The rules of a new request.
fn request(spec: &Node, errors: &mut Errors) {
    let signer = spec.field("signerName");
    signer_name(&signer, errors);
    user_annotations(&spec.field("unverifiedUserAnnotations"), errors);
    for (name, uid) in [
        ("podName", "podUID"),
        ("serviceAccountName", "serviceAccountUID"),
        ("nodeName", "nodeUID"),
    ] {
        let (name, uid) = (spec.field(name), spec.field(uid));
        errors.rule(&name, object_meta::dns_subdomain(name.str(), false));
        if uid.str().is_empty() {
            errors.invalid(&uid, "must not be empty");
        }
        if uid.str().len() > UID_MAX {
            errors.too_long(&uid, UID_MAX);
        }
    }
    let seconds = spec.field("maxExpirationSeconds");
    let Some(wanted) = seconds.int() else {
        errors.required(&seconds, "must be set");
        return;
    };
    let longest = longest_seconds(signer.str());
    if !(SHORTEST_SECONDS..=longest).contains(&wanted) {
        let detail = format!("must be in the range [{SHORTEST_SECONDS}, {longest}]");
        errors.invalid(&seconds, detail);
    }
    let stub = spec.field("stubPKCS10Request");
    let (key, proof) = (spec.field("pkixPublicKey"), spec.field("proofOfPossession"));
    let has = |field: &Node| !field.str().is_empty();
    match (has(&stub), has(&key), has(&proof)) {
        (true, false, false) => stub_request(&stub, errors),
        (false, true, true) => public_key(&key, &proof, spec.field("podUID").str(), errors),
        _ => omitted(
            spec,
            "exactly one of (stubPKCS10Request) or (pkixPublicKey, proofOfPossession) must be set",
            errors,
        ),
    }
}

/// A complaint that does not show what is complained about.
fn omitted(place: &Node, detail: &str, errors: &mut Errors) {
    errors.push(field::ErrorType::Invalid, place, None, detail);
}

const UNKNOWN_KEY: &str = "unknown public key type; supported types are Ed25519, ECDSA, and RSA";
const BAD_MODULUS: &str = "RSA keys must have modulus size 3072 or 4096";
const NOT_PKIX: &str = "must be a valid PKIX-serialized public key";
const NOT_PKCS10: &str = "must be a valid PKCS#10 CSR";

fn public_key(key: &Node, proof: &Node, pod_uid: &str, errors: &mut Errors) {
    let (der, signature) = (decode(key.str()), decode(proof.str()));
    for (field, bytes) in [(key, &der), (proof, &signature)] {
        if bytes.len() > PROOF_MAX {
            errors.too_long(field, PROOF_MAX);
            return;
        }
    }
    let Some(parsed) = PublicKey::from_der(&der) else {
        errors.invalid(key, NOT_PKIX);
        return;
    };
    if let Some((shown, why)) = parsed.refused() {
        let detail = match why {
            // COMPAT: P521 is allowed all the same.
            Refused::Curve => "elliptic public keys must use curve P256 or P384",
            Refused::Modulus => BAD_MODULUS,
            Refused::Sort => UNKNOWN_KEY,
        };
        match shown {
            Some(shown) => errors.invalid_value(key, shown, detail),
            None => errors.invalid(key, detail),
        }
    } else if !parsed.proves(pod_uid.as_bytes(), &signature) {
        omitted(proof, "could not verify proof-of-possession signature", errors);
    }
}

fn stub_request(stub: &Node, errors: &mut Errors) {
    let der = decode(stub.str());
    if der.len() > PROOF_MAX {
        errors.too_long(stub, PROOF_MAX);
        return;
    }
    let Some(parsed) = Request::from_der(&der) else {
        omitted(stub, NOT_PKCS10, errors);
        return;
    };
    if let Some((shown, why)) = parsed.key.refused() {
        let detail = match why {
            Refused::Curve => "elliptic public keys must use curve P256, P384, or P521",
            Refused::Modulus => BAD_MODULUS,
            Refused::Sort => UNKNOWN_KEY,
        };
        match shown {
            Some(shown) => errors.invalid_value(stub, shown, detail),
            None => omitted(stub, detail, errors),
        }
    } else if !parsed.is_signed {
        omitted(stub, "invalid signature", errors);
    }
}

/// Whether a request has a condition of this type, which is true.
fn is_in_state(request: &Value, state: &str) -> bool {
    list(request, "status.conditions")
        .iter()
        .any(|condition| text(condition, "type") == state && text(condition, "status") == "True")
}

/// The rules of a change of the status, beside those that need a clock.
fn status(new: &Value, old: &Value, errors: &mut Errors) {
    let root = Node::root(new);
    let status = root.field("status");
    let conditions = status.field("conditions");
    let mut is_decided = false;
    for condition in conditions.items() {
        let (kind, truth) = (condition.field("type"), condition.field("status"));
        if !STATES.contains(&kind.str()) {
            errors.not_supported(&kind, &["Issued", "Denied", "Failed"]);
            continue;
        }
        if is_decided {
            let detail = "There may be at most one condition with type \"Issued\", \"Denied\", or \"Failed\"";
            errors.invalid(&kind, detail);
        }
        is_decided = true;
        errors.one_of(&truth, &["True"]);
    }
    object_meta::conditions(&conditions, errors);
    if !errors.is_empty() {
        return;
    }
    let is_same = same(at(new, "status"), at(old, "status"));
    if STATES.iter().any(|state| is_in_state(old, state)) {
        if !is_same {
            let detail = "immutable after PodCertificateRequest is issued, denied, or failed";
            omitted(&status, detail, errors);
        }
    } else if is_in_state(new, "Denied") || is_in_state(new, "Failed") {
        let is_alone = status
            .entries()
            .all(|(name, value)| name == "conditions" || is_nothing(value.value));
        if !is_alone {
            let detail =
                "non-condition status fields must be empty when denying or failing the PodCertificateRequest";
            omitted(&status, detail, errors);
        }
    } else if is_in_state(new, "Issued") {
        issued(&status, at(old, "spec"), errors);
    } else if !is_same {
        let detail = "status is immutable unless transitioning to \"Issued\", \"Denied\", or \"Failed\"";
        omitted(&status, detail, errors);
    }
}

fn is_nothing(value: &Value) -> bool {
    is_empty(value) || value.as_str() == Some("")
}

/// The rules of what a signer issued for a request.
fn issued(status: &Node, spec: &Value, errors: &mut Errors) {
    let chain = status.field("certificateChain");
    if chain.str().len() > CHAIN_MAX {
        errors.too_long(&chain, CHAIN_MAX);
        return;
    }
    let blocks = pem::blocks(chain.str());
    let Some((first, rest)) = blocks.split_first() else {
        let detail = "issued certificate chain must contain at least one certificate";
        errors.invalid(&chain, detail);
        return;
    };
    if first.kind != "CERTIFICATE" {
        let detail = "issued certificate chain must consist entirely of CERTIFICATE PEM blocks";
        errors.invalid(&chain, detail);
        return;
    }
    let Some(leaf) = certificate(&first.bytes) else {
        errors.invalid(&chain, "leaf certificate does not parse as valid X.509");
        return;
    };
    alternative_names(&leaf, &chain, errors);
    let Some(wanted) = requested_key(spec, errors) else {
        return;
    };
    if PublicKey::of(leaf.public_key()).as_ref() != Some(&wanted) {
        let detail = "leaf certificate was not issued to the requested public key";
        errors.invalid(&chain, detail);
        return;
    }
    if !lifetime(status, &leaf, spec, errors) {
        return;
    }
    for block in rest {
        if block.kind != "CERTIFICATE" {
            // COMPAT: it is spelled so.
            let detail = "issued certificate chain must consist entirely of CERTFICATE PEM blocks";
            errors.invalid(&chain, detail);
            return;
        }
        if certificate(&block.bytes).is_none() {
            errors.invalid(&chain, "intermediate certificate does not parse as valid X.509");
            return;
        }
    }
}

fn certificate(der: &[u8]) -> Option<X509Certificate<'_>> {
    let (rest, certificate) = X509Certificate::from_der(der).ok()?;
    rest.is_empty().then_some(certificate)
}

/// The key that a request is for.
fn requested_key(spec: &Value, errors: &mut Errors) -> Option<PublicKey> {
    let root = json!({ "spec": spec });
    let spec = Node::root(&root);
    let (stub, key) = (
        spec.field("spec.stubPKCS10Request"),
        spec.field("spec.pkixPublicKey"),
    );
    let (found, place, detail) = match stub.str().is_empty() {
        false => {
            let request = Request::from_der(&decode(stub.str()));
            (request.map(|request| request.key), &stub, NOT_PKCS10)
        }
        true => (PublicKey::from_der(&decode(key.str())), &key, NOT_PKIX),
    };
    if found.is_none() {
        omitted(place, detail, errors);
    }
    found
}

/// Names of a certificate that Go's own verification would stumble over.
fn alternative_names(leaf: &X509Certificate<'_>, chain: &Node, errors: &mut Errors) {
    let Ok(Some(extension)) = leaf.subject_alternative_name() else {
        return;
    };
    for name in &extension.value.general_names {
        match name {
            GeneralName::DNSName(name) => {
                for (is_bad, detail) in [
                    (
                        name.is_empty(),
                        "leaf certificate should not contain empty DNSName",
                    ),
                    (
                        name.contains(".."),
                        "leaf certificate's DNSName should not contain '..'",
                    ),
                    (
                        name.starts_with('.') || name.ends_with('.'),
                        "leaf certificate's DNSName should not start or end with '.'",
                    ),
                ] {
                    if is_bad {
                        errors.invalid_value(chain, *name, detail);
                    }
                }
            }
            GeneralName::RFC822Name(address) if !is_email_address(address) => {
                let detail = "leaf certificate should not contain invalid EmailAddress";
                errors.invalid_value(chain, *address, detail);
            }
            _ => {}
        }
    }
}

/// A local part and a domain, alone or in angle brackets behind a name.
fn is_email_address(text: &str) -> bool {
    let text = text.trim();
    let address = match text.strip_suffix('>') {
        Some(named) => named.rsplit_once('<').map_or("", |(_, address)| address),
        None => text,
    };
    let is_plain = |c: char| !c.is_whitespace() && !c.is_control() && !"<>()[]:;,\\\"".contains(c);
    address.rsplit_once('@').is_some_and(|(local, domain)| {
        let is_dotted = |part: &str| part.split('.').all(|atom| !atom.is_empty());
        is_dotted(local) && is_dotted(domain) && !local.contains('@') && address.chars().all(is_plain)
    })
}

/// Seconds since the epoch of a time in the status.
fn seconds(time: &Node) -> Option<i64> {
    time::parse(time.str()).map(|at| at.as_second())
}

/// Checks the times against each other. Whether there was nothing to complain about.
fn lifetime(status: &Node, leaf: &X509Certificate<'_>, spec: &Value, errors: &mut Errors) -> bool {
    let [begins, ends, refresh] = ["notBefore", "notAfter", "beginRefreshAt"].map(|name| status.field(name));
    let (Some(not_before), Some(not_after), Some(refresh_at)) =
        (seconds(&begins), seconds(&ends), seconds(&refresh))
    else {
        for (time, detail) in [
            (
                &begins,
                "must be present and consistent with the issued certificate",
            ),
            (
                &ends,
                "must be present and consistent with the issued certificate",
            ),
            (
                &refresh,
                "must be present and in the range [notbefore+10min, notafter-10min]",
            ),
        ] {
            if seconds(time).is_none() {
                errors.required(time, detail);
            }
        }
        return false;
    };
    let validity = leaf.validity();
    let life = validity.not_after.timestamp() - validity.not_before.timestamp();
    let longest = at(spec, "maxExpirationSeconds")
        .as_i64()
        .unwrap_or(DEFAULT_SECONDS);
    let chain = status.field("certificateChain");
    // COMPAT: a duration shows in nanoseconds.
    let shown = life.saturating_mul(1_000_000_000);
    if not_before != validity.not_before.timestamp() {
        let detail = "must be set to the NotBefore time encoded in the leaf certificate";
        errors.invalid(&begins, detail);
    } else if not_after != validity.not_after.timestamp() {
        let detail = "must be set to the NotAfter time encoded in the leaf certificate";
        errors.invalid(&ends, detail);
    } else if life < SHORTEST_SECONDS {
        errors.invalid_value(&chain, shown, "leaf certificate lifetime must be >= 1 hour");
    } else if life > longest {
        let detail = format!("leaf certificate lifetime must be <= spec.maxExpirationSeconds ({longest})");
        errors.invalid_value(&chain, shown, detail);
    } else if refresh_at < not_before + REFRESH_MARGIN_SECONDS {
        errors.invalid(&refresh, "must be at least 10 minutes after status.notBefore");
    } else if refresh_at > not_after - REFRESH_MARGIN_SECONDS {
        errors.invalid(&refresh, "must be at least 10 minutes before status.notAfter");
    } else {
        return true;
    }
    false
}

/// The rule of a change of the status that needs a clock: a certificate begins about now. `now` is Unix seconds.
pub fn begins_now(new: &Value, old: &Value, now: i64) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let is_issued_now = is_in_state(new, "Issued") && !STATES.iter().any(|state| is_in_state(old, state));
    let root = Node::root(new);
    let begins = root.field("status.notBefore");
    if is_issued_now
        && let Some(not_before) = seconds(&begins)
        && not_before.abs_diff(now) >= CLOCK_SKEW_SECONDS.unsigned_abs()
    {
        let detail = "must be set to within 5 minutes of kube-apiserver's current time";
        errors.invalid(&begins, detail);
    }
    errors.into_vec()
}

#[cfg(test)]
#[path = "pod_request_tests.rs"]
mod tests;
