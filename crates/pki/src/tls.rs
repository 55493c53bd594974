//! rustls configurations made of identities.

use crate::{Error, Identity, Result};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::sync::Arc;

fn tls(why: impl std::fmt::Display) -> Error {
    Error::Tls(why.to_string())
}

fn chain(pem: &str) -> Result<Vec<CertificateDer<'static>>> {
    rustls_pemfile::certs(&mut pem.as_bytes())
        .collect::<std::result::Result<_, _>>()
        .map_err(tls)
}

fn key(pem: &str) -> Result<PrivateKeyDer<'static>> {
    rustls_pemfile::private_key(&mut pem.as_bytes())
        .map_err(tls)?
        .ok_or_else(|| tls("no private key in the PEM"))
}

fn roots(ca: &str) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in chain(ca)? {
        roots.add(certificate).map_err(tls)?;
    }
    Ok(roots)
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// A server that offers HTTP/2 and HTTP/1.1. With a client CA, certificates are asked for but not demanded:
/// those that are shown must be signed by it.
pub fn server_config(identity: &Identity, client_ca: Option<&str>) -> Result<ServerConfig> {
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(tls)?;
    let builder = match client_ca {
        Some(ca) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(ca)?), provider())
                .allow_unauthenticated()
                .build()
                .map_err(tls)?;
            builder.with_client_cert_verifier(verifier)
        }
        None => builder.with_no_client_auth(),
    };
    let mut config = builder
        .with_single_cert(chain(&identity.certificate)?, key(&identity.key)?)
        .map_err(tls)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// A client that trusts `ca` and, with an identity, shows its certificate.
pub fn client_config(ca: &str, identity: Option<&Identity>) -> Result<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(tls)?
        .with_root_certificates(roots(ca)?);
    match identity {
        Some(identity) => builder
            .with_client_auth_cert(chain(&identity.certificate)?, key(&identity.key)?)
            .map_err(tls),
        None => Ok(builder.with_no_client_auth()),
    }
}

#[cfg(test)]
mod tests {
    use crate::Pki;

    #[test]
    fn identities_make_configurations() {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::open(dir.path()).unwrap();
        let server = pki.serving("s", "s", &["localhost".to_owned()]).unwrap();
        let client = pki.client("c", "c", None).unwrap();
        super::server_config(&server, Some(pki.ca_certificate())).unwrap();
        super::client_config(pki.ca_certificate(), Some(&client)).unwrap();
        assert!(
            super::client_config(
                pki.ca_certificate(),
                Some(&crate::Identity {
                    certificate: String::new(),
                    key: String::new()
                })
            )
            .is_err()
        );
    }
}
