//! An identity that may be replaced while servers and clients use it: every handshake shows the newest certificate,
//! and connections that are open stay open.

use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use crate::{Identity, Result, tls};

#[derive(Debug)]
pub struct LiveIdentity {
    name: String,
    identity: ArcSwap<Identity>,
    certified: ArcSwap<CertifiedKey>,
}

impl LiveIdentity {
    /// `name` is that of its files.
    pub fn new(name: &str, identity: Identity) -> Result<Arc<LiveIdentity>> {
        Ok(Arc::new(LiveIdentity {
            name: name.to_owned(),
            certified: ArcSwap::from_pointee(tls::certified(&identity)?),
            identity: ArcSwap::from_pointee(identity),
        }))
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn identity(&self) -> Arc<Identity> {
        self.identity.load_full()
    }

    pub fn replace(&self, identity: Identity) -> Result<()> {
        self.certified.store(Arc::new(tls::certified(&identity)?));
        self.identity.store(Arc::new(identity));
        Ok(())
    }
}

impl ResolvesServerCert for LiveIdentity {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.certified.load_full())
    }
}

impl ResolvesClientCert for LiveIdentity {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.certified.load_full())
    }

    fn has_certs(&self) -> bool {
        true
    }
}
