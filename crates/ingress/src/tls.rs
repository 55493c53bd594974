//! Certificates by the name that a client asks for (SNI). They are looked up at each handshake: a change reaches the next
//! one and leaves open connections alone.

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use crate::table::HostMatch;

/// The certificates of all hosts that have one.
#[derive(Debug, Default)]
pub struct Certificates(HashMap<HostMatch, Arc<CertifiedKey>>);

impl Certificates {
    /// The first certificate of a host stays; false if there was one.
    pub fn add(&mut self, host: HostMatch, certificate: Arc<CertifiedKey>) -> bool {
        match self.0.entry(host) {
            std::collections::hash_map::Entry::Occupied(_) => false,
            std::collections::hash_map::Entry::Vacant(free) => {
                free.insert(certificate);
                true
            }
        }
    }

    /// Whether clients of this host see a certificate that was made for it.
    pub fn cover(&self, host: &HostMatch) -> bool {
        match host {
            HostMatch::Exact(name) => self.find(Some(name)).is_some(),
            other => self.0.contains_key(other),
        }
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// By the name itself, then by a wildcard for its last label, then that of any host.
    pub fn find(&self, name: Option<&str>) -> Option<&Arc<CertifiedKey>> {
        let name = name.map(str::to_ascii_lowercase);
        let of_name = name.and_then(|name| {
            let wildcard = || {
                let (_, parent) = name.split_once('.')?;
                self.0.get(&HostMatch::Wildcard(parent.to_owned()))
            };
            self.0.get(&HostMatch::Exact(name.clone())).or_else(wildcard)
        });
        of_name.or_else(|| self.0.get(&HostMatch::Any))
    }
}

/// What handshakes ask.
#[derive(Debug)]
pub struct Resolver {
    pub certificates: ArcSwap<Certificates>,
    /// Shown where no other fits: self-signed, as most controllers do.
    default: Arc<CertifiedKey>,
}

impl Resolver {
    pub fn new() -> Result<Arc<Resolver>, TlsError> {
        let made = rcgen::generate_simple_self_signed(vec!["ingress.local".to_owned()])?;
        let identity = skiff_pki::Identity {
            certificate: made.cert.pem(),
            key: made.signing_key.serialize_pem(),
        };
        Ok(Arc::new(Resolver {
            certificates: ArcSwap::default(),
            default: Arc::new(skiff_pki::certified(&identity)?),
        }))
    }

    /// A server that offers HTTP/2 and HTTP/1.1.
    pub fn server_config(self: &Arc<Self>) -> Result<Arc<ServerConfig>, TlsError> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(self.clone());
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

impl ResolvesServerCert for Resolver {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let certificates = self.certificates.load();
        let found = certificates.find(hello.server_name()).cloned();
        Some(found.unwrap_or_else(|| self.default.clone()))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot make the default certificate: {0}")]
    Make(#[from] rcgen::Error),
    #[error("{0}")]
    Pki(#[from] skiff_pki::Error),
    #[error("{0}")]
    Tls(#[from] rustls::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_specific_certificate_is_shown() {
        let make = || Resolver::new().expect("a certificate").default.clone();
        let (exact, wildcard) = (make(), make());
        let mut certificates = Certificates::default();
        assert!(certificates.add(HostMatch::parse("a.example"), exact.clone()));
        assert!(!certificates.add(HostMatch::parse("A.example"), wildcard.clone()));
        assert!(certificates.add(HostMatch::parse("*.example"), wildcard.clone()));
        let check = |name: Option<&str>, expected: Option<&Arc<CertifiedKey>>| {
            let found = certificates.find(name);
            assert_eq!(found.map(Arc::as_ptr), expected.map(Arc::as_ptr), "{name:?}");
        };
        check(Some("A.EXAMPLE"), Some(&exact));
        check(Some("b.example"), Some(&wildcard));
        check(Some("c.b.example"), None);
        check(None, None);
    }
}
