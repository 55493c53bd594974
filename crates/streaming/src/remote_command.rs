//! Exec and attach: the streams of one command over either transport, and its end as a `Status` on the
//! error stream.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::pump::{PIPE_SIZE, pump, read_sizes};
use crate::spdy::{Incoming, Outgoing, REFUSED_STREAM};
use crate::upgrade::{Agreed, negotiate};
use crate::{Body, ExitOutcome, Options, Streams, spdy, websocket};

/// How long a client may take to open its streams.
const STREAM_CREATION_TIMEOUT: Duration = Duration::from_secs(30);

const SPDY_PROTOCOLS: &[&str] = &[
    "v4.channel.k8s.io",
    "v3.channel.k8s.io",
    "v2.channel.k8s.io",
    "channel.k8s.io",
];

const WEBSOCKET_PROTOCOLS: &[&str] = &[
    "v5.channel.k8s.io",
    "v4.channel.k8s.io",
    "v4.base64.channel.k8s.io",
    "channel.k8s.io",
    "base64.channel.k8s.io",
];

/// Answers an exec or attach request. The returned response must reach the client (it is the 101 on
/// which the connection is handed over); the handler runs in a task of its own after that.
pub async fn serve_remote_command<B, F, Fut>(
    mut request: Request<B>,
    options: Options,
    handler: F,
) -> Response<Body>
where
    F: FnOnce(Streams) -> Fut + Send + 'static,
    Fut: Future<Output = ExitOutcome> + Send + 'static,
{
    let (agreed, response) = match negotiate(&request, SPDY_PROTOCOLS, WEBSOCKET_PROTOCOLS) {
        Ok(agreed) => agreed,
        Err(refusal) => return *refusal,
    };
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        match upgrade.await {
            Ok(upgraded) => serve(TokioIo::new(upgraded), agreed, options, handler).await,
            Err(error) => tracing::debug!(%error, "a client did not stay for the upgrade"),
        }
    });
    response
}

async fn serve<IO, F, Fut>(io: IO, agreed: Agreed, options: Options, handler: F)
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: FnOnce(Streams) -> Fut,
    Fut: Future<Output = ExitOutcome>,
{
    match agreed {
        Agreed::Spdy(protocol) => serve_spdy(io, &protocol, options, handler).await,
        Agreed::WebSocket(protocol) => serve_websocket(io, &protocol, options, handler).await,
    }
}

/// The message of a command's end: a `Status` from v4 on, before that the bare text of a failure.
fn status(outcome: &ExitOutcome, as_status: bool) -> Option<Bytes> {
    let (message, status) = match outcome {
        ExitOutcome::Exited(0) => (None, json!({"metadata": {}, "status": "Success"})),
        ExitOutcome::Exited(code) => {
            let message = format!(
                "command terminated with non-zero exit code: error executing command, exit code {code}"
            );
            let status = json!({
                "metadata": {},
                "status": "Failure",
                "message": message,
                "reason": "NonZeroExitCode",
                "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
            });
            (Some(message), status)
        }
        ExitOutcome::Failed(why) => {
            let message = format!("Internal error occurred: {why}");
            let status = json!({
                "metadata": {},
                "status": "Failure",
                "message": message,
                "reason": "InternalError",
                "details": {"causes": [{"message": why}]},
                "code": 500,
            });
            (Some(message), status)
        }
    };
    if as_status {
        Some(status.to_string().into())
    } else {
        message.map(Bytes::from)
    }
}

