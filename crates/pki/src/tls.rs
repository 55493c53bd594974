//! rustls configurations made of identities.

use crate::{Error, Identity, Result};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_name;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, CipherSuite, ClientConfig, DigitallySignedStruct, DistinguishedName, RootCertStore,
    ServerConfig, SignatureScheme,
};
use std::sync::Arc;
use x509_parser::prelude::{FromDer, X509Certificate};

fn tls(why: impl std::fmt::Display) -> Error {
    Error::Tls(why.to_string())
}

/// The certificates of a PEM, in order.
pub fn chain(pem: &str) -> Result<Vec<CertificateDer<'static>>> {
    rustls_pemfile::certs(&mut pem.as_bytes())
        .collect::<std::result::Result<_, _>>()
        .map_err(tls)
}

fn key(pem: &str) -> Result<PrivateKeyDer<'static>> {
    rustls_pemfile::private_key(&mut pem.as_bytes())
        .map_err(tls)?
        .ok_or_else(|| tls("no private key in the PEM"))
}

/// An identity as handshakes show it. Fails if the key is not that of the certificate.
pub fn certified(identity: &Identity) -> Result<CertifiedKey> {
    CertifiedKey::from_der(chain(&identity.certificate)?, key(&identity.key)?, &provider()).map_err(tls)
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

/// As upstream's: the server chooses what both sides can do, and takes the shorter AES key first.
fn serving_provider() -> Arc<rustls::crypto::CryptoProvider> {
    let mut provider = rustls::crypto::aws_lc_rs::default_provider();
    let short = |suite: CipherSuite| {
        matches!(
            suite,
            CipherSuite::TLS13_AES_128_GCM_SHA256
                | CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256
                | CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256
        )
    };
    let suites = &mut provider.cipher_suites;
    suites.sort_by_key(|suite| (suite.tls13().is_none(), !short(suite.suite())));
    Arc::new(provider)
}

/// A server that offers HTTP/2 and HTTP/1.1. With a client CA, certificates are asked for but not demanded:
/// those that are shown must be signed by it.
pub fn server_config(identity: &Identity, client_ca: Option<&str>) -> Result<ServerConfig> {
    let builder = ServerConfig::builder_with_provider(serving_provider())
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
    config.ignore_client_order = true;
    Ok(config)
}

/// A server that asks for client certificates and takes whichever it is shown: whose they are is decided by
/// [`ClientAuthority`], request by request. The client proves in the handshake that it holds the key.
/// The names of `authorities` (PEM) are told to clients, many of which then show no certificate of another.
pub fn asking_server_config(identity: &Identity, authorities: &[&str]) -> Result<ServerConfig> {
    let mut names = Vec::new();
    for pem in authorities {
        names.extend(roots(pem)?.subjects());
    }
    let verifier = AnyCertificate {
        provider: provider(),
        authorities: names,
    };
    let mut config = ServerConfig::builder_with_provider(serving_provider())
        .with_safe_default_protocol_versions()
        .map_err(tls)?
        .with_client_cert_verifier(Arc::new(verifier))
        .with_single_cert(chain(&identity.certificate)?, key(&identity.key)?)
        .map_err(tls)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    config.ignore_client_order = true;
    Ok(config)
}

/// An authority that client certificates are checked against.
#[derive(Clone, Debug)]
pub struct ClientAuthority(Arc<dyn ClientCertVerifier>);

impl ClientAuthority {
    pub fn new(ca: &str) -> Result<Self> {
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(ca)?), provider())
            .build()
            .map_err(tls)?;
        Ok(Self(verifier))
    }

    /// Whether the chain, leaf first, was signed by this authority, for clients, and is valid now.
    pub fn verify(&self, chain: &[CertificateDer<'_>], now: UnixTime) -> Result<()> {
        let (leaf, rest) = chain.split_first().ok_or_else(|| tls("no certificate"))?;
        self.0.verify_client_cert(leaf, rest, now).map(drop).map_err(tls)
    }
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

/// A client of the cluster's API servers, for machines that joined: it trusts `ca`, but takes no certificate of a
/// kubelet. The same authority signs those, and a node must not be able to answer in the API server's place.
pub fn api_client_config(ca: &str, identity: Option<&Identity>) -> Result<ClientConfig> {
    let by_authority = WebPkiServerVerifier::builder_with_provider(Arc::new(roots(ca)?), provider())
        .build()
        .map_err(tls)?;
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(tls)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(NoKubelet(by_authority)));
    match identity {
        Some(identity) => builder
            .with_client_auth_cert(chain(&identity.certificate)?, key(&identity.key)?)
            .map_err(tls),
        None => Ok(builder.with_no_client_auth()),
    }
}

