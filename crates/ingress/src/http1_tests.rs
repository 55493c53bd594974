//! When a connection to an endpoint is used again, and when it must not be. The endpoints are sockets that do as each test
//! says.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::backend::Protocol;
use crate::connections::ConnectionLimits;
use crate::proxy_tests::{PATIENCE, Running, exchange, statuses};
use crate::table::RouteOptions;

/// A proxy before one endpoint, whose connections are handled by `serve`, and the number of connections that it had.
async fn before<F, R>(serve: F) -> (Running, Arc<AtomicUsize>)
where
    F: Fn(TcpStream, usize) -> R + Send + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let accepted: Arc<AtomicUsize> = Arc::default();
    let count = accepted.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, count.fetch_add(1, Ordering::SeqCst)));
        }
    });
    let running = Running::start(ConnectionLimits::default()).await;
    running.route(Protocol::Http1, &[address], RouteOptions::default());
    (running, accepted)
}

/// Reads up to the text, and answers all that was read; `None` at the end of the stream.
async fn read_to(stream: &mut TcpStream, end: &str) -> Option<String> {
    let mut read = Vec::new();
    let reading = async {
        while !read.ends_with(end.as_bytes()) {
            let mut byte = [0];
            match stream.read(&mut byte).await {
                Ok(1) => read.push(byte[0]),
                _ => return false,
            }
        }
        true
    };
    let whole = tokio::time::timeout(PATIENCE, reading).await.expect("in time");
    whole.then(|| String::from_utf8_lossy(&read).into_owned())
}

const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

async fn ask(stream: &mut TcpStream, request: &str) -> String {
    stream.write_all(request.as_bytes()).await.expect("sent");
    read_to(stream, "ok").await.expect("a response")
}

const POST: &str = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx";

#[tokio::test]
async fn one_connection_serves_many_requests() {
    let (running, accepted) = before(|mut stream, _| async move {
        while read_to(&mut stream, "\r\n\r\nx").await.is_some() {
            // With a head of its own first, and in pieces, with a trailer.
            let _ = stream.write_all(b"HTTP/1.1 103 Early Hints\r\n\r\n").await;
            let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: t\r\n\r\n1\r\no\r\n";
            let _ = stream.write_all(head).await;
            tokio::task::yield_now().await;
            let _ = stream.write_all(b"1\r\nk\r\n0\r\nt: 1\r\n\r\n").await;
        }
    })
    .await;
    let mut client = TcpStream::connect(running.http).await.expect("a connection");
    for _ in 0..20 {
        client.write_all(POST.as_bytes()).await.expect("sent");
        let answer = read_to(&mut client, "0\r\n\r\n").await.expect("a response");
        assert_eq!(statuses(&answer), ["200"], "{answer}");
    }
    assert_eq!(accepted.load(Ordering::SeqCst), 1);
}

/// A POST cannot be sent twice, so a connection that was closed must be known before it is used.
#[tokio::test]
async fn a_connection_that_its_endpoint_closed_is_not_used() {
    let closed: Arc<tokio::sync::Semaphore> = Arc::new(tokio::sync::Semaphore::new(0));
    let closes = closed.clone();
    let (running, accepted) = before(move |mut stream, _| {
        let closes = closes.clone();
        async move {
            let _ = read_to(&mut stream, "\r\n\r\nx").await;
            let _ = stream.write_all(OK).await;
            drop(stream);
            closes.add_permits(1);
        }
    })
    .await;
    let mut client = TcpStream::connect(running.http).await.expect("a connection");
    for number in 1..=20 {
        let answer = ask(&mut client, POST).await;
        assert_eq!(statuses(&answer), ["200"], "{answer}");
        closed.acquire().await.expect("it is open").forget();
        assert_eq!(accepted.load(Ordering::SeqCst), number);
    }
}

/// The rest of a request is passed on though the response is over, and the connection is used again after it.
#[tokio::test]
async fn a_response_may_come_before_the_request_is_sent() {
    let bodies: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = bodies.clone();
    let (running, _) = before(move |mut stream, _| {
        let seen = seen.clone();
        async move {
            while read_to(&mut stream, "\r\n\r\n").await.is_some() {
                let _ = stream.write_all(OK).await;
                let Some(body) = read_to(&mut stream, "end").await else {
                    return;
                };
                seen.lock().push(body);
            }
        }
    })
    .await;
    let mut client = TcpStream::connect(running.http).await.expect("a connection");
    for number in 1..=5 {
        let head = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\nfirst";
        let answer = ask(&mut client, head).await;
        assert_eq!(statuses(&answer), ["200"], "{answer}");
        client.write_all(b"the end").await.expect("sent");
        let rest = async {
            while bodies.lock().len() < number {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, rest).await.expect("the rest");
    }
    assert!(bodies.lock().iter().all(|body| body == "firstthe end"));
}

/// Whoever comes after a client that went away in the middle of a response gets its own response.
#[tokio::test]
async fn a_connection_with_half_a_response_is_closed() {
    let ended: Arc<tokio::sync::Semaphore> = Arc::new(tokio::sync::Semaphore::new(0));
    let ends = ended.clone();
    let (running, accepted) = before(move |mut stream, number| {
        let ends = ends.clone();
        async move {
            let _ = read_to(&mut stream, "\r\n\r\n").await;
            if number > 0 {
                let _ = stream.write_all(OK).await;
                return;
            }
            let half = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf";
            let _ = stream.write_all(half).await;
            let next = stream.read(&mut [0; 1]).await;
            assert!(matches!(next, Ok(0) | Err(_)), "it was used again");
            ends.add_permits(1);
        }
    })
    .await;
    let mut client = TcpStream::connect(running.http).await.expect("a connection");
    let get = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
    client.write_all(get.as_bytes()).await.expect("sent");
    read_to(&mut client, "half").await.expect("half a response");
    drop(client);
    let closed = tokio::time::timeout(PATIENCE, ended.acquire()).await;
    closed.expect("it is closed").expect("it is open").forget();
    let answer = exchange(
        running.http,
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    )
    .await;
    assert_eq!(statuses(&answer), ["200"], "{answer}");
    assert!(answer.ends_with("ok"), "{answer}");
    assert_eq!(accepted.load(Ordering::SeqCst), 2);
}
