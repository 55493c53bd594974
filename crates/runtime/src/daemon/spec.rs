//! From CRI's configuration and the image's to what the first process is told. Pure but for looking at
//! host paths that are named in the configuration.

use super::capabilities;
use super::cdi;
use super::devices::{add_cdi_node, add_device, cdi_mount, default_devices, host_devices};
use super::user_namespaces::{self, Mapping};
use crate::cgroup::{self, Cgroup, DeviceRule, Resources};
use crate::image::{Image, ImageConfig};
use crate::init::spec::{
    ImageTree, InitSpec, Mount, MountKind, Namespaces, PidNamespace, ProcessSpec, Propagation, Rootfs,
    UserNamespace, UserSpec,
};
use crate::seccomp;
use skiff_cri::v1 as cri;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What the sandbox brings.
pub struct SandboxPaths {
    pub net: Option<PathBuf>,
    pub ipc: Option<PathBuf>,
    pub uts: Option<PathBuf>,
    /// The pod's shared pid namespace.
    pub pid: Option<PathBuf>,
    pub shm: Option<PathBuf>,
    pub hosts: PathBuf,
    pub hostname_file: PathBuf,
    pub resolv_conf: PathBuf,
    /// The pod's user namespace: the file it is bound to, and its ids.
    pub user: Option<(PathBuf, Mapping)>,
    pub hostname: String,
}

pub struct Request<'a> {
    pub config: &'a cri::ContainerConfig,
    pub sandbox: &'a SandboxPaths,
    pub image: &'a Image,
    /// The images that are mounted as volumes, by the place of their mount in the configuration.
    pub image_volumes: &'a BTreeMap<usize, Image>,
    pub layers_dir: PathBuf,
    /// The container's own directory: upper, work, rootfs are below it.
    pub directory: &'a Path,
    pub cgroup: &'a Cgroup,
    pub oom_score_adj: i32,
    pub available_capabilities: u64,
    pub cdi_spec_dirs: &'a [PathBuf],
}

pub struct Built {
    pub spec: InitSpec,
    pub device_rules: Vec<DeviceRule>,
}

const DEFAULT_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

pub fn build(request: &Request<'_>) -> Result<Built, String> {
    let config = request.config;
    let linux = config.linux.clone().unwrap_or_default();
    let security = linux.security_context.unwrap_or_default();
    refuse_unsupported(&security)?;
    let of_pod = request.sandbox.user.as_ref().map(|(_, mapping)| *mapping);
    check_user_namespace(config, &security, of_pod)?;
    if let Some(group) = &security.run_as_group
        && security.run_as_user.is_none()
        && security.run_as_username.is_empty()
    {
        // COMPAT: containerd's words.
        return Err(format!(
            "user group \"{}\" is specified without user",
            group.value
        ));
    }
    let privileged = security.privileged;
    let names: Vec<&str> = { config.cdi_devices.iter() }
        .map(|device| device.name.as_str())
        .collect();
    let edits = cdi::edits(request.cdi_spec_dirs, &names)?;

    let capabilities = capabilities::resolve(
        security.capabilities.as_ref(),
        privileged,
        request.available_capabilities,
    )?;
    let process = ProcessSpec {
        args: arguments(config, &request.image.config)?,
        env: environment(
            config,
            &request.image.config,
            &request.sandbox.hostname,
            &edits.env,
        )?,
        cwd: first_of(&config.working_dir, &request.image.config.working_dir),
        user: user(&security, &request.image.config, &edits.additional_gids),
        capabilities,
        no_new_privileges: security.no_new_privs,
        oom_score_adj: Some(request.oom_score_adj),
        cgroup_procs: request.cgroup.procs_files(),
        seccomp: seccomp_filter(&security, capabilities.bounding)?,
        terminal: config.tty,
        user_namespace: request
            .sandbox
            .user
            .as_ref()
            .map(|(path, mapping)| UserNamespace {
                path: path.clone(),
                root_uid: mapping.uid.host,
                root_gid: mapping.gid.host,
            }),
    };
    let (mut devices, mut device_rules) = if privileged {
        (host_devices(), vec![DeviceRule::everything()])
    } else {
        (default_devices(), cgroup::default_rules())
    };
    for device in &config.devices {
        add_device(device, &mut devices, &mut device_rules)?;
    }
    for node in &edits.device_nodes {
        add_cdi_node(node, &process.user, &mut devices, &mut device_rules)?;
    }
    let spec = InitSpec {
        rootfs: Rootfs {
            layers_dir: request.layers_dir.clone(),
            lower: request.image.layers.iter().rev().cloned().collect(),
            upper: request.directory.join("upper"),
            work: request.directory.join("work"),
            mountpoint: request.directory.join("rootfs"),
            readonly: security.readonly_rootfs,
        },
        namespaces: namespaces(&security, request.sandbox),
        mounts: mounts(request, privileged, &edits.mounts)?,
        devices,
        masked_paths: if privileged {
            Vec::new()
        } else {
            security.masked_paths.clone()
        },
        readonly_paths: if privileged {
            Vec::new()
        } else {
            security.readonly_paths.clone()
        },
        cgroup_mounts: request.cgroup.directories(),
        cgroup_readonly: !privileged,
        process,
    };
    Ok(Built { spec, device_rules })
}

