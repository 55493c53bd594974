//! Clients that are slow, greedy or broken: each is ended or bounded, and others are served all the while.

mod support;

use std::time::Duration;

use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use serde_json::json;
use skiff_server::Limits;
use support::{Cluster, Https};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

const SHORT: Duration = Duration::from_millis(300);

/// Far longer than anything here takes: only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_secs(120);

async fn patiently<T>(what: &str, future: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(PATIENCE, future).await;
    done.unwrap_or_else(|_| panic!("{what}: nothing happened"))
}

/// Reads until the other side ends the connection, however it does.
async fn until_closed(what: &str, stream: &mut (impl AsyncReadExt + Unpin)) -> Vec<u8> {
    let mut seen = Vec::new();
    let _ = patiently(what, stream.read_to_end(&mut seen)).await;
    seen
}

/// That a client of good manners is served.
async fn well_served(cluster: &Cluster, https: &Https) {
    let served = async {
        let stream = https.connect(cluster, None, "http/1.1").await;
        let (mut sender, driver) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .expect("HTTP/1.1");
        tokio::spawn(driver);
        let request = Request::builder().uri("/version").header("host", "localhost");
        let request = request.body(Full::<bytes::Bytes>::default()).expect("a request");
        let response = sender.send_request(request).await.expect("answers");
        assert_eq!(response.status(), 200);
        response.into_body().collect().await.expect("a body");
    };
    patiently("a request of good manners", served).await;
}

/// One frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    out.extend([kind, flags]);
    out.extend(stream.to_be_bytes());
    out.extend(payload);
    out
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The headers of a request, none of them from the dynamic table.
fn block(method: u8, path: &str) -> Vec<u8> {
    let mut out = vec![method, 0x87, 0x01, 9];
    out.extend(b"localhost");
    out.extend([0x04, path.len() as u8]);
    out.extend(path.as_bytes());
    out
}

const GET: u8 = 0x82;
const POST: u8 = 0x83;

/// A connection of HTTP/2 whose client gives streams `window` bytes.
async fn http2(
    cluster: &Cluster,
    https: &Https,
    window: u32,
    identity: Option<&skiff_pki::Identity>,
) -> TlsStream<TcpStream> {
    let mut stream = https.connect(cluster, identity, "h2").await;
    let mut hello = PREFACE.to_vec();
    let mut settings = vec![0, 4];
    settings.extend(window.to_be_bytes());
    hello.extend(frame(SETTINGS, 0, 0, &settings));
    stream.write_all(&hello).await.expect("writes");
    stream
}

/// The next frame: kind, stream, payload. Nothing if the connection ended.
async fn next_frame(stream: &mut TlsStream<TcpStream>) -> Option<(u8, u32, Vec<u8>)> {
    let mut head = [0; 9];
    patiently("a frame", stream.read_exact(&mut head)).await.ok()?;
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
    let mut payload = vec![0; length];
    patiently("a payload", stream.read_exact(&mut payload))
        .await
        .ok()?;
    let id = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
    Some((head[3], id, payload))
}

fn admin(cluster: &Cluster) -> skiff_pki::Identity {
    let identity = cluster.pki.client("admin", "admin", Some("system:masters"));
    identity.expect("a certificate")
}

/// Objects whose list is larger than what sockets take in by themselves.
async fn fill(cluster: &Cluster) -> &'static str {
    let maps = "/api/v1/namespaces/default/configmaps";
    for number in 0..24 {
        let object =
            json!({"metadata": {"name": format!("m{number}")}, "data": {"a": "x".repeat(1_000_000)}});
        assert_eq!(cluster.post(maps, object).await.code, 201);
    }
    maps
}

