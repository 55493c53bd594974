//! Who may use the node's server: holders of a certificate of the cluster's authority who are cluster
//! administrators or one of the named clients.

use x509_parser::prelude::{FromDer, X509Certificate};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub name: String,
    pub groups: Vec<String>,
}

/// The identity in a client certificate that TLS has already verified.
pub fn identity(der: &[u8]) -> Option<Identity> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let subject = certificate.subject();
    let name = subject.iter_common_name().next()?.as_str().ok()?.to_owned();
    let groups = subject
        .iter_organization()
        .filter_map(|o| o.as_str().ok())
        .map(str::to_owned)
        .collect();
    Some(Identity { name, groups })
}

pub fn is_allowed(identity: &Identity, allowed_clients: &[String]) -> bool {
    identity.groups.iter().any(|g| g == "system:masters") || allowed_clients.contains(&identity.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_let_in() {
        let allowed = ["kube-apiserver-kubelet-client".to_owned()];
        let check = |name: &str, groups: &[&str], expected: bool| {
            let identity = Identity {
                name: name.into(),
                groups: groups.iter().map(|g| (*g).to_owned()).collect(),
            };
            assert_eq!(is_allowed(&identity, &allowed), expected, "{name}");
        };
        check("admin", &["system:masters"], true);
        check("kube-apiserver-kubelet-client", &[], true);
        check("system:node:n1", &["system:nodes"], false);
        check("somebody", &[], false);
        assert_eq!(identity(b"garbage"), None);
    }
}
