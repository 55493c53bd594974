//! The rules of PodCertificateRequests, with keys, requests and certificates as nodes and signers make them.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rcgen::{
    CertificateParams, DistinguishedName, Issuer, KeyPair, PublicKeyData, RsaKeySize, SignatureAlgorithm,
    SigningKey, date_time_ymd,
};

use super::super::keys::Sort;
use super::*;

static KIND: &Kind = &POD_CERTIFICATE_REQUEST;
const UID: &str = "6f1d9b2e-0000-4000-8000-000000000001";
/// 2030-01-02T00:00:00Z.
const NOW: i64 = 1_893_542_400;

fn check(found: Vec<field::Error>, expected: &[&str]) {
    let found: Vec<String> = found.iter().map(ToString::to_string).collect();
    assert_eq!(found, expected);
}

fn key(algorithm: &'static SignatureAlgorithm) -> KeyPair {
    KeyPair::generate_for(algorithm).unwrap()
}

fn stub(key: &KeyPair) -> Vec<u8> {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = DistinguishedName::new();
    parameters.serialize_request(key).unwrap().der().to_vec()
}

fn request(spec: Value) -> Value {
    let mut object = json!({"metadata": {"namespace": "ns", "name": "req-1", "resourceVersion": "1"},
        "spec": {"signerName": "example.com/s", "podName": "p", "podUID": UID, "serviceAccountName": "sa",
            "serviceAccountUID": "u1", "nodeName": "n", "nodeUID": "u2", "maxExpirationSeconds": 86400}});
    for (name, value) in spec.as_object().unwrap() {
        object["spec"][name] = value.clone();
    }
    object
}

fn created(spec: Value, expected: &[&str]) {
    check(KIND.check_create(&request(spec), true), expected);
}

fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

#[test]
fn keys_sign_their_requests() {
    for algorithm in [
        &rcgen::PKCS_ED25519,
        &rcgen::PKCS_ECDSA_P256_SHA256,
        &rcgen::PKCS_ECDSA_P384_SHA384,
        &rcgen::PKCS_ECDSA_P521_SHA256,
        &rcgen::PKCS_ECDSA_P521_SHA512,
    ] {
        created(json!({"stubPKCS10Request": base64(&stub(&key(algorithm)))}), &[]);
    }
    let rsa = |size| KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, size).unwrap();
    created(
        json!({"stubPKCS10Request": base64(&stub(&rsa(RsaKeySize::_3072)))}),
        &[],
    );
    created(
        json!({"stubPKCS10Request": base64(&stub(&rsa(RsaKeySize::_2048)))}),
        &[
            "spec.stubPKCS10Request: Invalid value: \"2048-bit modulus\": RSA keys must have modulus size 3072 or 4096",
        ],
    );
    let mut broken = stub(&key(&rcgen::PKCS_ED25519));
    let last = broken.len() - 1;
    broken[last] ^= 1;
    created(
        json!({"stubPKCS10Request": base64(&broken)}),
        &["spec.stubPKCS10Request: Invalid value: invalid signature"],
    );
    broken.push(0);
    for bytes in [&broken[..], b"no request"] {
        created(
            json!({"stubPKCS10Request": base64(bytes)}),
            &["spec.stubPKCS10Request: Invalid value: must be a valid PKCS#10 CSR"],
        );
    }
    created(
        json!({"stubPKCS10Request": base64(&[0; PROOF_MAX + 1])}),
        &["spec.stubPKCS10Request: Too long: may not be more than 10240 bytes"],
    );
}

/// The way of nodes before v1.36.
#[test]
fn keys_sign_the_uid_of_the_pod() {
    for algorithm in [
        &rcgen::PKCS_ED25519,
        &rcgen::PKCS_ECDSA_P256_SHA256,
        &rcgen::PKCS_ECDSA_P521_SHA256,
    ] {
        let key = key(algorithm);
        let public = key.subject_public_key_info();
        let proof = |text: &str| json!({"pkixPublicKey": base64(&public), "proofOfPossession": base64(&key.sign(text.as_bytes()).unwrap())});
        created(proof(UID), &[]);
        created(
            proof("another"),
            &["spec.proofOfPossession: Invalid value: could not verify proof-of-possession signature"],
        );
    }
    created(
        json!({"pkixPublicKey": "YQ==", "proofOfPossession": "YQ=="}),
        &["spec.pkixPublicKey: Invalid value: \"YQ==\": must be a valid PKIX-serialized public key"],
    );
    let both = "spec: Invalid value: exactly one of (stubPKCS10Request) or (pkixPublicKey, proofOfPossession) must be set";
    created(json!({}), &[both]);
    created(json!({"pkixPublicKey": "YQ=="}), &[both]);
    created(
        json!({"stubPKCS10Request": "YQ==", "pkixPublicKey": "YQ==", "proofOfPossession": "YQ=="}),
        &[both],
    );
}

