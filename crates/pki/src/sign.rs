//! Certificates that the cluster's authority signs for keys that others hold.
//!
//! What may be signed for whom is the caller's decision: here an order is carried out, within the life of the
//! authority's own certificate.

use std::net::IpAddr;
use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rcgen::{
    CertificateParams, DistinguishedName, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType, SerialNumber, SigningKey,
};
use time::OffsetDateTime;

use crate::{CertificateFacts, Error, Pki, Result, file, read, unusable};

/// What a certificate shall say.
#[derive(Clone, Debug, Default)]
pub struct CertificateOrder {
    /// Attributes of the subject in their order: the last number of the type below 2.5.4 (3 is the common name, 10 an
    /// organization), and the value.
    pub subject: Vec<(u8, String)>,
    pub dns_names: Vec<String>,
    pub addresses: Vec<IpAddr>,
    pub emails: Vec<String>,
    pub uris: Vec<String>,
    /// The subject's public key: DER of a SubjectPublicKeyInfo.
    pub public_key: Vec<u8>,
    /// By the names of the certificates API.
    pub usages: Vec<String>,
    /// Unix seconds.
    pub not_before: i64,
    pub not_after: i64,
}

/// The authority `ca` of a folder. It is read for each certificate, so that a renewed one is used at once.
#[derive(Clone, Debug)]
pub struct SigningAuthority {
    dir: PathBuf,
}

impl Pki {
    pub fn signing_authority(&self) -> SigningAuthority {
        SigningAuthority {
            dir: self.dir.clone(),
        }
    }
}

impl SigningAuthority {
    pub fn new(pki_dir: impl Into<PathBuf>) -> SigningAuthority {
        SigningAuthority { dir: pki_dir.into() }
    }

    /// The certificate, PEM. Its life ends with the authority's at the latest.
    pub fn sign(&self, order: &CertificateOrder, now: i64) -> Result<String> {
        let (certificate_path, key_path) = (self.dir.join("ca.crt"), self.dir.join("ca.key"));
        let missing = |path: &PathBuf| file(path, std::io::ErrorKind::NotFound.into());
        let certificate = read(&certificate_path)?.ok_or_else(|| missing(&certificate_path))?;
        let key = read(&key_path)?.ok_or_else(|| missing(&key_path))?;
        let facts = CertificateFacts::parse(&certificate)?;
        let end = facts.not_after;
        if order.not_before >= end || now >= end {
            let why = format!("refusing to sign a certificate that expired in the past: NotAfter={end}");
            return Err(unusable(&certificate_path, why));
        }
        let key = KeyPair::from_pem(&key).map_err(|e| unusable(&key_path, e))?;
        let params = params(order, order.not_after.min(end))?;
        let signing = KeyPair::from_pem(&key.serialize_pem())?;
        let issuer =
            Issuer::from_ca_cert_pem(&certificate, signing).map_err(|e| unusable(&certificate_path, e))?;
        // The library keeps one value a subject field and makes keys of its own only, so it makes a certificate for
        // the authority's key, and subject and key are put in place before it is signed again.
        let draft = params.signed_by(&key, &issuer)?;
        let der = replaced(draft.der(), &subject(order), &order.public_key, &key)?;
        Ok(pem("CERTIFICATE", &der))
    }
}

fn params(order: &CertificateOrder, not_after: i64) -> Result<CertificateParams> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.is_ca = IsCa::ExplicitNoCa;
    params.use_authority_key_identifier_extension = true;
    let mut serial = [0u8; 16];
    rustls::crypto::aws_lc_rs::default_provider()
        .secure_random
        .fill(&mut serial)
        .map_err(|_| Error::Tls("the system has no random numbers".into()))?;
    // Positive, and of the same length as a number.
    serial[0] = serial[0] & 0x7f | 0x40;
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    let time = |seconds: i64| {
        OffsetDateTime::from_unix_timestamp(seconds)
            .map_err(|error| Error::Tls(format!("not a time of a certificate: {error}")))
    };
    params.not_before = time(order.not_before)?;
    params.not_after = time(not_after)?;
    for name in &order.dns_names {
        let name = SanType::DnsName(name.as_str().try_into()?);
        params.subject_alt_names.push(name);
    }
    for email in &order.emails {
        let email = SanType::Rfc822Name(email.as_str().try_into()?);
        params.subject_alt_names.push(email);
    }
    for address in &order.addresses {
        params.subject_alt_names.push(SanType::IpAddress(*address));
    }
    for uri in &order.uris {
        params
            .subject_alt_names
            .push(SanType::URI(uri.as_str().try_into()?));
    }
    for usage in &order.usages {
        match usage_of(usage) {
            Some(Usage::Key(usage)) if !params.key_usages.contains(&usage) => params.key_usages.push(usage),
            Some(Usage::Extended(usage)) if !params.extended_key_usages.contains(&usage) => {
                params.extended_key_usages.push(usage);
            }
            Some(_) => {}
            None => return Err(Error::Tls(format!("unrecognized usage values: [{usage:?}]"))),
        }
    }
    Ok(params)
}

