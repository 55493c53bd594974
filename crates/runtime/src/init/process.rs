//! The last steps of every container process, first or exec'd: terminal, identity, capabilities,
//! seccomp, execve. Their order is what makes them safe, see `become_program`.

use super::spec::{Capabilities, ProcessSpec, Report};
use super::users::{self, Identity};
use super::{Context, InitError, control, tree};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::process::{Gid, Uid};
use rustix::pty::OpenptFlags;
use rustix::thread::{CapabilitySet, CapabilitySets};
use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// A terminal of the container's own devpts.
pub struct Console {
    pub master: OwnedFd,
    pub slave: OwnedFd,
    /// Of the slave, in the devpts.
    pub name: CString,
}

/// For a process that joins a container. A volume on /dev may hold anything by these names, so it must be a
/// devpts.
pub fn open_terminal() -> Result<Console, InitError> {
    let what = || "open /dev/pts".into();
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let no_links = ResolveFlags::NO_SYMLINKS;
    let pts = rustix::fs::openat2(CWD, "/dev/pts", flags, Mode::empty(), no_links).context(what)?;
    if rustix::fs::fstatfs(&pts).context(what)?.f_type != tree::DEVPTS_SUPER_MAGIC {
        return Err(InitError::Message("/dev/pts is not of type devpts".into()));
    }
    open_terminal_in(pts.as_fd())
}

/// The slave is asked of the master and not looked up by its name.
pub fn open_terminal_in(pts: BorrowedFd<'_>) -> Result<Console, InitError> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let master =
        rustix::fs::openat(pts, "ptmx", flags, Mode::empty()).context(|| "open /dev/pts/ptmx".into())?;
    rustix::pty::unlockpt(&master).context(|| "unlock the terminal".into())?;
    let path = rustix::pty::ptsname(&master, Vec::new()).context(|| "name the terminal".into())?;
    let name = path
        .to_bytes()
        .rsplit(|byte| *byte == b'/')
        .next()
        .unwrap_or_default();
    let name = CString::new(name).map_err(|_| InitError::Message("a terminal without a name".into()))?;
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags).context(|| "open the terminal".into())?;
    Ok(Console { master, slave, name })
}

/// Makes the terminal this process' standard streams and controlling terminal.
pub fn take_terminal(slave: OwnedFd) -> Result<(), InitError> {
    rustix::process::setsid().context(|| "start a session".into())?;
    rustix::stdio::dup2_stdin(&slave).context(|| "terminal as stdin".into())?;
    rustix::stdio::dup2_stdout(&slave).context(|| "terminal as stdout".into())?;
    rustix::stdio::dup2_stderr(&slave).context(|| "terminal as stderr".into())?;
    rustix::process::ioctl_tiocsctty(&slave).context(|| "take the terminal".into())
}

/// Becomes the program. Does not return unless it fails.
///
/// The order: what needs the host's privileges first (working directory, bounding set), then the
/// identity with capabilities kept, then seccomp, then the final capabilities. Loading a filter takes
/// either no_new_privs or CAP_SYS_ADMIN: with the former it is the very last step before execve, without
/// it the filter goes in just before CAP_SYS_ADMIN is given up.
pub fn become_program(process: &ProcessSpec, socket: &mut File) -> Result<(), InitError> {
    let passwd = read_small("/etc/passwd");
    let group = read_small("/etc/group");
    let identity = users::resolve(&process.user, &passwd, &group)?;

    let environment = environment(process, &identity);
    enter_working_directory(&process.cwd)?;
    own_standard_streams(identity.uid, None);
    reset_signals();
    rustix::process::umask(Mode::from_raw_mode(0o022));
    // Nothing but the standard streams survives execve, whatever was left open.
    // SAFETY: only the close-on-exec flag of descriptors changes.
    unsafe {
        libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
    }

    leave_session_keyring()?;
    drop_bounding_set(process.capabilities.bounding)?;
    rustix::thread::set_keep_capabilities(true).context(|| "keep capabilities".into())?;
    set_identity(&identity)?;
    let current = rustix::thread::capabilities(None).context(|| "read capabilities".into())?;
    if process.no_new_privileges {
        rustix::thread::set_no_new_privs(true).context(|| "set no_new_privs".into())?;
    } else if let Some(filter) = &process.seccomp {
        // setuid cleared the effective set; what is permitted may be used for this one step.
        let all = CapabilitySets {
            effective: current.permitted,
            ..current
        };
        rustix::thread::set_capabilities(None, all).context(|| "raise capabilities".into())?;
        load_seccomp(filter)?;
    }
    set_capabilities(&process.capabilities)?;

    let path = find_program(&process.args, &environment)?;
    let argv = c_strings(&process.args)?;
    let envp = c_strings(&environment)?;
    control::send(
        socket,
        &Report::Ready {
            uid: identity.uid,
            gid: identity.gid,
            groups: identity.groups.clone(),
        },
    )
    .context(|| "report to the shim".into())?;
    if process.no_new_privileges
        && let Some(filter) = &process.seccomp
    {
        load_seccomp(filter)?;
    }

    let mut argv: Vec<*const libc::c_char> = argv.iter().map(|arg| arg.as_ptr()).collect();
    argv.push(std::ptr::null());
    let mut envp: Vec<*const libc::c_char> = envp.iter().map(|var| var.as_ptr()).collect();
    envp.push(std::ptr::null());
    // SAFETY: path, argv and envp are C strings kept alive past the call, the arrays end in null.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr()) };
    let error = std::io::Error::last_os_error();
    Err(InitError::Message(exec_message(&process.args[0], &error)))
}

