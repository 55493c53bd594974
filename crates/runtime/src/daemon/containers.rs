//! Containers: create, start, stop, remove, and exec in them.

use super::record::{Container, ContainerRecord, SPEC, STATE, Sandbox, Wire, new_id, now_nanos};
use super::shim_client::Error as ShimError;
use super::signals::stop_signal;
use super::{Daemon, internal, spec};
use crate::cgroup::{Cgroup, DeviceRule, default_rules};
use crate::image::Image;
use crate::init::spec::InitSpec;
use crate::shim::protocol::{ContainerState, ExecRequest, StartRequest, frame, read_frame, write_frame};
use serde::{Deserialize, Serialize};
use skiff_cri::v1 as cri;
use skiff_fs::remove_tree;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tonic::Status;

/// What start needs and create made.
#[derive(Serialize, Deserialize)]
struct Prepared {
    spec: InitSpec,
    device_rules: Vec<Rule>,
}

/// What a container was made of.
pub(super) fn specification(container: &Container) -> Result<InitSpec, Status> {
    let prepared: Option<Prepared> = crate::disk::read_json(&container.directory.join(SPEC))
        .map_err(internal("read the container's specification"))?;
    prepared
        .map(|prepared| prepared.spec)
        .ok_or_else(|| Status::internal("the container's specification is gone"))
}

/// A device rule on disk.
#[derive(Serialize, Deserialize)]
struct Rule(Option<bool>, Option<u32>, Option<u32>, String);

impl From<&DeviceRule> for Rule {
    fn from(rule: &DeviceRule) -> Rule {
        Rule(rule.block, rule.major, rule.minor, rule.access.clone())
    }
}

impl From<Rule> for DeviceRule {
    fn from(Rule(block, major, minor, access): Rule) -> DeviceRule {
        DeviceRule {
            block,
            major,
            minor,
            access,
        }
    }
}

pub fn name_of(record: &ContainerRecord) -> String {
    container_name(&record.sandbox_id, &record.config.0)
}

fn container_name(sandbox_id: &str, config: &cri::ContainerConfig) -> String {
    let metadata = config.metadata.clone().unwrap_or_default();
    format!("container/{}_{sandbox_id}_{}", metadata.name, metadata.attempt)
}

/// containerd gives a killed container ten seconds to be gone.
const KILL_WAIT: Duration = Duration::from_secs(30);

impl Daemon {
    pub(super) async fn create_container(
        self: &Arc<Self>,
        sandbox_id: &str,
        config: cri::ContainerConfig,
    ) -> Result<String, Status> {
        let sandbox = self.sandbox(sandbox_id)?;
        let sandbox_id = sandbox.get().id;
        let _life = sandbox.life.read().await;
        if !sandbox.get().ready {
            return Err(Status::failed_precondition(format!(
                "sandbox {sandbox_id:?} is not ready"
            )));
        }
        if config.metadata.is_none() {
            return Err(Status::invalid_argument("container config must include metadata"));
        }
        let wanted = config.image.clone().unwrap_or_default().image;
        let image = self
            .images
            .find(&wanted)
            .map_err(|error| Status::internal(error.to_string()))?
            .ok_or_else(|| Status::not_found(format!("failed to resolve image {wanted:?}: not found")))?;
        let image_volumes = self.image_volumes(&config)?;
        let id = new_id();
        self.reserve(&container_name(&sandbox_id, &config), &id)?;
        let directory = self.config.containers().join(&id);
        match self.prepare_container(&sandbox, &id, &directory, config, &image, &image_volumes) {
            Ok(container) => {
                self.containers.write().insert(id.clone(), Arc::new(container));
                self.publish(&id, cri::ContainerEventType::ContainerCreatedEvent, &sandbox_id);
                Ok(id)
            }
            Err(status) => {
                if let Err(error) = remove_tree(&directory) {
                    tracing::warn!(%error, container = %id, "cannot remove half a container");
                }
                self.images.release(&id);
                self.release(&id);
                Err(status)
            }
        }
    }

    /// The images that are mounted, by the place of their mount.
    fn image_volumes(&self, config: &cri::ContainerConfig) -> Result<BTreeMap<usize, Image>, Status> {
        let mut found = BTreeMap::new();
        for (index, mount) in config.mounts.iter().enumerate() {
            let Some(wanted) = mount.image.as_ref().filter(|image| !image.image.is_empty()) else {
                continue;
            };
            let image = self
                .images
                .find(&wanted.image)
                .map_err(|error| Status::internal(error.to_string()))?
                .ok_or_else(|| {
                    Status::not_found(format!(
                        "ImageVolumeMountFailed: failed to resolve image {:?}: not found",
                        wanted.image
                    ))
                })?;
            found.insert(index, image);
        }
        Ok(found)
    }