enum Usage {
    Key(KeyUsagePurpose),
    Extended(ExtendedKeyUsagePurpose),
}

fn usage_of(name: &str) -> Option<Usage> {
    use ExtendedKeyUsagePurpose as Extended;
    use KeyUsagePurpose as Key;
    let security = |last: u64| Extended::Other(vec![1, 3, 6, 1, 5, 5, 7, 3, last]);
    let extended = match name {
        "any" => Extended::Any,
        "server auth" => Extended::ServerAuth,
        "client auth" => Extended::ClientAuth,
        "code signing" => Extended::CodeSigning,
        "email protection" | "s/mime" => Extended::EmailProtection,
        "ipsec end system" => security(5),
        "ipsec tunnel" => security(6),
        "ipsec user" => security(7),
        "timestamping" => Extended::TimeStamping,
        "ocsp signing" => Extended::OcspSigning,
        "microsoft sgc" => Extended::Other(vec![1, 3, 6, 1, 4, 1, 311, 10, 3, 3]),
        "netscape sgc" => Extended::Other(vec![2, 16, 840, 1, 113_730, 4, 1]),
        _ => {
            return Some(Usage::Key(match name {
                "signing" | "digital signature" => Key::DigitalSignature,
                "content commitment" => Key::ContentCommitment,
                "key encipherment" => Key::KeyEncipherment,
                "key agreement" => Key::KeyAgreement,
                "data encipherment" => Key::DataEncipherment,
                "cert sign" => Key::KeyCertSign,
                "crl sign" => Key::CrlSign,
                "encipher only" => Key::EncipherOnly,
                "decipher only" => Key::DecipherOnly,
                _ => return None,
            }));
        }
    };
    Some(Usage::Extended(extended))
}

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT_ID: u8 = 0x06;
const UTF8_STRING: u8 = 0x0c;
const BIT_STRING: u8 = 0x03;

/// One DER element.
fn element(tag: u8, content: &[u8]) -> Vec<u8> {
    let mut der = vec![tag];
    if content.len() < 128 {
        der.push(content.len() as u8);
    } else {
        let length = content.len().to_be_bytes();
        let length = &length[length.iter().take_while(|byte| **byte == 0).count()..];
        der.push(0x80 | length.len() as u8);
        der.extend_from_slice(length);
    }
    der.extend_from_slice(content);
    der
}

/// The first element's content, the whole of it, and what follows.
fn first(der: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let &short = der.get(1)?;
    let (start, length) = if short < 128 {
        (2, usize::from(short))
    } else {
        let bytes = der.get(2..2 + usize::from(short & 0x7f))?;
        if bytes.len() > 4 {
            return None;
        }
        let length = bytes
            .iter()
            .fold(0usize, |length, byte| length << 8 | usize::from(*byte));
        (2 + bytes.len(), length)
    };
    let content = der.get(start..start.checked_add(length)?)?;
    let (whole, rest) = der.split_at(start + length);
    Some((content, whole, rest))
}

fn subject(order: &CertificateOrder) -> Vec<u8> {
    let mut names = Vec::new();
    for (arc, value) in &order.subject {
        let attribute = [
            element(OBJECT_ID, &[0x55, 0x04, *arc]),
            element(UTF8_STRING, value.as_bytes()),
        ];
        names.extend(element(SET, &element(SEQUENCE, &attribute.concat())));
    }
    element(SEQUENCE, &names)
}

