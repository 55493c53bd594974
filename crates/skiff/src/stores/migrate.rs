//! `skiff store migrate`: moves a cluster to another store. The server is stopped, everything is copied and compared,
//! the record names the new store, and the server starts again. Pods have shims of their own and notice nothing. Until
//! the server runs on the new store, any failure leads back to the old one, and the new one is left as it was.

use super::transfer::{Checksum, Sink, Source};
use super::{Kind, MigrateArgs};
use crate::cli::ClusterArgs;
use crate::cluster::Cluster;
use crate::daemon::{self, existing};
use crate::encryption::EncryptionArgs;
use crate::etcd_args::EtcdArgs;
use crate::restart::Running;
use crate::server_state::ServerState;
use anyhow::{Context, Result, bail};
use skiff_pki::Pki;
use skiff_store::etcd::{self, Owner, hand_over};
use skiff_store::{Store, embedded};
use std::ffi::OsString;
use std::fs;
use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use tokio::runtime::Runtime;

/// Beside the store: one that is being filled, and one that was left.
const NEW: &str = "store.new";
const LEFT: &str = "store.migrated";
/// Where API servers say that they run, by their addresses.
const SERVERS: &str = "/registry/masterleases/";
/// The owner of keys that a cluster has left behind in etcd.
const NOBODY: &str = "moved";

/// What is to be done, and undone if it fails.
struct Move {
    cluster: Cluster,
    /// What the server knew of itself; `None`: it was never started, or by an older skiff.
    state: Option<ServerState>,
    /// `None`: the embedded store.
    from: Option<EtcdArgs>,
    to: Option<EtcdArgs>,
    encryption: EncryptionArgs,
    owner: Owner,
    service_account_key: String,
    /// The new etcd, once something may be in it.
    loader: Option<Arc<etcd::Loader>>,
    /// The cluster's own key was made on the way.
    made_key: bool,
    /// The old etcd was told that its keys are nobody's.
    handed_over: bool,
}

pub fn run(cluster: &ClusterArgs, args: &MigrateArgs) -> Result<()> {
    let cluster = existing(cluster)?;
    if cluster.agent {
        bail!("this machine is a node; run the command where the API server runs");
    }
    let running = Running::find(
        &cluster,
        "stop it (such as by `systemctl stop skiff`), migrate, and start it without --etcd-servers",
    )?;
    let flags_of_server = running.as_ref().map(Running::parse).transpose()?;
    let mut from = cluster.etcd_with(flags_of_server.as_ref().map(|args| &args.etcd))?;
    let mut encryption = args.encryption.clone();
    if let Some(server) = &flags_of_server
        && encryption.encryption_provider_config.is_none()
    {
        encryption = server.encryption.clone();
    }
    let encryption = encryption.completed(&cluster)?;
    let to = match args.to {
        Kind::Etcd => Some(
            args.etcd
                .given()
                .context("--to etcd needs --etcd-servers")?
                .clone(),
        ),
        Kind::Embedded => {
            if from.is_none() && running.is_none() {
                from = args.etcd.given().cloned();
            }
            None
        }
    };
    match (&from, &to) {
        (Some(etcd), Some(_)) => bail!(
            "cluster {:?} is in {} already; to move it to another etcd, move it to the embedded store first",
            cluster.name,
            etcd.place()
        ),
        (None, None) => bail!(
            "cluster {:?} is in the embedded store already; if it is in etcd, name that by --etcd-servers",
            cluster.name
        ),
        _ => {}
    }
    let (_, public) = Pki::open(&cluster.pki_dir())?.service_account_keys()?;
    let mut step = Move {
        owner: cluster.owner(&public),
        service_account_key: public,
        state: ServerState::find(&cluster)?,
        cluster,
        from,
        to,
        encryption,
        loader: None,
        made_key: false,
        handed_over: false,
    };
    // One for all: connections to etcd live as long as it does.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(step.check())?;
    if let Some(running) = &running {
        daemon::stop(&step.cluster, running.pid)?;
    }
    let moved = step.carry_out(&runtime, running.as_ref());
    let Err(error) = moved else {
        return Ok(());
    };
    let back = runtime.block_on(step.undo());
    let from = step.old_name();
    if let Some(running) = &running {
        let started = running.start(&step.cluster, &running.flags);
        started.with_context(|| format!("after a failure ({error:#}) the old server cannot be started"))?;
    }
    back.with_context(|| format!("after a failure ({error:#}) not everything could be undone"))?;
    Err(error.context(format!("the cluster goes on with {from}")))
}