/// Upstream signs with the longest salt by RSA-PSS, and any program may sign with one of the digest's length.
#[test]
fn rsa_keys_sign_with_salts_of_two_lengths() {
    use aws_lc_rs::rand::SystemRandom;
    use aws_lc_rs::rsa::{KeySize, RsaPssSaltLength};
    use aws_lc_rs::signature::{KeyPair as _, RSA_PSS_SHA256, RsaKeyPair, RsaSignatureEncoding};
    const LONG: RsaSignatureEncoding = RSA_PSS_SHA256.with_pss_salt_length(RsaPssSaltLength::Max);
    let key = RsaKeyPair::generate(KeySize::Rsa3072).unwrap();
    let public = PublicKey {
        sort: Sort::Rsa(3072),
        bits: key.public_key().as_ref().to_vec(),
    };
    for encoding in [&RSA_PSS_SHA256, &LONG] {
        let mut signature = vec![0; key.public_modulus_len()];
        let random = SystemRandom::new();
        key.sign(encoding, &random, UID.as_bytes(), &mut signature)
            .unwrap();
        assert!(public.proves(UID.as_bytes(), &signature));
        assert!(!public.proves(b"another", &signature));
    }
}

#[test]
fn what_is_asked_for_is_named() {
    let stub = base64(&stub(&key(&rcgen::PKCS_ED25519)));
    let with = |mut spec: Value| {
        spec["stubPKCS10Request"] = json!(stub);
        spec
    };
    created(
        with(json!({"unverifiedUserAnnotations": {"Example.com/a": "b"}})),
        &[],
    );
    created(
        with(json!({"unverifiedUserAnnotations": {"a": "b"}})),
        &[
            "spec.unverifiedUserAnnotations: Invalid value: \"a\": must be a domain-prefixed key (such as \"acme.io/foo\")",
        ],
    );
    created(
        with(json!({"signerName": "s", "podUID": "", "nodeUID": "u".repeat(129)})),
        &[
            "spec.signerName: Invalid value: \"s\": must be a fully qualified domain and path of the form 'example.com/signer-name'",
            "spec.podUID: Invalid value: \"\": must not be empty",
            "spec.nodeUID: Too long: may not be more than 128 bytes",
        ],
    );
    for (signer, seconds, range) in [
        ("example.com/s", 3600, None),
        ("example.com/s", 7_862_400, None),
        ("example.com/s", 3599, Some("[3600, 7862400]")),
        ("example.com/s", 7_862_401, Some("[3600, 7862400]")),
        ("kubernetes.io/s", 86_400, None),
        ("kubernetes.io/s", 86_401, Some("[3600, 86400]")),
        ("x.kubernetes.io/s", 86_401, Some("[3600, 86400]")),
        ("xkubernetes.io/s", 86_401, None),
    ] {
        let why = range.map(|range| {
            format!("spec.maxExpirationSeconds: Invalid value: {seconds}: must be in the range {range}")
        });
        let expected: Vec<&str> = why.iter().map(String::as_str).collect();
        created(
            with(json!({"signerName": signer, "maxExpirationSeconds": seconds})),
            &expected,
        );
    }
    let mut object = request(json!({"maxExpirationSeconds": null}));
    (KIND.default)("v1beta1", &mut object);
    assert_eq!(object["spec"]["maxExpirationSeconds"], 86_400);
}

#[test]
fn the_spec_stays() {
    let old = request(json!({}));
    check(KIND.check_update(&old, &old, true), &[]);
    let new = request(json!({"podName": "other"}));
    let found = KIND.check_update(&new, &old, true);
    assert_eq!(found.len(), 1);
    assert_eq!(
        (found[0].path.as_str(), found[0].detail.as_str()),
        ("spec", "field is immutable")
    );
}

/// Times of a certificate, in minutes from now.
struct Life {
    begin: i64,
    end: i64,
}

fn at_minute(minute: i64) -> String {
    let at = jiff::Timestamp::from_second(NOW + minute * 60).unwrap();
    time::format_seconds(at)
}