#[tokio::test]
async fn handshakes_and_headers_that_never_end() {
    let cluster = Cluster::start().await;
    let short = Limits {
        handshake: SHORT,
        headers: SHORT,
        idle: SHORT,
        ..Limits::default()
    };
    let https = Https::within(&cluster, short).await;

    let mut silent = TcpStream::connect(https.address).await.expect("connects");
    until_closed("a handshake that does not begin", &mut silent).await;
    let mut begun = TcpStream::connect(https.address).await.expect("connects");
    begun.write_all(&[0x16, 3, 1, 2, 0, 1]).await.expect("writes");
    until_closed("a handshake that does not end", &mut begun).await;

    let mut silent = https.connect(&cluster, None, "http/1.1").await;
    until_closed("no request", &mut silent).await;
    let mut preface = https.connect(&cluster, None, "h2").await;
    preface.write_all(&PREFACE[..10]).await.expect("writes");
    until_closed("half a preface", &mut preface).await;
    let mut idle = http2(&cluster, &https, 65_535, None).await;
    until_closed("HTTP/2 without a request", &mut idle).await;

    // Byte by byte for as long as the server lets it.
    let stream = https.connect(&cluster, None, "http/1.1").await;
    let (mut read, mut write) = tokio::io::split(stream);
    let trickle = async {
        let _ = write
            .write_all(b"GET /version HTTP/1.1\r\nhost: localhost\r\nx-long: ")
            .await;
        while write.write_all(b"x").await.is_ok() {
            tokio::time::sleep(SHORT / 10).await;
        }
    };
    let closed = until_closed("headers byte by byte", &mut read);
    tokio::select! {
        _ = closed => {}
        () = trickle => {}
    }
    let stream = http2(&cluster, &https, 65_535, None).await;
    let (mut read, mut write) = tokio::io::split(stream);
    let trickle = async {
        let begin = frame(HEADERS, END_STREAM, 1, &block(GET, "/version"));
        let _ = write.write_all(&begin).await;
        while write.write_all(&frame(CONTINUATION, 0, 1, b"")).await.is_ok() {
            tokio::time::sleep(SHORT / 10).await;
        }
    };
    let closed = until_closed("CONTINUATION frame by frame", &mut read);
    tokio::select! {
        _ = closed => {}
        () = trickle => {}
    }
    https.end().await;
}

#[tokio::test]
async fn bodies_that_trickle_in_end_at_the_deadline() {
    let cluster = Cluster::start().await;
    let https = Https::open(&cluster).await;
    let identity = admin(&cluster);
    let path = "/api/v1/namespaces/default/configmaps?timeout=300ms";
    let stream = https.connect(&cluster, Some(&identity), "http/1.1").await;
    let (mut read, mut write) = tokio::io::split(stream);
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
    );
    let trickle = async {
        let _ = write.write_all(head.as_bytes()).await;
        while write.write_all(b" ").await.is_ok() {
            tokio::time::sleep(SHORT / 10).await;
        }
        std::future::pending::<()>().await;
    };
    let answered = async {
        let mut line = [0; 12];
        read.read_exact(&mut line).await.expect("an answer");
        String::from_utf8_lossy(&line).into_owned()
    };
    tokio::select! {
        answer = patiently("a body byte by byte", answered) => assert_eq!(answer, "HTTP/1.1 504"),
        () = trickle => {}
    }

    let mut stream = http2(&cluster, &https, 65_535, Some(&identity)).await;
    let headers = frame(HEADERS, END_HEADERS, 1, &block(POST, path));
    stream.write_all(&headers).await.expect("writes");
    stream.write_all(&frame(DATA, 0, 1, b" ")).await.expect("writes");
    let mut body = Vec::new();
    loop {
        let (kind, id, payload) = next_frame(&mut stream).await.expect("a frame");
        if kind == DATA && id == 1 {
            body.extend(payload);
        }
        if String::from_utf8_lossy(&body).contains("request did not complete within the allotted timeout") {
            break;
        }
    }
    https.end().await;
}

#[tokio::test]
async fn a_timeout_is_what_the_client_says() {
    let cluster = Cluster::start().await;
    let check = async |timeout: &str, code: u16, message: Option<&str>| {
        let reply = cluster
            .get(&format!("/api/v1/namespaces?timeout={timeout}"))
            .await;
        assert_eq!(
            (reply.code, reply.json["message"].as_str()),
            (code, message),
            "{timeout}"
        );
    };
    check("", 200, None).await;
    check("0s", 200, None).await;
    check("-1s", 200, None).await;
    check("1h", 200, None).await;
    check("1m30s", 200, None).await;
    let say = |why: &str| format!("invalid timeout specified in the request URL - time: {why}");
    check("5", 400, Some(&say("missing unit in duration \"5\""))).await;
    check("abc", 400, Some(&say("invalid duration \"abc\""))).await;
    check("5y", 400, Some(&say("unknown unit \"y\" in duration \"5y\""))).await;
    // A watch has a timeout of its own.
    let _watch = cluster.watch("/api/v1/namespaces?watch=true&timeout=abc").await;
}

