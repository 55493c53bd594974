//! The demo image's program: a small HTTP server that says which pod it is. It runs inside containers made of
//! skiff's own binary, so that the first five minutes need no registry.

use anyhow::{Context, Result};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use kube::api::{Api, PostParams};
use std::convert::Infallible;
use std::env;
use std::net::{Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// After SIGTERM the server goes on for this long, while the news that it leaves reaches every proxy.
const LINGER: Duration = Duration::from_secs(1);

/// Serves until SIGTERM or SIGINT.
pub async fn serve(port: u16) -> Result<()> {
    let listener = match TcpListener::bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))).await {
        Ok(listener) => listener,
        Err(_) => TcpListener::bind(("0.0.0.0", port))
            .await
            .with_context(|| format!("cannot listen on port {port}"))?,
    };
    let name = env::var("POD_NAME")
        .or_else(|_| env::var("HOSTNAME"))
        .unwrap_or_else(|_| "unknown".to_owned());
    let version = env::var("VERSION").unwrap_or_else(|_| "1".to_owned());
    println!("demo: {name} version {version} listens on port {port}");
    let greeting = Arc::new(format!("Hello from {name}, version {version}\n"));
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let stopping = CancellationToken::new();
    let connections = TaskTracker::new();
    let mut leave = None;
    loop {
        let linger = async {
            match leave {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = term.recv() => leave = Some(tokio::time::Instant::now() + LINGER),
            _ = int.recv() => break,
            () = linger => break,
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                let (greeting, stopping) = (Arc::clone(&greeting), stopping.clone());
                connections.spawn(async move {
                    let service = service_fn(move |request| answer(request, Arc::clone(&greeting)));
                    let connection = hyper::server::conn::http1::Builder::new()
                        .timer(TokioTimer::new())
                        .serve_connection(TokioIo::new(stream), service);
                    tokio::pin!(connection);
                    tokio::select! {
                        _ = connection.as_mut() => return,
                        () = stopping.cancelled() => connection.as_mut().graceful_shutdown(),
                    }
                    let _ = connection.await;
                });
            }
        }
    }
    stopping.cancel();
    connections.close();
    let _ = tokio::time::timeout(Duration::from_secs(5), connections.wait()).await;
    println!("demo: {name} ends");
    Ok(())
}

async fn answer(
    request: Request<Incoming>,
    greeting: Arc<String>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (code, text) = match request.uri().path() {
        "/" => (StatusCode::OK, greeting.as_str().to_owned()),
        "/healthz" => (StatusCode::OK, "ok\n".to_owned()),
        "/whoami" => match who_am_i().await {
            Ok(text) => (StatusCode::OK, text),
            Err(error) => (StatusCode::BAD_GATEWAY, format!("{error:#}\n")),
        },
        _ => (StatusCode::NOT_FOUND, "not found\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = code;
    Ok(response)
}

/// Asks the API server through the `kubernetes` service, with the token that the pod was given.
async fn who_am_i() -> Result<String> {
    let client = kube::Client::try_from(kube::Config::incluster().context("not in a cluster")?)?;
    let version = client.apiserver_version().await?.git_version;
    let reviews: Api<SelfSubjectReview> = Api::all(client);
    let review = reviews
        .create(&PostParams::default(), &SelfSubjectReview::default())
        .await?;
    let user = review
        .status
        .and_then(|s| s.user_info)
        .and_then(|u| u.username)
        .unwrap_or_default();
    Ok(format!("Kubernetes {version} knows me as {user}\n"))
}