fn certificate_of(key: &KeyPair, life: &Life, names: &[&str]) -> String {
    let mut parameters = CertificateParams::new(Vec::<String>::new()).unwrap();
    for name in names {
        let name = (*name).try_into().unwrap();
        parameters.subject_alt_names.push(rcgen::SanType::DnsName(name));
    }
    let start = date_time_ymd(2030, 1, 2);
    let minutes = |count: i64| {
        let span = std::time::Duration::from_secs(count.unsigned_abs() * 60);
        if count < 0 { start - span } else { start + span }
    };
    parameters.not_before = minutes(life.begin);
    parameters.not_after = minutes(life.end);
    let authority = KeyPair::generate().unwrap();
    let issuer = Issuer::new(CertificateParams::default(), authority);
    parameters.signed_by(key, &issuer).unwrap().pem()
}

fn condition(kind: &str, status: &str) -> Value {
    json!({"type": kind, "status": status, "reason": "R", "message": "", "lastTransitionTime": "2030-01-02T00:00:00Z"})
}

fn issued_status(chain: &str, life: &Life, refresh: i64) -> Value {
    json!({"conditions": [condition("Issued", "True")], "certificateChain": chain,
        "notBefore": at_minute(life.begin), "notAfter": at_minute(life.end), "beginRefreshAt": at_minute(refresh)})
}

/// The findings of a change of the status, with those that need a clock.
fn changed(old: &Value, status: Value, expected: &[&str]) {
    let mut new = old.clone();
    new["status"] = status;
    let mut found = KIND.check_status_update(&new, old, true);
    if found.is_empty() {
        found = begins_now(&new, old, NOW);
    }
    check(found, expected);
}

#[test]
fn a_signer_decides_once() {
    let old = request(json!({"stubPKCS10Request": base64(&stub(&key(&rcgen::PKCS_ED25519)))}));
    changed(&old, json!({"conditions": [condition("Denied", "True")]}), &[]);
    changed(&old, json!({"conditions": [condition("Failed", "True")]}), &[]);
    changed(
        &old,
        json!({"conditions": [condition("Failed", "True")], "certificateChain": "x"}),
        &[
            "status: Invalid value: non-condition status fields must be empty when denying or failing the PodCertificateRequest",
        ],
    );
    changed(
        &old,
        json!({"conditions": [condition("Denied", "True"), condition("Failed", "True")]}),
        &[
            "status.conditions[1].type: Invalid value: \"Failed\": There may be at most one condition with type \"Issued\", \"Denied\", or \"Failed\"",
        ],
    );
    changed(
        &old,
        json!({"conditions": [condition("Denied", "False"), condition("Other", "True")]}),
        &[
            "status.conditions[0].status: Unsupported value: \"False\": supported values: \"True\"",
            "status.conditions[1].type: Unsupported value: \"Other\": supported values: \"Issued\", \"Denied\", \"Failed\"",
        ],
    );
    changed(
        &old,
        json!({"notBefore": at_minute(0)}),
        &[
            "status: Invalid value: status is immutable unless transitioning to \"Issued\", \"Denied\", or \"Failed\"",
        ],
    );
    let mut denied = old.clone();
    denied["status"] = json!({"conditions": [condition("Denied", "True")]});
    changed(&denied, denied["status"].clone(), &[]);
    changed(
        &denied,
        json!({"conditions": [condition("Failed", "True")]}),
        &["status: Invalid value: immutable after PodCertificateRequest is issued, denied, or failed"],
    );
}

