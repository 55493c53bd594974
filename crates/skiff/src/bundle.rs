//! The keys of a cluster on their way to another server: one sealed document, in a Secret of `kube-system` that ends with
//! the token it was made for.
//!
//! Whoever reads the Secret gets nothing: the certificate key that opens it is printed once, in the line for the other
//! machine, and kept nowhere. Whoever has the certificate key alone gets nothing either: only the one token may read the
//! Secret, so a node, a token for nodes and another server's token may not.

use crate::cluster::{Cluster, needs_root};
use crate::encryption::write_private;
use crate::server_state::{ServerState, Settings, SettingsFiles};
use anyhow::{Context, Result, bail};
use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The fields of the Secret.
pub const SEALED: &str = "bundle";
pub const EXPIRES: &str = "expires";

const KEY_LEN: usize = 32;
/// What every server has: the authorities and the key of service-account tokens.
const KEYS: [&str; 6] = [
    "ca.crt",
    "ca.key",
    "front-proxy-ca.crt",
    "front-proxy-ca.key",
    "sa.key",
    "sa.pub",
];
const ETCD_CA: &str = "etcd-ca.crt";
const ETCD_CERTIFICATE: &str = "etcd-client.crt";
const ETCD_KEY: &str = "etcd-client.key";

/// The key that a bundle is sealed with: 64 hexadecimal digits.
#[derive(Clone, PartialEq, Eq)]
pub struct CertificateKey([u8; KEY_LEN]);

impl CertificateKey {
    pub fn generate() -> Result<CertificateKey> {
        let mut key = [0; KEY_LEN];
        aws_lc_rs::rand::fill(&mut key).map_err(|_| anyhow::anyhow!("the system has no random numbers"))?;
        Ok(CertificateKey(key))
    }

    fn cipher(&self) -> Result<RandomizedNonceKey> {
        RandomizedNonceKey::new(&AES_256_GCM, &self.0).map_err(|_| anyhow::anyhow!("the key cannot be used"))
    }
}

/// Without the key: what is printed ends up in logs.
impl std::fmt::Debug for CertificateKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CertificateKey(…)")
    }
}

/// For the line that is printed once.
impl std::fmt::Display for CertificateKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::str::FromStr for CertificateKey {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = "a certificate key is 64 hexadecimal digits, as `skiff token create --server` prints them";
        if text.len() != 2 * KEY_LEN || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(bad);
        }
        let mut key = [0; KEY_LEN];
        for (place, byte) in key.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * place..2 * place + 2], 16).map_err(|_| bad)?;
        }
        Ok(CertificateKey(key))
    }
}

/// What a bundle is bound to: another token's, another cluster's or a later one does not open.
#[derive(Clone, Copy, Debug)]
pub struct Purpose<'a> {
    pub token_id: &'a str,
    /// Of the cluster's authority.
    pub ca_hash: &'a str,
    /// When the token ends, as the Secret says it.
    pub expires: &'a str,
}

impl Purpose<'_> {
    fn text(&self) -> String {
        let Purpose {
            token_id,
            ca_hash,
            expires,
        } = self;
        format!("skiff server keys 1\n{token_id}\n{ca_hash}\n{expires}")
    }
}

#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Bundle {
    pub settings: Settings,
    /// By the names of their files in `<data-dir>/pki`.
    keys: BTreeMap<String, String>,
    /// The EncryptionConfiguration, if the cluster has one.
    encryption: Option<String>,
}

/// Without the keys: what is printed ends up in logs.
impl std::fmt::Debug for Bundle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bundle")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| needs_root(path))
}

