//! The other side of signing: keys that are made on a machine which has no authority, requests for certificates of
//! them, and the folder in which a node keeps what it got.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyPair, PKCS_ECDSA_P256_SHA256,
    PublicKeyData, SanType,
};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use sha2::{Digest, Sha256};
use time::OffsetDateTime;

use crate::facts::CertificateFacts;
use crate::{Error, Identity, Leaf, Result, file, load, read, save, tls, unusable, write};

/// A new key, and the PKCS#10 request for its certificate.
pub struct KeyRequest {
    key: KeyPair,
    /// PEM.
    pub request: String,
}

impl KeyRequest {
    /// For a subject with one organization. `hosts` are names and addresses.
    pub fn new(common_name: &str, organization: &str, hosts: &[String]) -> Result<KeyRequest> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::OrganizationName, organization);
        params.distinguished_name.push(DnType::CommonName, common_name);
        for host in hosts {
            params.subject_alt_names.push(match host.parse() {
                Ok(ip) => SanType::IpAddress(ip),
                Err(_) => SanType::DnsName(host.as_str().try_into()?),
            });
        }
        let request = params.serialize_request(&key)?.pem()?;
        Ok(KeyRequest { key, request })
    }

    /// A name for the request that no other key has.
    pub fn digest(&self) -> String {
        hex(&Sha256::digest(self.key.subject_public_key_info()))
    }

    /// The key with the certificate that was signed for it.
    pub fn signed(self, certificate: String) -> Result<Identity> {
        let facts = CertificateFacts::parse(&certificate)?;
        if facts.public_key != self.key.subject_public_key_info() {
            return Err(Error::Tls("the certificate is for another key".into()));
        }
        let identity = Identity {
            certificate,
            key: self.key.serialize_pem(),
        };
        tls::certified(&identity)?;
        Ok(identity)
    }
}

