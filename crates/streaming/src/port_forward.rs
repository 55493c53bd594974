//! Port forwarding: each TCP connection of the client is a pair of streams, one for its data and one
//! for an error. Over SPDY, over SPDY inside a WebSocket (what kubectl uses now), and over plain
//! WebSocket channels (one connection a port).

use std::collections::HashMap;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::pump::pump;
use crate::spdy::{Incoming, Outgoing, REFUSED_STREAM};
use crate::upgrade::{Agreed, negotiate};
use crate::{Body, refuse, spdy, websocket};

/// How long the second stream of a pair may keep us waiting.
const STREAM_CREATION_TIMEOUT: Duration = Duration::from_secs(30);

const SPDY_PROTOCOLS: &[&str] = &["portforward.k8s.io"];

const TUNNEL: &str = "SPDY/3.1+portforward.k8s.io";
const WEBSOCKET_PROTOCOLS: &[&str] = &[
    TUNNEL,
    "v4.channel.k8s.io",
    "v4.base64.channel.k8s.io",
    "portforward.k8s.io",
];

/// Answers a port-forward request. `pod` names the target in error messages; `ports` are those that were agreed on
/// before, or none if the request's query names them; `connect` opens a connection to a port of the pod and is called
/// once per forwarded connection.
pub async fn serve_port_forward<B, C, Fut, IO, E>(
    mut request: Request<B>,
    pod: impl Into<String>,
    ports: &[i32],
    connect: C,
) -> Response<Body>
where
    C: Fn(u16) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<IO, E>> + Send + 'static,
    IO: AsyncRead + AsyncWrite + Send + 'static,
    E: Display + Send + 'static,
{
    let (agreed, response) = match negotiate(&request, SPDY_PROTOCOLS, WEBSOCKET_PROTOCOLS) {
        Ok(agreed) => agreed,
        Err(refusal) => return *refusal,
    };
    // Over SPDY each stream names its port; plain channels must know them in advance.
    let ports = match &agreed {
        Agreed::WebSocket(protocol) if protocol != TUNNEL => {
            match channel_ports(ports, request.uri().query().unwrap_or("")) {
                Ok(ports) => ports,
                Err(why) => return refuse(http::StatusCode::BAD_REQUEST, why),
            }
        }
        _ => Vec::new(),
    };
    let upgrade = hyper::upgrade::on(&mut request);
    let forwarder = Arc::new(Forwarder {
        pod: pod.into(),
        connect,
    });
    tokio::spawn(async move {
        match upgrade.await {
            Ok(upgraded) => forwarder.serve(TokioIo::new(upgraded), agreed, ports).await,
            Err(error) => tracing::debug!(%error, "a client did not stay for the upgrade"),
        }
    });
    response
}

/// The ports that were agreed on, or else those of the query, as one list or many.
fn channel_ports(agreed: &[i32], query: &str) -> Result<Vec<u16>, String> {
    let mut ports = Vec::new();
    for port in agreed {
        ports.push(parse_port(&port.to_string())?);
    }
    if !ports.is_empty() {
        return limited(ports);
    }
    for (key, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
        if key == "port" || key == "ports" {
            for port in value.replace("%2C", ",").split(',') {
                ports.push(parse_port(port)?);
            }
        }
    }
    limited(ports)
}

fn limited(ports: Vec<u16>) -> Result<Vec<u16>, String> {
    match ports.len() {
        0 => Err("query parameter \"port\" is required".into()),
        // Channels are numbered in one byte, two a port.
        129.. => Err("too many ports".into()),
        _ => Ok(ports),
    }
}

fn parse_port(text: &str) -> Result<u16, String> {
    match text.parse::<u16>() {
        Ok(0) => Err(format!("port {text:?} must be > 0")),
        Ok(port) => Ok(port),
        Err(error) => Err(format!("unable to parse {text:?} as a port: {error}")),
    }
}

struct Forwarder<C> {
    pod: String,
    connect: C,
}

/// One half of a pair that waits for the other.
struct Half {
    stream: Incoming,
    is_error: bool,
    port: u16,
    since: Instant,
}

