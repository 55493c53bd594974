//! The end of sandboxes: stop, remove, the loss of a shim, and what a daemon that was killed left half done.
//!
//! A sandbox is first recorded as not ready, then torn down, then recorded as stopped. Every step can be done again, so
//! wherever the daemon is killed, the next one goes on with all that are neither ready nor stopped.

use super::record::{Container, Sandbox, SandboxRecord};
use super::sandboxes::{IFNAME, pause_cgroup};
use super::{Daemon, end_group, internal, namespaces, shim_client};
use crate::cgroup::Cgroup;
use crate::shim::protocol::PAUSE;
use futures::{FutureExt, StreamExt};
use skiff_cri::v1 as cri;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tonic::Status;

/// How often sandboxes that could not be torn down are tried again.
const SWEEP: Duration = Duration::from_secs(10);
/// Sandboxes that are torn down at the same time in a sweep.
const SWEEP_WIDTH: usize = 8;
/// What is reported of a container that ended without anybody to see its exit code.
/// COMPAT: as containerd does for a shim that is gone.
const KILLED: i32 = 128 + libc::SIGKILL;

impl Daemon {
    /// Ends every container, then the shim and the network. Stopping twice is fine.
    pub(super) async fn stop_sandbox(&self, id: &str) -> Result<(), Status> {
        let Ok(sandbox) = self.sandbox(id) else {
            return Ok(());
        };
        let _life = sandbox.life.write().await;
        self.stop_held(&sandbox).await
    }

    /// The caller holds the sandbox's `life` for writing.
    async fn stop_held(&self, sandbox: &Sandbox) -> Result<(), Status> {
        let was_ready = self.set_not_ready(sandbox);
        let stopped = self.tear_down(sandbox).await;
        if was_ready {
            let id = sandbox.get().id;
            self.publish(&id, cri::ContainerEventType::ContainerStoppedEvent, &id);
        }
        stopped
    }

    /// Returns whether it was ready.
    fn set_not_ready(&self, sandbox: &Sandbox) -> bool {
        let was_ready = std::mem::replace(&mut sandbox.record.write().ready, false);
        if was_ready {
            save(sandbox);
        }
        was_ready
    }

    /// Containers, shim, network, namespaces, mounts, cgroups: all that is not on disk. The caller holds the
    /// sandbox's `life` for writing.
    pub(super) async fn tear_down(&self, sandbox: &Sandbox) -> Result<(), Status> {
        let record = sandbox.get();
        if record.stopped {
            return Ok(());
        }
        let containers = self.containers_of(&record.id);
        let kills = containers.iter().map(|container| self.kill_container(container));
        for (killed, container) in futures::future::join_all(kills)
            .await
            .into_iter()
            .zip(&containers)
        {
            if let Err(error) = killed {
                let id = &container.record.read().id;
                tracing::warn!(container = %id, error = error.message(), "cannot kill a container");
            }
        }
        if sandbox.shim().shutdown().await.is_err() {
            // A shim that is gone or does not answer: nothing of it may outlive the sandbox.
            shim_client::kill(record.shim_pid, &record.socket)
                .await
                .map_err(internal("kill the shim"))?;
            let _ = std::fs::remove_file(&record.socket);
        }
        // Nobody is left to start a process: what is in the cgroups now is all there is.
        for container in &containers {
            self.settle(container).await?;
        }
        self.detach_network(&record).await?;
        namespaces::remove(&self.namespaces_of(&record.id)).map_err(internal("remove namespaces"))?;
        namespaces::unmount_all(&sandbox.directory.join("shm")).map_err(internal("unmount shm"))?;
        self.remove_cgroups(&record).await?;
        sandbox.record.write().stopped = true;
        save(sandbox);
        Ok(())
    }

    async fn detach_network(&self, record: &SandboxRecord) -> Result<(), Status> {
        if record.host_network {
            return Ok(());
        }
        match skiff_cni::Network::load(&self.config.cni_conf_dir) {
            Ok(network) => network.del(&self.attachment(record)).await.map_err(|error| {
                Status::unknown(format!(
                    "failed to destroy network for sandbox {:?}: {error}",
                    record.id
                ))
            }),
            // Without a network there is nothing that could take the sandbox off it.
            Err(error) => {
                tracing::warn!(sandbox = %record.id, %error, "no network to detach the sandbox from");
                Ok(())
            }
        }
    }

