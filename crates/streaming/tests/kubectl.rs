//! The real client against these protocols: kubectl, with a server behind it that knows one pod and runs
//! commands on this machine. Skipped where kubectl is not installed.
#![allow(clippy::unwrap_used, reason = "helpers of tests are not seen as tests")]

use std::net::SocketAddr;
use std::process::{Output, Stdio};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use skiff_streaming::{Body, BoxError, ExitOutcome, Options, Streams};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;

fn json(value: serde_json::Value) -> Response<Body> {
    let body = Full::new(Bytes::from(value.to_string())).map_err(|never| match never {});
    Response::builder()
        .header("content-type", "application/json")
        .body(body.boxed_unsync())
        .unwrap()
}

/// Enough of the API for kubectl to find the pod and its subresources.
async fn answer(request: Request<Incoming>, echo: SocketAddr) -> Result<Response<Body>, BoxError> {
    let pod = "/api/v1/namespaces/default/pods/web";
    let path = request.uri().path().to_string();
    let query = request.uri().query().unwrap_or("").to_string();
    Ok(match path.strip_prefix(pod) {
        Some("") => json(serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "namespace": "default"},
            "spec": {"containers": [{"name": "web"}]}, "status": {"phase": "Running"},
        })),
        Some("/exec") => {
            let options = Options::from_query(&query)?;
            skiff_streaming::serve_remote_command(request, options, move |streams| run(query, streams)).await
        }
        Some("/portforward") => {
            skiff_streaming::serve_port_forward(request, "web", &[], move |port| async move {
                match port {
                    80 => TcpStream::connect(echo).await.map_err(|error| error.to_string()),
                    _ => Err("connection refused".to_string()),
                }
            })
            .await
        }
        _ => match path.as_str() {
            "/api" => json(serde_json::json!({"kind": "APIVersions", "versions": ["v1"]})),
            "/apis" => json(serde_json::json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": []})),
            "/api/v1" => json(
                serde_json::json!({"kind": "APIResourceList", "groupVersion": "v1", "resources": [
                {"name": "pods", "singularName": "pod", "namespaced": true, "kind": "Pod", "verbs": ["get"]}]}),
            ),
            _ => Response::builder()
                .status(404)
                .body(json(serde_json::Value::Null).into_body())?,
        },
    })
}

/// Runs the last `command` of the query in a shell, as a runtime would in a container.
async fn run(query: String, mut streams: Streams) -> ExitOutcome {
    let command = query
        .split('&')
        .filter_map(|pair| pair.strip_prefix("command="))
        .next_back()
        .unwrap_or("");
    let command = command
        .replace('+', " ")
        .replace("%3B", ";")
        .replace("%26", "&")
        .replace("%3E", ">");
    let mut child = Command::new("sh")
        .args(["-c", &command])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let (mut to, mut out, mut err) = (
        child.stdin.take().unwrap(),
        child.stdout.take().unwrap(),
        child.stderr.take().unwrap(),
    );
    let stdin = streams.stdin.take();
    let feeding = tokio::spawn(async move {
        if let Some(mut stdin) = stdin {
            let _ = tokio::io::copy(&mut stdin, &mut to).await;
        }
    });
    let (stdout, stderr) = (streams.stdout.take(), streams.stderr.take());
    let reading = async {
        if let Some(mut stdout) = stdout {
            let _ = tokio::io::copy(&mut out, &mut stdout).await;
        }
    };
    let complaining = async {
        if let Some(mut stderr) = stderr {
            let _ = tokio::io::copy(&mut err, &mut stderr).await;
        }
    };
    let ((), (), status) = tokio::join!(reading, complaining, child.wait());
    feeding.abort();
    ExitOutcome::Exited(status.unwrap().code().unwrap_or(-1))
}

struct Server {
    url: String,
    home: std::path::PathBuf,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.home);
    }
}