impl Move {
    fn old_name(&self) -> String {
        name_of(self.from.as_ref())
    }

    /// What can be known before anything is stopped.
    async fn check(&self) -> Result<()> {
        let dir = self.cluster.store_dir();
        match &self.to {
            Some(etcd) => {
                if !dir.try_exists()? {
                    bail!(
                        "cluster {:?} has no embedded store at {}",
                        self.cluster.name,
                        dir.display()
                    );
                }
                etcd::Loader::check(&etcd.options(None)).await?;
            }
            None if dir.try_exists()? => bail!(
                "{} is there already, which may be the state of this cluster at another time; move it away",
                dir.display()
            ),
            None => {}
        }
        if self.from.is_some() {
            let store = self
                .cluster
                .open_store(self.from.as_ref(), &self.service_account_key);
            self.check_alone(&*store.await?).await?;
        }
        Ok(())
    }

    fn carry_out(&mut self, runtime: &Runtime, running: Option<&Running>) -> Result<()> {
        let objects = {
            // The lock keeps a server from starting in the middle.
            let Some(_lock) = self.cluster.lock()? else {
                bail!("another server of cluster {:?} was started", self.cluster.name);
            };
            let objects = runtime.block_on(self.copy())?;
            self.record(self.to.as_ref())?;
            objects
        };
        say!(
            "{objects} objects of cluster {:?} are in {}.",
            self.cluster.name,
            name_of(self.to.as_ref())
        );
        if let Some(running) = running {
            running.start(&self.cluster, &without_etcd(&running.flags))?;
        }
        // From here on the new store is in use, and nothing leads back.
        if self.from.is_none() {
            let left = self.cluster.data_dir.join(LEFT);
            let moved = skiff_fs::remove_tree(&left)
                .and_then(|()| fs::rename(self.cluster.store_dir(), &left))
                .and_then(|()| skiff_fs::sync_folder(&self.cluster.data_dir));
            match moved {
                Ok(()) => say!(
                    "The embedded store is kept as {}; remove it when you no longer need it.",
                    left.display()
                ),
                Err(error) => say!(
                    "{} cannot be put aside: {error}",
                    self.cluster.store_dir().display()
                ),
            }
        } else {
            say!(
                "The objects in {} are left there; no skiff starts on them.",
                self.old_name()
            );
        }
        if running.is_none() {
            say!(
                "Start the cluster without --etcd-servers: its record says where its store is.\n\n  skiff up{}",
                self.cluster.name_flag()
            );
        }
        Ok(())
    }

    /// Notes everywhere which store the cluster uses.
    fn record(&self, etcd: Option<&EtcdArgs>) -> Result<()> {
        let cluster = Cluster {
            etcd: etcd.cloned(),
            ..self.cluster.clone()
        };
        if let Some(mut state) = self.state.clone() {
            state.set_etcd(etcd);
            state.files.encryption_config = self.encryption.shared_config(&cluster, etcd)?;
            state.write(&cluster)?;
        }
        cluster.record()
    }

    /// The servers that share the old etcd would go on with it.
    async fn check_alone(&self, store: &dyn Store) -> Result<()> {
        let own = self.state.as_ref().and_then(|state| state.advertise);
        let servers = store.range(SERVERS, None, 0, None).await?;
        let servers = servers
            .items
            .iter()
            .filter_map(|item| item.key.strip_prefix(SERVERS));
        let mut others = servers.filter(|server| server.parse::<IpAddr>().ok() != own);
        if own.is_none() {
            // One of them is this one.
            others.next();
        }
        if let Some(other) = others.next() {
            bail!(
                "the cluster has another server, at {other}, which would not reach an embedded store here; take it out of the cluster with `skiff leave` first"
            );
        }
        Ok(())
    }

