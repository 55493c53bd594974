//! One group version that another server serves, as its APIService describes it.

use std::sync::Arc;

use base64::Engine;
use parking_lot::Mutex;
use serde_json::Value;
use skiff_pki::LiveIdentity;
use skiff_registry::object;

use super::discovery::Fetched;
use super::openapi::RemoteDocuments;
use crate::proxy::{LocalApi, Tls};

pub struct Remote {
    /// Of the APIService: `v1.example.org`.
    pub name: String,
    pub group: String,
    pub version: String,
    pub namespace: String,
    pub service: String,
    pub port: u16,
    pub group_priority: i64,
    pub version_priority: i64,
    pub available: bool,
    /// Set if it is a server of this process: then there is no service.
    pub local: Option<LocalApi>,
    /// How to speak to it, or why that cannot be done.
    pub tls: Result<Tls, String>,
    ca_bundle: String,
    insecure: bool,
    /// What it told of itself. Kept when only the status of the APIService changes. Leaf locks.
    pub discovery: Arc<Mutex<Fetched>>,
    pub documents: Arc<Mutex<RemoteDocuments>>,
}

impl Remote {
    /// Reads an APIService. None: it is a local one, of what the API server serves itself.
    pub fn read(
        object: &Value,
        identity: &Option<Arc<LiveIdentity>>,
        local: Option<LocalApi>,
        known: Option<Arc<Remote>>,
    ) -> Option<Remote> {
        let spec = object.get("spec")?;
        let service = spec.get("service").filter(|service| service.is_object());
        let (service, local) = match (service, local) {
            (Some(service), _) => (service, None),
            (None, Some(local)) => (&Value::Null, Some(local)),
            (None, None) => return None,
        };
        let text =
            |value: &Value, field: &str| value.get(field).and_then(Value::as_str).unwrap_or("").to_string();
        let number =
            |value: &Value, field: &str| value.get(field).and_then(Value::as_i64).unwrap_or_default();
        let available = object::at(object, &["status", "conditions"])
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .any(|condition| condition["type"] == "Available" && condition["status"] == "True");
        let (namespace, name) = (text(service, "namespace"), text(service, "name"));
        let ca_bundle = text(spec, "caBundle");
        let insecure = spec.get("insecureSkipTLSVerify").and_then(Value::as_bool) == Some(true);
        let mut remote = Remote {
            name: object::name(object).to_string(),
            group: text(spec, "group"),
            version: text(spec, "version"),
            port: u16::try_from(number(service, "port"))
                .ok()
                .filter(|port| *port > 0)
                .unwrap_or(443),
            group_priority: number(spec, "groupPriorityMinimum"),
            version_priority: number(spec, "versionPriority"),
            available,
            local,
            tls: Err(String::new()),
            service: name,
            namespace,
            ca_bundle,
            insecure,
            discovery: Arc::default(),
            documents: Arc::default(),
        };
        if let Some(known) = known.filter(|known| known.same_server(&remote)) {
            remote.tls = known.tls.clone();
            remote.discovery = known.discovery.clone();
            remote.documents = known.documents.clone();
        } else if remote.local.is_none() {
            remote.tls = tls(&remote, identity.as_ref());
        }
        Some(remote)
    }

    /// Whether requests go to the same place in the same way.
    pub fn same_server(&self, other: &Remote) -> bool {
        let key = |remote: &Remote| {
            (
                remote.namespace.clone(),
                remote.service.clone(),
                remote.port,
                remote.ca_bundle.clone(),
                remote.insecure,
                remote.local.is_some(),
            )
        };
        key(self) == key(other)
    }

    /// The path under which the group version is served.
    pub fn path(&self) -> String {
        if self.group.is_empty() {
            format!("/api/{}", self.version)
        } else {
            format!("/apis/{}/{}", self.group, self.version)
        }
    }
}

fn tls(remote: &Remote, live: Option<&Arc<LiveIdentity>>) -> Result<Tls, String> {
    let identity = live.map(|live| live.identity());
    let identity = identity.as_deref();
    let config = if remote.insecure {
        skiff_pki::insecure_client_config(identity)
    } else {
        let pem = base64::engine::general_purpose::STANDARD
            .decode(&remote.ca_bundle)
            .map_err(|error| error.to_string())?;
        let pem = String::from_utf8(pem).map_err(|error| error.to_string())?;
        if skiff_pki::chain(&pem).map_or(true, |chain| chain.is_empty()) && !pem.is_empty() {
            return Err("unable to load root certificates: unable to parse bytes as PEM block".to_string());
        }
        skiff_pki::pinning_client_config(&pem, identity)
    };
    let mut config = config.map_err(|error| error.to_string())?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    if let Some(live) = live {
        config.client_auth_cert_resolver = live.clone();
    }
    Ok(Tls {
        config: Arc::new(config),
        server_name: format!("{}.{}.svc", remote.service, remote.namespace),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_those_with_a_service() {
        let mut object = json!({"metadata": {"name": "v1.example.org"},
            "spec": {"group": "example.org", "version": "v1", "insecureSkipTLSVerify": true}});
        assert!(Remote::read(&object, &None, None, None).is_none());
        object["spec"]["service"] = json!({"namespace": "a", "name": "api"});
        let remote = Remote::read(&object, &None, None, None).expect("a remote one");
        assert_eq!((remote.port, remote.available), (443, false));
        assert_eq!(remote.path(), "/apis/example.org/v1");
        let tls = remote.tls.as_ref().map(|tls| tls.server_name.as_str());
        assert_eq!(tls.map_err(String::as_str), Ok("api.a.svc"));
        remote.discovery.lock().etag = "kept".to_string();
        object["status"] = json!({"conditions": [{"type": "Available", "status": "True"}]});
        let again = Remote::read(&object, &None, None, Some(Arc::new(remote))).expect("a remote one");
        assert!(again.available);
        assert_eq!(again.discovery.lock().etag, "kept");
        object["spec"]["service"]["port"] = json!(8443);
        let moved = Remote::read(&object, &None, None, Some(Arc::new(again))).expect("a remote one");
        assert_eq!(moved.discovery.lock().etag, "");
    }

    /// Whoever names a service takes a group version over from the server of this process.
    #[test]
    fn a_service_wins_over_a_local_server() {
        let mut object = json!({"metadata": {"name": "v1.example.org"},
            "spec": {"group": "example.org", "version": "v1", "insecureSkipTLSVerify": true}});
        let api = LocalApi::new(|_| async { http::Response::default() });
        let local = Remote::read(&object, &None, Some(api.clone()), None).expect("a local one");
        assert!(local.local.is_some() && local.service.is_empty());
        local.discovery.lock().etag = "ours".to_string();
        object["spec"]["service"] = json!({"namespace": "a", "name": "api"});
        let theirs = Remote::read(&object, &None, Some(api.clone()), Some(Arc::new(local)));
        let theirs = theirs.expect("a remote one");
        assert!(theirs.local.is_none() && theirs.tls.is_ok());
        assert_eq!(theirs.discovery.lock().etag, "");
        object["spec"]["service"] = Value::Null;
        let again = Remote::read(&object, &None, Some(api), Some(Arc::new(theirs)));
        assert!(again.is_some_and(|remote| remote.local.is_some()));
    }
}