#[test]
fn certificates_are_of_the_key_and_the_time_that_was_asked_for() {
    let key = key(&rcgen::PKCS_ECDSA_P384_SHA384);
    let old = request(json!({"stubPKCS10Request": base64(&stub(&key))}));
    let day = Life {
        begin: -1,
        end: 24 * 60 - 1,
    };
    let chain = certificate_of(&key, &day, &["a.example.com"]);
    let status = issued_status(&chain, &day, 600);
    changed(&old, status.clone(), &[]);
    // The way of nodes before v1.36 asks for the same.
    let older = request(json!({"pkixPublicKey": base64(&key.subject_public_key_info())}));
    changed(&older, status.clone(), &[]);
    changed(&old, issued_status(&format!("{chain}{chain}"), &day, 600), &[]);

    let invalid = |chain: &str, detail: &str| {
        let shown = field::quote(chain);
        format!("status.certificateChain: Invalid value: {shown}: {detail}")
    };
    let broken = "-----BEGIN CERTIFICATE-----\nYQ==\n-----END CERTIFICATE-----\n";
    let other = certificate_of(&KeyPair::generate().unwrap(), &day, &[]);
    let private = "-----BEGIN PRIVATE KEY-----\nYQ==\n-----END PRIVATE KEY-----\n";
    for (chain, detail) in [
        (
            "words".to_owned(),
            "issued certificate chain must contain at least one certificate",
        ),
        (
            format!("{private}{chain}"),
            "issued certificate chain must consist entirely of CERTIFICATE PEM blocks",
        ),
        (
            broken.to_owned(),
            "leaf certificate does not parse as valid X.509",
        ),
        (
            other,
            "leaf certificate was not issued to the requested public key",
        ),
        (
            format!("{chain}{private}"),
            "issued certificate chain must consist entirely of CERTFICATE PEM blocks",
        ),
        (
            format!("{chain}{broken}"),
            "intermediate certificate does not parse as valid X.509",
        ),
    ] {
        changed(
            &old,
            issued_status(&chain, &day, 600),
            &[&invalid(&chain, detail)],
        );
    }
    let dotted = certificate_of(&key, &day, &[".example.com"]);
    changed(
        &old,
        issued_status(&dotted, &day, 600),
        &[
            "status.certificateChain: Invalid value: \".example.com\": leaf certificate's DNSName should not start or end with '.'",
        ],
    );
    let mut without = status.clone();
    without["beginRefreshAt"] = Value::Null;
    changed(
        &old,
        without,
        &[
            "status.beginRefreshAt: Required value: must be present and in the range [notbefore+10min, notafter-10min]",
        ],
    );
    for (name, minute, detail) in [
        (
            "notBefore",
            0,
            "must be set to the NotBefore time encoded in the leaf certificate",
        ),
        (
            "notAfter",
            0,
            "must be set to the NotAfter time encoded in the leaf certificate",
        ),
        (
            "beginRefreshAt",
            8,
            "must be at least 10 minutes after status.notBefore",
        ),
        (
            "beginRefreshAt",
            24 * 60 - 10,
            "must be at least 10 minutes before status.notAfter",
        ),
    ] {
        let mut other = status.clone();
        other[name] = json!(at_minute(minute));
        let why = format!(
            "status.{name}: Invalid value: \"{}\": {detail}",
            at_minute(minute)
        );
        changed(&old, other, &[&why]);
    }
    for (life, refresh, why) in [
        (
            Life { begin: 0, end: 59 },
            30,
            "status.certificateChain: Invalid value: 3540000000000: leaf certificate lifetime must be >= 1 hour",
        ),
        (
            Life {
                begin: 0,
                end: 24 * 60 + 1,
            },
            30,
            "status.certificateChain: Invalid value: 86460000000000: leaf certificate lifetime must be <= spec.maxExpirationSeconds (86400)",
        ),
        (
            Life { begin: -5, end: 600 },
            30,
            "status.notBefore: Invalid value: \"2030-01-01T23:55:00Z\": must be set to within 5 minutes of kube-apiserver's current time",
        ),
    ] {
        let chain = certificate_of(&key, &life, &[]);
        changed(&old, issued_status(&chain, &life, refresh), &[why]);
    }
}

#[test]
fn addresses_of_mail() {
    for (text, expected) in [
        ("a@b.c", true),
        ("A B <a@b>", true),
        ("a", false),
        ("a@", false),
        ("@b", false),
        ("a b@c", false),
        ("a..b@c", false),
    ] {
        assert_eq!(is_email_address(text), expected, "{text}");
    }
}

#[test]
fn a_row_tells_the_state() {
    let mut object = request(json!({"unverifiedUserAnnotations": {"x.io/a": "b"}}));
    let cells = json!(["req-1", "p", "sa", "n", "example.com/s", "Pending", "x.io/a=b"]);
    assert_eq!(json!((KIND.row)(&object, 0)), cells);
    object["status"] = json!({"conditions": [condition("Denied", "True")]});
    assert_eq!((KIND.row)(&object, 0)[5], "Denied");
    let fields: Vec<String> = (KIND.selectable)(&object)
        .into_iter()
        .map(|(_, value)| value)
        .collect();
    assert_eq!(fields, ["example.com/s", "p", "n"]);
}
