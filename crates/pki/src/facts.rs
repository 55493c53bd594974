//! What a certificate says: whose it is, what for, how long, and when to renew it.

use std::net::IpAddr;

use x509_parser::prelude::{FromDer, GeneralName, ParsedExtension, X509Certificate};

use crate::{Error, Result};

/// A certificate is renewed in this part of its life, each at a point of its own, so that not all end at once.
const RENEW_FROM: f64 = 0.7;
const RENEW_TO: f64 = 0.9;

/// What a certificate says. Times are Unix seconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFacts {
    pub common_name: String,
    pub organization: Option<String>,
    /// Names and addresses, in order.
    pub hosts: Vec<String>,
    pub is_authority: bool,
    pub for_servers: bool,
    pub for_clients: bool,
    pub not_before: i64,
    pub not_after: i64,
    /// From when on it is renewed.
    pub renew_at: i64,
    pub(crate) self_signed: bool,
    pub(crate) subject: Vec<u8>,
    pub(crate) public_key: Vec<u8>,
    pub(crate) key_id: Option<Vec<u8>>,
    /// The name of the key that signed it, as it says.
    pub(crate) issuer_key_id: Option<Vec<u8>>,
}

impl CertificateFacts {
    /// Of the first certificate in a PEM.
    pub fn parse(pem: &str) -> Result<CertificateFacts> {
        let bad = |why: String| Error::Tls(format!("not a certificate: {why}"));
        let (_, pem) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).map_err(|e| bad(e.to_string()))?;
        let (_, certificate) = X509Certificate::from_der(&pem.contents).map_err(|e| bad(e.to_string()))?;
        let subject = certificate.subject();
        let mut hosts: Vec<String> = Vec::new();
        if let Ok(Some(names)) = certificate.subject_alternative_name() {
            hosts.extend(names.value.general_names.iter().filter_map(host_name));
        }
        hosts.sort();
        let (mut key_id, mut issuer_key_id) = (None, None);
        for extension in certificate.extensions() {
            match extension.parsed_extension() {
                ParsedExtension::SubjectKeyIdentifier(id) => key_id = Some(id.0.to_vec()),
                ParsedExtension::AuthorityKeyIdentifier(authority) => {
                    issuer_key_id = authority.key_identifier.as_ref().map(|id| id.0.to_vec());
                }
                _ => {}
            }
        }
        let usage = certificate.extended_key_usage().ok().flatten();
        let usage = usage.map(|usage| (usage.value.server_auth, usage.value.client_auth));
        let (for_servers, for_clients) = usage.unwrap_or_default();
        let validity = certificate.validity();
        let (not_before, not_after) = (validity.not_before.timestamp(), validity.not_after.timestamp());
        Ok(CertificateFacts {
            common_name: first(subject.iter_common_name()).unwrap_or_default(),
            organization: first(subject.iter_organization()),
            hosts,
            is_authority: certificate.is_ca(),
            for_servers,
            for_clients,
            not_before,
            not_after,
            renew_at: renew_at(not_before, not_after, &certificate.signature_value.data),
            self_signed: certificate.issuer().as_raw() == subject.as_raw(),
            subject: subject.as_raw().to_vec(),
            public_key: certificate.public_key().raw.to_vec(),
            key_id,
            issuer_key_id,
        })
    }

    /// Whether a new one is wanted at this time: it is near its end, or was made under a clock that was ahead.
    pub fn is_due(&self, now: i64) -> bool {
        now < self.not_before || now >= self.renew_at
    }

    pub fn is_valid(&self, now: i64) -> bool {
        (self.not_before..=self.not_after).contains(&now)
    }

    pub(crate) fn was_signed_by(&self, authority: &CertificateFacts) -> bool {
        self.issuer_key_id.is_some() && self.issuer_key_id == authority.key_id
    }
}

/// The point is drawn from the signature: it differs from certificate to certificate and stays for each.
fn renew_at(not_before: i64, not_after: i64, signature: &[u8]) -> i64 {
    let drawn = signature
        .iter()
        .rev()
        .take(2)
        .fold(0u32, |sum, byte| sum << 8 | u32::from(*byte));
    let part = RENEW_FROM + (RENEW_TO - RENEW_FROM) * f64::from(drawn) / f64::from(u16::MAX);
    not_before + ((not_after - not_before) as f64 * part) as i64
}

fn first<'a>(
    mut names: impl Iterator<Item = &'a x509_parser::x509::AttributeTypeAndValue<'a>>,
) -> Option<String> {
    names.next()?.as_str().ok().map(str::to_owned)
}

fn host_name(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match bytes.len() {
            4 => <[u8; 4]>::try_from(*bytes)
                .ok()
                .map(|b| IpAddr::from(b).to_string()),
            16 => <[u8; 16]>::try_from(*bytes)
                .ok()
                .map(|b| IpAddr::from(b).to_string()),
            _ => None,
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewal_is_spread_over_a_part_of_the_life() {
        assert_eq!(renew_at(1000, 2000, &[0, 0]), 1700);
        assert_eq!(renew_at(1000, 2000, &[0xff, 0xff]), 1900);
        assert_eq!(renew_at(1000, 2000, &[]), 1700);
    }
}