/// Takes what an authority signed for servers that are no kubelets.
#[derive(Debug)]
struct NoKubelet(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for NoKubelet {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        let verified = self.0.verify_server_cert(leaf, intermediates, name, ocsp, now)?;
        let (_, certificate) = X509Certificate::from_der(leaf)
            .map_err(|_| rustls::Error::InvalidCertificate(CertificateError::BadEncoding))?;
        let subject = certificate.subject();
        let is_node = |text: &str| text.starts_with("system:node:") || text == "system:nodes";
        let mut names = subject.iter_common_name().chain(subject.iter_organization());
        // What cannot be read is not an API server's either.
        if names.any(|name| name.as_str().map_or(true, is_node)) {
            return Err(CertificateError::ApplicationVerificationFailure.into());
        }
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// A client of a server that somebody else set up, such as an extension API server or a webhook: it trusts `ca`, and
/// also takes a certificate that is in `ca` itself. Those are often made without an authority, and marked as one.
pub fn pinning_client_config(ca: &str, identity: Option<&Identity>) -> Result<ClientConfig> {
    let pinned = chain(ca)?;
    let mut trusted = RootCertStore::empty();
    trusted.add_parsable_certificates(pinned.iter().cloned());
    if trusted.is_empty() {
        return Err(tls("no certificate in the PEM"));
    }
    let by_authority = WebPkiServerVerifier::builder_with_provider(Arc::new(trusted), provider())
        .build()
        .map_err(tls)?;
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(tls)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Pinning { by_authority, pinned }));
    match identity {
        Some(identity) => builder
            .with_client_auth_cert(chain(&identity.certificate)?, key(&identity.key)?)
            .map_err(tls),
        None => Ok(builder.with_no_client_auth()),
    }
}

/// Takes what an authority signed, and the very certificates that it was given, if their name and time fit.
#[derive(Debug)]
struct Pinning {
    by_authority: Arc<WebPkiServerVerifier>,
    pinned: Vec<CertificateDer<'static>>,
}

impl ServerCertVerifier for Pinning {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        let verified = self
            .by_authority
            .verify_server_cert(leaf, intermediates, name, ocsp, now);
        if verified.is_ok() {
            return verified;
        }
        if !self.pinned.iter().any(|known| known.as_ref() == leaf.as_ref()) {
            // That it is marked as an authority is not what is wrong with a stranger's certificate.
            return verified.map_err(|error| match error {
                rustls::Error::InvalidCertificate(CertificateError::Other(_)) => {
                    CertificateError::UnknownIssuer.into()
                }
                error => error,
            });
        }
        verify_server_name(&ParsedCertificate::try_from(leaf)?, name)?;
        let (_, certificate) = X509Certificate::from_der(leaf)
            .map_err(|_| rustls::Error::InvalidCertificate(CertificateError::BadEncoding))?;
        let seconds = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        let validity = certificate.validity();
        if seconds < validity.not_before.timestamp() {
            return Err(CertificateError::NotValidYet.into());
        }
        if seconds > validity.not_after.timestamp() {
            return Err(CertificateError::Expired.into());
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.by_authority
            .verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.by_authority
            .verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.by_authority.supported_verify_schemes()
    }
}

/// A client that takes any server certificate, for who asks for that in so many words.
pub fn insecure_client_config(identity: Option<&Identity>) -> Result<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(tls)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate {
            provider: provider(),
            authorities: Vec::new(),
        }));
    match identity {
        Some(identity) => builder
            .with_client_auth_cert(chain(&identity.certificate)?, key(&identity.key)?)
            .map_err(tls),
        None => Ok(builder.with_no_client_auth()),
    }
}