/// A server's certificate that no authority signed, for a year: clients trust it blindly or not at all.
pub fn self_signed(common_name: &str, hosts: &[String]) -> Result<Identity> {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    let leaf = Leaf {
        common_name,
        group: None,
        hosts,
        usage: ExtendedKeyUsagePurpose::ServerAuth,
    };
    let mut params = leaf.params(OffsetDateTime::now_utc())?;
    params.use_authority_key_identifier_extension = false;
    Ok(Identity {
        certificate: params.self_signed(&key)?.pem(),
        key: key.serialize_pem(),
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// How kubeadm pins an authority: `sha256:` and the digest of its public key. It stays when the authority's certificate is
/// renewed with the same key.
pub fn authority_hash(ca: &str) -> Result<String> {
    let facts = CertificateFacts::parse(ca)?;
    Ok(format!("sha256:{}", hex(&Sha256::digest(&facts.public_key))))
}

/// The certificates of a bundle whose key has this hash, and no other: who signs the bundle could add an authority of
/// their own to the right one. `Err` has the hashes that were found.
pub fn pinned_authorities(bundle: &str, hash: &str) -> Result<std::result::Result<String, Vec<String>>> {
    let (mut pinned, mut found) = (String::new(), Vec::new());
    for block in x509_parser::pem::Pem::iter_from_buffer(bundle.as_bytes()) {
        let block = block.map_err(|error| Error::Tls(format!("not a certificate: {error}")))?;
        let pem = crate::sign::pem("CERTIFICATE", &block.contents);
        let its = authority_hash(&pem)?;
        if its.eq_ignore_ascii_case(hash) {
            pinned.push_str(&pem);
        } else {
            found.push(its);
        }
    }
    Ok(if pinned.is_empty() { Err(found) } else { Ok(pinned) })
}

/// A serving certificate that is still to come, and then is renewed: handshakes fail until there is one.
#[derive(Debug, Default)]
pub struct ServingIdentity(ArcSwapOption<CertifiedKey>);

impl ServingIdentity {
    pub fn set(&self, identity: &Identity) -> Result<()> {
        self.0.store(Some(Arc::new(tls::certified(identity)?)));
        Ok(())
    }

    pub fn is_set(&self) -> bool {
        self.0.load().is_some()
    }
}

impl ResolvesServerCert for ServingIdentity {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.load_full()
    }
}

/// The keys of a machine that is a node of a cluster whose authority is elsewhere.
#[derive(Clone, Debug)]
pub struct NodePki {
    dir: PathBuf,
}

/// The node's certificate as a client of the API.
pub const NODE_CLIENT: &str = "kubelet-client";
/// The certificate of the kubelet's server.
pub const NODE_SERVER: &str = "kubelet";

impl NodePki {
    pub fn open(dir: &Path) -> Result<NodePki> {
        skiff_fs::create_folders_durably(dir, 0o700).map_err(|e| file(dir, e))?;
        Ok(NodePki { dir: dir.to_owned() })
    }

    pub fn save_authority(&self, ca: &str) -> Result<()> {
        write(&self.dir.join("ca.crt"), ca, 0o644)
    }

    /// PEM of the cluster's authority.
    pub fn authority(&self) -> Result<String> {
        let path = self.dir.join("ca.crt");
        read(&path)?.ok_or_else(|| file(&path, std::io::ErrorKind::NotFound.into()))
    }

    /// The identity of this name; `None` if there is none, or its key is another one's.
    pub fn load(&self, name: &str) -> Result<Option<Identity>> {
        let Some(identity) = load(&self.dir, name)? else {
            return Ok(None);
        };
        let path = self.dir.join(format!("{name}.crt"));
        let facts = CertificateFacts::parse(&identity.certificate).map_err(|e| unusable(&path, e))?;
        let own = KeyPair::from_pem(&identity.key)
            .is_ok_and(|key| key.subject_public_key_info() == facts.public_key);
        // A crash between the two files of a renewal leaves a new key with an old certificate.
        Ok(own.then_some(identity))
    }

    /// Replaces key and certificate. The old pair is kept beside until both are written, so that a crash in between
    /// loses neither.
    pub fn save(&self, name: &str, identity: &Identity) -> Result<()> {
        save(&self.dir, &format!("{name}.new"), identity)?;
        save(&self.dir, name, identity)?;
        for ending in ["key", "crt"] {
            let path = self.dir.join(format!("{name}.new.{ending}"));
            std::fs::remove_file(&path).map_err(|e| file(&path, e))?;
        }
        Ok(())
    }

    /// The identity of this name, also if the last renewal was cut off.
    pub fn recover(&self, name: &str) -> Result<Option<Identity>> {
        let fresh = format!("{name}.new");
        if let Ok(Some(identity)) = self.load(&fresh) {
            self.save(name, &identity)?;
            return Ok(Some(identity));
        }
        self.load(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CertificateOrder, Pki};

    fn sign(pki: &Pki, request: &KeyRequest) -> String {
        let now = time::OffsetDateTime::now_utc().unix_timestamp();
        let order = CertificateOrder {
            subject: vec![(10, "system:nodes".into()), (3, "system:node:n".into())],
            public_key: request.key.subject_public_key_info(),
            usages: vec!["client auth".into()],
            not_before: now - 60,
            not_after: now + 3600,
            ..CertificateOrder::default()
        };
        pki.signing_authority().sign(&order, now).unwrap()
    }

    #[test]
    fn a_certificate_belongs_to_its_request() {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::open(dir.path()).unwrap();
        let make =
            || KeyRequest::new("system:node:n", "system:nodes", &["n".into(), "192.0.2.1".into()]).unwrap();
        let (one, two) = (make(), make());
        assert_ne!(one.digest(), two.digest());
        assert!(one.request.starts_with("-----BEGIN CERTIFICATE REQUEST-----"));
        let certificate = sign(&pki, &one);
        assert!(two.signed(certificate.clone()).is_err(), "it is for another key");
        assert!(one.signed(certificate).is_ok());
    }

    #[test]
    fn without_an_authority_a_server_signs_itself() {
        let hosts = ["192.0.2.1".to_owned(), "n".to_owned()];
        let identity = self_signed("n", &hosts).unwrap();
        let facts = CertificateFacts::parse(&identity.certificate).unwrap();
        assert_eq!(facts.hosts, hosts);
        assert_eq!(facts.issuer_key_id, None, "it names no authority");
        let serving = ServingIdentity::default();
        serving.set(&identity).unwrap();
        assert!(serving.is_set());
    }

    #[test]
    fn a_renewal_that_is_cut_off_loses_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::open(&dir.path().join("ca")).unwrap();
        let node = NodePki::open(&dir.path().join("node")).unwrap();
        let make = || {
            let request = KeyRequest::new("system:node:n", "system:nodes", &[]).unwrap();
            let certificate = sign(&pki, &request);
            request.signed(certificate).unwrap()
        };
        let (old, new) = (make(), make());
        assert_eq!(node.recover(NODE_CLIENT).unwrap(), None);
        node.save(NODE_CLIENT, &old).unwrap();
        assert_eq!(node.recover(NODE_CLIENT).unwrap(), Some(old.clone()));
        // Cut off in the new files, then in the old ones.
        write(&node.dir.join("kubelet-client.new.key"), &new.key, 0o600).unwrap();
        assert_eq!(node.recover(NODE_CLIENT).unwrap(), Some(old));
        write(&node.dir.join("kubelet-client.new.crt"), &new.certificate, 0o644).unwrap();
        write(&node.dir.join("kubelet-client.key"), &new.key, 0o600).unwrap();
        assert_eq!(node.recover(NODE_CLIENT).unwrap(), Some(new.clone()));
        assert_eq!(node.load(NODE_CLIENT).unwrap(), Some(new));
    }

    #[test]
    fn what_is_not_pinned_is_not_trusted() {
        let (ours, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let ours = Pki::open(ours.path()).unwrap().ca_certificate().to_owned();
        let theirs = Pki::open(theirs.path()).unwrap().ca_certificate().to_owned();
        let hash = authority_hash(&ours).unwrap();
        for bundle in [format!("{ours}{theirs}"), format!("{theirs}{ours}"), ours.clone()] {
            let pinned = pinned_authorities(&bundle, &hash).unwrap().unwrap();
            assert_eq!(crate::chain(&pinned).unwrap(), crate::chain(&ours).unwrap());
        }
        let found = pinned_authorities(&theirs, &hash).unwrap().unwrap_err();
        assert_eq!(found, [authority_hash(&theirs).unwrap()]);
        assert!(pinned_authorities("no certificate", &hash).unwrap().is_err());
    }

    #[test]
    fn the_hash_is_that_of_the_key() {
        let dir = tempfile::tempdir().unwrap();
        let mut pki = Pki::open(dir.path()).unwrap();
        let before = (
            pki.ca_certificate().to_owned(),
            authority_hash(pki.ca_certificate()).unwrap(),
        );
        assert_eq!(before.1.len(), "sha256:".len() + 64);
        pki.renew_authority("ca").unwrap();
        assert_ne!(pki.ca_certificate(), before.0);
        assert_eq!(authority_hash(pki.ca_certificate()).unwrap(), before.1);
    }
}
