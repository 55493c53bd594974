//! The shim: one process a pod that outlives the daemon. It is the parent of the pod's containers,
//! copies their output into log files, records how they ended, and answers on a unix socket. It must
//! not know images, networks or CRI, and must stay small: one thread, no caches.

mod io;
pub mod launch;
pub mod logs;
pub mod protocol;
mod server;
mod sessions;

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;

/// `internal-shim <socket> [<cgroup.procs>…]`: binds the socket, says so with a byte on stdout, moves itself into
/// the cgroup, and serves until it is told to end.
pub fn main(arguments: &[OsString]) -> i32 {
    let Some(socket) = arguments.first().map(PathBuf::from) else {
        complain(format_args!("internal-shim needs a socket path"));
        return 2;
    };
    let cgroup = arguments[1..].iter().map(PathBuf::from).collect();
    match serve(&socket, cgroup) {
        Ok(()) => 0,
        Err(error) => {
            complain(format_args!("shim: {error}"));
            1
        }
    }
}

/// Tells the log, if that can be written: on a full disk `eprintln!` would panic, and take the pod down.
fn complain(text: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn serve(socket: &std::path::Path, cgroup: Vec<PathBuf>) -> std::io::Result<()> {
    // A session of its own: signals to the daemon's terminal are not for containers.
    let _ = rustix::process::setsid();
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    // The kernel should rather end a container than the one that records its end.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-998");
    let _ = std::env::set_current_dir("/");

    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async {
        let binary = launch::HelperBinary::open()
            .map_err(|error| std::io::Error::new(error.kind(), format!("protect the binary: {error}")))?;
        let _ = std::fs::remove_file(socket);
        let listener = tokio::net::UnixListener::bind(socket)?;
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600))?;
        let mut stdout = std::io::stdout();
        // A daemon that has died since does not know of this shim: then it ends.
        if let Err(error) = stdout.write_all(b"R").and_then(|()| stdout.flush()) {
            let _ = std::fs::remove_file(socket);
            return Err(error);
        }
        join_cgroup(cgroup);
        // Whoever waited for that byte may go away now.
        if let Ok(null) = std::fs::File::options().read(true).write(true).open("/dev/null") {
            let _ = rustix::stdio::dup2_stdout(&null);
        }
        server::run(listener, binary).await;
        let _ = std::fs::remove_file(socket);
        Ok(())
    })
}

/// Moves this process out of the daemon's cgroup, so that stopping the daemon's service does not take the pods
/// along. In a thread for the moment: the kernel takes its time over it, and nobody has to wait.
fn join_cgroup(procs: Vec<PathBuf>) {
    std::thread::spawn(move || {
        for file in procs {
            // 0 is whoever writes it.
            if let Err(error) = std::fs::write(&file, "0") {
                eprintln!("shim: join {}: {error}", file.display());
            }
        }
    });
}