async fn serve_spdy<IO, F, Fut>(io: IO, protocol: &str, options: Options, handler: F)
where
    IO: AsyncRead + AsyncWrite + Send + 'static,
    F: FnOnce(Streams) -> Fut,
    Fut: Future<Output = ExitOutcome>,
{
    let mut session = spdy::Session::start(io);
    // Resizing came with v3.
    let resizes = options.tty && matches!(protocol, "v4.channel.k8s.io" | "v3.channel.k8s.io");
    let wanted: Vec<&str> = [
        ("error", true),
        ("stdin", options.stdin),
        ("stdout", options.stdout),
        ("stderr", options.stderr && !options.tty),
        ("resize", resizes),
    ]
    .into_iter()
    .filter_map(|(kind, on)| on.then_some(kind))
    .collect();
    let collect = tokio::time::timeout(STREAM_CREATION_TIMEOUT, collect_streams(&mut session, &wanted));
    let Ok(Some(mut opened)) = collect.await else {
        tracing::debug!(?wanted, "a client did not open its streams");
        session.close().await;
        return;
    };
    // No more streams after these.
    session.incoming.close();

    let mut pumps = JoinSet::new();
    let mut output = |kind: &str| {
        let Incoming { id, gone, .. } = opened.remove(kind)?;
        let (theirs, ours) = tokio::io::duplex(PIPE_SIZE);
        pumps.spawn(pump(
            ours,
            session.out.clone(),
            gone,
            Outgoing::data(id),
            Some(Outgoing::fin(id)),
        ));
        Some(theirs)
    };
    let (stdout, stderr) = (output("stdout"), output("stderr"));
    let (sizes, resize) = mpsc::channel(1);
    let mut size_reader = JoinSet::new();
    if let Some(stream) = opened.remove("resize") {
        size_reader.spawn(read_sizes(stream.data, sizes));
    }
    let stdin_stream = opened.remove("stdin");
    let stdin_id = stdin_stream.as_ref().map(|stream| stream.id);
    let streams = Streams {
        stdin: stdin_stream.map(|stream| stream.data),
        stdout,
        stderr,
        resize,
        gone: session.gone.clone(),
    };
    let outcome = handler(streams).await;

    // All output goes before the end is told.
    while pumps.join_next().await.is_some() {}
    if let Some(error) = opened.remove("error") {
        if let Some(bytes) = status(&outcome, protocol == "v4.channel.k8s.io") {
            let _ = session
                .out
                .send(Outgoing::Data {
                    id: error.id,
                    bytes,
                    fin: false,
                })
                .await;
        }
        let _ = session.out.send(Outgoing::fin(error.id)).await;
    }
    if let Some(id) = stdin_id {
        let _ = session.out.send(Outgoing::fin(id)).await;
    }
    session.close().await;
}

/// Waits until the client has opened each wanted stream once; others are refused.
async fn collect_streams(session: &mut spdy::Session, wanted: &[&str]) -> Option<HashMap<String, Incoming>> {
    let mut opened = HashMap::new();
    while opened.len() < wanted.len() {
        let stream = session.incoming.recv().await?;
        let kind = stream.headers.get("streamtype").unwrap_or_default().to_string();
        if wanted.contains(&kind.as_str()) && !opened.contains_key(&kind) {
            session.out.send(Outgoing::SynReply(stream.id)).await.ok()?;
            opened.insert(kind, stream);
        } else {
            session
                .out
                .send(Outgoing::Reset {
                    id: stream.id,
                    status: REFUSED_STREAM,
                })
                .await
                .ok()?;
        }
    }
    Some(opened)
}

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;