/// The certificate with another subject and key, signed by `key`.
fn replaced(draft: &[u8], subject: &[u8], public_key: &[u8], key: &KeyPair) -> Result<Vec<u8>> {
    let broken = || Error::Tls("the certificate library made no certificate".into());
    let (content, _, _) = first(draft).ok_or_else(broken)?;
    let (mut fields, _, after) = first(content).ok_or_else(broken)?;
    let (_, algorithm, _) = first(after).ok_or_else(broken)?;
    let mut body = Vec::new();
    for index in 0.. {
        let Some((_, whole, rest)) = first(fields) else {
            break;
        };
        // Version, serial number, algorithm, issuer, validity, subject, key, extensions.
        body.extend_from_slice(match index {
            5 => subject,
            6 => public_key,
            _ => whole,
        });
        fields = rest;
    }
    let body = element(SEQUENCE, &body);
    let mut signature = vec![0];
    signature.extend(key.sign(&body)?);
    let parts = [body.as_slice(), algorithm, &element(BIT_STRING, &signature)];
    Ok(element(SEQUENCE, &parts.concat()))
}

pub(crate) fn pem(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let lines: Vec<&str> = (0..text.len())
        .step_by(64)
        .map(|start| &text[start..(start + 64).min(text.len())])
        .collect();
    format!(
        "-----BEGIN {label}-----\n{}\n-----END {label}-----\n",
        lines.join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::PublicKeyData;
    use rustls::pki_types::UnixTime;
    use x509_parser::prelude::{FromDer, X509Certificate};

    #[test]
    fn an_order_is_signed_as_it_says() {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::open(dir.path()).unwrap();
        let key = KeyPair::generate().unwrap();
        let now = OffsetDateTime::now_utc().unix_timestamp();
        let order = CertificateOrder {
            subject: vec![(10, "dev".into()), (10, "ops".into()), (3, "jane".into())],
            dns_names: vec!["a.example".into()],
            addresses: vec!["192.0.2.1".parse().unwrap()],
            public_key: key.subject_public_key_info(),
            usages: vec![
                "digital signature".into(),
                "client auth".into(),
                "ipsec user".into(),
            ],
            not_before: now - 300,
            not_after: now + 3600,
            ..CertificateOrder::default()
        };
        let authority = pki.signing_authority();
        let pem = authority.sign(&order, now).unwrap();
        let chain = crate::chain(&pem).unwrap();
        let (_, certificate) = X509Certificate::from_der(&chain[0]).unwrap();
        let organizations: Vec<&str> = certificate
            .subject()
            .iter_organization()
            .map(|o| o.as_str().unwrap())
            .collect();
        assert_eq!(organizations, ["dev", "ops"]);
        assert_eq!(certificate.public_key().raw, key.subject_public_key_info());
        assert!(!certificate.is_ca());
        assert_eq!(certificate.validity().not_before.timestamp(), now - 300);
        let facts = CertificateFacts::parse(&pem).unwrap();
        assert_eq!(facts.hosts, ["192.0.2.1", "a.example"]);
        assert!(facts.for_clients && !facts.for_servers);
        // The API server takes it from a client.
        let clients = crate::ClientAuthority::new(pki.ca_certificate()).unwrap();
        clients.verify(&chain, UnixTime::now()).unwrap();
        // No two have one serial number.
        let again = authority.sign(&order, now).unwrap();
        let again = crate::chain(&again).unwrap();
        let (_, again) = X509Certificate::from_der(&again[0]).unwrap();
        assert_ne!(again.raw_serial(), certificate.raw_serial());
    }

    #[test]
    fn nothing_outlives_the_authority() {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::open(dir.path()).unwrap();
        let end = CertificateFacts::parse(pki.ca_certificate()).unwrap().not_after;
        let now = OffsetDateTime::now_utc().unix_timestamp();
        let mut order = CertificateOrder {
            subject: vec![(3, "jane".into())],
            public_key: KeyPair::generate().unwrap().subject_public_key_info(),
            not_before: now,
            not_after: end + 1,
            ..CertificateOrder::default()
        };
        let authority = pki.signing_authority();
        let pem = authority.sign(&order, now).unwrap();
        assert_eq!(CertificateFacts::parse(&pem).unwrap().not_after, end);
        assert!(authority.sign(&order, end).is_err());
        order.usages = vec!["cooking".into()];
        assert!(
            authority
                .sign(&order, now)
                .unwrap_err()
                .to_string()
                .contains("unrecognized usage")
        );
        assert!(SigningAuthority::new("/nonexistent").sign(&order, now).is_err());
    }
}
