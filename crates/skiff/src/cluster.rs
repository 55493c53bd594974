//! One cluster on this machine: its names, addresses and folders, all derived from `--name` and kept so that
//! every later command finds them again.
//!
//! Several clusters share a host, so each gets a slot: a number that keeps its networks, bridge and ports apart.

use crate::etcd_args::EtcdArgs;
use crate::{cleanup, networks};
use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use skiff_meta::net::{Cidr, parse_list};
use std::fs::{self, File, OpenOptions};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

pub const DEFAULT_NAME: &str = "skiff";
const ROOT: &str = "/var/lib/skiff";
const RUN_ROOT: &str = "/run/skiff";
/// Slot 0 is the default cluster's; the pod and service networks of the others lie side by side in 10/8.
const MAX_SLOT: u8 = 40;
const DEFAULT_API_PORT: u16 = 6443;
const DEFAULT_KUBELET_PORT: u16 = 10250;
/// Of the default cluster; others have the ports behind it.
const WIREGUARD_PORT: u16 = 51820;

/// Where in a data directory a new one is written before it is moved to its place.
const STAGED: &str = "staged";

/// What is remembered of a cluster between commands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Cluster {
    pub name: String,
    pub slot: u8,
    pub data_dir: PathBuf,
    pub bind: SocketAddr,
    pub kubelet_port: u16,
    pub pod_cidr: String,
    pub service_cidr: String,
    /// This machine is a node of a cluster that runs elsewhere.
    #[serde(default)]
    pub agent: bool,
    /// The etcd that the cluster was moved to; `None`: its state is in the embedded store, unless flags say otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd: Option<EtcdArgs>,
}

/// What the command line may say of a new cluster.
#[derive(Debug, Clone, Default)]
pub struct Wishes {
    pub data_dir: Option<PathBuf>,
    pub bind: Option<SocketAddr>,
    pub pod_cidr: Option<String>,
    pub service_cidr: Option<String>,
    pub agent: bool,
}

impl Cluster {
    /// The cluster of this name, if it was ever started here and not deleted.
    pub fn find(name: &str) -> Result<Option<Self>> {
        check_name(name)?;
        read_record(&record_path(Path::new(ROOT), name))
    }