impl<C, Fut, IO, E> Forwarder<C>
where
    C: Fn(u16) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<IO, E>> + Send + 'static,
    IO: AsyncRead + AsyncWrite + Send + 'static,
    E: Display + Send + 'static,
{
    async fn serve<T>(self: Arc<Self>, io: T, agreed: Agreed, ports: Vec<u16>)
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        match agreed {
            Agreed::Spdy(_) => self.serve_spdy(io).await,
            Agreed::WebSocket(protocol) if protocol == TUNNEL => {
                self.serve_spdy(websocket::tunnel(io).await).await
            }
            Agreed::WebSocket(protocol) => self.serve_websocket(io, &protocol, &ports).await,
        }
    }

    async fn serve_spdy<T>(self: Arc<Self>, io: T)
    where
        T: AsyncRead + AsyncWrite + Send + 'static,
    {
        let mut session = spdy::Session::start(io);
        let mut waiting: HashMap<String, Half> = HashMap::new();
        let mut connections = JoinSet::new();
        loop {
            let oldest = waiting.values().map(|half| half.since).min();
            let patience = async {
                match oldest {
                    Some(since) => tokio::time::sleep_until(since + STREAM_CREATION_TIMEOUT).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                stream = session.incoming.recv() => {
                    let Some(stream) = stream else { break };
                    let id = stream.id;
                    match self.pair(&mut waiting, stream) {
                        Ok(pair) => {
                            if session.out.send(Outgoing::SynReply(id)).await.is_err() {
                                break;
                            }
                            if let Some((data, error, port)) = pair {
                                let (this, out) = (self.clone(), session.out.clone());
                                connections.spawn(async move { this.forward_spdy(out, data, error, port).await });
                            }
                        }
                        Err(why) => {
                            tracing::debug!(%why, "refusing a stream of a port-forward");
                            if session.out.send(Outgoing::Reset { id, status: REFUSED_STREAM }).await.is_err() {
                                break;
                            }
                        }
                    }
                }
                () = patience => {
                    let now = Instant::now();
                    let late = waiting.extract_if(|_, half| now >= half.since + STREAM_CREATION_TIMEOUT);
                    for (_, half) in late.collect::<Vec<_>>() {
                        let _ = session.out.send(Outgoing::Reset { id: half.stream.id, status: REFUSED_STREAM }).await;
                    }
                }
                Some(_) = connections.join_next() => {}
            }
        }
        // The client is gone; the connections to the pod go with it.
        drop(connections);
        session.close().await;
    }

    /// Takes a stream in; returns data, error and port when its pair is complete.
    fn pair(
        &self,
        waiting: &mut HashMap<String, Half>,
        stream: Incoming,
    ) -> Result<Option<(Incoming, Incoming, u16)>, String> {
        let headers = &stream.headers;
        let port = parse_port(headers.get("port").ok_or("\"port\" header is required")?)?;
        let is_error = match headers
            .get("streamtype")
            .ok_or("\"streamType\" header is required")?
        {
            "error" => true,
            "data" => false,
            other => return Err(format!("invalid stream type {other:?}")),
        };
        let request = match headers.get("requestid") {
            Some(request) => request.to_string(),
            // COMPAT: old clients open the error stream, then the data stream, and number neither.
            None if is_error => stream.id.to_string(),
            None => stream.id.saturating_sub(2).to_string(),
        };
        match waiting.remove(&request) {
            None => {
                waiting.insert(
                    request,
                    Half {
                        stream,
                        is_error,
                        port,
                        since: Instant::now(),
                    },
                );
                Ok(None)
            }
            Some(first) if first.is_error == is_error => {
                waiting.insert(request, first);
                Err("stream already exists for this request".into())
            }
            Some(first) if is_error => Ok(Some((first.stream, stream, port))),
            Some(first) => Ok(Some((stream, first.stream, first.port))),
        }
    }

    fn failure(&self, port: u16, error: impl Display) -> String {
        format!("error forwarding port {port} to pod {}, uid : {error}", self.pod)
    }

    async fn forward_spdy(
        &self,
        out: tokio::sync::mpsc::Sender<Outgoing>,
        data: Incoming,
        error: Incoming,
        port: u16,
    ) {
        let gone = data.gone.clone();
        let connected = tokio::select! {
            connected = (self.connect)(port) => connected,
            () = gone.cancelled() => return,
        };
        match connected {
            Ok(connection) => {
                let (from_pod, mut to_pod) = tokio::io::split(connection);
                let mut from_client = data.data;
                let upload = async {
                    let _ = tokio::io::copy(&mut from_client, &mut to_pod).await;
                    let _ = to_pod.shutdown().await;
                    std::future::pending::<()>().await
                };
                // The pod's end is the end; the client's is a half-close.
                let download = pump(
                    from_pod,
                    out.clone(),
                    gone,
                    Outgoing::data(data.id),
                    Some(Outgoing::fin(data.id)),
                );
                tokio::select! {
                    () = download => {}
                    () = upload => {}
                }
            }
            Err(why) => {
                let bytes = Bytes::from(self.failure(port, why));
                let _ = out
                    .send(Outgoing::Data {
                        id: error.id,
                        bytes,
                        fin: false,
                    })
                    .await;
                let _ = out.send(Outgoing::fin(data.id)).await;
            }
        }
        let _ = out.send(Outgoing::fin(error.id)).await;
    }

    async fn serve_websocket<T>(self: Arc<Self>, io: T, protocol: &str, ports: &[u16])
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let format = websocket::Format {
            base64: protocol.contains("base64"),
            close: false,
        };
        let channels: Vec<u8> = (0..ports.len()).map(|index| (index * 2) as u8).collect();
        let (session, mut readable) = websocket::Session::start(io, format, &channels).await;
        let mut connections = JoinSet::new();
        for (port, channel) in ports.iter().copied().zip(channels) {
            // COMPAT: each channel begins with its port.
            session.send(channel, &port.to_le_bytes()).await;
            session.send(channel + 1, &port.to_le_bytes()).await;
            let Some(mut from_client) = readable.remove(&channel) else {
                continue;
            };
            let ((mut to_client, moving), (mut errors, telling)) =
                (session.pipe(channel), session.pipe(channel + 1));
            connections.spawn(moving);
            connections.spawn(telling);
            let this = self.clone();
            connections.spawn(async move {
                match (this.connect)(port).await {
                    Ok(connection) => {
                        let (mut from_pod, mut to_pod) = tokio::io::split(connection);
                        let upload = async {
                            let _ = tokio::io::copy(&mut from_client, &mut to_pod).await;
                            let _ = to_pod.shutdown().await;
                            std::future::pending::<()>().await
                        };
                        tokio::select! {
                            _ = tokio::io::copy(&mut from_pod, &mut to_client) => {}
                            () = upload => {}
                        }
                    }
                    Err(why) => {
                        let _ = errors.write_all(this.failure(port, why).as_bytes()).await;
                    }
                }
            });
        }
        let gone = session.gone.clone();
        tokio::select! {
            () = async { while connections.join_next().await.is_some() {} } => {}
            () = gone.cancelled() => {}
        }
        drop(connections);
        session.close().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spdy_client::{Client, Frame};
    use futures::{SinkExt, StreamExt};
    use tokio::io::{AsyncReadExt, DuplexStream};
    use tokio_tungstenite::WebSocketStream;
    use tokio_tungstenite::tungstenite::{Message, protocol::Role};

    #[test]
    fn ports_of_queries() {
        fn check(query: &str, expected: Result<&[u16], &str>) {
            assert_eq!(
                channel_ports(&[], query),
                expected.map(<[u16]>::to_vec).map_err(str::to_string),
                "{query}"
            );
        }
        check("port=80&port=81", Ok(&[80, 81]));
        check("port=80,81", Ok(&[80, 81]));
        check("port=0", Err("port \"0\" must be > 0"));
        check("x=1", Err("query parameter \"port\" is required"));
        assert!(channel_ports(&[], "port=70000").is_err());
        assert!(channel_ports(&[], "port=").is_err());
        assert_eq!(channel_ports(&[80, 81], "").unwrap(), [80, 81]);
        assert!(channel_ports(&[0], "").is_err());
        assert!(channel_ports(&[1; 129], "").is_err());
    }

    /// Echoes in capitals on port 80; refuses other ports.
    async fn connect(port: u16) -> Result<DuplexStream, &'static str> {
        if port != 80 {
            return Err("connection refused");
        }
        let (near, mut far) = tokio::io::duplex(1024);
        tokio::spawn(async move {
            let mut text = String::new();
            far.read_to_string(&mut text).await.unwrap();
            far.write_all(text.to_uppercase().as_bytes()).await.unwrap();
        });
        Ok(near)
    }

    type Connecting = std::pin::Pin<Box<dyn Future<Output = Result<DuplexStream, &'static str>> + Send>>;

    fn forwarder() -> Arc<Forwarder<impl Fn(u16) -> Connecting>> {
        Arc::new(Forwarder {
            pod: "web".into(),
            connect: |port| Box::pin(connect(port)) as Connecting,
        })
    }

    async fn talk(mut client: Client<DuplexStream>) {
        let pair = |port, request| [("port", port), ("requestid", request)];
        let open = async |client: &mut Client<DuplexStream>, kind, port, request| {
            let [port, request] = pair(port, request);
            client.open(&[("streamtype", kind), port, request]).await
        };
        let error = open(&mut client, "error", "80", "0").await;
        let data = open(&mut client, "data", "80", "0").await;
        let bad_error = open(&mut client, "error", "81", "1").await;
        let bad_data = open(&mut client, "data", "81", "1").await;
        let refused = open(&mut client, "other", "80", "2").await;
        client.data(data, b"hello", true).await;
        let mut got: HashMap<u32, (Vec<u8>, bool)> = HashMap::new();
        let mut resets = Vec::new();
        while [error, data, bad_error, bad_data]
            .iter()
            .any(|id| got.get(id).is_none_or(|stream| !stream.1))
        {
            match client.next().await.unwrap() {
                Frame::Data(id, bytes, fin) => {
                    let stream = got.entry(id).or_default();
                    stream.0.extend(bytes);
                    stream.1 |= fin;
                }
                Frame::Reset(id, _) => resets.push(id),
                Frame::Reply(_) => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(got[&data].0, b"HELLO");
        assert_eq!(got[&error].0, b"");
        assert_eq!(got[&bad_data].0, b"");
        let text = String::from_utf8(got[&bad_error].0.clone()).unwrap();
        assert_eq!(
            text,
            "error forwarding port 81 to pod web, uid : connection refused"
        );
        assert_eq!(resets, [refused]);
    }

    #[tokio::test]
    async fn over_spdy() {
        let (client, server) = tokio::io::duplex(1 << 16);
        let task = tokio::spawn(forwarder().serve(server, Agreed::Spdy("portforward.k8s.io".into()), vec![]));
        talk(Client::new(client)).await;
        task.await.unwrap();
    }

    #[tokio::test]
    async fn over_spdy_in_websocket() {
        let (client, server) = tokio::io::duplex(1 << 16);
        let task = tokio::spawn(forwarder().serve(server, Agreed::WebSocket(TUNNEL.into()), vec![]));
        let websocket = WebSocketStream::from_raw_socket(client, Role::Client, None).await;
        let (mut sink, mut stream) = websocket.split();
        let (inner, outer) = tokio::io::duplex(1 << 16);
        let (mut from, mut to) = tokio::io::split(outer);
        let up = tokio::spawn(async move {
            let mut buffer = [0; 7];
            loop {
                let count = from.read(&mut buffer).await.unwrap();
                if count == 0 {
                    break sink.close().await.unwrap();
                }
                sink.send(Message::binary(buffer[..count].to_vec()))
                    .await
                    .unwrap();
            }
        });
        let down = tokio::spawn(async move {
            while let Some(Ok(Message::Binary(bytes))) = stream.next().await {
                if to.write_all(&bytes).await.is_err() {
                    break;
                }
            }
        });
        talk(Client::new(inner)).await;
        up.await.unwrap();
        task.await.unwrap();
        down.await.unwrap();
    }

    #[tokio::test]
    async fn over_plain_channels() {
        let (client, server) = tokio::io::duplex(1 << 16);
        let task = tokio::spawn(forwarder().serve(
            server,
            Agreed::WebSocket("v4.channel.k8s.io".into()),
            vec![80, 81],
        ));
        let mut client = WebSocketStream::from_raw_socket(client, Role::Client, None).await;
        let mut got: HashMap<u8, Vec<u8>> = HashMap::new();
        while got.get(&3).is_none_or(|text| text.len() <= 2) {
            if let Message::Binary(bytes) = client.next().await.unwrap().unwrap() {
                got.entry(bytes[0]).or_default().extend_from_slice(&bytes[1..]);
            }
        }
        assert_eq!(got[&0], 80u16.to_le_bytes());
        assert_eq!(
            got[&3][2..],
            b"error forwarding port 81 to pod web, uid : connection refused"[..]
        );
        drop(client);
        task.await.unwrap();
    }
}
