//! A runtime on its own directories, bridge and cgroups, that leaves nothing behind.

use skiff_cri::v1 as cri;
use skiff_cri::{Channel, ImageServiceClient, RuntimeServiceClient};
use skiff_runtime::{Config, Runtime};
use std::collections::HashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub const BUSYBOX: &str = "docker.io/library/busybox:latest";

pub struct Environment {
    directory: tempfile::TempDir,
    pub config: Config,
    pub runtime: Option<Runtime>,
    bridge: String,
}

impl Environment {
    pub async fn new() -> Environment {
        let directory = tempfile::Builder::new()
            .prefix("skr")
            .tempdir()
            .expect("a directory");
        let number: u16 = rand::random();
        let mut config = Config::new(
            directory.path().join("root"),
            directory.path().join("run"),
            format!("skiff-test-{number:x}"),
        );
        config.cdi_spec_dirs = vec![directory.path().join("cdi")];
        let bridge = format!("skt{number:x}");
        let subnet = format!("10.{}.{}.0/24", 100 + (number >> 8) % 100, number & 0xff);
        let data_dir = directory.path().join("ipam");
        write_network(&config, &bridge, &subnet, &data_dir);
        let mut environment = Environment {
            directory,
            config,
            runtime: None,
            bridge,
        };
        environment.start().await;
        let archive = environment.path("busybox.tar");
        busybox_archive(&archive);
        let images = environment.runtime.as_ref().expect("started").images();
        images
            .import(&archive, &skiff_runtime::image::silent())
            .expect("import busybox");
        environment
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub async fn start(&mut self) {
        self.runtime = Some(
            Runtime::start(self.config.clone())
                .await
                .expect("the runtime starts"),
        );
    }

    pub async fn channel(&self) -> Channel {
        let endpoint = format!("unix://{}", self.config.socket().display());
        skiff_cri::connect(&endpoint).await.expect("connects")
    }

    pub async fn client(&self) -> RuntimeServiceClient<Channel> {
        skiff_cri::runtime_client(self.channel().await)
    }

    pub async fn image_client(&self) -> ImageServiceClient<Channel> {
        skiff_cri::image_client(self.channel().await)
    }

    /// Removes everything and looks that nothing is left.
    pub async fn finish(mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.stop().await;
        }
        let parent = self.config.cgroup_parent.clone();
        skiff_runtime::cleanup(self.config.clone())
            .await
            .expect("cleans up");
        assert!(
            !self.config.root.exists() && !self.config.run_dir.exists(),
            "directories are gone"
        );
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        let directory = self.directory.path().to_string_lossy().into_owned();
        let left: Vec<&str> = mounts.lines().filter(|line| line.contains(&directory)).collect();
        assert!(left.is_empty(), "mounts are left: {left:?}");
        let left = cgroups_named(&parent);
        assert!(left.is_empty(), "cgroups are left: {left:?}");
        let left = processes_naming(&directory);
        assert!(left.is_empty(), "processes are left: {left:?}");
    }
}

impl Drop for Environment {
    /// Also after a failed test: nothing stays on the machine.
    fn drop(&mut self) {
        self.runtime = None;
        let (config, bridge) = (self.config.clone(), self.bridge.clone());
        let done = std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().expect("a runtime");
            runtime.block_on(async {
                let _ = skiff_runtime::cleanup(config).await;
                let _ = skiff_cni::remove_bridge(&bridge).await;
            });
        });
        let _ = done.join();
    }
}

fn cgroups_named(name: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for controller in std::fs::read_dir("/sys/fs/cgroup")
        .into_iter()
        .flatten()
        .flatten()
    {
        let path = controller.path().join(name);
        if path.exists() {
            found.push(path);
        }
    }
    found
}

fn processes_naming(text: &str) -> Vec<String> {
    std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok())
        .map(|cmdline| String::from_utf8_lossy(&cmdline).replace('\0', " "))
        .filter(|cmdline| cmdline.contains(text) && cmdline.contains("internal-"))
        .collect()
}

