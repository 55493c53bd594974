//! A TCP load balancer on the machines' link: every connection goes to the first server that takes it. What a server that
//! dies had ends, as with any balancer that does not look into TLS.

use crate::Switch;
use anyhow::{Context, Result};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

pub struct Balancer {
    address: SocketAddr,
    open: Arc<Vec<AtomicUsize>>,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl Balancer {
    /// Listens at the switch's own address, which no machine has.
    pub fn start(switch: &Switch, port: u16, servers: Vec<(Ipv4Addr, u16)>) -> Result<Balancer> {
        let namespace = std::fs::File::open(switch.network_namespace())?;
        let address = SocketAddr::new(switch.address().into(), port);
        let servers: Vec<SocketAddr> = servers.into_iter().map(SocketAddr::from).collect();
        let open: Arc<Vec<AtomicUsize>> = Arc::new(servers.iter().map(|_| AtomicUsize::new(0)).collect());
        let (stop, counts) = (CancellationToken::new(), open.clone());
        let stopped = stop.clone();
        let (started, listens) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let run = || -> Result<()> {
                // Only this thread moves, and what it opens.
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()?;
                runtime.block_on(async {
                    let listener = TcpListener::bind(address).await?;
                    let _ = started.send(Ok(()));
                    tokio::select! {
                        () = stopped.cancelled() => {}
                        () = accept(&listener, &servers, &counts) => {}
                    }
                    Ok(())
                })
            };
            if let Err(error) = run() {
                let _ = started.send(Err(error));
            }
        });
        listens.recv().context("the balancer")??;
        Ok(Balancer {
            address,
            open,
            stop,
            thread: Some(thread),
        })
    }

    /// `IP:PORT`, as `--control-plane-endpoint` takes it.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// How many connections each server has through it.
    pub fn open(&self) -> Vec<usize> {
        self.open
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .collect()
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn accept(listener: &TcpListener, servers: &[SocketAddr], open: &Arc<Vec<AtomicUsize>>) {
    while let Ok((client, _)) = listener.accept().await {
        let (servers, open) = (servers.to_vec(), open.clone());
        tokio::spawn(async move { forward(client, &servers, &open).await });
    }
}

async fn forward(mut client: TcpStream, servers: &[SocketAddr], open: &[AtomicUsize]) {
    for (address, count) in servers.iter().zip(open) {
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(address));
        if let Ok(Ok(mut server)) = connecting.await {
            count.fetch_add(1, Ordering::Relaxed);
            let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            count.fetch_sub(1, Ordering::Relaxed);
            return;
        }
    }
}
