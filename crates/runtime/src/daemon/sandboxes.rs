//! Pod sandboxes: namespaces, network, files that all containers share, and the shim.

use super::namespaces::{self, Wanted};
use super::record::{Sandbox, SandboxRecord, Wire, new_id, now_nanos};
use super::shim_client::{self, ShimClient};
use super::spec::{SandboxPaths, refuse_user_namespace};
use super::{Daemon, internal};
use crate::cgroup::Cgroup;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags};
use skiff_cri::v1 as cri;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tonic::Status;

/// COMPAT: containerd's size.
const SHM_SIZE: &str = "67108864";
const IFNAME: &str = "eth0";

pub fn name_of(config: &cri::PodSandboxConfig) -> String {
    let metadata = config.metadata.clone().unwrap_or_default();
    format!(
        "sandbox/{}_{}_{}_{}",
        metadata.name, metadata.namespace, metadata.uid, metadata.attempt
    )
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
        refuse_user_namespace(&options).map_err(Status::unimplemented)?;
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
            ips: Vec::new(),
            cgroup_parent,
            socket: self
                .config
                .run_dir
                .join("shim")
                .join(format!("{}.sock", &id[..13])),
            shim_pid: 0,
            pause_pid: 0,
            hostname,
            host_network,
            host_ipc: options.ipc() == cri::NamespaceMode::Node,
        };
        let sandbox = Arc::new(Sandbox::new(self.config.sandboxes().join(&id), record));
        match self
            .build_sandbox(&sandbox, options.pid() == cri::NamespaceMode::Pod, linux.sysctls)
            .await
        {
            Ok(()) => {}
            Err(status) => {
                match self.tear_down(&sandbox).await {
                    Ok(()) => {
                        let _ = skiff_fs::remove_tree(&sandbox.directory);
                        self.release(&id);
                    }
                    // COMPAT: like containerd, it is kept as a sandbox that is not ready: the kubelet
                    // stops and removes it until that works, and nothing is leaked.
                    Err(error) => {
                        tracing::warn!(sandbox = %id, error = error.message(), "cannot clean up after a failed sandbox");
                        self.sandboxes.write().insert(id, sandbox);
                    }
                }
                return Err(status);
            }
        }
        self.sandboxes.write().insert(id.clone(), sandbox.clone());
        self.follow_shim(&sandbox);
        self.publish(&id, cri::ContainerEventType::ContainerCreatedEvent, &id);
        self.publish(&id, cri::ContainerEventType::ContainerStartedEvent, &id);
        Ok(id)
    }

    async fn build_sandbox(
        &self,
        sandbox: &Arc<Sandbox>,
        shared_pid: bool,
        sysctls: std::collections::HashMap<String, String>,
    ) -> Result<(), Status> {
        let record = sandbox.get();
        std::fs::create_dir_all(&sandbox.directory).map_err(internal("make the sandbox's directory"))?;
        // Written before anything else exists, so that a daemon killed in between finds what to undo.
        sandbox.save().map_err(internal("record the sandbox"))?;
        write_files(sandbox).map_err(internal("write the sandbox's files"))?;

        let cgroup = Cgroup::new(&record.cgroup_parent).map_err(internal("cgroup parent"))?;
        let log = sandbox.directory.join("shim.log");
        let shim = ShimClient::spawn(&self.config.exe, &record.socket, &log);
        let network = self.build_network(sandbox, sysctls);
        let (shim, ips) = tokio::join!(shim, network);
        let (shim, pid) = shim.map_err(|error| Status::internal(format!("failed to start shim: {error}")))?;
        sandbox.record.write().shim_pid = pid;
        self.move_shim(pid);
        let ips = ips?;
        let mut pause_pid = 0;
        if shared_pid {
            cgroup.create().map_err(internal("make the pod's cgroup"))?;
            let pause = cgroup.child("pause");
            pause.create().map_err(internal("make the pod's cgroup"))?;
            pause_pid = shim
                .start_pause(pause.procs_files())
                .await
                .map_err(|error| Status::internal(format!("failed to share the pid namespace: {error}")))?;
        }
        {
            let mut record = sandbox.record.write();
            record.ips = ips;
            record.pause_pid = pause_pid;
            record.ready = true;
        }
        sandbox.save().map_err(internal("record the sandbox"))
    }

    /// Puts a shim into a cgroup of its own, so that stopping the daemon's service does not take the
    /// pods with it. In the background: the kernel takes its time over it, and nobody has to wait.
    fn move_shim(&self, pid: i32) {
        let Ok(group) = Cgroup::new(&self.config.cgroup_parent).map(|group| group.child("shims")) else {
            return;
        };
        tokio::task::spawn_blocking(move || {
            for file in group.procs_files() {
                // Fails when the shim has ended already.
                let _ = std::fs::write(&file, pid.to_string());
            }
        });
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
        };
        let (at, shm) = (
            directory.clone(),
            (!record.host_ipc).then(|| sandbox.directory.join("shm")),
        );
        tokio::task::spawn_blocking(move || {
            namespaces::create(&at, wanted)?;
            shm.map_or(Ok(()), |shm| mount_shm(&shm))
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

    fn attachment(&self, record: &SandboxRecord) -> skiff_cni::Attachment {
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

    fn namespaces_of(&self, id: &str) -> PathBuf {
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
            pid: (record.pause_pid > 0).then(|| PathBuf::from(format!("/proc/{}/ns/pid", record.pause_pid))),
            shm: Some(if record.host_ipc {
                PathBuf::from("/dev/shm")
            } else {
                sandbox.directory.join("shm")
            }),
            hosts: sandbox.directory.join("hosts"),
            hostname_file: sandbox.directory.join("hostname"),
            resolv_conf: sandbox.directory.join("resolv.conf"),
            hostname: record.hostname,
        }
    }

    pub(super) fn netns_path(&self, sandbox: &SandboxRecord) -> Option<PathBuf> {
        (!sandbox.host_network).then(|| self.namespaces_of(&sandbox.id).join("net"))
    }

    /// Ends every container, then the network and the shim. Stopping twice is fine.
    pub(super) async fn stop_sandbox(&self, id: &str) -> Result<(), Status> {
        let Ok(sandbox) = self.sandbox(id) else {
            return Ok(());
        };
        let _lock = sandbox.lock.lock().await;
        let id = sandbox.get().id;
        let was_ready = sandbox.get().ready;
        let containers = self.containers_of(&id);
        let stopped =
            futures::future::join_all(containers.iter().map(|container| self.kill_container(container)))
                .await;
        stopped.into_iter().collect::<Result<Vec<()>, Status>>()?;
        // From here on the shim's end is not a loss.
        sandbox.record.write().ready = false;
        sandbox.save().map_err(internal("record the sandbox"))?;
        self.tear_down(&sandbox).await?;
        if was_ready {
            self.publish(&id, cri::ContainerEventType::ContainerStoppedEvent, &id);
        }
        Ok(())
    }

    /// Network, namespaces, mounts, shim: all that is not on disk.
    async fn tear_down(&self, sandbox: &Sandbox) -> Result<(), Status> {
        let record = sandbox.get();
        if !record.host_network {
            match skiff_cni::Network::load(&self.config.cni_conf_dir) {
                Ok(network) => network.del(&self.attachment(&record)).await.map_err(|error| {
                    Status::unknown(format!(
                        "failed to destroy network for sandbox {:?}: {error}",
                        record.id
                    ))
                })?,
                // Without a network there is nothing that could take the sandbox off it.
                Err(error) => {
                    tracing::warn!(sandbox = %record.id, %error, "no network to detach the sandbox from")
                }
            }
        }
        let shim = sandbox.shim();
        if shim.shutdown().await.is_err() {
            // A shim that does not answer: nothing of it may outlive the sandbox.
            shim_client::kill(record.shim_pid, &record.socket);
            let _ = std::fs::remove_file(&record.socket);
        }
        namespaces::remove(&self.namespaces_of(&record.id)).map_err(internal("remove namespaces"))?;
        namespaces::unmount_all(&sandbox.directory.join("shm")).map_err(internal("unmount shm"))?;
        if let Ok(group) = Cgroup::new(&record.cgroup_parent) {
            let pause = group.child("pause");
            super::wait_until_empty(&pause).await;
            let _ = pause.remove();
        }
        // The kubelet removes the pod cgroups it made; ours, for sandboxes without a parent, we do.
        if record
            .config
            .0
            .linux
            .as_ref()
            .is_none_or(|linux| linux.cgroup_parent.is_empty())
            && let Ok(group) = Cgroup::new(&record.cgroup_parent)
        {
            let _ = group.remove();
        }
        Ok(())
    }

    pub(super) async fn remove_sandbox(&self, id: &str) -> Result<(), Status> {
        let Ok(sandbox) = self.sandbox(id) else {
            return Ok(());
        };
        let id = sandbox.get().id;
        self.stop_sandbox(&id).await?;
        for container in self.containers_of(&id) {
            self.remove_container(&container.get().id).await?;
        }
        let _lock = sandbox.lock.lock().await;
        skiff_fs::remove_tree(&sandbox.directory).map_err(internal("remove the sandbox's directory"))?;
        self.publish(&id, cri::ContainerEventType::ContainerDeletedEvent, &id);
        self.sandboxes.write().remove(&id);
        self.release(&id);
        Ok(())
    }

    /// A sandbox without a readable record: only its directory's name is known.
    pub(super) fn discard_sandbox_directory(&self, directory: &Path) {
        if let Some(id) = directory.file_name() {
            let _ = namespaces::remove(&self.config.run_dir.join("ns").join(id));
        }
        let _ = namespaces::unmount_all(&directory.join("shm"));
        let _ = skiff_fs::remove_tree(directory);
    }

    /// After a start: a sandbox whose shim answers goes on, one whose shim is gone is over.
    pub(super) async fn meet_shim(self: &Arc<Self>, sandbox: &Arc<Sandbox>) {
        let record = sandbox.get();
        let alive = record.ready && sandbox.shim().ping().await.is_ok();
        let namespaces = self
            .netns_path(&record)
            .is_none_or(|path| namespaces::is_alive(&path));
        if alive && namespaces {
            self.follow_shim(sandbox);
        } else {
            self.lose_shim(sandbox).await;
        }
    }

    /// Follows a shim's events until it ends or the daemon does.
    pub(super) fn follow_shim(self: &Arc<Self>, sandbox: &Arc<Sandbox>) {
        let (daemon, sandbox) = (self.clone(), sandbox.clone());
        tokio::spawn(async move {
            let mut failures = 0;
            while failures < 3 {
                match sandbox.shim().subscribe().await {
                    Ok(mut subscription) => {
                        failures = 0;
                        loop {
                            tokio::select! {
                                event = subscription.next() => match event {
                                    Some(event) => daemon.container_changed(&event.id, event.state),
                                    None => break,
                                },
                                () = daemon.shutdown.cancelled() => return,
                            }
                        }
                    }
                    Err(_) => failures += 1,
                }
                if !sandbox.get().ready {
                    return;
                }
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
            if sandbox.get().ready && !daemon.shutdown.is_cancelled() {
                tracing::warn!(sandbox = %sandbox.get().id, "the shim is gone");
                daemon.lose_shim(&sandbox).await;
            }
        });
    }

    /// Without its shim a pod's containers have no parent and no log: they are ended.
    async fn lose_shim(&self, sandbox: &Arc<Sandbox>) {
        let id = sandbox.get().id;
        for container in self.containers_of(&id) {
            let record = container.get();
            if let Ok(group) = Cgroup::new(&record.cgroup) {
                super::wait_until_empty(&group).await;
            }
            // What the shim wrote last counts more than what was heard of it.
            if let Ok(Some(state)) = crate::disk::read_json(&container.directory.join(super::record::STATE)) {
                container.state.send_replace(state);
            }
            if container.is_running() {
                container.set_exited(255, String::new());
                self.publish(&record.id, cri::ContainerEventType::ContainerStoppedEvent, &id);
            }
        }
        let was_ready = sandbox.get().ready;
        sandbox.record.write().ready = false;
        if let Err(error) = sandbox.save() {
            tracing::warn!(%error, sandbox = %id, "cannot record a sandbox's end");
        }
        if was_ready {
            self.publish(&id, cri::ContainerEventType::ContainerStoppedEvent, &id);
        }
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

fn mount_shm(path: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(path)?;
    let context = rustix::mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_set_string(&context, "mode", "1777")?;
    rustix::mount::fsconfig_set_string(&context, "size", SHM_SIZE)?;
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