/// What cannot be done is said, not skipped.
fn refuse_unsupported(security: &cri::LinuxContainerSecurityContext) -> Result<(), String> {
    if let Some(profile) = &security.apparmor
        && profile.profile_type != cri::security_profile::ProfileType::Unconfined as i32
    {
        return Err("AppArmor profiles are not supported by this runtime".into());
    }
    // COMPAT: like containerd, labels are ignored where the kernel does not enforce them.
    if let Some(label) = &security.selinux_options
        && *label != cri::SeLinuxOption::default()
        && Path::new("/sys/fs/selinux/enforce").exists()
    {
        return Err("SELinux labels are not supported by this runtime".into());
    }
    Ok(())
}

/// A container is in its pod's user namespace, and so are its mounts.
fn check_user_namespace(
    config: &cri::ContainerConfig,
    security: &cri::LinuxContainerSecurityContext,
    of_pod: Option<Mapping>,
) -> Result<(), String> {
    if let Some(options) = &security.namespace_options
        && options.userns_options.is_some()
        && user_namespaces::requested(options)? != of_pod
    {
        // COMPAT: containerd's words.
        return Err("user namespace config for sandbox is different from container".into());
    }
    for mount in &config.mounts {
        let path = &mount.container_path;
        match is_idmapped(mount, of_pod) {
            Err(()) => {
                return Err(format!(
                    "the ID mappings of mount {path:?} must be those of the pod's user namespace"
                ));
            }
            Ok(_) if of_pod.is_some() && mount.propagation() == BIDIRECTIONAL => {
                return Err(format!(
                    "mount {path:?}: Bidirectional mount propagation is not possible in a user namespace"
                ));
            }
            Ok(_) => {}
        }
    }
    Ok(())
}

const BIDIRECTIONAL: cri::MountPropagation = cri::MountPropagation::PropagationBidirectional;

fn is_idmapped(mount: &cri::Mount, of_pod: Option<Mapping>) -> Result<bool, ()> {
    if mount.uid_mappings.is_empty() && mount.gid_mappings.is_empty() {
        return Ok(false);
    }
    let wanted = cri::NamespaceOption {
        userns_options: Some(cri::UserNamespace {
            mode: cri::NamespaceMode::Pod as i32,
            uids: mount.uid_mappings.clone(),
            gids: mount.gid_mappings.clone(),
        }),
        ..Default::default()
    };
    match user_namespaces::requested(&wanted) {
        Ok(wanted) if wanted == of_pod => Ok(true),
        _ => Err(()),
    }
}

fn first_of(first: &str, second: &str) -> String {
    if first.is_empty() {
        second.to_owned()
    } else {
        first.to_owned()
    }
}

fn arguments(config: &cri::ContainerConfig, image: &ImageConfig) -> Result<Vec<String>, String> {
    let (mut command, mut args) = (config.command.clone(), config.args.clone());
    if command.is_empty() {
        if args.is_empty() {
            args = image.cmd.clone();
        }
        command = image.entrypoint.clone();
    }
    command.extend(args);
    if command.is_empty() {
        return Err("no command specified".into());
    }
    Ok(command)
}

