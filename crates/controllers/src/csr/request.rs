//! A PKCS#10 request out of a CertificateSigningRequest: read once, so that what is checked is what is signed.

use std::collections::BTreeSet;
use std::net::IpAddr;

use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer;

/// Last numbers of the attribute types below 2.5.4, in the order in which certificates name them.
const SUBJECT_TYPES: [u8; 9] = [6, 10, 11, 7, 8, 9, 17, COMMON_NAME, SERIAL_NUMBER];
const COMMON_NAME: u8 = 3;
const SERIAL_NUMBER: u8 = 5;
const ORGANIZATION: u8 = 10;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum RequestError {
    #[error("PEM block type must be CERTIFICATE REQUEST")]
    Pem,
    #[error("{0}")]
    Malformed(String),
    #[error("unable to verify certificate request signature: {0}")]
    Signature(String),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Request {
    /// Attributes of the subject, by the last number of their type; one common name and one serial number.
    pub(super) subject: Vec<(u8, String)>,
    pub(super) dns_names: Vec<String>,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) emails: Vec<String>,
    pub(super) uris: Vec<String>,
    /// DER of the SubjectPublicKeyInfo.
    pub(super) public_key: Vec<u8>,
}

impl Request {
    /// Reads the first PEM block and checks that its signer holds the key.
    pub(super) fn parse(pem: &[u8]) -> Result<Request, RequestError> {
        let (_, pem) = x509_parser::pem::parse_x509_pem(pem).map_err(|_| RequestError::Pem)?;
        if pem.label != "CERTIFICATE REQUEST" {
            return Err(RequestError::Pem);
        }
        let malformed = |why: &dyn std::fmt::Display| RequestError::Malformed(why.to_string());
        let (_, parsed) =
            X509CertificationRequest::from_der(&pem.contents).map_err(|error| malformed(&error))?;
        parsed
            .verify_signature()
            .map_err(|error| RequestError::Signature(error.to_string()))?;
        let info = &parsed.certification_request_info;
        let mut request = Request {
            subject: subject(info)?,
            public_key: info.subject_pki.raw.to_vec(),
            ..Request::default()
        };
        for extension in parsed.requested_extensions().into_iter().flatten() {
            let names = match extension {
                ParsedExtension::SubjectAlternativeName(names) => names,
                ParsedExtension::ParseError { error } => return Err(malformed(error)),
                _ => continue,
            };
            for name in &names.general_names {
                request.add_name(name)?;
            }
        }
        Ok(request)
    }