    /// All clusters that exist on this machine, by name.
    pub fn all() -> Result<Vec<Self>> {
        let records = Path::new(ROOT).join("clusters");
        if !records.is_dir() {
            return Ok(Vec::new());
        }
        let mut found = all_records(&records)?;
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// The cluster of this name, made if there is none. Wishes that contradict an existing or a running one, or
    /// that cannot work, are refused before anything is recorded.
    pub fn find_or_make(name: &str, wishes: &Wishes) -> Result<Self> {
        check_name(name)?;
        Self::find_or_make_in(Path::new(ROOT), name, wishes)
    }

    pub(crate) fn find_or_make_in(root: &Path, name: &str, wishes: &Wishes) -> Result<Self> {
        let _lock = lock_records(root)?;
        let path = record_path(root, name);
        if let Some(found) = read_record(&path)? {
            let wanted = found.adopt(wishes)?;
            if wanted != found {
                found.refuse_while_running()?;
                wanted.write(&path)?;
            }
            make_data_dir(&wanted.data_dir)?;
            return Ok(wanted);
        }
        let cluster = Self::plan(root, name, wishes)?;
        make_data_dir(&cluster.data_dir)?;
        cluster.write(&path)?;
        Ok(cluster)
    }

    /// Makes a cluster whose data directory `fill` writes: all of it, or nothing is left. Other clusters cannot be made
    /// meanwhile: each would have to know the networks of this one.
    pub fn make_filled(name: &str, wishes: &Wishes, fill: impl FnOnce(&Self) -> Result<()>) -> Result<Self> {
        check_name(name)?;
        Self::make_filled_in(Path::new(ROOT), name, wishes, fill)
    }

    fn make_filled_in(
        root: &Path,
        name: &str,
        wishes: &Wishes,
        fill: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<Self> {
        let _lock = lock_records(root)?;
        let path = record_path(root, name);
        if read_record(&path)?.is_some() {
            bail!(
                "there is a cluster {name:?} on this machine; choose another --name, or remove it with `skiff down --delete{}`",
                name_flag(name)
            );
        }
        let cluster = Self::plan(root, name, wishes)?;
        let dir = &cluster.data_dir;
        for name in cleanup::OURS {
            if dir.join(name).try_exists()? {
                bail!(
                    "{} is there already; remove it, or choose another --data-dir",
                    dir.join(name).display()
                );
            }
        }
        // It may be a mount point, or a folder of the user's.
        let made = !dir.try_exists()?;
        let staged = Self {
            data_dir: dir.join(STAGED),
            ..cluster.clone()
        };
        // Of one that was killed.
        skiff_fs::remove_tree(&staged.data_dir)?;
        let mut moved = Vec::new();
        let filled = (|| {
            make_data_dir(&staged.data_dir)?;
            fill(&staged)?;
            for entry in fs::read_dir(&staged.data_dir)? {
                let entry = entry?;
                let to = dir.join(entry.file_name());
                fs::rename(entry.path(), &to).with_context(|| needs_root(&to))?;
                moved.push(to);
            }
            fs::remove_dir(&staged.data_dir)?;
            skiff_fs::sync_folder(dir)?;
            cluster.write(&path)
        })();
        if let Err(error) = filled {
            for left in moved.iter().chain([&staged.data_dir]) {
                if let Err(error) = skiff_fs::remove_tree(left) {
                    say!("{} cannot be removed: {error}", left.display());
                }
            }
            if made {
                let _ = fs::remove_dir(dir);
            }
            return Err(error);
        }
        Ok(cluster)
    }

    /// A new cluster, not recorded yet.
    fn plan(root: &Path, name: &str, wishes: &Wishes) -> Result<Self> {
        let taken: Vec<Self> = all_records(&root.join("clusters"))?;
        let slot = free_slot(name, &taken)?;
        let cluster = Self {
            name: name.to_owned(),
            slot,
            data_dir: absolute(&wishes.data_dir.clone().unwrap_or_else(|| root.join(name)))?,
            bind: wishes.bind.unwrap_or_else(|| default_bind(slot)),
            kubelet_port: if slot == 0 { DEFAULT_KUBELET_PORT } else { 0 },
            pod_cidr: wishes.pod_cidr.clone().unwrap_or_else(|| match slot {
                0 => "10.244.0.0/16".to_owned(),
                slot => format!("10.{}.0.0/16", 160 + u16::from(slot)),
            }),
            service_cidr: wishes.service_cidr.clone().unwrap_or_else(|| match slot {
                0 => "10.96.0.0/12".to_owned(),
                slot => format!("10.{}.0.0/16", 112 + u16::from(slot)),
            }),
            agent: wishes.agent,
            etcd: None,
        };
        if let Some(other) = taken.iter().find(|c| c.data_dir == cluster.data_dir) {
            bail!(
                "{} belongs to cluster {:?}; choose another --data-dir",
                cluster.data_dir.display(),
                other.name
            );
        }
        networks::check(&cluster, &taken, host_address())?;
        Ok(cluster)
    }

    /// Records the cluster as it is now.
    pub fn record(&self) -> Result<()> {
        let _lock = lock_records(Path::new(ROOT))?;
        self.write(&record_path(Path::new(ROOT), &self.name))
    }

    /// The cluster with new wishes. What is written into its objects cannot change any more.
    fn adopt(&self, wishes: &Wishes) -> Result<Self> {
        if self.agent && wishes.bind.is_some() {
            bail!("this machine is a node of another machine's cluster and has no API server to --bind");
        }
        let undo = if self.agent {
            "skiff leave"
        } else {
            "skiff down --delete"
        };
        let fixed = [
            (
                "--data-dir",
                wishes
                    .data_dir
                    .as_ref()
                    .map(|d| absolute(d))
                    .transpose()?
                    .map(|d| d.display().to_string()),
                self.data_dir.display().to_string(),
            ),
            ("--cluster-cidr", wishes.pod_cidr.clone(), self.pod_cidr.clone()),
            (
                "--service-cluster-ip-range",
                wishes.service_cidr.clone(),
                self.service_cidr.clone(),
            ),
        ];
        for (flag, wish, have) in fixed {
            if let Some(wish) = wish.filter(|wish| *wish != have) {
                bail!(
                    "cluster {:?} was made with {flag} {have}, not {wish}; leave the flag out, choose another --name, or remove the cluster with `{undo}{}`",
                    self.name,
                    self.name_flag()
                );
            }
        }
        Ok(Self {
            bind: wishes.bind.unwrap_or(self.bind),
            ..self.clone()
        })
    }

    fn refuse_while_running(&self) -> Result<()> {
        let Some(pid) = self.running()? else { return Ok(()) };
        bail!(
            "cluster {:?} is running (pid {pid}) at {}; to start it with another --bind, first stop it with `skiff down{}`",
            self.name,
            self.endpoint(),
            self.name_flag()
        )
    }

    /// What to add to a command so that it is about this cluster.
    pub fn name_flag(&self) -> String {
        name_flag(&self.name)
    }

    fn write(&self, path: &Path) -> Result<()> {
        let record = serde_json::to_vec_pretty(self)?;
        // A start on a full disk must not need room for what is there already.
        if fs::read(path).is_ok_and(|present| present == record) {
            return Ok(());
        }
        skiff_fs::write_durably(path, &record, 0o644).with_context(|| needs_root(path))
    }

    /// Forgets the cluster: the last step of its deletion.
    pub fn forget(&self) -> Result<()> {
        remove_if_there(&record_path(Path::new(ROOT), &self.name))
    }

    pub fn run_dir(&self) -> PathBuf {
        Path::new(RUN_ROOT).join(&self.name)
    }

    /// Where the process listens that keeps the ingress proxy's sockets.
    pub fn listening_sockets(&self) -> PathBuf {
        self.run_dir().join("ports.sock")
    }

    /// For a server that has no ingress proxy, when the one before had.
    pub fn close_listening_sockets(&self) {
        if let Err(error) = skiff_sockets::close(&self.listening_sockets()) {
            tracing::warn!(%error, "cannot close the sockets that an earlier server left");
        }
    }

    pub fn log_file(&self) -> PathBuf {
        self.data_dir.join("skiff.log")
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.data_dir.join("admin.kubeconfig")
    }

    pub fn bridge(&self) -> String {
        format!("skiff{}", self.slot)
    }

    pub fn nft_table(&self) -> String {
        format!("skiff-{}", self.name)
    }

    pub fn cgroup(&self) -> String {
        format!("skiff-{}", self.name)
    }

    /// The n-th address of the service network: 1 is the API's, 10 is DNS's.
    pub fn service_ip(&self, n: u32) -> Result<IpAddr> {
        let networks = self.service_cidrs()?;
        let network = networks.first().context("the cluster has no service network")?;
        network
            .nth(u128::from(n))
            .with_context(|| format!("the service network {network} has no address {n}"))
    }

    /// The services' networks, one of each family at most.
    pub fn service_cidrs(&self) -> Result<Vec<Cidr>> {
        Ok(parse_list(&self.service_cidr)?)
    }

    /// The pods' networks, one of each family at most.
    pub fn pod_cidrs(&self) -> Result<Vec<Cidr>> {
        Ok(parse_list(&self.pod_cidr)?)
    }

    pub fn is_dual_stack(&self) -> bool {
        self.pod_cidrs().is_ok_and(|cidrs| cidrs.len() > 1)
    }

    /// The pod networks of a node that nobody assigns one to: the first part of the cluster's.
    pub fn node_pod_cidrs(&self) -> Result<Vec<Cidr>> {
        let part = |network: Cidr| {
            let prefix = if network.is_ipv4() { 24 } else { 64 };
            network.part(prefix.max(network.prefix()), 0)
        };
        Ok(self.pod_cidrs()?.into_iter().filter_map(part).collect())
    }

    /// The address of the pods' bridge, where this machine is reached by its pods: as it was when the pod network last
    /// stood here, or as the cluster's first node gets it.
    pub fn pod_gateway(&self) -> Result<IpAddr> {
        let remembered = fs::read(self.cni_conf_dir().join("10-skiff.conflist"))
            .ok()
            .and_then(|bytes| serde_json::from_slice::<serde_json::Value>(&bytes).ok())
            .and_then(|list| serde_json::from_value::<Cidr>(list["plugins"][0]["subnets"][0].clone()).ok());
        let first = self.pod_cidrs()?.first().copied();
        remembered
            .or(first)
            .and_then(|network| network.nth(1))
            .context("the cluster has no pod network")
    }

    pub fn cni_conf_dir(&self) -> PathBuf {
        self.data_dir.join("cni/conf")
    }

    /// The pod network of this machine.
    pub fn pod_network_config(
        &self,
        node_name: &str,
        mode: skiff_network::pods::Mode,
        dns: bool,
    ) -> Result<skiff_network::pods::PodNetworkConfig> {
        Ok(skiff_network::pods::PodNetworkConfig {
            node_name: node_name.to_owned(),
            cluster_cidrs: self.pod_cidrs()?,
            network: self.nft_table(),
            bridge: self.bridge(),
            table: format!("{}-pods", self.nft_table()),
            cni_conf_dir: self.cni_conf_dir(),
            published: self.published().map(|published| published.configuration),
            addresses_dir: self.data_dir.join("cni/addresses"),
            state_dir: self.data_dir.join("cni"),
            mode,
            mtu: None,
            wireguard_port: WIREGUARD_PORT + u16::from(self.slot),
            connection_limit: None,
            dns,
            policy_socket: Some(self.policy_socket()),
        })
    }

    /// Where the CNI plugin waits for a pod's network policies.
    fn policy_socket(&self) -> PathBuf {
        self.run_dir().join("policy.sock")
    }

    /// The network policies of this machine's pods.
    pub fn policy_config(&self, node_name: &str) -> skiff_network::policy::PolicyConfig {
        skiff_network::policy::PolicyConfig {
            node_name: node_name.to_owned(),
            bridge: self.bridge(),
            table: format!("{}-policy", self.nft_table()),
            socket: self.policy_socket(),
        }
    }

    /// Where clients on this machine find the API server.
    pub fn endpoint(&self) -> String {
        let host = match self.bind.ip() {
            ip if ip.is_unspecified() => "127.0.0.1".to_owned(),
            IpAddr::V6(ip) => format!("[{ip}]"),
            ip => ip.to_string(),
        };
        format!("https://{host}:{}", self.bind.port())
    }

    /// Takes the cluster's lock, which the server holds as long as it lives. `None`: a server runs.
    pub fn lock(&self) -> Result<Option<File>> {
        let path = self.data_dir.join("skiff.pid");
        let open = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .open(&path);
        let file = open.with_context(|| needs_root(&path))?;
        // Whoever can open the file can lock it, and keep the cluster from starting.
        file.set_permissions(fs::Permissions::from_mode(0o600))
            .with_context(|| needs_root(&path))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(file)),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot lock {}", path.display())),
        }
    }

