//! The cluster's keys and certificates: made on first start, kept in one folder with safe modes, renewed when
//! they near their end or were made under a wrong clock. The layout is kubeadm's (`ca.crt`, `ca.key`, `apiserver.crt`, `sa.key`, …).
//!
//! Knows files and X.509, nothing of Kubernetes objects.

mod facts;
mod live;
mod renew;
mod request;
mod sign;
mod tls;

pub use facts::CertificateFacts;
pub use live::LiveIdentity;
pub use renew::{Renewed, Renewer};
pub use request::{
    KeyRequest, NODE_CLIENT, NODE_SERVER, NodePki, ServingIdentity, authority_hash, pinned_authorities,
    self_signed,
};
pub use sign::{CertificateOrder, SigningAuthority};
pub use tls::{
    ClientAuthority, api_client_config, asking_server_config, certified, chain, client_config,
    insecure_client_config, pinning_client_config, server_config,
};

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType,
};
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;
use thiserror::Error;
use time::{Duration, OffsetDateTime};

const CA_YEARS: i64 = 10;
const LEAF_DAYS: i64 = 365;
/// The names of the authorities: the cluster's own, and that of front proxies.
const AUTHORITIES: [&str; 2] = ["ca", "front-proxy-ca"];

/// What time it is.
pub type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

#[derive(Debug, Error)]
pub enum Error {
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{path} cannot be used: {why}")]
    Unusable { path: PathBuf, why: String },
    #[error("cannot make a certificate: {0}")]
    Certificate(#[from] rcgen::Error),
    #[error("TLS configuration: {0}")]
    Tls(String),
}

type Result<T> = std::result::Result<T, Error>;

/// A certificate and its private key, both PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Identity {
    pub certificate: String,
    pub key: String,
}

/// Without the key: what is printed ends up in logs.
impl std::fmt::Debug for Identity {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Identity")
            .field("certificate", &self.certificate)
            .finish_non_exhaustive()
    }
}

/// A folder of keys and certificates under one certificate authority, and under a second one for the proxies that
/// speak for users.
pub struct Pki {
    dir: PathBuf,
    ca: Identity,
    clock: Clock,
}

/// What the API server shows to extension API servers when it passes a user's request on.
#[derive(Clone, Debug)]
pub struct FrontProxy {
    /// PEM of the authority that signs front proxies and nothing else.
    pub ca: String,
    pub identity: Identity,
    /// The same, as it is renewed.
    pub live: Arc<LiveIdentity>,
}

/// The common name of the front proxy's certificate.
pub const FRONT_PROXY_CLIENT: &str = "front-proxy-client";

impl Pki {
    /// Opens the folder, making it and the CA if they are not there.
    pub fn open(dir: &Path) -> Result<Self> {
        Self::open_at(dir, Arc::new(SystemTime::now))
    }

    /// The same by another clock.
    pub fn open_at(dir: &Path, clock: Clock) -> Result<Self> {
        skiff_fs::create_folders_durably(dir, 0o700).map_err(|e| file(dir, e))?;
        Ok(Self {
            dir: dir.to_owned(),
            ca: authority(dir, "ca", "kubernetes", clock().into())?,
            clock,
        })
    }

    fn now(&self) -> OffsetDateTime {
        (self.clock)().into()
    }

    /// The front proxy's authority and certificate. An authority of its own: whoever holds a certificate of it may
    /// claim to be anybody.
    pub fn front_proxy(&self) -> Result<FrontProxy> {
        let ca = authority(&self.dir, "front-proxy-ca", "front-proxy-ca", self.now())?;
        let leaf = Leaf {
            common_name: FRONT_PROXY_CLIENT,
            group: None,
            hosts: &[],
            usage: ExtendedKeyUsagePurpose::ClientAuth,
        };
        let identity = self.leaf_of("front-proxy-ca", &ca, FRONT_PROXY_CLIENT, leaf)?;
        Ok(FrontProxy {
            ca: ca.certificate,
            live: LiveIdentity::new(FRONT_PROXY_CLIENT, identity.clone())?,
            identity,
        })
    }

    pub fn ca_certificate(&self) -> &str {
        &self.ca.certificate
    }

    /// A server's certificate for these names and addresses. Reissued when they change.
    pub fn serving(&self, name: &str, common_name: &str, hosts: &[String]) -> Result<Identity> {
        self.leaf(
            name,
            Leaf {
                common_name,
                group: None,
                hosts,
                usage: ExtendedKeyUsagePurpose::ServerAuth,
            },
        )
    }

    /// A client's certificate: the user is the common name, the group is the organisation.
    pub fn client(&self, name: &str, user: &str, group: Option<&str>) -> Result<Identity> {
        let usage = ExtendedKeyUsagePurpose::ClientAuth;
        self.leaf(
            name,
            Leaf {
                common_name: user,
                group,
                hosts: &[],
                usage,
            },
        )
    }