/// A file of the image, which may be anything: a pipe that nobody writes to, a device without an end.
/// What is no small file is no file.
fn read_small(path: &str) -> String {
    use std::io::Read;
    const MAX: u64 = 8 * 1024 * 1024;
    let open = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let read = || -> std::io::Result<String> {
        let file = File::from(rustix::fs::open(path, open, Mode::empty())?);
        let mut text = Vec::new();
        if file.metadata()?.is_file() {
            file.take(MAX).read_to_end(&mut text)?;
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    };
    read().unwrap_or_default()
}

/// Keys of whoever started skiff are not for containers, nor one container's for the next.
fn leave_session_keyring() -> Result<(), InitError> {
    const JOIN_SESSION_KEYRING: libc::c_long = 1;
    // SAFETY: without a name the call takes no pointer.
    let result = unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, 0usize) };
    match std::io::Error::last_os_error() {
        error if result < 0 => match error.raw_os_error() {
            // A kernel without keys, or a filter around skiff that is around the container too.
            Some(libc::ENOSYS | libc::EPERM) => Ok(()),
            _ => Err(error).context(|| "make a session keyring".into()),
        },
        _ => Ok(()),
    }
}

/// COMPAT: the words are runc's, which users search for.
fn exec_message(program: &str, error: &std::io::Error) -> String {
    let reason = match error.raw_os_error() {
        Some(libc::ENOENT) => "no such file or directory".to_owned(),
        Some(libc::EACCES) => "permission denied".to_owned(),
        Some(libc::ENOEXEC) => "exec format error".to_owned(),
        _ => error.to_string(),
    };
    format!("exec {program}: {reason}")
}

fn environment(process: &ProcessSpec, identity: &Identity) -> Vec<String> {
    let mut environment = process.env.clone();
    if !environment.iter().any(|variable| variable.starts_with("HOME=")) {
        environment.push(format!("HOME={}", identity.home));
    }
    environment
}

fn enter_working_directory(cwd: &str) -> Result<(), InitError> {
    let cwd = if cwd.is_empty() { "/" } else { cwd };
    if !Path::new(cwd).exists() {
        // COMPAT: runc makes a missing working directory.
        std::fs::create_dir_all(cwd).context(|| format!("mkdir {cwd}"))?;
    }
    std::env::set_current_dir(cwd).context(|| format!("chdir to cwd ({cwd:?}) set in config.json failed"))?;
    // A descriptor of the host leaked into the image's idea of a path would end outside the root; the
    // kernel says so in getcwd.
    let real = rustix::process::getcwd(Vec::new()).context(|| "getcwd".into())?;
    if !real.to_bytes().starts_with(b"/") {
        return Err(InitError::Message(
            "current working directory is outside of container mount namespace root".into(),
        ));
    }
    Ok(())
}

/// The program may reopen its standard streams by /proc/self/fd (`> /dev/stderr`), also when it is not
/// root: the pipes must then be its own. Files that are no pipe keep their owner.
pub(super) fn own_standard_streams(uid: u32, gid: Option<u32>) {
    for fd in 0..3 {
        // SAFETY: the standard streams are open for the life of the process.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
        let Ok(stat) = rustix::fs::fstat(fd) else { continue };
        let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
        let ours = matches!(kind, rustix::fs::FileType::Fifo | rustix::fs::FileType::Socket)
            || rustix::termios::isatty(fd);
        if ours {
            let _ = rustix::fs::fchown(fd, Some(Uid::from_raw(uid)), gid.map(Gid::from_raw));
        }
    }
}

/// Ignored signals survive execve; the program must find the defaults (Rust ignores SIGPIPE).
fn reset_signals() {
    for signal in 1..=64 {
        // SAFETY: the default action is valid for every signal; the two that cannot be set fail.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // SAFETY: an empty mask is initialised before it is set.
    unsafe {
        let mut mask = std::mem::zeroed();
        libc::sigemptyset(&raw mut mask);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const mask, std::ptr::null_mut());
    }
}