    /// The process id of the running server, if one runs.
    pub fn running(&self) -> Result<Option<u32>> {
        if !self.data_dir.is_dir() || self.lock()?.is_some() {
            return Ok(None);
        }
        let text = fs::read_to_string(self.data_dir.join("skiff.pid"))?;
        Ok(text.trim().parse().ok())
    }
}

pub fn name_flag(name: &str) -> String {
    if name == DEFAULT_NAME {
        String::new()
    } else {
        format!(" --name {name}")
    }
}

fn make_data_dir(dir: &Path) -> Result<()> {
    if dir.exists() && !dir.is_dir() {
        bail!("--data-dir {} is not a folder", dir.display());
    }
    skiff_fs::create_folders_durably(dir, 0o755).with_context(|| needs_root(dir))
}

fn check_name(name: &str) -> Result<()> {
    let fits = name.len() <= 40
        && name.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        && name.ends_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        && name
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    if !fits || name == "clusters" {
        bail!(
            "--name {name:?}: use up to 40 lower case letters, digits and '-', with a letter or digit at both ends"
        );
    }
    Ok(())
}

fn record_path(root: &Path, name: &str) -> PathBuf {
    root.join("clusters").join(format!("{name}.json"))
}

/// Held while the clusters of this machine are looked at to make another.
fn lock_records(root: &Path) -> Result<File> {
    let records = root.join("clusters");
    skiff_fs::create_folders_durably(&records, 0o755).with_context(|| needs_root(&records))?;
    let lock = File::create(records.join(".lock")).with_context(|| needs_root(&records))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    Ok(lock)
}

