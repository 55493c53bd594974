//! Renewal: at start, while a server runs, and when somebody asks for it.
//!
//! An authority is renewed with the key and the name that it has: what it signed stays signed by it, and clients that
//! know its old certificate take the new ones for as long as that lasts.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyIdMethod, KeyPair, KeyUsagePurpose,
};
use time::{Duration, OffsetDateTime};

use crate::facts::CertificateFacts;
use crate::{AUTHORITIES, CA_YEARS, Error, Identity, Leaf, LiveIdentity, Pki, Result, load, unusable, write};

/// What was renewed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Renewed {
    /// Names of certificates that were replaced.
    pub certificates: Vec<String>,
    /// Whether an authority has another certificate now.
    pub authorities: bool,
}

impl Renewed {
    pub fn is_empty(&self) -> bool {
        self.certificates.is_empty() && !self.authorities
    }
}

/// Keeps the identities of a running server fresh.
pub struct Renewer {
    pki: Pki,
    identities: Vec<Arc<LiveIdentity>>,
    /// The certificates of the authorities as they were last seen.
    authorities: Vec<Option<String>>,
}

impl Renewer {
    pub fn new(pki: Pki, identities: Vec<Arc<LiveIdentity>>) -> Renewer {
        let authorities = pki.authority_certificates();
        Renewer {
            pki,
            identities,
            authorities,
        }
    }

