//! The TLS configurations of listeners. They outlive the tables that name them, so that clients can resume sessions.

use std::collections::HashMap;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use skiff_client::Key;

#[derive(Debug)]
struct Always(Arc<CertifiedKey>);

impl ResolvesServerCert for Always {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
}

/// By their Secret, and whether they are for HTTP.
#[derive(Default)]
pub struct ConfigCache(HashMap<(Key, bool), CachedConfig>);

struct CachedConfig {
    certificate: Arc<CertifiedKey>,
    config: Arc<ServerConfig>,
    used: bool,
}

impl ConfigCache {
    pub fn get(
        &mut self,
        secret: Key,
        certificate: &Arc<CertifiedKey>,
        is_http: bool,
    ) -> Result<Arc<ServerConfig>, rustls::Error> {
        let key = (secret, is_http);
        match self.0.get_mut(&key) {
            Some(cached) if Arc::ptr_eq(&cached.certificate, certificate) => {
                cached.used = true;
                Ok(cached.config.clone())
            }
            _ => {
                let config = make(certificate.clone(), is_http)?;
                let cached = CachedConfig {
                    certificate: certificate.clone(),
                    config: config.clone(),
                    used: true,
                };
                self.0.insert(key, cached);
                Ok(config)
            }
        }
    }

    pub fn forget_unused(&mut self) {
        self.0.retain(|_, cached| std::mem::take(&mut cached.used));
    }
}

fn make(certificate: Arc<CertifiedKey>, is_http: bool) -> Result<Arc<ServerConfig>, rustls::Error> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(Always(certificate)));
    if is_http {
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    }
    Ok(Arc::new(config))
}
