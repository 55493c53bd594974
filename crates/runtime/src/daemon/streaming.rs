//! The HTTP server behind the URLs that Exec, Attach and PortForward return. A URL works once and for a
//! minute; the server listens on loopback only, the kubelet passes connections on.

use super::Daemon;
use super::containers::exit_code;
use crate::shim::protocol::{frame, read_frame, write_frame};
use http::StatusCode;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use skiff_cri::v1 as cri;
use skiff_streaming::{Body, ExitOutcome, Options, Streams as ClientStreams};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tonic::Status;

const LIFETIME: Duration = Duration::from_secs(60);
/// URLs that may wait at a time.
const MAX_WAITING: usize = 1000;

enum Ticket {
    Exec(cri::ExecRequest),
    Attach(cri::AttachRequest),
    PortForward(cri::PortForwardRequest),
}

pub struct Streams {
    address: SocketAddr,
    waiting: Mutex<HashMap<String, (Instant, Ticket)>>,
}

impl Streams {
    pub async fn bind(address: SocketAddr) -> std::io::Result<(Streams, TcpListener)> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        Ok((
            Streams {
                address,
                waiting: Mutex::default(),
            },
            listener,
        ))
    }

    fn url(&self, kind: &str, ticket: Ticket) -> String {
        let token = crate::image::hex(&rand::random::<[u8; 16]>());
        let mut waiting = self.waiting.lock();
        let now = Instant::now();
        waiting.retain(|_, (made, _)| now.duration_since(*made) < LIFETIME);
        if waiting.len() >= MAX_WAITING {
            let oldest = waiting
                .iter()
                .min_by_key(|(_, (made, _))| *made)
                .map(|(token, _)| token.clone());
            oldest.map(|token| waiting.remove(&token));
        }
        waiting.insert(token.clone(), (now, ticket));
        format!("http://{}/{kind}/{token}", self.address)
    }

    pub fn exec_url(&self, request: cri::ExecRequest) -> Result<String, Status> {
        check(request.tty, request.stdin, request.stdout, request.stderr)?;
        Ok(self.url("exec", Ticket::Exec(request)))
    }

    pub fn attach_url(&self, request: cri::AttachRequest) -> Result<String, Status> {
        check(request.tty, request.stdin, request.stdout, request.stderr)?;
        Ok(self.url("attach", Ticket::Attach(request)))
    }

    pub fn port_forward_url(&self, request: cri::PortForwardRequest) -> String {
        self.url("portforward", Ticket::PortForward(request))
    }

    fn take(&self, token: &str) -> Option<Ticket> {
        let (made, ticket) = self.waiting.lock().remove(token)?;
        (made.elapsed() < LIFETIME).then_some(ticket)
    }
}

/// COMPAT: the words of upstream's streaming server.
fn check(tty: bool, stdin: bool, stdout: bool, stderr: bool) -> Result<(), Status> {
    if tty && stderr {
        return Err(Status::invalid_argument("tty and stderr cannot both be true"));
    }
    if !stdin && !stdout && !stderr {
        return Err(Status::invalid_argument(
            "one of stdin, stdout, or stderr must be set",
        ));
    }
    Ok(())
}

pub(super) async fn serve(daemon: Arc<Daemon>, listener: TcpListener) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = daemon.shutdown.cancelled() => return,
        };
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let daemon = daemon.clone();
        tokio::spawn(async move {
            let service = hyper::service::service_fn(move |request| {
                let daemon = daemon.clone();
                async move { Ok::<_, std::convert::Infallible>(daemon.handle_stream(request).await) }
            });
            let connection =
                hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "a streaming connection ended");
            }
        });
    }
}

fn plain(status: StatusCode, text: &str) -> http::Response<Body> {
    use http_body_util::BodyExt;
    let body = http_body_util::Full::new(bytes::Bytes::from(text.to_owned())).map_err(|never| match never {});
    let mut response = http::Response::new(body.boxed_unsync());
    *response.status_mut() = status;
    response
}

impl Daemon {
    async fn handle_stream(
        self: Arc<Self>,
        request: http::Request<hyper::body::Incoming>,
    ) -> http::Response<Body> {
        let token = request.uri().path().rsplit('/').next().unwrap_or_default();
        match self.streams.take(token) {
            None => plain(StatusCode::NOT_FOUND, "404 page not found\n"),
            Some(Ticket::Exec(exec)) => {
                let options = Options {
                    stdin: exec.stdin,
                    stdout: exec.stdout,
                    stderr: exec.stderr,
                    tty: exec.tty,
                };
                skiff_streaming::serve_remote_command(request, options, move |streams| async move {
                    match self
                        .open_exec(&exec.container_id, &exec.cmd, exec.tty, exec.stdin, false)
                        .await
                    {
                        Ok(stream) => pump(stream, streams, options).await,
                        Err(status) => ExitOutcome::Failed(status.message().to_owned()),
                    }
                })
                .await
            }
            Some(Ticket::Attach(attach)) => {
                let options = Options {
                    stdin: attach.stdin,
                    stdout: attach.stdout,
                    stderr: attach.stderr,
                    tty: attach.tty,
                };
                skiff_streaming::serve_remote_command(request, options, move |streams| async move {
                    match self.open_attach(&attach.container_id).await {
                        // The end of an attach is not the command's failure.
                        Ok(stream) => match pump(stream, streams, options).await {
                            ExitOutcome::Exited(_) => ExitOutcome::Exited(0),
                            failed => failed,
                        },
                        Err(status) => ExitOutcome::Failed(status.message().to_owned()),
                    }
                })
                .await
            }
            Some(Ticket::PortForward(forward)) => {
                let (daemon, id) = (self.clone(), forward.pod_sandbox_id.clone());
                let connect = move |port| {
                    let (daemon, id) = (daemon.clone(), id.clone());
                    async move { daemon.connect_in_sandbox(&id, port).await }
                };
                skiff_streaming::serve_port_forward(request, forward.pod_sandbox_id, &forward.port, connect)
                    .await
            }
        }
    }