/// Takes any certificate, but checks that the peer holds its key.
#[derive(Debug)]
struct AnyCertificate {
    provider: Arc<CryptoProvider>,
    /// Those that a server names when it asks for a certificate.
    authorities: Vec<DistinguishedName>,
}

impl AnyCertificate {
    fn schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }

    fn tls12(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn tls13(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }
}

impl ClientCertVerifier for AnyCertificate {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.authorities
    }

    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> std::result::Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.tls12(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.tls13(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.tls12(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.tls13(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::FromDer;
    use crate::Pki;

    #[test]
    fn a_certificate_that_is_given_is_taken_for_its_own_name() {
        use super::*;
        let mut params = rcgen::CertificateParams::new(vec!["api.default.svc".to_owned()]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let pair = rcgen::KeyPair::generate().unwrap();
        let certificate = params.self_signed(&pair).unwrap();
        let pinned = vec![certificate.der().clone()];
        let mut trusted = RootCertStore::empty();
        trusted.add_parsable_certificates(pinned.iter().cloned());
        let by_authority = WebPkiServerVerifier::builder_with_provider(Arc::new(trusted), provider())
            .build()
            .unwrap();
        let verifier = Pinning { by_authority, pinned };
        let verify = |certificate: &CertificateDer<'_>, name: &'static str, now: UnixTime| {
            let name = ServerName::try_from(name).unwrap();
            verifier
                .verify_server_cert(certificate, &[], &name, &[], now)
                .is_ok()
        };
        let leaf = certificate.der();
        assert!(verify(leaf, "api.default.svc", UnixTime::now()));
        assert!(!verify(leaf, "other.default.svc", UnixTime::now()));
        let long_ago = UnixTime::since_unix_epoch(std::time::Duration::ZERO);
        assert!(!verify(leaf, "api.default.svc", long_ago));
        let other = params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap();
        assert!(!verify(other.der(), "api.default.svc", UnixTime::now()));
    }

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

    /// Remembers which authorities the server named, and shows nothing.
    #[derive(Debug, Default)]
    struct RequestedAuthorities(std::sync::Mutex<Vec<Vec<u8>>>);

    impl rustls::client::ResolvesClientCert for RequestedAuthorities {
        fn resolve(
            &self,
            names: &[&[u8]],
            _: &[rustls::SignatureScheme],
        ) -> Option<std::sync::Arc<rustls::sign::CertifiedKey>> {
            *self.0.lock().unwrap() = names.iter().map(|name| name.to_vec()).collect();
            None
        }

        fn has_certs(&self) -> bool {
            true
        }
    }

    #[test]
    fn who_asks_for_certificates_names_the_authorities() {
        use std::sync::Arc;
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::open(dir.path()).unwrap();
        let identity = pki.serving("s", "s", &["localhost".to_owned()]).unwrap();
        let front_proxy = pki.front_proxy().unwrap();
        let authorities = [pki.ca_certificate(), &front_proxy.ca];
        let server = super::asking_server_config(&identity, &authorities).unwrap();
        let mut client = super::client_config(pki.ca_certificate(), None).unwrap();
        let asked = Arc::new(RequestedAuthorities::default());
        client.client_auth_cert_resolver = asked.clone();
        let name = "localhost".try_into().unwrap();
        let mut client = rustls::ClientConnection::new(Arc::new(client), name).unwrap();
        let mut server = rustls::ServerConnection::new(Arc::new(server)).unwrap();
        while client.is_handshaking() || server.is_handshaking() {
            let mut bytes = Vec::new();
            client.write_tls(&mut bytes).unwrap();
            server.read_tls(&mut bytes.as_slice()).unwrap();
            server.process_new_packets().unwrap();
            let mut bytes = Vec::new();
            server.write_tls(&mut bytes).unwrap();
            client.read_tls(&mut bytes.as_slice()).unwrap();
            client.process_new_packets().unwrap();
        }
        let asked = asked.0.lock().unwrap();
        let expected: Vec<Vec<u8>> = authorities
            .iter()
            .map(|pem| {
                let chain = super::chain(pem).unwrap();
                let (_, certificate) = super::X509Certificate::from_der(&chain[0]).unwrap();
                certificate.subject().as_raw().to_vec()
            })
            .collect();
        assert_eq!(*asked, expected);
    }
}