fn write_network(config: &Config, bridge: &str, subnet: &str, data_dir: &Path) {
    std::fs::create_dir_all(&config.cni_conf_dir).expect("conf dir");
    let conf = serde_json::json!({
        "cniVersion": "1.0.0", "name": bridge,
        "plugins": [{"type": "skiff-bridge", "bridge": bridge, "subnet": subnet, "dataDir": data_dir}],
    });
    std::fs::write(config.cni_conf_dir.join("10-test.conflist"), conf.to_string()).expect("conf");
    let bin = &config.cni_bin_dirs[0];
    std::fs::create_dir_all(bin).expect("bin dir");
    std::os::unix::fs::symlink(std::env::current_exe().expect("exe"), bin.join("skiff-bridge"))
        .expect("link");
}

/// `serve <root> <run> <cgroup>`: a daemon in a process of its own, to be killed.
pub fn serve(arguments: &[OsString]) {
    let config = Config::new(&arguments[0], &arguments[1], arguments[2].to_string_lossy());
    tokio::runtime::Runtime::new()
        .expect("a runtime")
        .block_on(async {
            let _runtime = Runtime::start(config).await.expect("the runtime starts");
            println!("ready");
            std::future::pending::<()>().await;
        });
}

pub fn layer() -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut add = |path: &str, kind: tar::EntryType, mode: u32, body: &[u8], link: Option<&str>| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(body.len() as u64);
        match link {
            Some(link) => builder.append_link(&mut header, path, link).expect("link"),
            None => builder.append_data(&mut header, path, body).expect("entry"),
        }
    };
    for directory in ["bin/", "etc/", "tmp/", "home/"] {
        let mode = if directory == "tmp/" { 0o1777 } else { 0o755 };
        add(directory, tar::EntryType::Directory, mode, &[], None);
    }
    let busybox = std::fs::read("/bin/busybox").expect("busybox-static is installed");
    add("bin/busybox", tar::EntryType::Regular, 0o755, &busybox, None);
    for applet in [
        "sh", "cat", "ls", "grep", "sleep", "id", "echo", "hostname", "ip", "mount", "touch", "nc", "wget",
        "head", "tty", "stty", "env", "true", "false", "dd", "mkdir", "ping", "tail", "unshare", "ps",
        "kill",
    ] {
        add(
            &format!("bin/{applet}"),
            tar::EntryType::Symlink,
            0o777,
            &[],
            Some("busybox"),
        );
    }
    let passwd = "root:x:0:0:root:/root:/bin/sh\nweb:x:1001:1002:web:/home:/bin/sh\n";
    add(
        "etc/passwd",
        tar::EntryType::Regular,
        0o644,
        passwd.as_bytes(),
        None,
    );
    let group = "root:x:0:\nweb:x:1002:\nlog:x:1003:web\n";
    add(
        "etc/group",
        tar::EntryType::Regular,
        0o644,
        group.as_bytes(),
        None,
    );
    builder.into_inner().expect("tar")
}

pub fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    sha2::Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).expect("compress");
    encoder.finish().expect("compress")
}

/// An OCI layout: config, layer and manifest blobs, and the index.
pub fn oci_files(name: &str, layer_plain: &[u8], layer_packed: Vec<u8>) -> Vec<(String, Vec<u8>)> {
    let config = serde_json::json!({
        "architecture": if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" },
        "os": "linux",
        "config": {"Cmd": ["sh"], "Env": ["PATH=/bin"], "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", sha256(layer_plain))]},
    })
    .to_string()
    .into_bytes();
    let descriptor = |kind: &str, body: &[u8]| serde_json::json!({"mediaType": kind, "digest": format!("sha256:{}", sha256(body)), "size": body.len()});
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
        "layers": [descriptor("application/vnd.oci.image.layer.v1.tar+gzip", &layer_packed)],
    })
    .to_string()
    .into_bytes();
    let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
    entry["annotations"] = serde_json::json!({"io.containerd.image.name": name});
    let index = serde_json::json!({"schemaVersion": 2, "manifests": [entry]})
        .to_string()
        .into_bytes();
    let blob = |body: Vec<u8>| (format!("blobs/sha256/{}", sha256(&body)), body);
    vec![
        ("oci-layout".into(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec()),
        ("index.json".into(), index),
        blob(config),
        blob(layer_packed),
        blob(manifest),
    ]
}