/// Later values win: defaults, the image's, the container's, those of its devices.
fn environment(
    config: &cri::ContainerConfig,
    image: &ImageConfig,
    hostname: &str,
    of_devices: &[String],
) -> Result<Vec<String>, String> {
    let mut environment: Vec<String> = Vec::new();
    let mut set = |variable: String| {
        let key = variable.split('=').next().unwrap_or_default().to_owned() + "=";
        match environment.iter_mut().find(|existing| existing.starts_with(&key)) {
            Some(existing) => *existing = variable,
            None => environment.push(variable),
        }
    };
    set(DEFAULT_PATH.to_owned());
    set(format!("HOSTNAME={hostname}"));
    if config.tty {
        set("TERM=xterm".to_owned());
    }
    for variable in &image.env {
        set(variable.clone());
    }
    for pair in &config.envs {
        let value = std::str::from_utf8(&pair.value)
            .map_err(|_| format!("the value of environment variable {} is not UTF-8", pair.key))?;
        set(format!("{}={value}", pair.key));
    }
    for variable in of_devices {
        set(variable.clone());
    }
    Ok(environment)
}

fn user(security: &cri::LinuxContainerSecurityContext, image: &ImageConfig, more_groups: &[u32]) -> UserSpec {
    let (image_user, image_group) = image.user.split_once(':').unwrap_or((&image.user, ""));
    let (user, mut group) = match (&security.run_as_user, security.run_as_username.as_str()) {
        (Some(uid), _) => (uid.value.to_string(), String::new()),
        (None, "") => (image_user.to_owned(), image_group.to_owned()),
        (None, name) => (name.to_owned(), String::new()),
    };
    if let Some(gid) = &security.run_as_group {
        group = gid.value.to_string();
    }
    UserSpec {
        user,
        group,
        supplemental_groups: security
            .supplemental_groups
            .iter()
            .filter_map(|gid| u32::try_from(*gid).ok())
            .chain(more_groups.iter().copied())
            .collect(),
        strict_groups: security.supplemental_groups_policy == cri::SupplementalGroupsPolicy::Strict as i32,
    }
}

fn seccomp_filter(
    security: &cri::LinuxContainerSecurityContext,
    capabilities: u64,
) -> Result<Option<Vec<u64>>, String> {
    use cri::security_profile::ProfileType;
    if security.privileged {
        return Ok(None);
    }
    #[allow(deprecated)] // older kubelets send only this
    let (kind, path) = match (&security.seccomp, security.seccomp_profile_path.as_str()) {
        (Some(profile), _) => (profile.profile_type(), profile.localhost_ref.clone()),
        (None, "" | "unconfined") => (ProfileType::Unconfined, String::new()),
        (None, "runtime/default" | "docker/default") => (ProfileType::RuntimeDefault, String::new()),
        (None, other) => (
            ProfileType::Localhost,
            other.trim_start_matches("localhost/").to_owned(),
        ),
    };
    let profile = match kind {
        ProfileType::Unconfined => return Ok(None),
        ProfileType::RuntimeDefault => seccomp::default::profile(capabilities),
        ProfileType::Localhost => {
            let body = read_profile(Path::new(&path))
                .map_err(|error| format!("failed to load seccomp profile {path:?}: {error}"))?;
            seccomp::Profile::parse(&body).map_err(|error| format!("seccomp profile {path:?}: {error}"))?
        }
    };
    seccomp::compile(&profile)
        .map(Some)
        .map_err(|error| error.to_string())
}

/// A profile has some tens of kilobytes. What is no file, or has no end, is none.
fn read_profile(path: &Path) -> std::io::Result<Vec<u8>> {
    use std::io::Read;
    const MAX: u64 = 4 * 1024 * 1024;
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::CLOEXEC;
    let file = std::fs::File::from(rustix::fs::open(path, flags, rustix::fs::Mode::empty())?);
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() > MAX {
        return Err(std::io::Error::other("it is not a small file"));
    }
    let mut body = Vec::new();
    file.take(MAX).read_to_end(&mut body)?;
    Ok(body)
}

fn namespaces(security: &cri::LinuxContainerSecurityContext, sandbox: &SandboxPaths) -> Namespaces {
    let options = security.namespace_options.clone().unwrap_or_default();
    let pid = match options.pid() {
        cri::NamespaceMode::Node => PidNamespace::Host,
        cri::NamespaceMode::Pod => sandbox.pid.clone().map_or(PidNamespace::New, PidNamespace::Join),
        // A target's process is known when the container starts.
        cri::NamespaceMode::Container | cri::NamespaceMode::Target => PidNamespace::New,
    };
    Namespaces {
        net: sandbox.net.clone(),
        ipc: sandbox.ipc.clone(),
        uts: sandbox.uts.clone(),
        pid,
    }
}