impl Server {
    async fn start(name: &str) -> Server {
        let echo = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let echo_address = echo.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = echo.accept().await {
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.split();
                    let _ = tokio::io::copy(&mut read, &mut write).await;
                });
            }
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let service = hyper::service::service_fn(move |request| answer(request, echo_address));
                let serving = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .with_upgrades();
                tokio::spawn(async move {
                    let _ = serving.await;
                });
            }
        });
        let home = std::env::temp_dir().join(format!("skiff-streaming-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&home).unwrap();
        Server { url, home }
    }

    fn kubectl(&self, websockets: bool, arguments: &[&str]) -> Command {
        let mut command = Command::new("kubectl");
        command
            .args(["--server", &self.url])
            .args(arguments)
            .env("HOME", &self.home)
            .env("KUBECONFIG", self.home.join("none"))
            .env("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", websockets.to_string())
            .env("KUBECTL_PORT_FORWARD_WEBSOCKETS", websockets.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    async fn exec(&self, websockets: bool, arguments: &[&str], input: Vec<u8>) -> Output {
        let mut child = self.kubectl(websockets, arguments).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        tokio::spawn(async move { stdin.write_all(&input).await });
        child.wait_with_output().await.unwrap()
    }
}

async fn kubectl_is_there() -> bool {
    let there = Command::new("kubectl")
        .args(["version", "--client"])
        .output()
        .await
        .is_ok_and(|o| o.status.success());
    if !there {
        println!("skipped: kubectl is not installed");
    }
    there
}

#[tokio::test]
async fn exec() {
    if !kubectl_is_there().await {
        return;
    }
    let server = Server::start("exec").await;
    for websockets in [true, false] {
        let arguments = ["exec", "web", "--", "sh", "-c", "echo out; echo err >&2; exit 3"];
        let output = server.exec(websockets, &arguments, vec![]).await;
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "websockets {websockets}: {stderr}");
        assert_eq!(output.stdout, b"out\n", "websockets {websockets}");
        assert!(stderr.starts_with("err\n"), "websockets {websockets}: {stderr}");
        assert!(
            stderr.contains("command terminated with exit code 3"),
            "websockets {websockets}: {stderr}"
        );

        // More than any buffer on the way, and the end of input must come through.
        let input: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
        let output = server
            .exec(websockets, &["exec", "-i", "web", "--", "cat"], input.clone())
            .await;
        assert_eq!(
            output.status.code(),
            Some(0),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(
            output.stdout == input,
            "websockets {websockets}: {} bytes came back",
            output.stdout.len()
        );
    }
}

#[tokio::test]
async fn port_forward() {
    if !kubectl_is_there().await {
        return;
    }
    let server = Server::start("port-forward").await;
    for websockets in [true, false] {
        let mut child = server
            .kubectl(
                websockets,
                &["port-forward", "--address", "127.0.0.1", "web", ":80", ":81"],
            )
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut local = async || {
            let line = lines
                .next_line()
                .await
                .unwrap()
                .expect("kubectl says where it listens");
            line.split([':', ' ']).nth(3).unwrap().parse::<u16>().unwrap()
        };
        let (good, bad) = (local().await, local().await);
        // Several connections at once over the one to the server.
        let talk = |number: u8| async move {
            let mut stream = TcpStream::connect(("127.0.0.1", good)).await.unwrap();
            let message = vec![number; 200_000];
            let (mut read, mut write) = stream.split();
            let sending = async {
                write.write_all(&message).await.unwrap();
                write.shutdown().await.unwrap();
            };
            let mut back = Vec::new();
            let ((), read) = tokio::join!(sending, read.read_to_end(&mut back));
            read.unwrap();
            assert!(
                back == message,
                "websockets {websockets}: {} bytes came back",
                back.len()
            );
        };
        tokio::join!(talk(1), talk(2), talk(3));
        let mut refused = TcpStream::connect(("127.0.0.1", bad)).await.unwrap();
        let mut nothing = Vec::new();
        let _ = refused.read_to_end(&mut nothing).await;
        assert!(nothing.is_empty());
        let mut complaints = BufReader::new(child.stderr.take().unwrap()).lines();
        let complaint = complaints.next_line().await.unwrap().unwrap_or_default();
        assert!(
            complaint.contains("error forwarding port 81 to pod web, uid : connection refused"),
            "websockets {websockets}: {complaint}"
        );
        child.kill().await.unwrap();
    }
}
