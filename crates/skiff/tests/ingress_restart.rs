//! Clients of the ingress proxy while skiff is restarted and killed: with new connections, kept ones and HTTP/2 over TLS.
//! An orderly restart breaks no request, and nothing makes the ports refuse a connection but `skiff down`.

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use skiff_testkit::{Cluster, Kubectl, eventually, expect_eq, free_port};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
const PATIENCE: Duration = Duration::from_secs(90);
const HOST: &str = "web.example";
/// Requests of each sort of client that must pass before and after each step.
const LOAD: usize = 100;
/// Between two requests of a client.
const PAUSE: Duration = Duration::from_millis(5);

#[derive(Clone, Copy, Debug)]
enum Sort {
    NewConnections,
    KeepAlive,
    Http2,
}

const SORTS: [Sort; 3] = [Sort::NewConnections, Sort::KeepAlive, Sort::Http2];

#[derive(Default)]
struct Tally {
    passed: [AtomicUsize; SORTS.len()],
    /// Connections that were refused.
    refused: Mutex<Vec<String>>,
    /// Requests that were not answered.
    broken: Mutex<Vec<String>>,
}

impl Tally {
    /// Waits until each sort of client had `LOAD` more answers.
    fn more_pass(&self) -> Result<()> {
        let counts = || self.passed.each_ref().map(|count| count.load(Ordering::Relaxed));
        let before = counts();
        eventually("requests of all clients pass", PATIENCE, || {
            let now = counts();
            let enough = now.iter().zip(before).all(|(now, before)| *now >= before + LOAD);
            ensure!(enough, "{before:?}, now {now:?}");
            Ok(())
        })
    }

    fn expect_unbroken(&self, what: &str) -> Result<()> {
        let (refused, broken) = (self.refused.lock(), self.broken.lock());
        ensure!(
            refused.is_empty() && broken.is_empty(),
            "{what}: refused {refused:?}, broken {broken:?}"
        );
        Ok(())
    }
}

#[test]
fn clients_do_not_notice_a_restart() -> Result<()> {
    let (http, https) = (free_port()?, free_port()?);
    let flags = [
        format!("--ingress-http-port={http}"),
        format!("--ingress-https-port={https}"),
    ];
    let cluster = Cluster::start(SKIFF, &[flags[0].as_str(), flags[1].as_str()])?;
    let name = cluster.name().to_owned();
    expect_eq(holders(&name)?, vec![])?;
    serve(&cluster.kubectl())?;
    let runtime = tokio::runtime::Runtime::new()?;
    eventually("the ingress answers", PATIENCE, || runtime.block_on(fresh(http)))?;
    let [holder] = holders(&name)?[..] else {
        bail!("{:?} keep the sockets", holders(&name)?)
    };

    let (tally, stop) = (Arc::new(Tally::default()), CancellationToken::new());
    for sort in SORTS.into_iter().chain(SORTS) {
        let (tally, stop) = (tally.clone(), stop.clone());
        runtime.spawn(async move { stop.run_until_cancelled(load(sort, http, https, &tally)).await });
    }
    tally.more_pass()?;
    tally.expect_unbroken("before")?;

    let first = cluster.pid()?;
    cluster.skiff(&["restart"])?;
    ensure!(cluster.pid()? != first, "it is the same process");
    tally.more_pass()?;
    tally.expect_unbroken("restart")?;

    // As systemd does it.
    signal(cluster.pid()?, Signal::TERM)?;
    eventually("it ends", PATIENCE, || {
        ensure!(cluster.pid().is_err(), "it runs");
        Ok(())
    })?;
    cluster.up()?;
    tally.more_pass()?;
    tally.expect_unbroken("SIGTERM")?;

    signal(cluster.pid()?, Signal::KILL)?;
    cluster.up()?;
    tally.more_pass()?;
    let refused = std::mem::take(&mut *tally.refused.lock());
    ensure!(refused.is_empty(), "SIGKILL: {refused:?}");
    tally.broken.lock().clear();
    // What the clients lost, they lost with the process.
    tally.more_pass()?;
    tally.expect_unbroken("after SIGKILL")?;
    expect_eq(holders(&name)?, vec![holder])?;

    // Without its holder it gets another.
    signal(u32::try_from(holder)?, Signal::KILL)?;
    eventually("another process keeps the sockets", PATIENCE, || {
        let found = holders(&name)?;
        ensure!(found.len() == 1 && found != [holder], "{found:?}");
        Ok(())
    })?;
    cluster.skiff(&["restart"])?;
    tally.more_pass()?;
    tally.expect_unbroken("restart with another holder")?;
    stop.cancel();

    // Stopped is stopped.
    cluster.skiff(&["down"])?;
    for port in [http, https] {
        let refused = runtime.block_on(TcpStream::connect(("127.0.0.1", port)));
        ensure!(refused.is_err(), "{port} is open");
    }
    eventually("the holder ends", PATIENCE, || expect_eq(holders(&name)?, vec![]))?;
    let restarted = cluster.skiff(&["restart"]);
    ensure!(
        format!("{restarted:?}").contains("is not running"),
        "{restarted:?}"
    );
    cluster.up()?;
    eventually("the ingress answers again", PATIENCE, || {
        runtime.block_on(fresh(http))
    })?;

    // A port that is no longer wanted is closed, and the process goes with the last one.
    cluster.kubectl().run(&["delete", "ingress", "--all"])?;
    eventually("nothing is kept", PATIENCE, || expect_eq(holders(&name)?, vec![]))?;
    serve(&cluster.kubectl())?;
    eventually("the ingress answers once more", PATIENCE, || {
        runtime.block_on(fresh(http))
    })?;
    drop(cluster);
    eventually("nothing is left", PATIENCE, || expect_eq(holders(&name)?, vec![]))?;
    ensure!(runtime.block_on(TcpStream::connect(("127.0.0.1", http))).is_err());
    Ok(())
}