pub(super) fn filesystem(
    target: &str,
    fstype: &str,
    options: &[&str],
    readonly: bool,
    noexec: bool,
    nodev: bool,
) -> Mount {
    Mount {
        target: target.into(),
        kind: MountKind::Filesystem {
            fstype: fstype.into(),
            options: options.iter().map(|option| option.to_string()).collect(),
        },
        volume: false,
        readonly,
        nosuid: true,
        nodev,
        noexec,
    }
}

fn bind(target: &str, source: &Path, readonly: bool) -> Mount {
    let kind = MountKind::Bind {
        source: source.to_owned(),
        propagation: Propagation::Private,
        recursive_readonly: false,
        idmapped: false,
    };
    Mount {
        target: target.into(),
        kind,
        volume: false,
        readonly,
        nosuid: false,
        nodev: false,
        noexec: false,
    }
}

fn mounts(request: &Request<'_>, privileged: bool, of_devices: &[cdi::Mount]) -> Result<Vec<Mount>, String> {
    let (config, sandbox) = (request.config, request.sandbox);
    let user = sandbox.user.as_ref().map(|(_, mapping)| *mapping);
    // The group of terminals, as the host knows it.
    let tty = user.map_or(Some(5), |mapping| mapping.gid.to_host(5));
    let tty = tty.ok_or("the user namespace has no group 5")?;
    let mut mounts = vec![
        filesystem("/proc", "proc", &[], false, true, true),
        filesystem("/dev", "tmpfs", &["mode=755", "size=65536k"], false, false, false),
        filesystem(
            "/dev/pts",
            "devpts",
            &["newinstance", "ptmxmode=0666", "mode=0620", &format!("gid={tty}")],
            false,
            true,
            false,
        ),
        filesystem("/dev/mqueue", "mqueue", &[], false, true, true),
        filesystem("/sys", "sysfs", &[], !privileged, true, true),
        Mount {
            target: "/sys/fs/cgroup".into(),
            kind: MountKind::Cgroup,
            volume: false,
            readonly: !privileged,
            nosuid: true,
            nodev: true,
            noexec: true,
        },
    ];
    let named = |path: &str| {
        config
            .mounts
            .iter()
            .any(|mount| clean_path(&mount.container_path) == path)
    };
    let readonly_rootfs = config
        .linux
        .as_ref()
        .and_then(|linux| linux.security_context.as_ref())
        .is_some_and(|security| security.readonly_rootfs);
    for (path, source) in [
        ("/etc/hostname", &sandbox.hostname_file),
        ("/etc/hosts", &sandbox.hosts),
        ("/etc/resolv.conf", &sandbox.resolv_conf),
    ] {
        if !named(path) {
            let mut mount = bind(path, source, readonly_rootfs);
            if let MountKind::Bind { idmapped, .. } = &mut mount.kind {
                *idmapped = user.is_some();
            }
            mounts.push(mount);
        }
    }
    if let Some(shm) = &sandbox.shm
        && !named("/dev/shm")
    {
        let mut mount = bind("/dev/shm", shm, false);
        (mount.nosuid, mount.nodev, mount.noexec) = (true, true, true);
        mounts.push(mount);
    }
    let mut own = Vec::new();
    for (index, mount) in config.mounts.iter().enumerate() {
        own.push(match request.image_volumes.get(&index) {
            Some(image) => image_volume(request, index, mount, image)?,
            None => volume(mount, user)?,
        });
    }
    for mount in of_devices {
        let made = cdi_mount(mount)?;
        own.retain(|other| other.target != made.target);
        own.push(made);
    }
    // A volume inside another must come after it, whatever the order they are named in.
    own.sort_by_key(|mount| Path::new(&mount.target).components().count());
    mounts.extend(own);
    Ok(mounts)
}

pub(super) fn clean_path(path: &str) -> String {
    let trimmed = path.trim_end_matches('/');
    if trimmed.is_empty() {
        "/".into()
    } else {
        trimmed.to_owned()
    }
}