    /// Other kinds of names are not carried over into a certificate.
    fn add_name(&mut self, name: &GeneralName<'_>) -> Result<(), RequestError> {
        match name {
            GeneralName::DNSName(name) => self.dns_names.push((*name).to_owned()),
            GeneralName::RFC822Name(email) => self.emails.push((*email).to_owned()),
            GeneralName::URI(uri) => self.uris.push((*uri).to_owned()),
            GeneralName::IPAddress(bytes) => {
                let four = <[u8; 4]>::try_from(*bytes).map(IpAddr::from);
                let address = four.or_else(|_| <[u8; 16]>::try_from(*bytes).map(IpAddr::from));
                self.addresses.push(address.map_err(|_| {
                    let message = format!("x509: cannot parse IP address of length {}", bytes.len());
                    RequestError::Malformed(message)
                })?);
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn common_name(&self) -> &str {
        let found = self.subject.iter().find(|(kind, _)| *kind == COMMON_NAME);
        found.map_or("", |(_, name)| name)
    }

    fn organizations(&self) -> Vec<&str> {
        let found = self.subject.iter().filter(|(kind, _)| *kind == ORGANIZATION);
        found.map(|(_, name)| name.as_str()).collect()
    }
}

fn subject(
    info: &x509_parser::certification_request::X509CertificationRequestInfo<'_>,
) -> Result<Vec<(u8, String)>, RequestError> {
    let mut found: Vec<(u8, String)> = Vec::new();
    for attribute in info.subject.iter_attributes() {
        let [0x55, 0x04, kind] = *attribute.attr_type().as_bytes() else {
            continue;
        };
        if !SUBJECT_TYPES.contains(&kind) {
            continue;
        }
        // What cannot be read cannot be judged, and is not signed.
        let value = attribute
            .as_str()
            .map_err(|error| RequestError::Malformed(error.to_string()))?;
        if [COMMON_NAME, SERIAL_NUMBER].contains(&kind) {
            // COMPAT: the last one counts.
            found.retain(|(other, _)| *other != kind);
        }
        found.push((kind, value.to_owned()));
    }
    found.sort_by_key(|(kind, _)| SUBJECT_TYPES.iter().position(|one| one == kind));
    Ok(found)
}

fn one_of(usages: &[String], allowed: &[&[&str]]) -> bool {
    let given: BTreeSet<&str> = usages.iter().map(String::as_str).collect();
    allowed
        .iter()
        .any(|allowed| given == allowed.iter().copied().collect::<BTreeSet<&str>>())
}

/// Why a request is not one for a kubelet's client certificate.
pub(super) fn check_kubelet_client(request: &Request, usages: &[String]) -> Result<(), String> {
    let problem = if request.organizations() != ["system:nodes"] {
        "subject organization is not system:nodes"
    } else if !request.dns_names.is_empty() {
        "DNS subjectAltNames are not allowed"
    } else if !request.emails.is_empty() {
        "Email subjectAltNames are not allowed"
    } else if !request.addresses.is_empty() {
        "IP subjectAltNames are not allowed"
    } else if !request.uris.is_empty() {
        "URI subjectAltNames are not allowed"
    } else if !request.common_name().starts_with("system:node:") {
        "subject common name does not begin with system:node:"
    } else if !one_of(
        usages,
        &[
            &["digital signature", "key encipherment", "client auth"],
            &["digital signature", "client auth"],
        ],
    ) {
        "usages did not match [client auth digital signature key encipherment]"
    } else {
        return Ok(());
    };
    Err(problem.to_owned())
}

/// Why a request is not one for a kubelet's serving certificate.
pub(super) fn check_kubelet_serving(request: &Request, usages: &[String]) -> Result<(), String> {
    let problem = if request.organizations() != ["system:nodes"] {
        "subject organization is not system:nodes"
    } else if request.dns_names.is_empty() && request.addresses.is_empty() {
        "DNS or IP subjectAltName is required"
    } else if !request.emails.is_empty() {
        "Email subjectAltNames are not allowed"
    } else if !request.uris.is_empty() {
        "URI subjectAltNames are not allowed"
    } else if !one_of(
        usages,
        &[
            &["digital signature", "key encipherment", "server auth"],
            &["digital signature", "server auth"],
        ],
    ) {
        "usages did not match [digital signature key encipherment server auth]"
    } else if !request.common_name().starts_with("system:node:") {
        "subject common name does not begin with system:node:"
    } else {
        return Ok(());
    };
    Err(problem.to_owned())
}

/// Why usages are not those of a client of the API server.
pub(super) fn check_client_usages(usages: &[String]) -> Result<(), String> {
    for usage in usages {
        if !["digital signature", "key encipherment", "client auth"].contains(&usage.as_str()) {
            return Err(format!("invalid usage for client certificate: {usage}"));
        }
    }
    if usages.iter().any(|usage| usage == "client auth") {
        Ok(())
    } else {
        Err("missing required usage for client certificate: client auth".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(organizations: &[&str], name: &str) -> Request {
        let mut subject: Vec<(u8, String)> = organizations
            .iter()
            .map(|one| (ORGANIZATION, (*one).to_owned()))
            .collect();
        subject.push((COMMON_NAME, name.to_owned()));
        Request {
            subject,
            ..Request::default()
        }
    }

    fn usages(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn kubelet_clients() {
        let all = ["digital signature", "key encipherment", "client auth"];
        let check = |request: &Request, names: &[&str], expected: Result<(), &str>| {
            let seen = check_kubelet_client(request, &usages(names));
            assert_eq!(seen, expected.map_err(str::to_owned));
        };
        let node = request(&["system:nodes"], "system:node:n");
        check(&node, &all, Ok(()));
        check(&node, &["client auth", "digital signature"], Ok(()));
        let usages_differ = Err("usages did not match [client auth digital signature key encipherment]");
        check(&node, &["client auth"], usages_differ);
        check(&node, &["digital signature", "server auth"], usages_differ);
        let masters = request(&["system:nodes", "system:masters"], "system:node:n");
        check(&masters, &all, Err("subject organization is not system:nodes"));
        let other = request(&["system:nodes"], "jane");
        check(
            &other,
            &all,
            Err("subject common name does not begin with system:node:"),
        );
        let mut named = node.clone();
        named.addresses.push([192, 0, 2, 1].into());
        check(&named, &all, Err("IP subjectAltNames are not allowed"));
        named.dns_names.push("n".into());
        check(&named, &all, Err("DNS subjectAltNames are not allowed"));
    }

    #[test]
    fn kubelet_servers() {
        let all = ["digital signature", "key encipherment", "server auth"];
        let check = |request: &Request, names: &[&str], expected: Result<(), &str>| {
            let seen = check_kubelet_serving(request, &usages(names));
            assert_eq!(seen, expected.map_err(str::to_owned));
        };
        let mut node = request(&["system:nodes"], "system:node:n");
        check(&node, &all, Err("DNS or IP subjectAltName is required"));
        node.dns_names.push("n".into());
        check(&node, &all, Ok(()));
        check(&node, &["digital signature", "server auth"], Ok(()));
        check(
            &node,
            &["client auth"],
            Err("usages did not match [digital signature key encipherment server auth]"),
        );
        node.uris.push("x:y".into());
        check(&node, &all, Err("URI subjectAltNames are not allowed"));
    }

    #[test]
    fn client_usages() {
        let check = |names: &[&str], expected: Result<(), &str>| {
            assert_eq!(
                check_client_usages(&usages(names)),
                expected.map_err(str::to_owned)
            );
        };
        check(&["client auth"], Ok(()));
        check(&["client auth", "key encipherment"], Ok(()));
        check(
            &["digital signature"],
            Err("missing required usage for client certificate: client auth"),
        );
        check(
            &["client auth", "server auth"],
            Err("invalid usage for client certificate: server auth"),
        );
    }

    #[test]
    fn what_is_no_request() {
        assert_eq!(Request::parse(b"x"), Err(RequestError::Pem));
        let certificate = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        assert_eq!(Request::parse(certificate), Err(RequestError::Pem));
        let empty = b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n";
        assert!(matches!(Request::parse(empty), Err(RequestError::Malformed(_))));
    }
}
