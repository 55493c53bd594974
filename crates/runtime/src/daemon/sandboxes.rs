//! Pod sandboxes: namespaces, network, files that all containers share, and the shim.

use super::namespaces::{self, Wanted};
use super::record::{Sandbox, SandboxRecord, Wire, new_id, now_nanos};
use super::shim_client::ShimClient;
use super::spec::SandboxPaths;
use super::user_namespaces::{self, Mapping};
use super::{Daemon, internal};
use crate::cgroup::Cgroup;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags};
use skiff_cri::v1 as cri;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tonic::Status;

/// COMPAT: containerd's size.
const SHM_SIZE: &str = "67108864";
pub(super) const IFNAME: &str = "eth0";

pub fn name_of(config: &cri::PodSandboxConfig) -> String {
    let metadata = config.metadata.clone().unwrap_or_default();
    format!(
        "sandbox/{}_{}_{}_{}",
        metadata.name, metadata.namespace, metadata.uid, metadata.attempt
    )
}

/// The cgroup of a sandbox's pause process. One a sandbox: an old sandbox of the pod is torn down while its successor
/// runs.
pub(super) fn pause_cgroup(record: &SandboxRecord) -> std::io::Result<Cgroup> {
    Ok(Cgroup::new(&record.cgroup_parent)?.child(&record.id))
}

impl Daemon {
    pub(super) async fn run_sandbox(
        self: &Arc<Self>,
        config: cri::PodSandboxConfig,
        handler: &str,
    ) -> Result<String, Status> {
        if !handler.is_empty() {
            return Err(Status::unknown(format!(
                "failed to get sandbox runtime: no runtime for {handler:?} is configured"
            )));
        }
        if config.metadata.is_none() {
            return Err(Status::invalid_argument("sandbox config must include metadata"));
        }
        let linux = config.linux.clone().unwrap_or_default();
        let options = linux
            .security_context
            .unwrap_or_default()
            .namespace_options
            .unwrap_or_default();
        let user = user_namespaces::requested(&options).map_err(Status::invalid_argument)?;
        if let (Some(_), Some(why)) = (user, self.no_user_namespaces().await) {
            return Err(Status::unimplemented(format!(
                "user namespaces are not supported by this runtime on this machine: {why}"
            )));
        }
        let host_network = options.network() == cri::NamespaceMode::Node;
        let id = new_id();
        self.reserve(&name_of(&config), &id)?;
        let cgroup_parent = match linux.cgroup_parent.as_str() {
            "" => format!("/{}/pods/{id}", self.config.cgroup_parent.trim_matches('/')),
            parent => parent.to_owned(),
        };
        let hostname = if config.hostname.is_empty() || host_network {
            rustix::system::uname().nodename().to_string_lossy().into_owned()
        } else {
            config.hostname.clone()
        };
        let record = SandboxRecord {
            id: id.clone(),
            config: Wire(config),
            created_at: now_nanos(),
            ready: false,
            stopped: false,
            ips: Vec::new(),
            cgroup_parent,
            socket: self
                .config
                .run_dir
                .join("shim")
                .join(format!("{}.sock", &id[..13])),
            shim_pid: 0,
            hostname,
            host_network,
            host_ipc: options.ipc() == cri::NamespaceMode::Node,
        };
        let sandbox = Arc::new(Sandbox::new(self.config.sandboxes().join(&id), record));
        // Listed from the start, as not ready: whoever removes the pod meanwhile finds it, and waits.
        let life = sandbox.life.write().await;
        self.sandboxes.write().insert(id.clone(), sandbox.clone());
        if let Err(status) = self.build_sandbox(&sandbox, linux.sysctls).await {
            let undone = match self.tear_down(&sandbox).await {
                Ok(()) => self.delete_sandbox(&sandbox),
                Err(error) => Err(error),
            };
            // COMPAT: like containerd, it is kept as a sandbox that is not ready: the kubelet
            // stops and removes it until that works, and nothing is leaked.
            if let Err(error) = undone {
                tracing::warn!(sandbox = %id, error = error.message(), "cannot clean up after a failed sandbox");
            }
            return Err(status);
        }
        self.follow_shim(&sandbox);
        drop(life);
        self.publish(&id, cri::ContainerEventType::ContainerCreatedEvent, &id);
        self.publish(&id, cri::ContainerEventType::ContainerStartedEvent, &id);
        Ok(id)
    }

