//! `skiff backup` and `skiff restore`: all objects of a cluster in one file, as they were at one revision.
//!
//! Values are in the clear inside of the file, whatever they are encrypted with in the store: only so can they be read
//! where that key is not. Therefore a file is never protected less than its store: if that one encrypts, or if keys are
//! added, the file is encrypted with a passphrase, unless the user says otherwise.

mod file;
mod live;
mod passphrase;
mod records;
mod restore;

pub use live::answer;
pub use restore::{RestoreArgs, restore};

use crate::cli::{self, ClusterArgs};
use crate::cluster::{Cluster, needs_root};
use crate::daemon::existing;
use crate::encryption::EncryptionArgs;
use crate::etcd_args::EtcdArgs;
use crate::preflight;
use crate::stores::transfer::Source;
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use passphrase::{Passphrase, VARIABLE};
use records::{Manifest, Record};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use skiff_pki::Pki;
use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The keys of a cluster: with them it is the same one to everybody who knew it.
const KEYS: [&str; 7] = [
    "pki/ca.crt",
    "pki/ca.key",
    "pki/front-proxy-ca.crt",
    "pki/front-proxy-ca.key",
    "pki/sa.key",
    "pki/sa.pub",
    "encryption/config.yaml",
];

#[derive(Debug, Clone, Args)]
pub struct BackupArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// File to write; it must not exist
    pub file: PathBuf,
    /// Add the cluster's keys: its CAs, the key of service accounts, and the one that Secrets are encrypted with
    #[arg(long)]
    pub with_keys: bool,
    /// File whose first line is the passphrase to encrypt with [env: SKIFF_BACKUP_PASSPHRASE] [default: ask]
    #[arg(long, value_name = "FILE", value_parser = cli::file)]
    pub passphrase_file: Option<PathBuf>,
    /// Write Secrets, and whatever else the store encrypts, in plain text if there is no passphrase
    #[arg(long, conflicts_with_all = ["with_keys", "passphrase_file"])]
    pub secrets_in_plain_text: bool,
    #[command(flatten, next_help_heading = "For a cluster that is not running")]
    pub etcd: EtcdArgs,
    #[command(flatten, next_help_heading = "For a cluster that is not running")]
    pub encryption: EncryptionArgs,
}

/// What was written.
struct Written {
    manifest: Manifest,
    objects: u64,
    bytes: u64,
    encrypted: bool,
}

pub fn run(args: &BackupArgs) -> Result<()> {
    preflight::check_root()?;
    let cluster = existing(&args.cluster)?;
    if cluster.agent {
        bail!("this machine is a node; run the command where the API server runs");
    }
    if args.file.try_exists()? {
        bail!("{} is there already; choose another name", args.file.display());
    }
    // Held until the end: a server must not start in between.
    let lock = cluster.lock()?;
    let records = match &lock {
        None => live::from_server(&cluster)?,
        Some(_) => live::from_store(&cluster, open_stopped(cluster.clone(), args.clone()))?,
    };
    let temporary = Temporary::new(&args.file);
    let written = write(args, &cluster, records, &temporary.0)?;
    renameat_with(CWD, &temporary.0, CWD, &args.file, RenameFlags::NOREPLACE)
        .with_context(|| needs_root(&args.file))?;
    skiff_fs::sync_folder(&folder_of(&args.file))?;
    let Manifest {
        revision,
        encrypted_at_rest,
        ..
    } = written.manifest;
    say!(
        "Cluster {:?} is backed up in {}: {} objects at revision {revision}, {} KiB{}{}.",
        cluster.name,
        args.file.display(),
        written.objects,
        written.bytes.div_ceil(1024),
        if written.encrypted { ", encrypted" } else { "" },
        if args.with_keys {
            ", with the cluster's keys"
        } else {
            ""
        },
    );
    if !written.encrypted {
        let hint = if encrypted_at_rest {
            ", unlike in the store"
        } else {
            ""
        };
        say!(
            "It holds Secrets in plain text{hint}: keep it where only those may read it who may read Secrets."
        );
    }
    Ok(())
}