    /// Copies everything and compares it; how many objects there were.
    async fn copy(&mut self) -> Result<u64> {
        let (cluster, key) = (&self.cluster, &self.service_account_key);
        let store = cluster.open_store(self.from.as_ref(), key).await?;
        let encryption = self.encryption.open(cluster, self.from.as_ref(), &store).await?;
        let source = Source::of_store(store, self.from.is_some(), encryption).await?;
        let revision = source.revision();
        let target = Cluster {
            etcd: self.to.clone(),
            ..cluster.clone()
        };
        self.made_key = !cluster.encryption_config().try_exists()?;
        let encryption = self.encryption.prepare(&target, self.to.as_ref()).await?;
        let sum;
        let store = match &self.to {
            Some(etcd) => {
                let options = etcd.options(Some(self.owner.clone()));
                let loader = Arc::new(etcd::Loader::create(&options, revision).await?);
                self.loader = Some(loader.clone());
                sum = Sink::etcd(loader, encryption.clone()).copy(source).await?;
                cluster.open_store(self.to.as_ref(), key).await?
            }
            None => {
                let dir = cluster.data_dir.join(NEW);
                // Of one that was killed.
                skiff_fs::remove_tree(&dir)?;
                let loader = embedded::Loader::create(&dir, revision)?;
                sum = Sink::embedded(loader, encryption.clone()).copy(source).await?;
                fs::rename(&dir, cluster.store_dir())?;
                skiff_fs::sync_folder(&cluster.data_dir)?;
                cluster.open_store(None, key).await?
            }
        };
        let objects = sum.count;
        let copy = Source::of_store(store, self.to.is_some(), encryption).await?;
        if copy.revision() < revision {
            bail!(
                "the new store is at revision {} and the old one at {revision}",
                copy.revision()
            );
        }
        sum.compare(Checksum::of(copy).await?)?;
        if let Some(etcd) = &self.from {
            let nobody = Owner {
                id: NOBODY.to_owned(),
                name: format!("{}, which was moved to its embedded store", cluster.name),
            };
            self.handed_over = true;
            hand_over(&etcd.options(None), &nobody).await?;
        }
        Ok(objects)
    }

    /// The old store is in use again, and the new one is as it was.
    async fn undo(&self) -> Result<()> {
        if let Some(state) = &self.state {
            state.write(&self.cluster)?;
        }
        self.cluster.record()?;
        if let Some(loader) = &self.loader {
            loader.undo().await?;
        }
        if let Some(etcd) = &self.from {
            if self.handed_over {
                hand_over(&etcd.options(None), &self.owner).await?;
            }
            // It was not there before, as was checked.
            skiff_fs::remove_tree(&self.cluster.store_dir())?;
            skiff_fs::remove_tree(&self.cluster.data_dir.join(NEW))?;
            if self.made_key {
                crate::cluster::remove_if_there(&self.cluster.encryption_config())?;
            }
        }
        Ok(())
    }
}

fn name_of(etcd: Option<&EtcdArgs>) -> String {
    match etcd {
        Some(etcd) => etcd.place(),
        None => "its embedded store".to_owned(),
    }
}

/// The record says where the store is.
fn without_etcd(flags: &[OsString]) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut flags = flags.iter();
    while let Some(flag) = flags.next() {
        let bytes = flag.as_bytes();
        if !bytes.starts_with(b"--etcd-") {
            kept.push(flag.clone());
        } else if !bytes.contains(&b'=') {
            flags.next();
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_etcd_are_left_out() {
        let check = |line: &str, expected: &str| {
            let flags: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
            let kept = without_etcd(&flags);
            let kept: Vec<&str> = kept.iter().filter_map(|flag| flag.to_str()).collect();
            assert_eq!(kept.join(" "), expected);
        };
        check("", "");
        check("--name a --bind 1.2.3.4:5", "--name a --bind 1.2.3.4:5");
        check(
            "--name a --etcd-servers http://x --etcd-prefix=/y --no-kubeconfig-merge",
            "--name a --no-kubeconfig-merge",
        );
    }
}