    fn prepare_container(
        &self,
        sandbox: &Sandbox,
        id: &str,
        directory: &Path,
        config: cri::ContainerConfig,
        image: &Image,
        image_volumes: &BTreeMap<usize, Image>,
    ) -> Result<Container, Status> {
        let make =
            |path: &Path| std::fs::create_dir_all(path).map_err(internal("make the container's directory"));
        for name in ["upper", "work", "rootfs"] {
            make(&directory.join(name))?;
        }
        use std::os::unix::fs::PermissionsExt;
        // The upper directory is the container's root directory as programs in it see it.
        std::fs::set_permissions(directory.join("upper"), std::fs::Permissions::from_mode(0o755))
            .map_err(internal("make the container's directory"))?;
        if let Some(user) = sandbox.get().user_namespace() {
            let (uid, gid) = (Some(user.uid.host), Some(user.gid.host));
            std::os::unix::fs::chown(directory.join("upper"), uid, gid)
                .map_err(internal("make the container's directory"))?;
        }
        // Its own layers, and those of images that it mounts.
        let volumes = image_volumes.values().flat_map(|image| &image.layers);
        let held: Vec<String> = image.layers.iter().chain(volumes).cloned().collect();
        self.images
            .lease(id, &held)
            .map_err(|error| Status::internal(error.to_string()))?;

        let record = sandbox.get();
        let cgroup_path = format!("{}/{id}", record.cgroup_parent.trim_end_matches('/'));
        let cgroup = Cgroup::new(&cgroup_path).map_err(internal("cgroup"))?;
        let linux = config.linux.clone().unwrap_or_default();
        let oom_score_adj = linux
            .resources
            .as_ref()
            .map_or(0, |resources| resources.oom_score_adj);
        let oom_score_adj = i32::try_from(oom_score_adj).unwrap_or(0).clamp(-1000, 1000);
        let paths = self.sandbox_paths(sandbox);
        let built = spec::build(&spec::Request {
            config: &config,
            sandbox: &paths,
            image,
            image_volumes,
            layers_dir: self.images.layers_directory(),
            directory,
            cgroup: &cgroup,
            oom_score_adj: self
                .oom_floor
                .map_or(oom_score_adj, |floor| oom_score_adj.max(floor)),
            available_capabilities: self.capabilities,
            cdi_spec_dirs: &self.config.cdi_spec_dirs,
        })
        .map_err(|message| Status::unknown(format!("failed to generate container {id:?} spec: {message}")))?;
        let prepared = Prepared {
            spec: built.spec,
            device_rules: built.device_rules.iter().map(Rule::from).collect(),
        };
        crate::disk::write_json(&directory.join(SPEC), &prepared)
            .map_err(internal("record the container"))?;

        let log_directory = &record.config.0.log_directory;
        let log_path = if log_directory.is_empty() || config.log_path.is_empty() {
            String::new()
        } else {
            Path::new(log_directory)
                .join(&config.log_path)
                .to_string_lossy()
                .into_owned()
        };
        let container = Container::new(
            directory.to_owned(),
            ContainerRecord {
                id: id.to_owned(),
                sandbox_id: record.id,
                image_id: image.id.clone(),
                image_ref: image.repo_digests.first().unwrap_or(&image.id).clone(),
                created_at: now_nanos(),
                log_path,
                cgroup: cgroup_path,
                stop_signal: stop_signal(&config, &image.config.stop_signal),
                config: Wire(config),
            },
            ContainerState::default(),
        );
        container.save().map_err(internal("record the container"))?;
        Ok(container)
    }