/// The objects of a cluster without a server.
async fn open_stopped(cluster: Cluster, args: BackupArgs) -> Result<Source> {
    let etcd = cluster.etcd_with(Some(&args.etcd))?;
    let etcd = etcd.as_ref();
    if etcd.is_none() && !cluster.store_dir().try_exists()? {
        bail!(
            "cluster {:?} is not running and has no embedded store; start it, or name its etcd by --etcd-servers",
            cluster.name
        );
    }
    let (_, public) = Pki::open(&cluster.pki_dir())?.service_account_keys()?;
    let store = cluster.open_store(etcd, &public).await?;
    let encryption = args.encryption.completed(&cluster)?;
    let encryption = encryption.open(&cluster, etcd, &store).await?;
    Source::of_store(store, etcd.is_some(), encryption).await
}

/// Writes the file, durably.
fn write(args: &BackupArgs, cluster: &Cluster, records: impl Read, path: &Path) -> Result<Written> {
    let mut records = BufReader::new(records);
    let manifest = match next(&mut records)? {
        Record::Manifest(manifest) => manifest,
        _ => bail!("the server did not send a manifest first"),
    };
    let passphrase = choose_passphrase(args, &manifest)?;
    let file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    let file = file.with_context(|| needs_root(path))?;
    let mut writer = file::Writer::new(BufWriter::new(file), passphrase.as_deref())?;
    Record::Manifest(manifest.clone()).write(&mut writer)?;
    if args.with_keys {
        for key in read_keys(&cluster.data_dir)? {
            key.write(&mut writer)?;
        }
    }
    let mut objects = 0;
    loop {
        let record = next(&mut records)?;
        match &record {
            Record::Object(_) => objects += 1,
            Record::End(count) => ensure!(*count == objects, "the server sent {objects} of {count} objects"),
            _ => bail!("the server sent something else than an object"),
        }
        record.write(&mut writer)?;
        if matches!(record, Record::End(_)) {
            break;
        }
    }
    let file = writer
        .finish()?
        .into_inner()
        .map_err(|error| error.into_error())?;
    file.sync_all().with_context(|| needs_root(path))?;
    Ok(Written {
        manifest,
        objects,
        bytes: file.metadata()?.len(),
        encrypted: passphrase.is_some(),
    })
}

fn next(records: &mut impl Read) -> Result<Record> {
    match Record::read(records).context("the server ended in the middle")? {
        Record::Failed(why) => bail!("the objects cannot be read: {why}"),
        record => Ok(record),
    }
}

fn choose_passphrase(args: &BackupArgs, manifest: &Manifest) -> Result<Option<Vec<u8>>> {
    let passphrase = Passphrase {
        file: args.passphrase_file.clone(),
    };
    if args.secrets_in_plain_text {
        return Ok(None);
    }
    let needed = args.with_keys || manifest.encrypted_at_rest;
    if passphrase.given()?.is_some() || (needed && passphrase.is_askable()) {
        return passphrase.choose().map(Some);
    }
    if args.with_keys {
        bail!("a backup with keys is encrypted: give a passphrase by --passphrase-file FILE or {VARIABLE}");
    }
    if needed {
        bail!(
            "the store of this cluster encrypts Secrets, and in this file they would be in plain text: give a passphrase by --passphrase-file FILE or {VARIABLE}, or say --secrets-in-plain-text"
        );
    }
    Ok(None)
}

fn read_keys(data_dir: &Path) -> Result<Vec<Record>> {
    let mut found = Vec::new();
    for path in KEYS {
        let from = data_dir.join(path);
        match fs::read(&from) {
            Ok(content) => found.push(Record::File {
                path: path.to_owned(),
                content,
            }),
            // A cluster with a configuration of its own, or in etcd, has no key for Secrets.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !path.starts_with("pki/") => {}
            Err(error) => return Err(error).with_context(|| needs_root(&from)),
        }
    }
    Ok(found)
}

fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => ".".into(),
    }
}

/// A file beside another that is gone at the end, unless it was renamed.
struct Temporary(PathBuf);

impl Temporary {
    fn new(beside: &Path) -> Temporary {
        let mut name = beside.as_os_str().to_owned();
        name.push(format!(".{}.tmp", std::process::id()));
        Temporary(name.into())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