fn read_record(path: &Path) -> Result<Option<Cluster>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(
            serde_json::from_slice(&bytes).with_context(|| format!("{} is damaged", path.display()))?,
        )),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| needs_root(path)),
    }
}

fn all_records(records: &Path) -> Result<Vec<Cluster>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(records)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "json") {
            found.extend(read_record(&path)?);
        }
    }
    Ok(found)
}

fn free_slot(name: &str, taken: &[Cluster]) -> Result<u8> {
    if name == DEFAULT_NAME {
        return Ok(0);
    }
    (1..=MAX_SLOT)
        .find(|slot| taken.iter().all(|c| c.slot != *slot))
        .with_context(|| {
            format!(
                "{MAX_SLOT} clusters exist on this machine; remove one with `skiff down --delete --name NAME`"
            )
        })
}

/// The default cluster has the well-known port, the others the first free one after it.
fn default_bind(slot: u8) -> SocketAddr {
    let any = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port);
    if slot == 0 {
        return any(DEFAULT_API_PORT);
    }
    let first = DEFAULT_API_PORT + u16::from(slot);
    (0..100)
        .map(|n| any(first + n * 41))
        .find(|a| TcpListener::bind(a).is_ok())
        .unwrap_or_else(|| any(first))
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("{} is not a usable path", path.display()))
}