    pub(super) async fn start_container(&self, id: &str) -> Result<(), Status> {
        let container = self.container(id)?;
        let record = container.get();
        let sandbox = self.sandbox(&record.sandbox_id)?;
        let _life = sandbox.life.read().await;
        let _lock = container.lock.lock().await;
        let state = container.current();
        if state.started_at != 0 || state.finished_at != 0 {
            let state = super::record::cri_state(&state).as_str_name();
            return Err(Status::failed_precondition(format!(
                "container {:?} is in {state} state",
                record.id
            )));
        }
        if !sandbox.get().ready {
            return Err(Status::failed_precondition(format!(
                "sandbox container {:?} is not running",
                record.sandbox_id
            )));
        }
        match self.launch_container(&container, &record, &sandbox).await {
            Ok(state) => {
                self.container_changed(&record.id, state);
                Ok(())
            }
            Err(message) => {
                // COMPAT: a container that could not start has ended with 128 and StartError.
                container.set_exited(128, message.clone());
                // A shim that took too long may still be at it.
                let _ = sandbox.shim().forget(&record.id).await;
                self.release_cgroup(&record).await;
                self.publish(
                    &record.id,
                    cri::ContainerEventType::ContainerStoppedEvent,
                    &record.sandbox_id,
                );
                Err(Status::unknown(format!(
                    "failed to start container {:?}: {message}",
                    record.id
                )))
            }
        }
    }

    async fn launch_container(
        &self,
        container: &Container,
        record: &ContainerRecord,
        sandbox: &Sandbox,
    ) -> Result<ContainerState, String> {
        let prepared: Prepared = crate::disk::read_json(&container.directory.join(SPEC))
            .map_err(|error| error.to_string())?
            .ok_or("its specification is gone")?;
        let config = &record.config.0;
        let linux = config.linux.clone().unwrap_or_default();
        let options = linux
            .security_context
            .unwrap_or_default()
            .namespace_options
            .unwrap_or_default();
        let mut join_pid_of = None;
        if options.pid() == cri::NamespaceMode::Target {
            let target = self
                .container(&options.target_id)
                .map_err(|status| status.message().to_owned())?;
            join_pid_of = Some(target.get().id);
        }
        let cgroup = Cgroup::new(&record.cgroup).map_err(|error| error.to_string())?;
        let rules: Vec<DeviceRule> = prepared.device_rules.into_iter().map(DeviceRule::from).collect();
        let rules = if rules.is_empty() { default_rules() } else { rules };
        let set_up = || -> std::io::Result<()> {
            cgroup.create()?;
            cgroup.restrict_devices(&rules)?;
            cgroup.apply(&linux.resources.as_ref().map(spec::resources).unwrap_or_default())
        };
        set_up().map_err(|error| format!("failed to set up the cgroup: {error}"))?;
        let request = StartRequest {
            id: record.id.clone(),
            state_path: container.directory.join(STATE),
            log_path: (!record.log_path.is_empty()).then(|| record.log_path.clone().into()),
            stdin: config.stdin,
            stdin_once: config.stdin_once,
            spec: prepared.spec,
            join_pid_of,
            oom_file: cgroup.oom_file(),
            kill_file: cgroup.main_procs_file(),
        };
        sandbox.shim().start(request).await.map_err(|error| match error {
            ShimError::Refused(message) => format!("unable to start container process: {message}"),
            other => other.to_string(),
        })
    }

    /// News of a container, from its shim.
    pub(super) fn container_changed(&self, id: &str, state: ContainerState) {
        let Ok(container) = self.container(id) else { return };
        let before = container.current();
        if before == state || (before.finished_at != 0 && state.finished_at == 0) {
            return;
        }
        let sandbox_id = container.get().sandbox_id;
        let event = if state.finished_at != 0 {
            cri::ContainerEventType::ContainerStoppedEvent
        } else {
            cri::ContainerEventType::ContainerStartedEvent
        };
        container.state.send_replace(state);
        self.publish(id, event, &sandbox_id);
    }

    /// Asks with the stop signal, waits, then kills.
    pub(super) async fn stop_container(&self, id: &str, timeout: i64) -> Result<(), Status> {
        let Ok(container) = self.container(id) else {
            return Ok(());
        };
        // A start that is under way ends first: what it started is then stopped.
        drop(container.lock.lock().await);
        if !container.is_running() {
            return Ok(());
        }
        if timeout > 0 {
            let record = container.get();
            let shim = self.sandbox(&record.sandbox_id)?.shim();
            match shim.signal(&record.id, record.stop_signal).await {
                Ok(()) => {
                    let wait = Duration::from_secs(timeout.unsigned_abs());
                    if wait_exited(&container, wait).await {
                        return Ok(());
                    }
                }
                Err(error) => tracing::warn!(container = %record.id, %error, "cannot send the stop signal"),
            }
        }
        self.kill_container(&container).await
    }