impl Bundle {
    /// The keys of this server.
    pub fn collect(cluster: &Cluster, state: &ServerState) -> Result<Bundle> {
        let mut keys = BTreeMap::new();
        for name in KEYS {
            keys.insert(name.to_owned(), read(&cluster.pki_dir().join(name))?);
        }
        let files = &state.files;
        for (name, file) in [
            (ETCD_CA, &files.etcd_ca),
            (ETCD_CERTIFICATE, &files.etcd_certificate),
            (ETCD_KEY, &files.etcd_key),
        ] {
            if let Some(path) = file {
                keys.insert(name.to_owned(), read(path)?);
            }
        }
        let encryption = files.encryption_config.as_deref().map(read).transpose()?;
        Ok(Bundle {
            settings: state.settings.clone(),
            keys,
            encryption,
        })
    }

    /// Nonce, ciphertext and tag, in this order.
    pub fn seal(&self, key: &CertificateKey, purpose: Purpose<'_>) -> Result<Vec<u8>> {
        let mut text = serde_json::to_vec(self)?;
        let bound = Aad::from(purpose.text());
        let sealed = key.cipher()?.seal_in_place_append_tag(bound, &mut text);
        let nonce = sealed.map_err(|_| anyhow::anyhow!("the keys cannot be sealed"))?;
        Ok([nonce.as_ref().as_slice(), &text].concat())
    }