    async fn build_sandbox(
        &self,
        sandbox: &Arc<Sandbox>,
        sysctls: std::collections::HashMap<String, String>,
    ) -> Result<(), Status> {
        let record = sandbox.get();
        std::fs::create_dir_all(&sandbox.directory).map_err(internal("make the sandbox's directory"))?;
        // Written before anything else exists, so that a daemon killed in between finds what to undo.
        sandbox.save().map_err(internal("record the sandbox"))?;
        write_files(sandbox).map_err(internal("write the sandbox's files"))?;

        let log = sandbox.directory.join("shim.log");
        let shims = Cgroup::new(&self.config.cgroup_parent)
            .map_err(internal("cgroup parent"))?
            .child("shims")
            .procs_files();
        let shim = ShimClient::spawn(&self.config.exe, &record.socket, &log, &shims);
        let network = self.build_network(sandbox, sysctls);
        let (shim, ips) = tokio::join!(shim, network);
        let (shim, pid) = shim.map_err(|error| Status::internal(format!("failed to start shim: {error}")))?;
        sandbox.record.write().shim_pid = pid;
        let ips = ips?;
        if record.shared_pid() {
            let cgroup = pause_cgroup(&record).map_err(internal("cgroup parent"))?;
            cgroup
                .create()
                .map_err(internal("make the pause process's cgroup"))?;
            let namespaces = self.namespaces_of(&record.id);
            let user = record.user_namespace().map(|_| namespaces.join("user"));
            shim.start_pause(cgroup.procs_files(), namespaces.join("pid"), user)
                .await
                .map_err(|error| Status::internal(format!("failed to share the pid namespace: {error}")))?;
        }
        {
            let mut record = sandbox.record.write();
            record.ips = ips;
            record.ready = true;
        }
        let saved = sandbox.save().map_err(internal("record the sandbox"));
        if saved.is_err() {
            sandbox.record.write().ready = false;
        }
        saved
    }

    async fn build_network(
        &self,
        sandbox: &Arc<Sandbox>,
        sysctls: std::collections::HashMap<String, String>,
    ) -> Result<Vec<String>, Status> {
        let record = sandbox.get();
        let directory = self.namespaces_of(&record.id);
        let wanted = Wanted {
            net: !record.host_network,
            ipc: !record.host_ipc,
            uts: !record.host_network,
            hostname: record.hostname.clone(),
            sysctls,
            user: record.user_namespace(),
        };
        let user = record.user_namespace();
        let (at, shm) = (
            directory.clone(),
            (!record.host_ipc).then(|| sandbox.directory.join("shm")),
        );
        tokio::task::spawn_blocking(move || {
            namespaces::create(&at, wanted)?;
            shm.map_or(Ok(()), |shm| mount_shm(&shm, user))
        })
        .await
        .map_err(|error| Status::internal(error.to_string()))?
        .map_err(internal("failed to create namespaces"))?;
        if record.host_network {
            return Ok(Vec::new());
        }
        let fail = |error: skiff_cni::Error| {
            Status::unknown(format!(
                "failed to setup network for sandbox {:?}: {error}",
                record.id
            ))
        };
        let network = skiff_cni::Network::load(&self.config.cni_conf_dir).map_err(fail)?;
        let result = network.add(&self.attachment(&record)).await.map_err(fail)?;
        let ips: Vec<String> = result.pod_ips().iter().map(ToString::to_string).collect();
        Ok(ips)
    }

    pub(super) fn attachment(&self, record: &SandboxRecord) -> skiff_cni::Attachment {
        let config = &record.config.0;
        let metadata = config.metadata.clone().unwrap_or_default();
        let mut runtime_config = serde_json::Map::new();
        let ports: Vec<serde_json::Value> = config
            .port_mappings
            .iter()
            .filter(|mapping| mapping.host_port > 0)
            .map(|mapping| {
                serde_json::json!({
                    "hostPort": mapping.host_port,
                    "containerPort": mapping.container_port,
                    "protocol": mapping.protocol().as_str_name().to_ascii_lowercase(),
                    "hostIP": mapping.host_ip,
                })
            })
            .collect();
        if !ports.is_empty() {
            runtime_config.insert("portMappings".into(), ports.into());
        }
        let netns = self.namespaces_of(&record.id).join("net");
        skiff_cni::Attachment {
            bin_dirs: self.config.cni_bin_dirs.clone(),
            cache_dir: self.config.root.join("cni"),
            container_id: record.id.clone(),
            netns: namespaces::is_alive(&netns).then_some(netns),
            ifname: IFNAME.into(),
            pod: skiff_cni::PodArgs {
                namespace: metadata.namespace,
                name: metadata.name,
                uid: metadata.uid,
            },
            runtime_config,
        }
    }