pub fn write_archive(path: &Path, files: &[(String, Vec<u8>)]) {
    let mut builder = tar::Builder::new(std::fs::File::create(path).expect("archive"));
    for (name, body) in files {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(body.len() as u64);
        builder
            .append_data(&mut header, name, body.as_slice())
            .expect("entry");
    }
    builder.finish().expect("archive");
}

fn busybox_archive(path: &Path) {
    let plain = layer();
    write_archive(path, &oci_files(BUSYBOX, &plain, gzip(&plain)));
}

pub fn sandbox_config(environment: &Environment, name: &str) -> cri::PodSandboxConfig {
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: name.into(),
            uid: format!("uid-{name}"),
            namespace: "default".into(),
            attempt: 0,
        }),
        hostname: name.into(),
        log_directory: environment.path("logs").join(name).to_string_lossy().into_owned(),
        dns_config: Some(cri::DnsConfig {
            servers: vec!["10.96.0.10".into()],
            searches: Vec::new(),
            options: Vec::new(),
        }),
        labels: HashMap::from([("app".into(), name.into())]),
        linux: Some(cri::LinuxPodSandboxConfig {
            security_context: Some(cri::LinuxSandboxSecurityContext {
                namespace_options: Some(cri::NamespaceOption {
                    pid: cri::NamespaceMode::Container as i32,
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

pub fn container_config(name: &str, script: &str) -> cri::ContainerConfig {
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata {
            name: name.into(),
            attempt: 0,
        }),
        image: Some(cri::ImageSpec {
            image: BUSYBOX.into(),
            ..Default::default()
        }),
        command: vec!["/bin/sh".into(), "-c".into(), script.into()],
        log_path: format!("{name}.log"),
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(cri::LinuxContainerResources::default()),
            security_context: Some(cri::LinuxContainerSecurityContext {
                namespace_options: Some(cri::NamespaceOption {
                    pid: cri::NamespaceMode::Container as i32,
                    ..Default::default()
                }),
                seccomp: Some(cri::SecurityProfile::default()),
                masked_paths: vec![
                    "/proc/version".into(),
                    "/proc/scsi".into(),
                    "/sys/firmware".into(),
                ],
                readonly_paths: vec!["/proc/sys".into()],
                ..Default::default()
            }),
        }),
        ..Default::default()
    }
}

/// The security context, to be changed.
pub fn security(config: &mut cri::ContainerConfig) -> &mut cri::LinuxContainerSecurityContext {
    config
        .linux
        .as_mut()
        .expect("linux")
        .security_context
        .as_mut()
        .expect("security context")
}

pub struct Pod {
    pub client: RuntimeServiceClient<Channel>,
    pub id: String,
    pub config: cri::PodSandboxConfig,
}

impl Pod {
    pub async fn run(environment: &Environment, name: &str) -> Pod {
        Pod::run_with(environment, sandbox_config(environment, name)).await
    }

    pub async fn run_with(environment: &Environment, config: cri::PodSandboxConfig) -> Pod {
        let mut client = environment.client().await;
        let request = cri::RunPodSandboxRequest {
            config: Some(config.clone()),
            runtime_handler: String::new(),
        };
        let id = client
            .run_pod_sandbox(request)
            .await
            .expect("sandbox runs")
            .into_inner()
            .pod_sandbox_id;
        Pod { client, id, config }
    }

    pub async fn create(&mut self, config: cri::ContainerConfig) -> Result<String, tonic::Status> {
        let request = cri::CreateContainerRequest {
            pod_sandbox_id: self.id.clone(),
            config: Some(config),
            sandbox_config: Some(self.config.clone()),
        };
        Ok(self
            .client
            .create_container(request)
            .await?
            .into_inner()
            .container_id)
    }

    pub async fn start(&mut self, config: cri::ContainerConfig) -> String {
        let id = self.create(config).await.expect("container is created");
        let request = cri::StartContainerRequest {
            container_id: id.clone(),
        };
        self.client
            .start_container(request)
            .await
            .expect("container starts");
        id
    }

    pub async fn status(&mut self, id: &str) -> cri::ContainerStatus {
        let request = cri::ContainerStatusRequest {
            container_id: id.into(),
            verbose: false,
        };
        self.client
            .container_status(request)
            .await
            .expect("status")
            .into_inner()
            .status
            .expect("status")
    }

    /// The first process, as the host sees it.
    pub async fn pid(&mut self, id: &str) -> i32 {
        let request = cri::ContainerStatusRequest {
            container_id: id.into(),
            verbose: true,
        };
        let info = self
            .client
            .container_status(request)
            .await
            .expect("status")
            .into_inner()
            .info;
        let info: serde_json::Value = serde_json::from_str(&info["info"]).expect("json");
        info["pid"]
            .as_i64()
            .and_then(|pid| i32::try_from(pid).ok())
            .expect("pid")
    }

    /// Waits for the end and returns the status.
    pub async fn wait(&mut self, id: &str) -> cri::ContainerStatus {
        for _ in 0..2000 {
            let status = self.status(id).await;
            if status.state() == cri::ContainerState::ContainerExited {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("container {id} does not end");
    }

    /// Runs a script as a container and returns its exit code and log text.
    pub async fn script(&mut self, config: cri::ContainerConfig) -> (i32, String) {
        let id = self.start(config).await;
        let status = self.wait(&id).await;
        (status.exit_code, log_text(&status.log_path))
    }

    pub async fn exec(&mut self, id: &str, command: &[&str]) -> Result<cri::ExecSyncResponse, tonic::Status> {
        let request = cri::ExecSyncRequest {
            container_id: id.into(),
            cmd: command.iter().map(|word| word.to_string()).collect(),
            timeout: 10,
        };
        Ok(self.client.exec_sync(request).await?.into_inner())
    }

    pub async fn exec_text(&mut self, id: &str, command: &[&str]) -> String {
        let response = self.exec(id, command).await.expect("exec");
        let stdout = String::from_utf8_lossy(&response.stdout).into_owned();
        assert_eq!(
            response.exit_code,
            0,
            "{command:?}: {stdout} {}",
            String::from_utf8_lossy(&response.stderr)
        );
        stdout
    }

    pub async fn remove(&mut self) {
        let id = self.id.clone();
        self.client
            .stop_pod_sandbox(cri::StopPodSandboxRequest {
                pod_sandbox_id: id.clone(),
            })
            .await
            .expect("stops");
        self.client
            .remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id: id })
            .await
            .expect("removes");
    }
}

/// The lines of a CRI log without their heads.
pub fn log_text(path: &str) -> String {
    let log = std::fs::read_to_string(path).unwrap_or_default();
    log.lines()
        .filter_map(|line| line.splitn(4, ' ').nth(3))
        .map(|line| format!("{line}\n"))
        .collect()
}

/// The shim of a sandbox, known by the socket on its command line.
pub fn shim_of(environment: &Environment, sandbox: &str) -> Option<rustix::process::Pid> {
    let socket = environment
        .config
        .run_dir
        .join("shim")
        .join(format!("{}.sock", &sandbox[..13]));
    let shim = std::fs::read_dir("/proc")
        .expect("proc")
        .flatten()
        .find(|entry| {
            let cmdline = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&cmdline).contains(&format!("internal-shim\0{}", socket.display()))
        })?;
    rustix::process::Pid::from_raw(shim.file_name().to_string_lossy().parse().ok()?)
}

/// Waits until `condition` holds.
pub async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    for _ in 0..2000 {
        if condition().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("never happened: {what}");
}