    async fn remove_cgroups(&self, record: &SandboxRecord) -> Result<(), Status> {
        let pause = pause_cgroup(record).map_err(internal("cgroup parent"))?;
        end_group(&pause)
            .await
            .map_err(internal("remove the pause process's cgroup"))?;
        // The kubelet removes the pod cgroups it made; ours, for sandboxes without a parent, we do.
        let linux = record.config.0.linux.as_ref();
        if linux.is_none_or(|linux| linux.cgroup_parent.is_empty()) {
            let group = Cgroup::new(&record.cgroup_parent).map_err(internal("cgroup parent"))?;
            end_group(&group)
                .await
                .map_err(internal("remove the pod's cgroup"))?;
        }
        Ok(())
    }

    /// Makes sure that nothing of a container runs, and records its end if nobody did. For a container whose shim
    /// is gone or does not answer.
    pub(super) async fn settle(&self, container: &Container) -> Result<(), Status> {
        let record = container.get();
        let group = Cgroup::new(&record.cgroup).map_err(internal("cgroup"))?;
        end_group(&group).await.map_err(|error| {
            Status::deadline_exceeded(format!(
                "an error occurs during waiting for container {:?} to be killed: {error}",
                record.id
            ))
        })?;
        let was_running = container.is_running();
        container.reload();
        if container.is_running() {
            container.set_exited(KILLED, String::new());
        }
        if was_running {
            let event = cri::ContainerEventType::ContainerStoppedEvent;
            self.publish(&record.id, event, &record.sandbox_id);
        }
        Ok(())
    }

    pub(super) async fn remove_sandbox(&self, id: &str) -> Result<(), Status> {
        let Ok(sandbox) = self.sandbox(id) else {
            return Ok(());
        };
        let _life = sandbox.life.write().await;
        self.stop_held(&sandbox).await?;
        for container in self.containers_of(&sandbox.get().id) {
            self.remove_container_held(&container, &sandbox).await?;
        }
        self.delete_sandbox(&sandbox)
    }

    /// The last step: the sandbox is stopped and has no container.
    pub(super) fn delete_sandbox(&self, sandbox: &Sandbox) -> Result<(), Status> {
        let id = sandbox.get().id;
        skiff_fs::remove_tree(&sandbox.directory).map_err(internal("remove the sandbox's directory"))?;
        self.publish(&id, cri::ContainerEventType::ContainerDeletedEvent, &id);
        self.sandboxes.write().remove(&id);
        self.release(&id);
        Ok(())
    }

    /// A sandbox without a readable record: only its directory's name is known. Its shim and its network are found
    /// with the other strangers.
    pub(super) fn discard_sandbox_directory(&self, directory: &Path) {
        let discard = || {
            namespaces::unmount_all(&directory.join("shm"))?;
            skiff_fs::remove_tree(directory)
        };
        if let Err(error) = discard() {
            tracing::warn!(%error, directory = %directory.display(), "cannot remove half a sandbox");
        }
    }