/// COMPAT: the start of the message is the kubelet's name for it.
fn image_volume(
    request: &Request<'_>,
    index: usize,
    mount: &cri::Mount,
    image: &Image,
) -> Result<Mount, String> {
    if !mount.container_path.starts_with('/') {
        return Err(format!("mount path {:?} is not absolute", mount.container_path));
    }
    let sub_path = Path::new(&mount.image_sub_path);
    let is_inside = sub_path.components().all(|part| {
        matches!(
            part,
            std::path::Component::Normal(_) | std::path::Component::CurDir
        )
    });
    if !is_inside {
        let path = &mount.image_sub_path;
        return Err(format!(
            "ImageVolumeMountFailed: image sub path {path:?} leaves the image"
        ));
    }
    if !mount.image_sub_path.is_empty() && !is_in_layers(&request.layers_dir, &image.layers, sub_path) {
        let path = &mount.image_sub_path;
        return Err(format!(
            "ImageVolumeMountFailed: image sub path {path:?} does not exist"
        ));
    }
    let images = request.directory.join("images");
    let (empty, mountpoint) = (images.join("empty"), images.join(index.to_string()));
    for directory in [&empty, &mountpoint] {
        std::fs::create_dir_all(directory)
            .map_err(|error| format!("failed to make {}: {error}", directory.display()))?;
    }
    Ok(Mount {
        target: clean_path(&mount.container_path),
        kind: MountKind::Image(ImageTree {
            layers_dir: request.layers_dir.clone(),
            lower: image.layers.iter().rev().cloned().collect(),
            empty,
            mountpoint,
            sub_path: mount.image_sub_path.clone(),
        }),
        volume: true,
        readonly: true,
        nosuid: true,
        nodev: true,
        noexec: true,
    })
}

/// Whether the topmost layer that knows the path has it. What lies behind a link is found out when it is mounted.
fn is_in_layers(layers_dir: &Path, layers: &[String], path: &Path) -> bool {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    for layer in layers.iter().rev() {
        let mut at = layers_dir.join(layer);
        for part in path.components() {
            at.push(part);
            match std::fs::symlink_metadata(&at) {
                // A whiteout: what lower layers have of it is gone.
                Ok(found) if found.file_type().is_char_device() && found.rdev() == 0 => return false,
                Ok(found) if found.is_symlink() => return true,
                Ok(_) if at == layers_dir.join(layer).join(path) => return true,
                Ok(_) => {}
                Err(_) => break,
            }
        }
    }
    false
}

pub(super) fn volume(mount: &cri::Mount, user: Option<Mapping>) -> Result<Mount, String> {
    if !mount.container_path.starts_with('/') {
        return Err(format!("mount path {:?} is not absolute", mount.container_path));
    }
    let source = Path::new(&mount.host_path);
    if !source.exists() {
        // COMPAT: containerd makes a missing source a directory.
        std::fs::create_dir_all(source).map_err(|error| {
            format!(
                "failed to create directory for mount source {:?}: {error}",
                mount.host_path
            )
        })?;
    }
    let source = source
        .canonicalize()
        .map_err(|error| format!("failed to resolve mount source {:?}: {error}", mount.host_path))?;
    let propagation = match mount.propagation() {
        cri::MountPropagation::PropagationPrivate => Propagation::Private,
        cri::MountPropagation::PropagationHostToContainer => Propagation::HostToContainer,
        cri::MountPropagation::PropagationBidirectional => Propagation::Bidirectional,
    };
    check_propagation(&source, propagation)?;
    if mount.recursive_read_only && (!mount.readonly || propagation != Propagation::Private) {
        return Err("recursive read-only mounts must be read-only and without propagation".into());
    }
    Ok(Mount {
        target: clean_path(&mount.container_path),
        kind: MountKind::Bind {
            source,
            propagation,
            recursive_readonly: mount.recursive_read_only,
            idmapped: is_idmapped(mount, user) == Ok(true),
        },
        volume: true,
        readonly: mount.readonly,
        nosuid: false,
        nodev: false,
        noexec: false,
    })
}

/// COMPAT: containerd's check and words. Without it a mount that cannot propagate would silently not.
fn check_propagation(source: &Path, propagation: Propagation) -> Result<(), String> {
    let (wanted, what): (&[&str], &str) = match propagation {
        Propagation::Private => return Ok(()),
        Propagation::Bidirectional => (&["shared:"], "a shared mount"),
        Propagation::HostToContainer => (&["shared:", "master:"], "a shared or slave mount"),
    };
    let stat = rustix::fs::statx(
        rustix::fs::CWD,
        source,
        rustix::fs::AtFlags::empty(),
        rustix::fs::StatxFlags::MNT_ID,
    )
    .map_err(|error| format!("failed to stat {source:?}: {error}"))?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")
        .map_err(|error| format!("failed to read /proc/self/mountinfo: {error}"))?;
    let id = stat.stx_mnt_id.to_string();
    let line = mounts
        .lines()
        .find(|line| line.split(' ').next() == Some(id.as_str()))
        .ok_or_else(|| format!("failed to find the mount of {source:?}"))?;
    let mut fields = line.split(' ').skip(4);
    let mount_point = fields.next().unwrap_or_default();
    let propagates = fields
        .skip(1)
        .take_while(|field| *field != "-")
        .any(|field| wanted.iter().any(|wanted| field.starts_with(wanted)));
    if propagates {
        Ok(())
    } else {
        Err(format!(
            "path {source:?} is mounted on {mount_point:?} but it is not {what}"
        ))
    }
}