    /// Kills what runs of a container, by its shim or, where that is gone, by its cgroup.
    pub(super) async fn kill_container(&self, container: &Container) -> Result<(), Status> {
        let record = container.get();
        if !container.is_running() {
            self.release_cgroup(&record).await;
            return Ok(());
        }
        let shim = self.sandbox(&record.sandbox_id).map(|sandbox| sandbox.shim());
        let ended = match shim {
            Ok(shim) => match shim.signal(&record.id, libc::SIGKILL).await {
                Ok(()) => wait_exited(container, KILL_WAIT).await,
                Err(error) => {
                    tracing::debug!(container = %record.id, %error, "the shim cannot kill, the cgroup is killed");
                    false
                }
            },
            Err(_) => false,
        };
        if ended {
            self.release_cgroup(&record).await;
            return Ok(());
        }
        self.settle(container).await
    }

    /// The group goes with the container's end, not with its record.
    async fn release_cgroup(&self, record: &ContainerRecord) {
        if let Ok(group) = Cgroup::new(&record.cgroup)
            && let Err(error) = super::end_group(&group).await
        {
            tracing::warn!(container = %record.id, %error, "cannot remove the container's cgroup");
        }
    }

    pub(super) async fn remove_container(&self, id: &str) -> Result<(), Status> {
        let Ok(container) = self.container(id) else {
            return Ok(());
        };
        // A container without a sandbox is left to itself, with nobody to start it.
        let Ok(sandbox) = self.sandbox(&container.get().sandbox_id) else {
            self.settle(&container).await?;
            return self.delete_container(&container).await;
        };
        let _life = sandbox.life.read().await;
        self.remove_container_held(&container, &sandbox).await
    }

    /// The caller holds the sandbox's `life`.
    pub(super) async fn remove_container_held(
        &self,
        container: &Container,
        sandbox: &Sandbox,
    ) -> Result<(), Status> {
        let _lock = container.lock.lock().await;
        if !self.containers.read().contains_key(&container.record.read().id) {
            return Ok(());
        }
        if sandbox.get().ready {
            // Also ends a start that a daemon before this one asked for.
            let _ = sandbox.shim().forget(&container.get().id).await;
        }
        self.kill_container(container).await?;
        self.delete_container(container).await
    }

    /// The last step: nothing of the container runs.
    async fn delete_container(&self, container: &Container) -> Result<(), Status> {
        let record = container.get();
        let directory = container.directory.clone();
        // Large layers take a while to delete.
        let removed = tokio::task::spawn_blocking(move || remove_tree(&directory)).await;
        match removed {
            Ok(Err(error)) => return Err(internal("remove the container's directory")(error)),
            // A panic there ends here.
            Err(error) => return Err(Status::internal(error.to_string())),
            Ok(Ok(())) => {}
        }
        self.images.release(&record.id);
        self.publish(
            &record.id,
            cri::ContainerEventType::ContainerDeletedEvent,
            &record.sandbox_id,
        );
        self.containers.write().remove(&record.id);
        self.release(&record.id);
        Ok(())
    }

    /// Starts a process in a running container; the stream carries frames.
    pub(super) async fn open_exec(
        &self,
        id: &str,
        command: &[String],
        tty: bool,
        stdin: bool,
        kill_on_close: bool,
    ) -> Result<UnixStream, Status> {
        let container = self.container(id)?;
        let record = container.get();
        if !container.is_running() {
            let state = super::record::cri_state(&container.current()).as_str_name();
            return Err(Status::failed_precondition(format!(
                "container is in {state} state"
            )));
        }
        if command.is_empty() {
            return Err(Status::invalid_argument("no command specified"));
        }
        let mut process = specification(&container)?.process;
        process.args = command.to_vec();
        process.terminal = tty;
        if tty && !process.env.iter().any(|variable| variable.starts_with("TERM=")) {
            process.env.push("TERM=xterm".into());
        }
        let shim = self.sandbox(&record.sandbox_id)?.shim();
        shim.exec(ExecRequest {
            id: record.id,
            process,
            stdin,
            kill_on_close,
        })
        .await
        .map_err(|error| {
            Status::unknown(format!(
                "failed to exec in container: failed to start exec: {error}"
            ))
        })
    }

