//! `skiff restore`: makes a cluster out of a backup. It makes all of it or nothing, and starts nothing.
//!
//! Objects keep their uids and revisions. The store goes on far above the revision of the backup, and knows no history:
//! clients have seen revisions that came after the backup, and must neither meet them again nor miss what went back.

use super::KEYS;
use super::file;
use super::passphrase::Passphrase;
use super::records::{Manifest, Record};
use crate::cli::{self, ClusterArgs};
use crate::cluster::{Cluster, Wishes, name_flag, needs_root};
use crate::encryption::EncryptionArgs;
use crate::preflight;
use crate::stores::transfer::{Checksum, Sink, Source};
use anyhow::{Context, Result, bail};
use clap::Args;
use skiff_store::Embedded;
use skiff_store::embedded::Loader;
use std::fs::File;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

/// How far revisions go on above those of the backup: more writes than any cluster makes between a backup and its loss.
const AHEAD: i64 = 1_000_000_000;

#[derive(Debug, Clone, Args)]
pub struct RestoreArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// File that `skiff backup` wrote
    pub file: PathBuf,
    /// File whose first line is the passphrase of the backup [env: SKIFF_BACKUP_PASSPHRASE] [default: ask]
    #[arg(long, value_name = "FILE", value_parser = cli::file)]
    pub passphrase_file: Option<PathBuf>,
    /// Address of the API server [default: 0.0.0.0:6443]
    #[arg(long, value_name = "IP:PORT")]
    pub bind: Option<SocketAddr>,
    #[command(flatten)]
    pub encryption: EncryptionArgs,
}

/// What was restored.
struct Restored {
    objects: u64,
    with_keys: bool,
}

pub fn restore(args: &RestoreArgs) -> Result<()> {
    preflight::check_root()?;
    let name = &args.cluster.name;
    if Cluster::find(name)?.is_some() {
        bail!(
            "there is a cluster {name:?} on this machine, which a restore does not overwrite; choose another --name, or remove it with `skiff down --delete{}`",
            name_flag(name)
        );
    }
    let named = || format!("{} cannot be restored", args.file.display());
    let file = File::open(&args.file).with_context(|| needs_root(&args.file))?;
    let passphrase = Passphrase {
        file: args.passphrase_file.clone(),
    };
    let mut reader = file::Reader::open(file, || passphrase.recall()).with_context(named)?;
    let manifest = match Record::read(&mut reader).with_context(named)? {
        Record::Manifest(manifest) => manifest,
        _ => bail!("{}: it does not begin with a manifest", named()),
    };
    let wishes = Wishes {
        data_dir: args.cluster.data_dir.clone(),
        bind: args.bind,
        // Pods and Services have addresses out of these.
        pod_cidr: Some(manifest.pod_cidr.clone()),
        service_cidr: Some(manifest.service_cidr.clone()),
        agent: false,
    };
    let mut restored = None;
    let cluster = Cluster::make_filled(name, &wishes, |staged| {
        let filled = crate::block_on(fill(staged, &args.encryption, &manifest, reader))?;
        restored = Some(filled.with_context(named)?);
        Ok(())
    })?;
    let Some(Restored { objects, with_keys }) = restored else {
        bail!("nothing was restored");
    };
    say!(
        "Cluster {name:?} is restored in {}: {objects} objects of cluster {:?} as of {} (revision {}).",
        cluster.data_dir.display(),
        manifest.cluster,
        manifest.created,
        manifest.revision
    );
    if !with_keys {
        say!(
            "The backup has no keys, so that new ones are made: tokens and kubeconfigs of the old cluster are not valid here, and nodes must join again."
        );
    }
    say!("\n  skiff up{}", cluster.name_flag());
    Ok(())
}

async fn fill(
    staged: &Cluster,
    encryption: &EncryptionArgs,
    manifest: &Manifest,
    mut reader: file::Reader<File>,
) -> Result<Restored> {
    let mut with_keys = false;
    let mut record = Record::read(&mut reader)?;
    while let Record::File { path, content } = &record {
        if !KEYS.contains(&path.as_str()) {
            bail!("it has a file {path:?} that this skiff does not know");
        }
        let to = staged.data_dir.join(path);
        skiff_fs::create_folders_durably(to.parent().unwrap_or(&staged.data_dir), 0o700)?;
        let public = path.ends_with(".crt") || path.ends_with(".pub");
        let mode = if public { 0o644 } else { 0o600 };
        skiff_fs::write_durably(&to, content, mode).with_context(|| needs_root(&to))?;
        with_keys = true;
        record = Record::read(&mut reader)?;
    }
    // With the key that came along, or else with a new one.
    let encryption = encryption.prepare(staged, None).await?;
    let loader = Loader::create(&staged.store_dir(), manifest.revision + AHEAD)?;
    let mut sink = Sink::embedded(loader, encryption.clone());
    let mut sum = Checksum::default();
    loop {
        match record {
            Record::Object(item) => {
                sum.add(&item);
                sink.put(item)?;
            }
            Record::End(count) if count == sum.count => break,
            Record::End(count) => bail!("it has {} of {count} objects", sum.count),
            _ => bail!("it has a record where an object should be"),
        }
        record = Record::read(&mut reader)?;
    }
    reader.finish()?;
    sink.finish().await?;
    let objects = sum.count;
    let store = Arc::new(Embedded::open(staged.store_dir())?);
    sum.compare(Checksum::of(Source::of_store(store, false, encryption).await?).await?)?;
    Ok(Restored { objects, with_keys })
}