    /// After a start: a sandbox whose shim answers goes on, one whose shim is gone is over.
    pub(super) async fn meet_shim(self: &Arc<Self>, sandbox: &Arc<Sandbox>) {
        let record = sandbox.get();
        if !record.ready {
            // How its containers end is heard of for as long as there is a shim to tell.
            if !record.stopped {
                self.follow_shim(sandbox);
            }
            return;
        }
        let bound = self.namespaces_of(&record.id);
        let is_bound = |needed: bool, name: &str| !needed || namespaces::is_alive(&bound.join(name));
        let namespaces = is_bound(!record.host_network, "net")
            && is_bound(record.shared_pid(), "pid")
            && is_bound(record.user_namespace().is_some(), "user");
        if namespaces && sandbox.shim().ping().await.is_ok() {
            self.follow_shim(sandbox);
            return;
        }
        tracing::warn!(sandbox = %record.id, "the shim of a sandbox is gone");
        // Only what clients must not see any more; the sweep does the rest, which may take its time.
        self.set_not_ready(sandbox);
        if let Err(error) = shim_client::kill(record.shim_pid, &record.socket).await {
            tracing::warn!(sandbox = %record.id, %error, "cannot kill a shim");
        }
        for container in self.containers_of(&record.id) {
            if let Err(error) = self.settle(&container).await {
                tracing::warn!(sandbox = %record.id, error = error.message(), "cannot stop the container");
            }
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
                                    Some(event) if event.id == PAUSE => {
                                        // How the containers ended is still to be heard.
                                        let (daemon, sandbox) = (daemon.clone(), sandbox.clone());
                                        tokio::spawn(async move {
                                            daemon.lose_sandbox(&sandbox, "pause process").await;
                                        });
                                    }
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
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            daemon.lose_sandbox(&sandbox, "shim").await;
        });
    }

    /// Without its shim a pod's containers have no parent and no log, and without its pause process no pid namespace:
    /// the pod is over.
    async fn lose_sandbox(&self, sandbox: &Sandbox, lost: &str) {
        let _life = sandbox.life.write().await;
        let id = sandbox.get().id;
        if !sandbox.get().ready || self.shutdown.is_cancelled() {
            return;
        }
        tracing::warn!(sandbox = %id, "the {lost} of a sandbox is gone; the sandbox is stopped");
        if let Err(error) = self.stop_held(sandbox).await {
            tracing::warn!(sandbox = %id, error = error.message(), "cannot stop a sandbox; trying again");
        }
    }

    /// Finishes what was left half done, now and then.
    pub(super) async fn run_sweep(self: Arc<Self>) {
        loop {
            let sweep = std::panic::AssertUnwindSafe(self.sweep()).catch_unwind();
            if sweep.await.is_err() {
                tracing::error!("a sweep over sandboxes panicked");
            }
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = tokio::time::sleep(SWEEP) => {}
            }
        }
    }

    async fn sweep(&self) {
        let unfinished = |sandbox: &Arc<Sandbox>| {
            let record = sandbox.record.read();
            !record.ready && !record.stopped
        };
        let sandboxes: Vec<_> = self
            .sandboxes
            .read()
            .values()
            .filter(|s| unfinished(s))
            .cloned()
            .collect();
        let finish = async |sandbox: Arc<Sandbox>| {
            // Somebody is at it.
            let Ok(_life) = sandbox.life.try_write() else {
                return;
            };
            if let Err(error) = self.tear_down(&sandbox).await {
                let id = sandbox.get().id;
                tracing::warn!(sandbox = %id, error = error.message(), "cannot tear down a sandbox; trying again");
            }
        };
        futures::stream::iter(sandboxes)
            .for_each_concurrent(SWEEP_WIDTH, finish)
            .await;
    }

    /// Removes what belongs to no sandbox. Only at a start: nothing is being made.
    pub(super) async fn discard_strangers(&self) {
        let sockets: Vec<_> = self.sandboxes.read().values().map(|s| s.get().socket).collect();
        let own = self.config.run_dir.join("shim");
        for (pid, socket) in shim_client::running() {
            let is_stranger = socket.starts_with(&own) && !sockets.contains(&socket);
            if is_stranger && shim_client::shares_folder(pid, &own) {
                tracing::warn!(pid, socket = %socket.display(), "ending a shim without a sandbox");
                if let Err(error) = shim_client::kill(pid, &socket).await {
                    tracing::warn!(pid, %error, "cannot kill a shim");
                }
            }
        }
        for socket in super::list(&own).iter().filter(|path| !sockets.contains(path)) {
            let _ = std::fs::remove_file(socket);
        }
        let is_known = |path: &Path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            self.sandboxes.read().contains_key(name.as_ref())
        };
        for bound in super::list(&self.config.run_dir.join("ns")) {
            if !is_known(&bound)
                && let Err(error) = namespaces::remove(&bound)
            {
                tracing::warn!(%error, namespaces = %bound.display(), "cannot remove namespaces without a sandbox");
            }
        }
        let valid: Vec<_> = self
            .sandboxes
            .read()
            .keys()
            .map(|id| (id.clone(), IFNAME.to_owned()))
            .collect();
        if let Ok(network) = skiff_cni::Network::load(&self.config.cni_conf_dir) {
            let cache = self.config.root.join("cni");
            if let Err(error) = network.gc(&self.config.cni_bin_dirs, &cache, &valid).await {
                tracing::warn!(%error, "cannot free the addresses of sandboxes that are gone");
            }
        }
    }
}

/// Records how far the end of a sandbox has come. A full disk must not keep pods from ending: where the record is older
/// than what was done, the next daemon finds no shim, or does a step again.
fn save(sandbox: &Sandbox) {
    if sandbox.directory.exists()
        && let Err(error) = sandbox.save()
    {
        tracing::warn!(sandbox = %sandbox.get().id, %error, "cannot record the end of a sandbox");
    }
}