    /// The key pair that signs service-account tokens: private and public PEM.
    pub fn service_account_keys(&self) -> Result<(String, String)> {
        let (private, public) = (self.dir.join("sa.key"), self.dir.join("sa.pub"));
        if let Some(pem) = read(&private)? {
            let pair = KeyPair::from_pem(&pem).map_err(|e| unusable(&private, e))?;
            return Ok((pem, pair.public_key_pem()));
        }
        let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        write(&public, &pair.public_key_pem(), 0o644)?;
        write(&private, &pair.serialize_pem(), 0o600)?;
        Ok((pair.serialize_pem(), pair.public_key_pem()))
    }

    fn leaf(&self, name: &str, leaf: Leaf<'_>) -> Result<Identity> {
        self.leaf_of("ca", &self.ca, name, leaf)
    }

    fn leaf_of(&self, ca_name: &str, ca: &Identity, name: &str, leaf: Leaf<'_>) -> Result<Identity> {
        let _lock = renew::lock(&self.dir)?;
        if let Some(found) = load(&self.dir, name)?
            && leaf.is_served_by(&found, ca, self.now())
        {
            return Ok(found);
        }
        self.issue(ca_name, ca, name, &leaf)
    }

    /// Makes a new key and certificate, and writes them.
    fn issue(&self, ca_name: &str, ca: &Identity, name: &str, leaf: &Leaf<'_>) -> Result<Identity> {
        let ca_key_path = self.dir.join(format!("{ca_name}.key"));
        let ca_key = KeyPair::from_pem(&ca.key).map_err(|e| unusable(&ca_key_path, e))?;
        let issuer = Issuer::from_ca_cert_pem(&ca.certificate, ca_key)
            .map_err(|e| unusable(&self.dir.join(format!("{ca_name}.crt")), e))?;
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let certificate = leaf.params(self.now())?.signed_by(&key, &issuer)?;
        let identity = Identity {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        };
        save(&self.dir, name, &identity)?;
        Ok(identity)
    }
}

struct Leaf<'a> {
    common_name: &'a str,
    /// At most one: the certificate library keeps one value a subject field.
    group: Option<&'a str>,
    hosts: &'a [String],
    usage: ExtendedKeyUsagePurpose,
}

impl Leaf<'_> {
    fn params(&self, now: OffsetDateTime) -> Result<CertificateParams> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::CommonName, self.common_name);
        if let Some(group) = self.group {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        for host in self.hosts {
            params.subject_alt_names.push(match host.parse::<IpAddr>() {
                Ok(ip) => SanType::IpAddress(ip),
                Err(_) => SanType::DnsName(host.as_str().try_into()?),
            });
        }
        params.key_usages = vec![
            KeyUsagePurpose::DigitalSignature,
            KeyUsagePurpose::KeyEncipherment,
        ];
        params.extended_key_usages = vec![self.usage.clone()];
        params.use_authority_key_identifier_extension = true;
        params.not_before = valid_from(now);
        params.not_after = now + Duration::days(LEAF_DAYS);
        Ok(params)
    }

    /// Whether a certificate on disk still says what is wanted and lasts, has its key beside it (a crash
    /// between the two files leaves a new key with an old certificate) and is of this authority.
    fn is_served_by(&self, identity: &Identity, ca: &Identity, now: OffsetDateTime) -> bool {
        let (Ok(facts), Ok(ca)) = (
            CertificateFacts::parse(&identity.certificate),
            CertificateFacts::parse(&ca.certificate),
        ) else {
            return false;
        };
        let own_key = KeyPair::from_pem(&identity.key)
            .is_ok_and(|key| key.subject_public_key_info() == facts.public_key);
        let mut wanted = self.hosts.to_vec();
        wanted.sort();
        own_key
            && facts.was_signed_by(&ca)
            && !facts.is_due(now.unix_timestamp())
            && facts.common_name == self.common_name
            && facts.organization.as_deref() == self.group
            && facts.hosts == wanted
    }
}

/// An hour of grace for clocks that are behind. A machine without a clock of its own starts in 1970, and verifiers take
/// no time before that.
fn valid_from(now: OffsetDateTime) -> OffsetDateTime {
    (now - Duration::hours(1)).max(OffsetDateTime::UNIX_EPOCH)
}

/// The authority of this name in a folder, made if it is not there and renewed if it is due.
fn authority(dir: &Path, name: &str, common_name: &str, now: OffsetDateTime) -> Result<Identity> {
    let certificate = dir.join(format!("{name}.crt"));
    if load(dir, name)?.is_some() {
        return renew::renewed_authority(dir, name, now, false);
    }
    if certificate.exists() {
        // All that the old one signed would be worth nothing; that is not for us to decide.
        return Err(unusable(&certificate, format!("its key {name}.key is missing")));
    }
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    let ca = Identity {
        certificate: renew::authority_params(common_name, now).self_signed(&key)?.pem(),
        key: key.serialize_pem(),
    };
    save(dir, name, &ca)?;
    Ok(ca)
}