/// 0 is "not set" in CRI.
pub fn resources(linux: &cri::LinuxContainerResources) -> Resources {
    let positive = |value: i64| (value > 0).then_some(value);
    let text = |value: &str| (!value.is_empty()).then(|| value.to_owned());
    Resources {
        cpu_shares: positive(linux.cpu_shares).map(|shares| shares as u64),
        cpu_quota: (linux.cpu_quota != 0).then_some(linux.cpu_quota),
        cpu_period: positive(linux.cpu_period).map(|period| period as u64),
        cpuset_cpus: text(&linux.cpuset_cpus),
        cpuset_mems: text(&linux.cpuset_mems),
        memory_limit: positive(linux.memory_limit_in_bytes),
        memory_swap_limit: positive(linux.memory_swap_limit_in_bytes),
        pids_limit: None,
        huge_pages: linux
            .hugepage_limits
            .iter()
            .map(|limit| (limit.page_size.clone(), limit.limit))
            .collect(),
        unified: linux
            .unified
            .iter()
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| text.to_string()).collect()
    }

    #[test]
    fn profiles_that_cannot_be_enforced_are_refused() {
        use cri::security_profile::ProfileType::{Localhost, RuntimeDefault, Unconfined};
        for (kind, is_refused) in [(RuntimeDefault, true), (Localhost, true), (Unconfined, false)] {
            let security = cri::LinuxContainerSecurityContext {
                apparmor: Some(cri::SecurityProfile {
                    profile_type: kind as i32,
                    localhost_ref: String::new(),
                }),
                ..Default::default()
            };
            let result = refuse_unsupported(&security);
            assert_eq!(result.is_err(), is_refused, "{kind:?}");
        }
    }

    #[test]
    fn commands() {
        let image = ImageConfig {
            entrypoint: strings(&["e"]),
            cmd: strings(&["c"]),
            ..Default::default()
        };
        let check = |command: &[&str], args: &[&str], expected: &[&str]| {
            let config = cri::ContainerConfig {
                command: strings(command),
                args: strings(args),
                ..Default::default()
            };
            assert_eq!(
                arguments(&config, &image).expect("command"),
                strings(expected),
                "{command:?} {args:?}"
            );
        };
        check(&[], &[], &["e", "c"]);
        check(&[], &["a"], &["e", "a"]);
        check(&["x"], &[], &["x"]);
        check(&["x"], &["a"], &["x", "a"]);
        assert!(arguments(&cri::ContainerConfig::default(), &ImageConfig::default()).is_err());
    }

    #[test]
    fn environments() {
        let image = ImageConfig {
            env: strings(&["PATH=/x", "A=1"]),
            ..Default::default()
        };
        let pair = |key: &str, value: &str| cri::KeyValue {
            key: key.into(),
            value: value.into(),
        };
        let config = cri::ContainerConfig {
            envs: vec![pair("A", "2"), pair("B", "a=b")],
            ..Default::default()
        };
        let got = environment(&config, &image, "h", &[]).expect("environment");
        assert_eq!(got, strings(&["PATH=/x", "HOSTNAME=h", "A=2", "B=a=b"]));
    }

    #[test]
    fn users() {
        let check = |image_user: &str, uid: Option<i64>, gid: Option<i64>, expected: (&str, &str)| {
            let security = cri::LinuxContainerSecurityContext {
                run_as_user: uid.map(|value| cri::Int64Value { value }),
                run_as_group: gid.map(|value| cri::Int64Value { value }),
                ..Default::default()
            };
            let image = ImageConfig {
                user: image_user.into(),
                ..Default::default()
            };
            let got = user(&security, &image, &[]);
            assert_eq!(
                (got.user.as_str(), got.group.as_str()),
                expected,
                "{image_user} {uid:?} {gid:?}"
            );
        };
        check("", None, None, ("", ""));
        check("web:log", None, None, ("web", "log"));
        check("web:log", Some(5), None, ("5", ""));
        check("web", Some(5), Some(6), ("5", "6"));
        check("web", None, Some(6), ("web", "6"));
    }
}