fn drop_bounding_set(keep: u64) -> Result<(), InitError> {
    for bit in 0..64 {
        if keep & (1 << bit) != 0 {
            continue;
        }
        let capability = CapabilitySet::from_bits_retain(1 << bit);
        match rustix::thread::capability_is_in_bounding_set(capability) {
            Ok(true) => rustix::thread::remove_capability_from_bounding_set(capability)
                .context(|| format!("drop capability {bit}"))?,
            Ok(false) => {}
            // Past the kernel's last capability.
            Err(_) => break,
        }
    }
    Ok(())
}

fn set_identity(identity: &Identity) -> Result<(), InitError> {
    let groups: Vec<Gid> = identity.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
    let (uid, gid) = (Uid::from_raw(identity.uid), Gid::from_raw(identity.gid));
    rustix::thread::set_thread_groups(&groups).context(|| "set groups".into())?;
    rustix::thread::set_thread_res_gid(gid, gid, gid).context(|| "set gid".into())?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).context(|| "set uid".into())
}

fn set_capabilities(wanted: &Capabilities) -> Result<(), InitError> {
    let set = CapabilitySet::from_bits_retain;
    rustix::thread::set_capabilities(
        None,
        CapabilitySets {
            effective: set(wanted.effective),
            permitted: set(wanted.permitted),
            inheritable: set(wanted.inheritable),
        },
    )
    .context(|| "set capabilities".into())?;
    let _ = rustix::thread::clear_ambient_capability_set();
    for bit in 0..64 {
        if wanted.ambient & (1 << bit) != 0 {
            rustix::thread::configure_capability_in_ambient_set(set(1 << bit), true)
                .context(|| format!("set ambient capability {bit}"))?;
        }
    }
    Ok(())
}

fn load_seccomp(filter: &[u64]) -> Result<(), InitError> {
    let length =
        u16::try_from(filter.len()).map_err(|_| InitError::Message("seccomp filter too long".into()))?;
    let program = libc::sock_fprog {
        len: length,
        filter: filter.as_ptr().cast_mut().cast(),
    };
    // SAFETY: an instruction is eight bytes in the kernel's layout (made by `seccomp::compile`), the
    // count is right, and the array outlives the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            0,
            &raw const program,
        )
    };
    if result != 0 {
        return Err(InitError::Os {
            what: "load the seccomp filter".into(),
            source: std::io::Error::last_os_error(),
        });
    }
    Ok(())
}

/// COMPAT: the messages are those of runc, whose words the kubelet's events carry.
fn find_program(args: &[String], environment: &[String]) -> Result<CString, InitError> {
    let Some(program) = args.first().filter(|program| !program.is_empty()) else {
        return Err(InitError::Message("no command specified".into()));
    };
    let failure = |reason: &str| InitError::Message(format!("exec: {program:?}: {reason}"));
    let usable = |path: &Path| -> Result<(), &'static str> {
        match std::fs::metadata(path) {
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Err("permission denied"),
            Err(_) => Err("no such file or directory"),
            Ok(metadata) if metadata.is_dir() => Err("is a directory"),
            Ok(_) => rustix::fs::access(path, rustix::fs::Access::EXEC_OK).map_err(|_| "permission denied"),
        }
    };
    let to_c = |path: &Path| {
        use std::os::unix::ffi::OsStrExt;
        CString::new(path.as_os_str().as_bytes()).map_err(|_| failure("invalid argument"))
    };
    if program.contains('/') {
        let path = Path::new(program);
        return match usable(path) {
            Ok(()) => to_c(path),
            Err("no such file or directory") => {
                Err(failure(&format!("stat {program}: no such file or directory")))
            }
            Err(reason) => Err(failure(reason)),
        };
    }
    let search = environment
        .iter()
        .rev()
        .find_map(|variable| variable.strip_prefix("PATH="))
        .unwrap_or_default();
    let mut denied = false;
    for directory in search.split(':') {
        let directory = if directory.is_empty() { "." } else { directory };
        let path = Path::new(directory).join(program);
        match usable(&path) {
            Ok(()) => return to_c(&path),
            Err("permission denied") => denied = true,
            Err(_) => {}
        }
    }
    Err(failure(if denied {
        "permission denied"
    } else {
        "executable file not found in $PATH"
    }))
}

fn c_strings(strings: &[String]) -> Result<Vec<CString>, InitError> {
    strings
        .iter()
        .map(|string| {
            CString::new(string.as_str())
                .map_err(|_| InitError::Message("an argument or variable holds a zero byte".into()))
        })
        .collect()
}