    pub fn open(sealed: &[u8], key: &CertificateKey, purpose: Purpose<'_>, now: Timestamp) -> Result<Bundle> {
        let wrong = "the certificate key does not open the server's keys: copy the whole line that `skiff token create --server` printed, or make another";
        let expires: Timestamp = purpose.expires.parse().map_err(|_| anyhow::anyhow!(wrong))?;
        if now >= expires {
            bail!(
                "the server's keys were offered until {expires}; make another line with `skiff token create --server`"
            );
        }
        let Some((nonce, text)) = sealed.split_at_checked(NONCE_LEN) else {
            bail!(wrong);
        };
        let mut text = text.to_vec();
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| anyhow::anyhow!(wrong))?;
        let bound = Aad::from(purpose.text());
        let opened = key.cipher()?.open_in_place(nonce, bound, &mut text);
        let opened = opened.map_err(|_| anyhow::anyhow!(wrong))?;
        serde_json::from_slice(opened)
            .context("the server's keys have another form; install the same version of skiff here")
    }

    /// Writes the keys where a server finds them. The files are the rest of what it needs to know.
    pub fn unpack(&self, cluster: &Cluster) -> Result<SettingsFiles> {
        let folder = cluster.pki_dir();
        if let Some(name) = KEYS.iter().find(|name| !self.keys.contains_key(**name)) {
            bail!("the server's keys lack {name}; install the same version of skiff here");
        }
        skiff_fs::create_folders_durably(&folder, 0o700).with_context(|| needs_root(&folder))?;
        let place = |name: &str| -> Option<PathBuf> {
            let known = self.keys.contains_key(name);
            known.then(|| folder.join(name))
        };
        for (name, text) in &self.keys {
            // Names come from outside: only those that are known become paths.
            if ![ETCD_CA, ETCD_CERTIFICATE, ETCD_KEY]
                .iter()
                .chain(&KEYS)
                .any(|known| known == name)
            {
                continue;
            }
            let path = folder.join(name);
            skiff_fs::write_durably(&path, text.as_bytes(), 0o600).with_context(|| needs_root(&path))?;
        }
        let mut files = SettingsFiles {
            etcd_ca: place(ETCD_CA),
            etcd_certificate: place(ETCD_CERTIFICATE),
            etcd_key: place(ETCD_KEY),
            encryption_config: None,
        };
        if let Some(text) = &self.encryption {
            let path = cluster.encryption_config();
            write_private(&path, text).with_context(|| needs_root(&path))?;
            files.encryption_config = Some(path);
        }
        Ok(files)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Wishes;
    use std::os::unix::fs::PermissionsExt;

    const PURPOSE: Purpose<'static> = Purpose {
        token_id: "abcdef",
        ca_hash: "sha256:00",
        expires: "2026-01-02T03:04:05Z",
    };

    fn bundle() -> Bundle {
        let keys = KEYS.iter().chain(&[ETCD_CA]);
        Bundle {
            settings: Settings::default(),
            keys: keys
                .map(|name| ((*name).to_owned(), format!("PRIVATE {name}")))
                .collect(),
            encryption: Some("kind: EncryptionConfiguration".to_owned()),
        }
    }

    #[test]
    fn only_the_right_key_in_time_opens_it() {
        let before: Timestamp = "2026-01-02T03:04:04Z".parse().unwrap();
        let after: Timestamp = "2026-01-02T03:04:05Z".parse().unwrap();
        let key = CertificateKey::generate().unwrap();
        let sealed = bundle().seal(&key, PURPOSE).unwrap();
        assert!(!sealed.windows(7).any(|bytes| bytes == b"PRIVATE"));
        assert_ne!(
            sealed,
            bundle().seal(&key, PURPOSE).unwrap(),
            "a nonce is used once"
        );
        assert_eq!(Bundle::open(&sealed, &key, PURPOSE, before).unwrap(), bundle());
        let refused = |sealed: &[u8], key: &CertificateKey, purpose: Purpose<'_>, at, why: &str| {
            let told = Bundle::open(sealed, key, purpose, at).unwrap_err().to_string();
            assert!(told.contains(why), "{told}");
        };
        let wrong = "the certificate key does not open";
        refused(
            &sealed,
            &CertificateKey::generate().unwrap(),
            PURPOSE,
            before,
            wrong,
        );
        refused(
            &sealed,
            &key,
            PURPOSE,
            after,
            "were offered until 2026-01-02T03:04:05Z",
        );
        // Nobody can make it last longer, or move it to another token or cluster.
        for purpose in [
            Purpose {
                expires: "2027-01-02T03:04:05Z",
                ..PURPOSE
            },
            Purpose {
                token_id: "ghijkl",
                ..PURPOSE
            },
            Purpose {
                ca_hash: "sha256:01",
                ..PURPOSE
            },
        ] {
            refused(&sealed, &key, purpose, before, wrong);
        }
        let mut changed = sealed.clone();
        *changed.last_mut().unwrap() ^= 1;
        refused(&changed, &key, PURPOSE, before, wrong);
        refused(&sealed[..5], &key, PURPOSE, before, wrong);
    }

    #[test]
    fn a_certificate_key_is_text_and_is_not_logged() {
        let key = CertificateKey::generate().unwrap();
        let text = key.to_string();
        assert_eq!(text.parse(), Ok(key.clone()));
        assert!(!format!("{key:?}").contains(&text[..8]));
        assert!(!format!("{:?}", bundle()).contains("PRIVATE"));
        for bad in ["", "ab", &"x".repeat(64), &"ä".repeat(32)] {
            assert!(bad.parse::<CertificateKey>().is_err(), "{bad}");
        }
    }

    #[test]
    fn keys_are_private_where_they_arrive() {
        let root = tempfile::tempdir().unwrap();
        let cluster = Cluster::find_or_make_in(root.path(), "skiff", &Wishes::default()).unwrap();
        let mut sent = bundle();
        sent.keys.insert("../evil".to_owned(), "x".to_owned());
        let files = sent.unpack(&cluster).unwrap();
        assert!(!cluster.data_dir.join("evil").exists());
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        for name in ["ca.key", "sa.key", "front-proxy-ca.key", ETCD_CA] {
            assert_eq!(mode(&cluster.pki_dir().join(name)), 0o600, "{name}");
        }
        assert_eq!(files.etcd_ca, Some(cluster.pki_dir().join(ETCD_CA)));
        assert_eq!(files.etcd_key, None);
        assert_eq!(mode(&files.encryption_config.unwrap()), 0o600);
        sent.keys.remove("sa.key");
        assert!(sent.unpack(&cluster).is_err());
    }
}