    async fn open_attach(&self, id: &str) -> Result<UnixStream, Status> {
        let record = self.container(id)?.get();
        let shim = self.sandbox(&record.sandbox_id)?.shim();
        shim.attach(&record.id)
            .await
            .map_err(|error| Status::unknown(format!("failed to attach: {error}")))
    }

    /// A connection to the pod's loopback, from inside its network namespace.
    async fn connect_in_sandbox(&self, id: &str, port: u16) -> Result<TcpStream, std::io::Error> {
        let sandbox = self
            .sandbox(id)
            .map_err(|status| std::io::Error::other(status.message().to_owned()))?;
        let Some(netns) = self.netns_path(&sandbox.get()) else {
            return TcpStream::connect(("localhost", port)).await;
        };
        let (v4, v6) = tokio::task::spawn_blocking(move || sockets_in(&netns))
            .await
            .map_err(std::io::Error::other)??;
        // A socket stays in the namespace it was made in, so connecting needs no thread there.
        let first = v4.connect(SocketAddr::from(([127, 0, 0, 1], port))).await;
        match (first, v6) {
            (Err(error), Some(v6)) => {
                let second = v6
                    .connect(SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, port)))
                    .await;
                second.map_err(|_| error)
            }
            (first, _) => first,
        }
    }
}

fn sockets_in(
    netns: &std::path::Path,
) -> std::io::Result<(tokio::net::TcpSocket, Option<tokio::net::TcpSocket>)> {
    let netns = std::fs::File::open(netns)?;
    let runtime = tokio::runtime::Handle::current();
    // A thread of its own, which dies in that namespace: nothing has to be put back.
    std::thread::Builder::new()
        .name("port-forward".into())
        .spawn(move || {
            let _runtime = runtime.enter();
            rustix::thread::move_into_link_name_space(
                netns.as_fd(),
                Some(rustix::thread::LinkNameSpaceType::Network),
            )?;
            Ok((
                tokio::net::TcpSocket::new_v4()?,
                tokio::net::TcpSocket::new_v6().ok(),
            ))
        })?
        .join()
        .map_err(|_| std::io::Error::other("the connecting thread ended early"))?
}

/// Between the client's streams and the shim's frames, until the process ends or the client goes.
async fn pump(shim: UnixStream, client: ClientStreams, options: Options) -> ExitOutcome {
    let (mut reader, mut writer) = shim.into_split();
    let ClientStreams {
        stdin,
        mut stdout,
        mut stderr,
        mut resize,
        gone,
    } = client;
    let input = async {
        let mut stdin = stdin;
        let mut buffer = vec![0; 16 * 1024];
        let mut sizes_end = false;
        while stdin.is_some() || !sizes_end {
            tokio::select! {
                read = async {
                    match stdin.as_mut() {
                        Some(stdin) => stdin.read(&mut buffer).await,
                        None => std::future::pending().await,
                    }
                } => {
                    let sent = match read {
                        Ok(length) if length > 0 => write_frame(&mut writer, frame::STDIN, &buffer[..length]).await,
                        _ => {
                            stdin = None;
                            write_frame(&mut writer, frame::STDIN_CLOSED, &[]).await
                        }
                    };
                    if sent.is_err() {
                        break;
                    }
                }
                size = resize.recv(), if !sizes_end => match size {
                    Some(size) => {
                        let mut data = [0; 4];
                        data[..2].copy_from_slice(&size.width.to_be_bytes());
                        data[2..].copy_from_slice(&size.height.to_be_bytes());
                        if write_frame(&mut writer, frame::RESIZE, &data).await.is_err() {
                            break;
                        }
                    }
                    None => sizes_end = true,
                },
            }
        }
        // The process' end is what ends the session.
        std::future::pending::<()>().await;
    };
    let output = async {
        loop {
            let Ok((kind, data)) = read_frame(&mut reader).await else {
                return ExitOutcome::Failed("the connection to the container was lost".into());
            };
            let stream = match kind {
                frame::STDOUT => &mut stdout,
                frame::STDERR if options.tty => &mut stdout,
                frame::STDERR => &mut stderr,
                frame::EXIT => return ExitOutcome::Exited(exit_code(&data)),
                _ => continue,
            };
            if let Some(target) = stream
                && target.write_all(&data).await.is_err()
            {
                *stream = None;
            }
        }
    };
    let outcome = tokio::select! {
        () = input => ExitOutcome::Failed("input ended".into()),
        outcome = output => outcome,
        () = gone.cancelled() => ExitOutcome::Failed("the client is gone".into()),
    };
    for stream in [&mut stdout, &mut stderr].into_iter().flatten() {
        let _ = stream.flush().await;
    }
    outcome
}