/// What to say of a file that cannot be used.
pub fn needs_root(path: &Path) -> String {
    let hint = if rustix::process::geteuid().is_root() {
        ""
    } else {
        " (skiff needs root: run it with sudo)"
    };
    format!("cannot access {}{hint}", path.display())
}

pub fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e).with_context(|| needs_root(path)),
        _ => Ok(()),
    }
}

/// The address of this host that others reach it by: the source of its default route. No packet is sent.
pub fn host_address() -> Option<IpAddr> {
    // Addresses for documentation, which are nobody's.
    default_source(
        IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        Ipv4Addr::new(203, 0, 113, 1).into(),
    )
}

/// The IPv6 address of this host, if it has one that others reach.
pub fn host_address_v6() -> Option<IpAddr> {
    let elsewhere = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
    default_source(IpAddr::V6(Ipv6Addr::UNSPECIFIED), elsewhere.into())
}

fn default_source(any: IpAddr, elsewhere: IpAddr) -> Option<IpAddr> {
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((elsewhere, 9)).ok()?;
    let usable = |ip: &IpAddr| {
        let link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
        !ip.is_loopback() && !ip.is_unspecified() && !link_local
    };
    socket.local_addr().ok().map(|a| a.ip()).filter(usable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_is_filled_wholly_or_not_at_all() {
        let root = tempfile::tempdir().unwrap();
        let make = |fill: &dyn Fn(&Cluster) -> Result<()>| {
            Cluster::make_filled_in(root.path(), "one", &Wishes::default(), fill)
        };
        let dir = root.path().join("one");
        let write = |cluster: &Cluster| Ok(fs::create_dir(cluster.store_dir())?);
        let failed = make(&|cluster| {
            write(cluster)?;
            bail!("damaged")
        });
        assert_eq!(failed.unwrap_err().to_string(), "damaged");
        assert!(!dir.exists());
        assert!(!root.path().join("clusters/one.json").exists());
        // A folder that was there stays, and what a killed one left goes.
        fs::create_dir_all(dir.join("staged/pki")).unwrap();
        assert!(make(&|_| bail!("damaged")).is_err());
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
        let made = make(&write).unwrap();
        assert_eq!(made.data_dir, dir);
        assert!(dir.join("store").is_dir() && !dir.join("staged").exists());
        assert!(make(&write).is_err(), "there is one");
        fs::remove_file(root.path().join("clusters/one.json")).unwrap();
        let error = make(&write).unwrap_err().to_string();
        assert!(error.contains("store is there already"), "{error}");
        assert!(dir.join("store").is_dir());
    }

    #[test]
    fn clusters_are_kept_apart_and_found_again() {
        let root = tempfile::tempdir().unwrap();
        let make = |name: &str, wishes: &Wishes| Cluster::find_or_make_in(root.path(), name, wishes);
        let none = Wishes::default();
        let first = make("skiff", &none).unwrap();
        let (one, two) = (make("one", &none).unwrap(), make("two", &none).unwrap());
        assert_eq!((first.slot, one.slot, two.slot), (0, 1, 2));
        assert_eq!(make("one", &none).unwrap(), one);
        for (a, b) in [(&first, &one), (&one, &two)] {
            assert_ne!(a.pod_cidr, b.pod_cidr);
            assert_ne!(a.service_cidr, b.service_cidr);
            assert_ne!(a.bridge(), b.bridge());
            assert_ne!(a.data_dir, b.data_dir);
        }
        let error = make(
            "one",
            &Wishes {
                pod_cidr: Some("10.9.0.0/16".into()),
                ..none.clone()
            },
        )
        .unwrap_err();
        assert!(
            error
                .to_string()
                .contains("was made with --cluster-cidr 10.161.0.0/16"),
            "{error}"
        );
        let error = make(
            "three",
            &Wishes {
                data_dir: Some(one.data_dir.clone()),
                ..none
            },
        )
        .unwrap_err();
        assert!(
            error.to_string().contains("belongs to cluster \"one\""),
            "{error}"
        );
    }

    #[test]
    fn what_cannot_work_is_not_recorded() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        fs::write(&file, "mine").unwrap();
        for (wishes, why) in [
            (
                Wishes {
                    pod_cidr: Some("10.9.0.0/30".into()),
                    ..Wishes::default()
                },
                "too small",
            ),
            (
                Wishes {
                    data_dir: Some(file.clone()),
                    ..Wishes::default()
                },
                "is not a folder",
            ),
        ] {
            let error = Cluster::find_or_make_in(root.path(), "one", &wishes).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
            assert!(!record_path(root.path(), "one").exists(), "{why}");
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    }

    #[test]
    fn a_running_cluster_keeps_its_record() {
        let root = tempfile::tempdir().unwrap();
        let wish = |port: u16| Wishes {
            bind: Some(SocketAddr::from(([127, 0, 0, 1], port))),
            ..Wishes::default()
        };
        let cluster = Cluster::find_or_make_in(root.path(), "one", &wish(1)).unwrap();
        let mut lock = cluster.lock().unwrap().unwrap();
        std::io::Write::write_all(&mut lock, b"4711").unwrap();
        let error = Cluster::find_or_make_in(root.path(), "one", &wish(2)).unwrap_err();
        assert!(error.to_string().contains("`skiff down --name one`"), "{error}");
        assert_eq!(
            Cluster::find_or_make_in(root.path(), "one", &Wishes::default()).unwrap(),
            cluster
        );
        drop(lock);
        let moved = Cluster::find_or_make_in(root.path(), "one", &wish(2)).unwrap();
        assert_eq!(moved.bind.port(), 2);
    }

    #[test]
    fn names_are_checked() {
        for bad in ["", "A", "-a", "a-", "a/b", "clusters"] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
        assert!(check_name("e2e-1").is_ok());
    }

    #[test]
    fn addresses_follow_from_the_network() {
        let root = tempfile::tempdir().unwrap();
        let cluster = Cluster::find_or_make_in(root.path(), "skiff", &Wishes::default()).unwrap();
        assert_eq!(cluster.service_ip(10).unwrap().to_string(), "10.96.0.10");
        assert_eq!(cluster.endpoint(), "https://127.0.0.1:6443");
        assert_eq!(cluster.pod_gateway().unwrap().to_string(), "10.244.0.1");
        // Another node's networks, as the CNI configuration remembers them.
        fs::create_dir_all(cluster.cni_conf_dir()).unwrap();
        let list = r#"{"plugins":[{"subnets":["10.244.7.0/24","fd00:7::/64"]}]}"#;
        fs::write(cluster.cni_conf_dir().join("10-skiff.conflist"), list).unwrap();
        assert_eq!(cluster.pod_gateway().unwrap().to_string(), "10.244.7.1");
    }
}
