//! TLS to endpoints: as with ingress-nginx, whose certificate an endpoint shows is looked at only where an Ingress asks
//! for it.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;

use super::basic::local_secret;
use super::values::{Values, on_or_off};
use crate::backend::Protocol;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsSpec {
    /// With authorities, and a certificate that is shown to endpoints.
    pub secret: Option<String>,
    pub verify: bool,
    pub name: Option<String>,
    /// Whether endpoints are told the name (SNI).
    tells_name: bool,
}

impl TlsSpec {
    /// Of a Service that is named by an address.
    pub fn of_address() -> TlsSpec {
        TlsSpec {
            tells_name: true,
            ..TlsSpec::default()
        }
    }

    /// `namespace` is the Ingress'.
    pub fn read(values: &mut Values<'_>, namespace: &str) -> TlsSpec {
        let secret = values.strict("proxy-ssl-secret", |text| local_secret(text, namespace));
        let verify = values.strict("proxy-ssl-verify", on_or_off).unwrap_or(false);
        let name = values.strict("proxy-ssl-name", |text| match ServerName::try_from(text) {
            Ok(_) => Ok(text.to_owned()),
            Err(_) => Err("its value must be the name of a server"),
        });
        let tells_name = values.read("proxy-ssl-server-name", on_or_off);
        if verify && secret.is_none() && !values.closed {
            values.close(
                "proxy-ssl-verify",
                "proxy-ssl-secret names no Secret with a ca.crt",
            );
        }
        if verify
            && values
                .text("proxy-ssl-verify-depth")
                .is_some_and(|depth| depth != "1")
        {
            values.close("proxy-ssl-verify-depth", "other depths than 1 are not supported");
        }
        TlsSpec {
            tells_name: tells_name.unwrap_or(name.is_some()),
            secret,
            verify,
            name,
        }
    }

    /// What tells one configuration from another.
    pub fn id(&self, secret: Option<&Secret>, default_name: &str, protocol: Protocol) -> String {
        let meta = secret.map(|secret| &secret.metadata);
        let version = meta.and_then(|meta| {
            Some(format!(
                "{}@{}",
                meta.uid.as_deref()?,
                meta.resource_version.as_deref()?
            ))
        });
        format!(
            "{protocol:?} {:?} {} {} {:?} {default_name}",
            version, self.verify, self.tells_name, self.name
        )
    }

    /// `default_name` is the Service's.
    pub fn build(
        &self,
        secret: Option<&Secret>,
        default_name: &str,
        protocol: Protocol,
    ) -> Result<BackendTls, String> {
        let text = |name: &str| {
            let bytes = secret?.data.as_ref()?.get(name)?;
            String::from_utf8(bytes.0.clone()).ok()
        };
        let identity = match (text("tls.crt"), text("tls.key")) {
            (Some(certificate), Some(key)) => Some(skiff_pki::Identity { certificate, key }),
            (None, None) => None,
            _ => return Err("it has only one of tls.crt and tls.key".to_owned()),
        };
        let config = match (self.verify, text("ca.crt")) {
            (true, None) => return Err("it has no ca.crt".to_owned()),
            (true, Some(authorities)) => skiff_pki::pinning_client_config(&authorities, identity.as_ref()),
            (false, _) => skiff_pki::insecure_client_config(identity.as_ref()),
        };
        let mut config = config.map_err(|error| error.to_string())?;
        config.enable_sni = self.tells_name;
        if protocol == Protocol::Http2 {
            config.alpn_protocols = vec![b"h2".to_vec()];
        }
        let name = self.name.as_deref().unwrap_or(default_name).to_owned();
        Ok(BackendTls {
            id: self.id(secret, default_name, protocol),
            config: Arc::new(config),
            name: ServerName::try_from(name).map_err(|error| error.to_string())?,
        })
    }
}

/// How the endpoints of a backend are spoken to.
#[derive(Debug)]
pub struct BackendTls {
    /// Two of the same are the same.
    pub id: String,
    pub config: Arc<ClientConfig>,
    pub name: ServerName<'static>,
}