    pub(super) async fn exec_sync(
        &self,
        request: cri::ExecSyncRequest,
    ) -> Result<cri::ExecSyncResponse, Status> {
        /// COMPAT: more output than this is cut, as the kubelet expects. Both streams must fit in one message
        /// of 16 MiB.
        const MAX_OUTPUT: usize = 16 * 1024 * 1024 - 64 * 1024;
        let mut stream = self
            .open_exec(&request.container_id, &request.cmd, false, false, true)
            .await?;
        let mut response = cri::ExecSyncResponse::default();
        let collect = async {
            loop {
                let (kind, data) = read_frame(&mut stream)
                    .await
                    .map_err(internal("failed to exec in container"))?;
                let used = response.stdout.len() + response.stderr.len();
                let output = match kind {
                    frame::STDOUT => &mut response.stdout,
                    frame::STDERR => &mut response.stderr,
                    frame::EXIT => return Ok::<i32, Status>(exit_code(&data)),
                    _ => continue,
                };
                let room = MAX_OUTPUT.saturating_sub(used);
                output.extend_from_slice(&data[..data.len().min(room)]);
            }
        };
        if request.timeout <= 0 {
            response.exit_code = collect.await?;
            return Ok(response);
        }
        let timeout = Duration::from_secs(request.timeout.unsigned_abs());
        match tokio::time::timeout(timeout, collect).await {
            Ok(code) => {
                response.exit_code = code?;
                Ok(response)
            }
            Err(_) => {
                let _ = write_frame(&mut stream, frame::SIGNAL, &[libc::SIGKILL as u8]).await;
                Err(Status::deadline_exceeded(format!(
                    "failed to exec in container: timeout {}s exceeded: context deadline exceeded",
                    request.timeout
                )))
            }
        }
    }

    pub(super) async fn update_resources(
        &self,
        request: cri::UpdateContainerResourcesRequest,
    ) -> Result<(), Status> {
        let container = self.container(&request.container_id)?;
        let Some(linux) = request.linux else { return Ok(()) };
        let _lock = container.lock.lock().await;
        let record = container.get();
        let state = container.current();
        if state.finished_at != 0 {
            return Err(Status::failed_precondition("container is not running"));
        }
        if container.is_running() {
            let cgroup = Cgroup::new(&record.cgroup).map_err(internal("cgroup"))?;
            let limit = linux.memory_limit_in_bytes;
            let before = record
                .config
                .0
                .linux
                .as_ref()
                .and_then(|linux| linux.resources.as_ref());
            let shrinks = before.is_none_or(|before| {
                before.memory_limit_in_bytes == 0 || limit < before.memory_limit_in_bytes
            });
            if limit > 0
                && shrinks
                && let Some(used) = cgroup.uses_more_than(limit)
            {
                return Err(Status::failed_precondition(format!(
                    "failed to update resources: memory limit {limit} is below the {used} bytes in use"
                )));
            }
            cgroup
                .apply(&spec::resources(&linux))
                .map_err(internal("failed to update resources"))?;
        }
        {
            let mut record = container.record.write();
            let resources = record
                .config
                .0
                .linux
                .get_or_insert_default()
                .resources
                .get_or_insert_default();
            merge_resources(resources, &linux);
        }
        container.save().map_err(internal("record the container"))
    }
}

/// What an update does not name stays.
fn merge_resources(into: &mut cri::LinuxContainerResources, update: &cri::LinuxContainerResources) {
    let number = |into: &mut i64, update: i64| {
        if update != 0 {
            *into = update;
        }
    };
    number(&mut into.cpu_period, update.cpu_period);
    number(&mut into.cpu_quota, update.cpu_quota);
    number(&mut into.cpu_shares, update.cpu_shares);
    number(&mut into.memory_limit_in_bytes, update.memory_limit_in_bytes);
    number(
        &mut into.memory_swap_limit_in_bytes,
        update.memory_swap_limit_in_bytes,
    );
    number(&mut into.oom_score_adj, update.oom_score_adj);
    if !update.cpuset_cpus.is_empty() {
        into.cpuset_cpus.clone_from(&update.cpuset_cpus);
    }
    if !update.cpuset_mems.is_empty() {
        into.cpuset_mems.clone_from(&update.cpuset_mems);
    }
    for (file, value) in &update.unified {
        into.unified.insert(file.clone(), value.clone());
    }
}

pub fn exit_code(data: &[u8]) -> i32 {
    data.try_into().map_or(255, i32::from_be_bytes)
}

async fn wait_exited(container: &Container, timeout: Duration) -> bool {
    let mut state = container.state.subscribe();
    tokio::time::timeout(timeout, state.wait_for(|state| state.finished_at != 0))
        .await
        .is_ok_and(|result| result.is_ok())
}