async fn serve_websocket<IO, F, Fut>(io: IO, protocol: &str, options: Options, handler: F)
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: FnOnce(Streams) -> Fut,
    Fut: Future<Output = ExitOutcome>,
{
    let format = websocket::Format {
        base64: protocol.contains("base64"),
        close: protocol == "v5.channel.k8s.io",
    };
    let (session, mut readable) = websocket::Session::start(io, format, &[STDIN, RESIZE]).await;
    let mut pumps = JoinSet::new();
    let mut output = |channel, on: bool| {
        on.then(|| {
            let (theirs, body) = session.pipe(channel);
            pumps.spawn(body);
            theirs
        })
    };
    let stdout = output(STDOUT, options.stdout);
    let stderr = output(STDERR, options.stderr && !options.tty);
    // COMPAT: an empty message tells the client that the command's streams are there.
    let first = match (options.stdout, options.stderr) {
        (true, _) => STDOUT,
        (false, true) => STDERR,
        (false, false) => ERROR,
    };
    session.send(first, &[]).await;
    let (sizes, resize) = mpsc::channel(1);
    let mut size_reader = JoinSet::new();
    if let Some(pipe) = readable.remove(&RESIZE).filter(|_| options.tty) {
        size_reader.spawn(read_sizes(pipe, sizes));
    }
    let stdin = readable.remove(&STDIN).filter(|_| options.stdin);
    let outcome = handler(Streams {
        stdin,
        stdout,
        stderr,
        resize,
        gone: session.gone.clone(),
    })
    .await;

    while pumps.join_next().await.is_some() {}
    if let Some(bytes) = status(&outcome, protocol.starts_with('v')) {
        session.send(ERROR, &bytes).await;
    }
    session.close().await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spdy_client::{Client, Frame};
    use futures::{SinkExt, StreamExt};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio_tungstenite::WebSocketStream;
    use tokio_tungstenite::tungstenite::{Message, protocol::Role};

    const ALL: Options = Options {
        stdin: true,
        stdout: true,
        stderr: true,
        tty: false,
    };

    /// Echoes stdin to stdout, says how much it was on stderr, and exits with 3.
    async fn echo(mut streams: Streams) -> ExitOutcome {
        let (mut stdin, mut stdout) = (streams.stdin.take().unwrap(), streams.stdout.take().unwrap());
        let count = tokio::io::copy(&mut stdin, &mut stdout).await.unwrap();
        streams
            .stderr
            .unwrap()
            .write_all(format!("{count} bytes").as_bytes())
            .await
            .unwrap();
        ExitOutcome::Exited(3)
    }

    #[test]
    fn the_end_in_words() {
        fn check(outcome: ExitOutcome, text: Option<&str>, json: &str) {
            assert_eq!(status(&outcome, false).as_deref(), text.map(str::as_bytes));
            let got: serde_json::Value = serde_json::from_slice(&status(&outcome, true).unwrap()).unwrap();
            assert_eq!(got, serde_json::from_str::<serde_json::Value>(json).unwrap());
        }
        check(
            ExitOutcome::Exited(0),
            None,
            r#"{"metadata":{},"status":"Success"}"#,
        );
        check(
            ExitOutcome::Exited(3),
            Some("command terminated with non-zero exit code: error executing command, exit code 3"),
            r#"{"metadata":{},"status":"Failure","reason":"NonZeroExitCode",
                "message":"command terminated with non-zero exit code: error executing command, exit code 3",
                "details":{"causes":[{"reason":"ExitCode","message":"3"}]}}"#,
        );
        check(
            ExitOutcome::Failed("gone".into()),
            Some("Internal error occurred: gone"),
            r#"{"metadata":{},"status":"Failure","message":"Internal error occurred: gone",
                "reason":"InternalError","details":{"causes":[{"message":"gone"}]},"code":500}"#,
        );
    }

    #[tokio::test]
    async fn a_command_over_spdy() {
        let (client, server) = tokio::io::duplex(1 << 16);
        let task = tokio::spawn(serve(server, Agreed::Spdy("v4.channel.k8s.io".into()), ALL, echo));
        let mut client = Client::new(client);
        let error = client.open(&[("streamtype", "error")]).await;
        let odd = client.open(&[("streamtype", "nonsense")]).await;
        let stdin = client.open(&[("streamtype", "stdin")]).await;
        let stdout = client.open(&[("streamtype", "stdout")]).await;
        let stderr = client.open(&[("streamtype", "stderr")]).await;
        let mut replies = Vec::new();
        for _ in 0..5 {
            replies.push(client.next().await.unwrap());
        }
        let expected = [
            Frame::Reply(error),
            Frame::Reset(odd, REFUSED_STREAM),
            Frame::Reply(stdin),
            Frame::Reply(stdout),
            Frame::Reply(stderr),
        ];
        assert_eq!(replies, expected);
        // More than all the buffers between here and there, so that the flow must be kept up.
        let (mut read, write) = tokio::io::split(client.io);
        let sent = 3_000_000;
        let mut writer = Client::new(tokio::io::join(tokio::io::empty(), write));
        let feed = tokio::spawn(async move {
            for _ in 0..sent / 10_000 {
                writer.data(stdin, &[b'x'; 10_000], false).await;
            }
            writer.data(stdin, b"", true).await;
            writer
        });
        let mut reader = Client::new(tokio::io::join(&mut read, tokio::io::sink()));
        let streams = reader.collect().await;
        drop(feed.await.unwrap());
        assert_eq!((streams[&stdout].0.len(), streams[&stdout].1), (sent, true));
        assert_eq!(streams[&stderr], (format!("{sent} bytes").into_bytes(), true));
        let status: serde_json::Value = serde_json::from_slice(&streams[&error].0).unwrap();
        assert_eq!(status["details"]["causes"][0]["message"], "3");
        drop(read);
        task.await.unwrap();
    }

    #[tokio::test]
    async fn a_terminal_over_spdy() {
        let options = Options {
            stdin: false,
            stdout: true,
            stderr: false,
            tty: true,
        };
        let (client, server) = tokio::io::duplex(1 << 16);
        let task = tokio::spawn(serve(
            server,
            Agreed::Spdy("v4.channel.k8s.io".into()),
            options,
            |mut streams| async move {
                let size = streams.resize.recv().await.unwrap();
                let text = format!("{}x{}", size.width, size.height);
                streams.stdout.unwrap().write_all(text.as_bytes()).await.unwrap();
                ExitOutcome::Exited(0)
            },
        ));
        let mut client = Client::new(client);
        client.open(&[("streamtype", "error")]).await;
        let resize = client.open(&[("streamtype", "resize")]).await;
        client.data(resize, br#"{"Width":120,"Height":40}"#, false).await;
        let stdout = client.open(&[("streamtype", "stdout")]).await;
        assert_eq!(client.collect().await[&stdout].0, b"120x40");
        drop(client);
        task.await.unwrap();
    }

    #[tokio::test]
    async fn a_client_that_leaves_is_noticed() {
        let (client, server) = tokio::io::duplex(1 << 16);
        let options = Options {
            stdin: true,
            ..Options::default()
        };
        let task = tokio::spawn(serve(
            server,
            Agreed::Spdy("".into()),
            options,
            |mut streams| async move {
                streams.gone.cancelled().await;
                let mut rest = Vec::new();
                streams
                    .stdin
                    .take()
                    .unwrap()
                    .read_to_end(&mut rest)
                    .await
                    .unwrap();
                ExitOutcome::Exited(0)
            },
        ));
        let mut client = Client::new(client);
        client.open(&[("streamtype", "error")]).await;
        client.open(&[("streamtype", "stdin")]).await;
        client.next().await.unwrap();
        client.next().await.unwrap();
        drop(client);
        task.await.unwrap();
    }

    #[tokio::test]
    async fn a_command_over_websocket() {
        async fn check(protocol: &'static str, base64: bool) {
            let (client, server) = tokio::io::duplex(1 << 16);
            let task = tokio::spawn(serve(
                server,
                Agreed::WebSocket(protocol.into()),
                ALL,
                |mut streams: Streams| async move {
                    // Without v5 a client cannot close stdin, so read what is known to come.
                    let mut text = [0; 5];
                    streams
                        .stdin
                        .as_mut()
                        .unwrap()
                        .read_exact(&mut text)
                        .await
                        .unwrap();
                    streams.stdout.take().unwrap().write_all(&text).await.unwrap();
                    ExitOutcome::Exited(1)
                },
            ));
            let mut client = WebSocketStream::from_raw_socket(client, Role::Client, None).await;
            let format = websocket::Format { base64, close: false };
            client.send(format.message(0, b"hello")).await.unwrap();
            let mut got = Vec::new();
            let mut closed = None;
            while let Some(Ok(message)) = client.next().await {
                match message {
                    Message::Close(frame) => closed = frame.map(|frame| u16::from(frame.code)),
                    message => got.push(message),
                }
            }
            assert_eq!(closed, Some(1000), "{protocol}");
            assert_eq!(got[0], format.message(1, b""));
            assert_eq!(got[1], format.message(1, b"hello"));
            let end = status(&ExitOutcome::Exited(1), protocol.starts_with('v')).unwrap();
            assert_eq!(got[2], format.message(3, &end));
            task.await.unwrap();
        }
        check("v5.channel.k8s.io", false).await;
        check("v4.channel.k8s.io", false).await;
        check("v4.base64.channel.k8s.io", true).await;
        check("channel.k8s.io", false).await;
        check("", false).await;
    }

    #[tokio::test]
    async fn v5_closes_stdin() {
        let (client, server) = tokio::io::duplex(1 << 16);
        let task = tokio::spawn(serve(
            server,
            Agreed::WebSocket("v5.channel.k8s.io".into()),
            ALL,
            echo,
        ));
        let mut client = WebSocketStream::from_raw_socket(client, Role::Client, None).await;
        client.send(Message::binary(&b"\x00hello"[..])).await.unwrap();
        client.send(Message::Ping("are you there".into())).await.unwrap();
        client.send(Message::binary(&b"\xff\x00"[..])).await.unwrap();
        let (mut stdout, mut pongs) = (Vec::new(), 0);
        while let Some(Ok(message)) = client.next().await {
            match message {
                Message::Binary(bytes) if bytes.starts_with(&[1]) => stdout.extend_from_slice(&bytes[1..]),
                Message::Pong(_) => pongs += 1,
                _ => {}
            }
        }
        assert_eq!((stdout.as_slice(), pongs), (&b"hello"[..], 1));
        task.await.unwrap();
    }
}
