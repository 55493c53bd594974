//! `skiff store import`: makes a cluster out of another Kubernetes' objects. Those are upstream's bytes, which is what
//! skiff stores; their revisions go on. The source is only read.

use super::ImportArgs;
use super::transfer::{Checksum, Sink, Source};
use crate::cli::ClusterArgs;
use crate::cluster::{Cluster, Wishes, needs_root};
use crate::encryption::EncryptionArgs;
use anyhow::{Context, Result, bail, ensure};
use skiff_encryption::Encryption;
use skiff_pki::Pki;
use skiff_store::embedded::Loader;
use skiff_store::{Embedded, Etcd, Kine};
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// What is taken of the old cluster's keys, each a pair: the private one first.
const PAIRS: [(&str, &str); 3] = [
    ("ca.key", "ca.crt"),
    ("front-proxy-ca.key", "front-proxy-ca.crt"),
    ("sa.key", ""),
];

pub fn run(cluster: &ClusterArgs, args: &ImportArgs) -> Result<()> {
    let wishes = Wishes {
        data_dir: cluster.data_dir.clone(),
        bind: args.bind,
        pod_cidr: args.cluster_cidr.clone(),
        service_cidr: args.service_cluster_ip_range.clone(),
        agent: false,
    };
    let mut imported = (0, 0);
    let made = Cluster::make_filled(&cluster.name, &wishes, |staged| {
        if let Some(from) = &args.pki_dir {
            take_keys(from, &staged.pki_dir())?;
        }
        imported = crate::block_on(fill(staged, args))??;
        Ok(())
    })?;
    let (objects, revision) = imported;
    say!(
        "Cluster {:?} is made in {} out of {objects} objects at revision {revision}.",
        made.name,
        made.data_dir.display(),
    );
    if args.pki_dir.is_none() {
        say!("New keys are made for it: tokens and kubeconfigs of the old cluster are not valid here.");
    }
    say!("Stop the old cluster's API server before you start this one:\n");
    say!("  skiff up{}", made.name_flag());
    Ok(())
}

async fn fill(staged: &Cluster, args: &ImportArgs) -> Result<(u64, i64)> {
    let source = open(args).await?;
    let revision = source.revision();
    let own = EncryptionArgs {
        encryption_provider_config: None,
        encryption_provider_config_automatic_reload: false,
    };
    let encryption = own.prepare(staged, None).await?;
    let loader = Loader::create(&staged.store_dir(), revision)?;
    let sum = Sink::embedded(loader, encryption.clone()).copy(source).await?;
    let objects = sum.count;
    ensure!(objects > 0, "there are no objects below the prefix");
    let store = Arc::new(Embedded::open(staged.store_dir())?);
    sum.compare(Checksum::of(Source::of_store(store, false, encryption).await?).await?)?;
    Ok((objects, revision))
}

async fn open(args: &ImportArgs) -> Result<Source> {
    let file = args.source_encryption_provider_config.as_deref();
    let context = "--source-encryption-provider-config";
    if let Some(kine) = &args.from_kine {
        let encryption = match file {
            Some(file) => Some(Encryption::load(file).await.context(context)?),
            None => None,
        };
        return Ok(Source::of_kine(Kine::open(kine)?, encryption));
    }
    let encryption = match file {
        Some(file) => {
            let loaded = Encryption::load_below(&args.etcd.etcd_prefix, file).await;
            Some(loaded.context(context)?)
        }
        None => None,
    };
    let store = Etcd::open_to_read(args.etcd.options(None)).await;
    let store = store.with_context(|| format!("{} cannot be used", args.etcd.place()))?;
    let source = Source::of_store(Arc::new(store), true, encryption).await?;
    Ok(source.foreign())
}

/// Copies what there is of the old cluster's keys, and tries whether they can be used.
fn take_keys(from: &Path, to: &Path) -> Result<()> {
    skiff_fs::create_folders_durably(to, 0o700)?;
    let mut taken = 0;
    for (key, certificate) in PAIRS {
        if !from.join(key).try_exists()? {
            continue;
        }
        for (name, mode) in [(key, 0o600), (certificate, 0o644)] {
            if name.is_empty() {
                continue;
            }
            let path = from.join(name);
            let content = fs::read(&path).with_context(|| needs_root(&path))?;
            skiff_fs::write_durably(&to.join(name), &content, mode)?;
        }
        taken += 1;
    }
    if taken == 0 {
        bail!("{} has neither ca.key nor sa.key", from.display());
    }
    let pki = Pki::open(to)?;
    pki.front_proxy()?;
    let (private, public) = pki.service_account_keys()?;
    skiff_auth::TokenIssuer::new(&private, &public, String::new(), Vec::new())
        .with_context(|| from.join("sa.key").display().to_string())?;
    Ok(())
}