#[tokio::test]
async fn answers_that_nobody_reads() {
    let cluster = Cluster::start().await;
    let path = fill(&cluster).await;
    let identity = admin(&cluster);
    // One connection at a time: the next is served only once the first is gone.
    let one = |limits: Limits| Limits {
        connections: 1,
        ..limits
    };
    let stalled = Limits {
        stalled: SHORT,
        ..Limits::default()
    };
    let unanswered = Limits {
        answer: SHORT,
        ..Limits::default()
    };
    for limits in [stalled, unanswered.clone()] {
        let https = Https::within(&cluster, one(limits)).await;
        let mut deaf = https.connect(&cluster, Some(&identity), "http/1.1").await;
        let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
        deaf.write_all(request.as_bytes()).await.expect("writes");
        // The answer has begun: from now on it is not a connection that does nothing.
        let mut line = [0; 12];
        deaf.read_exact(&mut line).await.expect("an answer");
        assert_eq!(&line, b"HTTP/1.1 200");
        well_served(&cluster, &https).await;
        let seen = until_closed("the rest of an answer", &mut deaf).await;
        assert!(seen.len() < 24_000_000, "{} bytes came", seen.len());
        https.end().await;
    }

    // Over HTTP/2 the one stream ends, and the connection goes on.
    let https = Https::within(&cluster, unanswered).await;
    for window in [0, 1, 100_000] {
        let mut deaf = http2(&cluster, &https, window, Some(&identity)).await;
        let request = frame(HEADERS, END_HEADERS | END_STREAM, 1, &block(GET, path));
        deaf.write_all(&request).await.expect("writes");
        loop {
            let (kind, id, _) = next_frame(&mut deaf).await.expect("a frame");
            assert_ne!(kind, GOAWAY);
            if kind == RST_STREAM && id == 1 {
                break;
            }
        }
        let request = frame(HEADERS, END_HEADERS | END_STREAM, 3, &block(GET, "/version"));
        deaf.write_all(&request).await.expect("writes");
        loop {
            let (kind, id, _) = next_frame(&mut deaf).await.expect("a frame");
            if kind == HEADERS && id == 3 {
                break;
            }
        }
    }
    https.end().await;
}

#[tokio::test]
async fn idle_connections_make_room() {
    let cluster = Cluster::start().await;
    let few = Limits {
        connections: 8,
        ..Limits::default()
    };
    let https = Https::within(&cluster, few).await;
    // In the middle of a watch: nobody makes room at its cost.
    let identity = admin(&cluster);
    let mut watching = http2(&cluster, &https, 65_535, Some(&identity)).await;
    let watch = frame(
        HEADERS,
        END_HEADERS | END_STREAM,
        1,
        &block(GET, "/api/v1/nodes?watch=true"),
    );
    watching.write_all(&watch).await.expect("writes");
    loop {
        let (kind, id, _) = next_frame(&mut watching).await.expect("a frame");
        if kind == HEADERS && id == 1 {
            break;
        }
    }
    let mut idle = Vec::new();
    for _ in 0..50 {
        idle.push(TcpStream::connect(https.address).await.expect("connects"));
    }
    well_served(&cluster, &https).await;
    let node = json!({"metadata": {"name": "n"}});
    assert_eq!(cluster.post("/api/v1/nodes", node).await.code, 201);
    loop {
        let (kind, id, payload) = next_frame(&mut watching).await.expect("a frame");
        if kind == DATA && id == 1 {
            assert!(String::from_utf8_lossy(&payload).contains("ADDED"));
            break;
        }
    }
    drop(idle);
    https.end().await;
}

/// Sends what `more` makes, again and again, until the server ends the connection. Gives how many bytes it took.
async fn flood(what: &str, mut stream: TlsStream<TcpStream>, mut more: impl FnMut(u32) -> Vec<u8>) -> usize {
    let mut sent = 0;
    let sending = async {
        for turn in 0.. {
            let bytes = more(turn);
            if stream.write_all(&bytes).await.is_err() {
                break;
            }
            sent += bytes.len();
        }
    };
    patiently(what, sending).await;
    sent
}