    pub(super) fn namespaces_of(&self, id: &str) -> PathBuf {
        self.config.run_dir.join("ns").join(id)
    }

    pub(super) fn sandbox_paths(&self, sandbox: &Sandbox) -> SandboxPaths {
        let record = sandbox.get();
        let namespaces = self.namespaces_of(&record.id);
        let unless = |host: bool, name: &str| (!host).then(|| namespaces.join(name));
        SandboxPaths {
            net: unless(record.host_network, "net"),
            ipc: unless(record.host_ipc, "ipc"),
            uts: unless(record.host_network, "uts"),
            pid: record.shared_pid().then(|| namespaces.join("pid")),
            shm: Some(if record.host_ipc {
                PathBuf::from("/dev/shm")
            } else {
                sandbox.directory.join("shm")
            }),
            hosts: sandbox.directory.join("hosts"),
            hostname_file: sandbox.directory.join("hostname"),
            resolv_conf: sandbox.directory.join("resolv.conf"),
            user: record
                .user_namespace()
                .map(|mapping| (namespaces.join("user"), mapping)),
            hostname: record.hostname,
        }
    }

    /// Why no pod can have a user namespace. That they can is found out once.
    pub(super) async fn no_user_namespaces(&self) -> Option<String> {
        let directory = self.config.root.clone();
        let tried = self.user_namespaces_work.get_or_try_init(async || {
            tokio::task::spawn_blocking(move || user_namespaces::unsupported(&directory))
                .await
                .unwrap_or_else(|error| Some(error.to_string()))
                .map_or(Ok(()), Err)
        });
        tried.await.err()
    }

    pub(super) fn netns_path(&self, sandbox: &SandboxRecord) -> Option<PathBuf> {
        (!sandbox.host_network).then(|| self.namespaces_of(&sandbox.id).join("net"))
    }
}

/// hostname, hosts and resolv.conf for containers that bring none of their own.
fn write_files(sandbox: &Sandbox) -> std::io::Result<()> {
    let record = sandbox.get();
    std::fs::write(
        sandbox.directory.join("hostname"),
        format!("{}\n", record.hostname),
    )?;
    let hosts = std::fs::read("/etc/hosts").unwrap_or_default();
    std::fs::write(sandbox.directory.join("hosts"), hosts)?;
    let resolv_conf = match &record.config.0.dns_config {
        Some(dns) if !dns.servers.is_empty() || !dns.searches.is_empty() || !dns.options.is_empty() => {
            resolv_conf(dns).into_bytes()
        }
        _ => std::fs::read("/etc/resolv.conf").unwrap_or_default(),
    };
    std::fs::write(sandbox.directory.join("resolv.conf"), resolv_conf)
}

fn resolv_conf(dns: &cri::DnsConfig) -> String {
    let mut text = String::new();
    if !dns.searches.is_empty() {
        text += &format!("search {}\n", dns.searches.join(" "));
    }
    for server in &dns.servers {
        text += &format!("nameserver {server}\n");
    }
    if !dns.options.is_empty() {
        text += &format!("options {}\n", dns.options.join(" "));
    }
    text
}

fn mount_shm(path: &Path, user: Option<Mapping>) -> std::io::Result<()> {
    std::fs::create_dir_all(path)?;
    let context = rustix::mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_set_string(&context, "mode", "1777")?;
    rustix::mount::fsconfig_set_string(&context, "size", SHM_SIZE)?;
    if let Some(user) = user {
        rustix::mount::fsconfig_set_string(&context, "uid", user.uid.host.to_string())?;
        rustix::mount::fsconfig_set_string(&context, "gid", user.gid.host.to_string())?;
    }
    rustix::mount::fsconfig_create(&context)?;
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let tree = rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, flags)?;
    rustix::mount::move_mount(
        &tree,
        "",
        rustix::fs::CWD,
        path,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolver_file() {
        let dns = cri::DnsConfig {
            servers: vec!["10.96.0.10".into()],
            searches: vec!["default.svc.cluster.local".into(), "svc.cluster.local".into()],
            options: vec!["ndots:5".into()],
        };
        let expected =
            "search default.svc.cluster.local svc.cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n";
        assert_eq!(resolv_conf(&dns), expected);
    }
}