/// Two pods of the demo server, reached by an Ingress.
fn serve(kubectl: &Kubectl) -> Result<()> {
    let container = json!({"name": "web", "image": "skiff.local/demo:v1",
        "ports": [{"name": "http", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 1}});
    let path = json!({"path": "/", "pathType": "Prefix",
        "backend": {"service": {"name": "web", "port": {"name": "http"}}}});
    for object in [
        json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {
            "replicas": 2, "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [container]}}}}),
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": {
            "selector": {"app": "web"}, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]}}),
        json!({"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": {"name": "web"}, "spec": {
            "rules": [{"host": HOST, "http": {"paths": [path]}}]}}),
    ] {
        kubectl.apply(&object.to_string())?;
    }
    kubectl
        .run(&["rollout", "status", "deployment/web", "--timeout=90s"])
        .map(drop)
}

fn signal(pid: u32, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(pid)?).context("a process id")?;
    Ok(kill_process(pid, signal)?)
}

/// The processes that keep sockets of the cluster.
fn holders(name: &str) -> Result<Vec<i32>> {
    let path = format!("/run/skiff/{name}/ports.sock");
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let cmdline = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let mut words = cmdline.split(|byte| *byte == 0);
        if words.any(|word| word == b"internal-sockets") && words.any(|word| word == path.as_bytes()) {
            found.push(pid);
        }
    }
    Ok(found)
}

/// Sends requests for ever.
async fn load(sort: Sort, http: u16, https: u16, tally: &Tally) {
    loop {
        let done = match sort {
            Sort::NewConnections => {
                let asked = fresh(http).await;
                if asked.is_ok() {
                    tally.passed[sort as usize].fetch_add(1, Ordering::Relaxed);
                }
                asked
            }
            Sort::KeepAlive => kept(http, &tally.passed[sort as usize]).await,
            Sort::Http2 => http2(https, &tally.passed[sort as usize]).await,
        };
        if let Err(error) = done {
            let text = format!("{sort:?}: {error:#}");
            match error.is::<Refused>() {
                true => tally.refused.lock().push(text),
                false => tally.broken.lock().push(text),
            }
            // A port that is closed would be asked thousands of times.
            tokio::time::sleep(PAUSE * 10).await;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

#[derive(Debug)]
struct Refused(std::io::Error);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot connect: {}", self.0)
    }
}

impl std::error::Error for Refused {}

async fn connect(port: u16) -> Result<TcpStream> {
    Ok(TcpStream::connect(("127.0.0.1", port)).await.map_err(Refused)?)
}

/// One request on a connection of its own.
async fn fresh(port: u16) -> Result<()> {
    let mut stream = connect(port).await?;
    let request = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    tokio::time::timeout(PATIENCE, stream.read_to_string(&mut answer)).await??;
    ensure!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("Hello"),
        "{answer:?}"
    );
    Ok(())
}

fn request(scheme: &str) -> Result<Request<Empty<Bytes>>> {
    let request = Request::get(if scheme == "https" {
        format!("https://{HOST}/")
    } else {
        "/".to_owned()
    });
    let request = if scheme == "https" {
        request
    } else {
        request.header("host", HOST)
    };
    Ok(request.body(Empty::new())?)
}

async fn read(response: Response<Incoming>) -> Result<()> {
    let status = response.status();
    let body = response.into_body().collect().await?.to_bytes();
    ensure!(status == 200 && body.starts_with(b"Hello"), "{status} {body:?}");
    Ok(())
}

/// Requests on one connection until the server says that it ends.
async fn kept(port: u16, passed: &AtomicUsize) -> Result<()> {
    let io = TokioIo::new(connect(port).await?);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await?;
    tokio::spawn(connection);
    while sender.ready().await.is_ok() {
        let response = tokio::time::timeout(PATIENCE, sender.send_request(request("http")?)).await??;
        let is_last = response
            .headers()
            .get("connection")
            .is_some_and(|value| value == "close");
        read(response).await?;
        passed.fetch_add(1, Ordering::Relaxed);
        if is_last {
            return Ok(());
        }
        tokio::time::sleep(PAUSE).await;
    }
    bail!("the connection was closed, and no response said so")
}

/// Requests on one connection until the server says that it ends.
async fn http2(port: u16, passed: &AtomicUsize) -> Result<()> {
    let mut config = skiff_pki::insecure_client_config(None)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    let connector = TlsConnector::from(Arc::new(config));
    let name = rustls::pki_types::ServerName::try_from(HOST)?;
    let stream = connector.connect(name, connect(port).await?).await?;
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (mut sender, connection) = handshake.await?;
    let ended = tokio::spawn(connection);
    while sender.ready().await.is_ok() {
        let sent = tokio::time::timeout(PATIENCE, sender.send_request(request("https")?)).await?;
        let response = match sent {
            Ok(response) => response,
            // It was not sent: the server had said that it takes no more.
            Err(error) if error.is_canceled() || format!("{error:?}").contains("GoAway") => break,
            Err(error) => return Err(error.into()),
        };
        read(response).await?;
        passed.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(PAUSE).await;
    }
    drop(sender);
    // Without GOAWAY this is an error.
    tokio::time::timeout(PATIENCE, ended).await???;
    Ok(())
}