#[tokio::test]
async fn floods_of_frames_end() {
    let cluster = Cluster::start().await;
    let short = Limits {
        stalled: SHORT,
        ..Limits::default()
    };
    let https = Https::within(&cluster, short).await;
    let connect = || http2(&cluster, &https, 65_535, None);

    // Nobody reads the answers to these: at some time no more can be sent.
    flood("PING", connect().await, |_| {
        frame(PING, 0, 0, &[7; 8]).repeat(100)
    })
    .await;
    flood("SETTINGS", connect().await, |_| {
        frame(SETTINGS, 0, 0, &[]).repeat(100)
    })
    .await;

    // Headers without an end, large and empty.
    let begin = |turn: u32| {
        if turn == 0 {
            frame(HEADERS, END_STREAM, 1, &block(GET, "/version"))
        } else {
            Vec::new()
        }
    };
    let mut large = vec![0x00, 1, b'x', 0x7f, 0x81, 0x7e];
    large.resize(16_384, b'y');
    let sent = flood("CONTINUATION", connect().await, |turn| {
        [begin(turn), frame(CONTINUATION, 0, 1, &large)].concat()
    });
    assert!(sent.await < 32 << 20);
    let sent = flood("empty CONTINUATION", connect().await, |turn| {
        [begin(turn), frame(CONTINUATION, 0, 1, &[]).repeat(100)].concat()
    });
    assert!(sent.await < 32 << 20);
    let stream = https.connect(&cluster, None, "http/1.1").await;
    let sent = flood("endless headers of HTTP/1.1", stream, |turn| match turn {
        0 => b"GET /version HTTP/1.1\r\nhost: localhost\r\nx: ".to_vec(),
        _ => vec![b'y'; 16_384],
    });
    assert!(sent.await < 32 << 20);
    well_served(&cluster, &https).await;
    https.end().await;
}

#[tokio::test]
async fn streams_that_are_reset_at_once() {
    let cluster = Cluster::start().await;
    let https = Https::open(&cluster).await;
    let stream = http2(&cluster, &https, 65_535, None).await;
    let (mut read, mut write) = tokio::io::split(stream);
    // What is answered is thrown away.
    let reading = tokio::spawn(async move {
        let mut buffer = vec![0; 65_536];
        while matches!(read.read(&mut buffer).await, Ok(count) if count > 0) {}
    });
    for turn in 0..5000 {
        let id = turn * 2 + 1;
        let mut bytes = frame(HEADERS, END_HEADERS | END_STREAM, id, &block(GET, "/version"));
        bytes.extend(frame(RST_STREAM, 0, id, &8u32.to_be_bytes()));
        if patiently("a reset", write.write_all(&bytes)).await.is_err() {
            break;
        }
    }
    well_served(&cluster, &https).await;
    drop(write);
    reading.abort();
    https.end().await;
}

#[tokio::test]
async fn headers_that_grow_when_they_are_unpacked() {
    let cluster = Cluster::start().await;
    let https = Https::open(&cluster).await;
    let mut stream = http2(&cluster, &https, 65_535, None).await;
    // 4,000 bytes into the table, then named 12,000 times: 48 MB of headers in 16 KB.
    let mut bomb = block(GET, "/version");
    bomb.extend([0x40, 1, b'x', 0x7f, 0xa1, 0x1e]);
    bomb.extend([b'y'; 4000]);
    bomb.extend([0xbe; 12_000]);
    let bytes = frame(HEADERS, END_HEADERS | END_STREAM, 1, &bomb[..16_000]);
    stream.write_all(&bytes).await.expect("writes");
    // Refused, one way or another; never answered with the version.
    while let Some((kind, id, payload)) = next_frame(&mut stream).await {
        let refused = kind == RST_STREAM || kind == GOAWAY || (kind == HEADERS && id == 1);
        assert!(kind != DATA || !String::from_utf8_lossy(&payload).contains("gitVersion"));
        if refused {
            break;
        }
    }
    well_served(&cluster, &https).await;
    https.end().await;
}
