//! Network namespaces that stand for sandboxes.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::mpsc;

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

pub(crate) fn unshare_network() {
    // SAFETY: only the network namespace changes; no memory or descriptors are unshared.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
}

/// A network namespace kept alive by a thread, which also runs what the test wants to run inside.
pub(crate) struct Sandbox {
    pub(crate) path: PathBuf,
    jobs: mpsc::Sender<Box<dyn FnOnce() + Send>>,
}

impl Sandbox {
    pub(crate) fn new() -> Sandbox {
        let (jobs, queue) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            unshare_network();
            let (pid, tid) = (rustix::process::getpid(), rustix::thread::gettid());
            tell.send(format!(
                "/proc/{}/task/{}/ns/net",
                pid.as_raw_nonzero(),
                tid.as_raw_nonzero()
            ))
            .unwrap();
            for job in queue {
                job();
            }
        });
        Sandbox {
            path: told.recv().unwrap().into(),
            jobs,
        }
    }

    pub(crate) fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (tell, told) = mpsc::channel();
        self.jobs
            .send(Box::new(move || tell.send(job()).unwrap()))
            .unwrap();
        told.recv().unwrap()
    }

    /// Serves one connection at a time, answering with the peer's address.
    pub(crate) fn listen(&self, address: IpAddr) {
        let path = self.path.clone();
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            let namespace = std::fs::File::open(path).unwrap();
            move_into_link_name_space(
                std::os::fd::AsFd::as_fd(&namespace),
                Some(LinkNameSpaceType::Network),
            )
            .unwrap();
            let listener = TcpListener::bind((address, 8080)).unwrap();
            tell.send(()).unwrap();
            while let Ok((mut stream, peer)) = listener.accept() {
                let _ = stream.write_all(peer.ip().to_string().as_bytes());
            }
        });
        told.recv().unwrap();
    }
}

pub(crate) fn ask(address: IpAddr) -> String {
    let mut stream =
        TcpStream::connect_timeout(&(address, 8080).into(), std::time::Duration::from_secs(5)).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}