    /// Renews what is due, and takes over what another process renewed on disk. What fails does not keep the rest from
    /// being renewed; the first failure is returned besides.
    pub fn renew(&mut self) -> (Renewed, Option<Error>) {
        let (mut renewed, mut failure) = (Renewed::default(), None);
        if let Err(error) = self.pki.renew_authorities() {
            failure = Some(error);
        }
        let authorities = self.pki.authority_certificates();
        renewed.authorities = authorities != self.authorities;
        self.authorities = authorities;
        for live in &self.identities {
            let current = self.pki.renewed(live.name(), false);
            let replaced = current.and_then(|current| {
                let changed = current != *live.identity();
                if changed {
                    live.replace(current)?;
                }
                Ok(changed)
            });
            match replaced {
                Ok(true) => renewed.certificates.push(live.name().to_owned()),
                Ok(false) => {}
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        (renewed, failure)
    }

    /// The certificate of the cluster's authority, and that of front proxies.
    pub fn authority_certificates(&self) -> &[Option<String>] {
        &self.authorities
    }
}

impl Pki {
    fn authority_certificates(&self) -> Vec<Option<String>> {
        let of = |name: &&str| load(&self.dir, name).ok().flatten().map(|ca| ca.certificate);
        AUTHORITIES.iter().map(of).collect()
    }

    /// Renews the authorities that are due, in memory too.
    fn renew_authorities(&mut self) -> Result<()> {
        for name in AUTHORITIES {
            if load(&self.dir, name)?.is_some() {
                let ca = renewed_authority(&self.dir, name, self.now(), false)?;
                if name == AUTHORITIES[0] {
                    self.ca = ca;
                }
            }
        }
        Ok(())
    }

    /// The identity of this name on disk, or another like it if that is due, or in any case (`force`).
    pub fn renewed(&self, name: &str, force: bool) -> Result<Identity> {
        let _lock = lock(&self.dir)?;
        let path = self.dir.join(format!("{name}.crt"));
        let found = load(&self.dir, name)?.ok_or_else(|| unusable(&path, "it or its key is missing"))?;
        let facts = CertificateFacts::parse(&found.certificate).map_err(|e| unusable(&path, e))?;
        let usage = match facts.for_servers {
            true => ExtendedKeyUsagePurpose::ServerAuth,
            false => ExtendedKeyUsagePurpose::ClientAuth,
        };
        let leaf = Leaf {
            common_name: &facts.common_name,
            group: facts.organization.as_deref(),
            hosts: &facts.hosts,
            usage,
        };
        for ca_name in AUTHORITIES {
            let Some(ca) = load(&self.dir, ca_name)? else {
                continue;
            };
            let ca_facts = CertificateFacts::parse(&ca.certificate)?;
            if facts.was_signed_by(&ca_facts) {
                if !force && leaf.is_served_by(&found, &ca, self.now()) {
                    return Ok(found);
                }
                return self.issue(ca_name, &ca, name, &leaf);
            }
        }
        Err(unusable(
            &path,
            "it was signed by none of the cluster's authorities",
        ))
    }

    /// Renews an authority (`ca`, `front-proxy-ca`) in any case.
    pub fn renew_authority(&mut self, name: &str) -> Result<()> {
        let ca = renewed_authority(&self.dir, name, self.now(), true)?;
        if name == AUTHORITIES[0] {
            self.ca = ca;
        }
        Ok(())
    }

    /// All certificates of a folder by name, authorities first. Nothing is made or changed.
    pub fn list(dir: &Path) -> Result<Vec<(String, CertificateFacts)>> {
        let mut found = Vec::new();
        let entries = std::fs::read_dir(dir).map_err(|e| crate::file(dir, e))?;
        for entry in entries {
            let path = entry.map_err(|e| crate::file(dir, e))?.path();
            let name = path.file_stem().and_then(|name| name.to_str()).map(str::to_owned);
            let (Some(name), Some("crt")) = (name, path.extension().and_then(|e| e.to_str())) else {
                continue;
            };
            let pem = crate::read(&path)?.unwrap_or_default();
            let facts = CertificateFacts::parse(&pem).map_err(|e| unusable(&path, e))?;
            found.push((name, facts));
        }
        found.sort_by(|(a, one), (b, other)| (!one.is_authority, a).cmp(&(!other.is_authority, b)));
        Ok(found)
    }
}

/// Two processes may renew: the server and `skiff certs renew`.
pub(crate) fn lock(dir: &Path) -> Result<File> {
    let path = dir.join(".lock");
    let open = || {
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)?;
        file.lock()?;
        Ok(file)
    };
    open().map_err(|e| crate::file(&path, e))
}

/// The authority on disk, renewed if it is due or `force` says so. One that is not of our making is left as it is.
pub(crate) fn renewed_authority(
    dir: &Path,
    name: &str,
    now: OffsetDateTime,
    force: bool,
) -> Result<Identity> {
    let _lock = lock(dir)?;
    let path = dir.join(format!("{name}.crt"));
    let ca =
        load(dir, name)?.ok_or_else(|| unusable(&path, format!("it or its key {name}.key is missing")))?;
    let facts = CertificateFacts::parse(&ca.certificate).map_err(|e| unusable(&path, e))?;
    if !force && !facts.is_due(now.unix_timestamp()) {
        return Ok(ca);
    }
    let foreign = || {
        let why = "it was not made by skiff: renew it with what made it, keeping its key";
        match force || !facts.is_valid(now.unix_timestamp()) {
            true => Err(unusable(&path, why)),
            false => Ok(ca.clone()),
        }
    };
    if !facts.self_signed {
        return foreign();
    }
    let key = KeyPair::from_pem(&ca.key).map_err(|e| unusable(&dir.join(format!("{name}.key")), e))?;
    let mut params = authority_params(&facts.common_name, now);
    if let Some(id) = &facts.key_id {
        params.key_identifier_method = KeyIdMethod::PreSpecified(id.clone());
    }
    let certificate = params.self_signed(&key)?.pem();
    let new = CertificateFacts::parse(&certificate)?;
    // What it signed must verify by the new certificate as by the old one.
    if new.subject != facts.subject || new.public_key != facts.public_key {
        return foreign();
    }
    write(&path, &certificate, 0o644)?;
    Ok(Identity {
        certificate,
        key: ca.key,
    })
}

pub(crate) fn authority_params(common_name: &str, now: OffsetDateTime) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![
        KeyUsagePurpose::DigitalSignature,
        KeyUsagePurpose::KeyEncipherment,
        KeyUsagePurpose::KeyCertSign,
    ];
    params.not_before = crate::valid_from(now);
    params.not_after = now + Duration::days(CA_YEARS * 365);
    params
}