fn load(dir: &Path, name: &str) -> Result<Option<Identity>> {
    let certificate = read(&dir.join(format!("{name}.crt")))?;
    let key = read(&dir.join(format!("{name}.key")))?;
    Ok(certificate
        .zip(key)
        .map(|(certificate, key)| Identity { certificate, key }))
}

/// The key first: a certificate without its key is made anew, a key without its certificate too.
fn save(dir: &Path, name: &str, identity: &Identity) -> Result<()> {
    write(&dir.join(format!("{name}.key")), &identity.key, 0o600)?;
    write(&dir.join(format!("{name}.crt")), &identity.certificate, 0o644)
}

fn read(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(file(path, e)),
    }
}

fn write(path: &Path, text: &str, mode: u32) -> Result<()> {
    skiff_fs::write_durably(path, text.as_bytes(), mode).map_err(|e| file(path, e))
}

fn file(path: &Path, source: std::io::Error) -> Error {
    Error::File {
        path: path.to_owned(),
        source,
    }
}

fn unusable(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::Unusable {
        path: path.to_owned(),
        why: why.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn hosts(names: &[&str]) -> Vec<String> {
        names.iter().map(|n| (*n).to_owned()).collect()
    }

    #[test]
    fn a_second_opening_finds_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("pki");
        let make = |names: &[&str]| {
            let pki = Pki::open(&folder).unwrap();
            (
                pki.ca_certificate().to_owned(),
                pki.serving("apiserver", "kube-apiserver", &hosts(names)).unwrap(),
                pki.client("admin", "kubernetes-admin", Some("system:masters"))
                    .unwrap(),
                pki.service_account_keys().unwrap(),
            )
        };
        let first = make(&["localhost", "127.0.0.1", "::1"]);
        assert_eq!(first, make(&["::1", "127.0.0.1", "localhost"]));
        let other = make(&["localhost", "10.96.0.1"]);
        assert_ne!(first.1, other.1, "new names, new certificate");
        assert_eq!((&first.0, &first.2, &first.3), (&other.0, &other.2, &other.3));
    }

    #[test]
    fn what_does_not_belong_together_is_made_anew() {
        let dir = tempfile::tempdir().unwrap();
        let serving = || {
            Pki::open(dir.path())
                .unwrap()
                .serving("kubelet", "node", &hosts(&["a"]))
                .unwrap()
        };
        let first = serving();
        assert_eq!(first, serving());
        // Killed between the two files of a renewal.
        let other = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        fs::write(dir.path().join("kubelet.key"), other.serialize_pem()).unwrap();
        let second = serving();
        assert_ne!(first.certificate, second.certificate);
        // Another authority.
        fs::remove_file(dir.path().join("ca.crt")).unwrap();
        let third = serving();
        assert_ne!(second.certificate, third.certificate);
        fs::remove_file(dir.path().join("ca.key")).unwrap();
        assert!(
            Pki::open(dir.path()).is_err(),
            "an authority is not replaced unasked"
        );
        assert!(!format!("{third:?}").contains("PRIVATE"));
    }

    #[test]
    fn keys_are_private() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("pki");
        let pki = Pki::open(&folder).unwrap();
        pki.client("admin", "a", None).unwrap();
        pki.service_account_keys().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder), 0o700);
        for name in ["ca.key", "admin.key", "sa.key"] {
            assert_eq!(mode(&folder.join(name)), 0o600, "{name}");
        }
    }

    #[test]
    fn the_front_proxy_has_its_own_authority() {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::open(dir.path()).unwrap();
        let proxy = pki.front_proxy().unwrap();
        assert_eq!(proxy.identity, pki.front_proxy().unwrap().identity);
        assert_ne!(proxy.ca, pki.ca_certificate());
        let chain = chain(&proxy.identity.certificate).unwrap();
        let now = rustls::pki_types::UnixTime::now();
        let verifies = |ca: &str| ClientAuthority::new(ca).unwrap().verify(&chain, now).is_ok();
        assert!(verifies(&proxy.ca));
        assert!(!verifies(pki.ca_certificate()));
    }

    #[test]
    fn a_broken_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::open(dir.path()).unwrap();
        drop(pki);
        fs::write(dir.path().join("sa.key"), "nonsense").unwrap();
        let error = Pki::open(dir.path())
            .unwrap()
            .service_account_keys()
            .unwrap_err()
            .to_string();
        assert!(error.contains("sa.key cannot be used"), "{error}");
    }
}
