//! One connection to a bus: it authenticates as the user of this process, sends messages, and reads them with the file
//! descriptors that belong to them, which no child inherits.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::Error;
use crate::message::{self, Body, FIXED_HEADER, Kind, Message};

/// As the reference implementation waits for a reply.
const CALL_TIMEOUT: Duration = Duration::from_secs(25);
/// A line of the authentication has at most so many bytes.
const MAX_LINE: usize = 4096;
/// Of one read, and of one message.
const MAX_FDS: usize = 16;
/// Signals that wait while a reply is waited for; older ones are dropped.
const MAX_WAITING: usize = 64;

const BUS: &str = "org.freedesktop.DBus";
const BUS_PATH: &str = "/org/freedesktop/DBus";

pub struct Connection {
    stream: UnixStream,
    unique_name: String,
    serial: u32,
    /// Received and not yet read.
    buffer: Vec<u8>,
    fds: VecDeque<OwnedFd>,
    /// Came while a reply was waited for.
    waiting: VecDeque<Message>,
}

impl Connection {
    /// `address` is one of the forms `unix:path=…` and `unix:abstract=…`, or several of them with `;` between.
    pub async fn open(address: &str) -> Result<Self, Error> {
        let mut last = Error::Address(address.to_owned());
        for one in address.split(';').filter(|one| !one.is_empty()) {
            let opened = tokio::time::timeout(CALL_TIMEOUT, Self::open_one(one));
            match opened
                .await
                .unwrap_or_else(|_| Err(Error::Timeout(one.to_owned())))
            {
                Ok(connection) => return Ok(connection),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn open_one(address: &str) -> Result<Self, Error> {
        let target = socket_address(address)?;
        let connect = |source| Error::Connect {
            address: address.to_owned(),
            source,
        };
        // Connecting to a unix socket waits only where its queue is full.
        let stream = std::os::unix::net::UnixStream::connect_addr(&target).map_err(connect)?;
        stream.set_nonblocking(true).map_err(connect)?;
        let mut connection = Connection {
            stream: UnixStream::from_std(stream).map_err(connect)?,
            unique_name: String::new(),
            serial: 0,
            buffer: Vec::new(),
            fds: VecDeque::new(),
            waiting: VecDeque::new(),
        };
        connection.authenticate().await?;
        let hello = connection.call_bus("Hello", Body::default()).await?;
        connection.unique_name = hello.read().string()?.to_owned();
        Ok(connection)
    }

    pub fn unique_name(&self) -> &str {
        &self.unique_name
    }

    async fn authenticate(&mut self) -> Result<(), Error> {
        let uid = rustix::process::geteuid().as_raw().to_string();
        let hex: String = uid.bytes().map(|byte| format!("{byte:02x}")).collect();
        self.write(format!("\0AUTH EXTERNAL {hex}\r\n").as_bytes(), &[])
            .await?;
        let answer = self.line().await?;
        if !answer.starts_with("OK ") {
            return Err(Error::Refused(answer));
        }
        self.write(b"NEGOTIATE_UNIX_FD\r\n", &[]).await?;
        let answer = self.line().await?;
        if answer != "AGREE_UNIX_FD" {
            return Err(Error::Refused(answer));
        }
        self.write(b"BEGIN\r\n", &[]).await
    }

    async fn line(&mut self) -> Result<String, Error> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|two| two == b"\r\n") {
                let line: Vec<u8> = self.buffer.drain(..end + 2).take(end).collect();
                return Ok(String::from_utf8_lossy(&line).into_owned());
            }
            if self.buffer.len() > MAX_LINE {
                return Err(Error::Malformed("an answer without an end"));
            }
            self.fill().await?;
        }
    }

    /// Calls the bus itself.
    pub async fn call_bus(&mut self, member: &str, body: Body) -> Result<Message, Error> {
        self.call(Message::call(BUS, BUS_PATH, BUS, member, body)).await
    }

    /// Sends a call and waits for its reply. Signals that come meanwhile are kept for [`Connection::receive`].
    pub async fn call(&mut self, call: Message) -> Result<Message, Error> {
        let member = call.member.clone().unwrap_or_default();
        let answer = tokio::time::timeout(CALL_TIMEOUT, async {
            let serial = self.send(call).await?;
            loop {
                let message = self.next().await?;
                if message.reply_serial == Some(serial) && matches!(message.kind, Kind::Return | Kind::Error)
                {
                    return Ok(message);
                }
                // A signal to this connection alone is not what a match rule asked for. Anybody can send those, and they must not
                // push others out.
                let is_signal = message.kind == Kind::Signal && message.destination.is_none();
                if is_signal || message.kind == Kind::Call {
                    if self.waiting.len() >= MAX_WAITING {
                        self.waiting.pop_front();
                    }
                    self.waiting.push_back(message);
                }
            }
        });
        let message = answer
            .await
            .unwrap_or_else(|_| Err(Error::Timeout(member.clone())))?;
        if message.kind == Kind::Error {
            let text = match message.body.signature().starts_with('s') {
                true => message.read().string()?.to_owned(),
                false => String::new(),
            };
            return Err(Error::Failed {
                member,
                name: message.error_name.unwrap_or_default(),
                message: text,
            });
        }
        Ok(message)
    }

    /// Sends a message and returns its serial number.
    pub async fn send(&mut self, mut message: Message) -> Result<u32, Error> {
        // Zero is no serial number.
        self.serial = self.serial.wrapping_add(1).max(1);
        message.serial = self.serial;
        let fds: Vec<BorrowedFd<'_>> = message.fds.iter().map(AsFd::as_fd).collect();
        self.write(&message::encode(&message), &fds).await?;
        Ok(message.serial)
    }

    /// The next signal or call.
    pub async fn receive(&mut self) -> Result<Message, Error> {
        if let Some(message) = self.waiting.pop_front() {
            return Ok(message);
        }
        loop {
            let message = self.next().await?;
            if matches!(message.kind, Kind::Signal | Kind::Call) {
                return Ok(message);
            }
        }
    }

    async fn next(&mut self) -> Result<Message, Error> {
        loop {
            if let Some(header) = self.buffer.get(..FIXED_HEADER) {
                let length = message::length(header)?;
                if let Some(bytes) = self.buffer.get(..length) {
                    let count = message::fd_count(bytes)?;
                    if count > self.fds.len() {
                        return Err(Error::Malformed("without its file descriptors"));
                    }
                    let fds = self.fds.drain(..count).collect();
                    let mut message = message::decode(bytes, fds)?;
                    self.buffer.drain(..length);
                    if message.kind != Kind::Return {
                        // Nobody asked for them, and messages that wait would keep them open.
                        message.fds.clear();
                    }
                    return Ok(message);
                }
            }
            self.fill().await?;
        }
    }

    /// Reads what is there, at least one byte.
    async fn fill(&mut self) -> Result<(), Error> {
        let mut bytes = [0u8; 4096];
        let (count, fds) = self
            .stream
            .async_io(Interest::READABLE, || receive(self.stream.as_fd(), &mut bytes))
            .await?;
        if count == 0 {
            return Err(Error::Closed);
        }
        if self.fds.len() + fds.len() > MAX_FDS {
            return Err(Error::Malformed("too many file descriptors"));
        }
        self.fds.extend(fds);
        self.buffer
            .extend_from_slice(bytes.get(..count).unwrap_or_default());
        Ok(())
    }

    /// Descriptors go with the first byte.
    async fn write(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let (mut rest, mut fds) = (bytes, fds);
        while !rest.is_empty() {
            let count = self
                .stream
                .async_io(Interest::WRITABLE, || {
                    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
                    let mut ancillary = SendAncillaryBuffer::new(&mut space);
                    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
                        return Err(io::Error::other("too many file descriptors"));
                    }
                    let data = [IoSlice::new(rest)];
                    Ok(sendmsg(&self.stream, &data, &mut ancillary, SendFlags::NOSIGNAL)?)
                })
                .await?;
            rest = rest.get(count..).unwrap_or_default();
            fds = &[];
        }
        Ok(())
    }
}

fn receive(stream: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        stream,
        &mut [IoSliceMut::new(bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other("too many file descriptors"));
    }
    Ok((received.bytes, fds))
}

fn socket_address(address: &str) -> Result<SocketAddr, Error> {
    let wrong = || Error::Address(address.to_owned());
    let options = address.strip_prefix("unix:").ok_or_else(wrong)?;
    for option in options.split(',') {
        let Some((name, value)) = option.split_once('=') else {
            continue;
        };
        let value = unescape(value).ok_or_else(wrong)?;
        let parsed = match name {
            "path" => SocketAddr::from_pathname(std::path::Path::new(std::ffi::OsStr::new(&value))),
            "abstract" => SocketAddr::from_abstract_name(value.as_bytes()),
            _ => continue,
        };
        return parsed.map_err(|_| wrong());
    }
    Err(wrong())
}

/// `%20` is a blank.
fn unescape(value: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = value.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = [rest.next()?, rest.next()?];
        let digits = std::str::from_utf8(&digits).ok()?.to_owned();
        bytes.push(u8::from_str_radix(&digits, 16).ok()?);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        for good in [
            "unix:path=/run/dbus/system_bus_socket",
            "unix:abstract=/tmp/x,guid=1",
            "unix:guid=1,path=/a%20b",
        ] {
            assert!(socket_address(good).is_ok(), "{good}");
        }
        let path = socket_address("unix:path=/a%20b").unwrap();
        assert_eq!(path.as_pathname(), Some(std::path::Path::new("/a b")));
        for bad in [
            "",
            "tcp:host=localhost",
            "unix:",
            "unix:path=/a%2",
            "unix:tmpdir=/tmp",
        ] {
            assert!(socket_address(bad).is_err(), "{bad}");
        }
    }

    /// A bus that authenticates anybody, answers Hello, and then sends `bytes` and `fds`.
    async fn answered(bytes: Vec<u8>, fd_count: usize) -> Result<Message, Error> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bus");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let bus = async {
            let mut bus = Connection {
                stream: listener.accept().await.unwrap().0,
                unique_name: String::new(),
                serial: 0,
                buffer: Vec::new(),
                fds: VecDeque::new(),
                waiting: VecDeque::new(),
            };
            for answer in ["OK 1234", "AGREE_UNIX_FD"] {
                bus.line().await.unwrap();
                bus.write(format!("{answer}\r\n").as_bytes(), &[]).await.unwrap();
            }
            assert_eq!(bus.line().await.unwrap(), "BEGIN");
            let hello = bus.receive().await.unwrap();
            bus.send(hello.reply(Body::default().string(":1.1")))
                .await
                .unwrap();
            let file = std::fs::File::open("/dev/null").unwrap();
            let fds = vec![file.as_fd(); fd_count];
            let _ = bus.write(&bytes, &fds).await;
        };
        let client = async {
            let address = format!("unix:path={}", path.display());
            let mut connection = Connection::open(&address).await.unwrap();
            assert_eq!(connection.unique_name(), ":1.1");
            connection.receive().await
        };
        tokio::join!(bus, client).1
    }

    #[tokio::test]
    async fn what_others_send_is_bounded() {
        let signal = |text: &str, fd_count: usize| {
            let mut signal = Message::signal("/", "a.b", "C", Body::default().string(text));
            signal.serial = 1;
            let fd = || std::fs::File::open("/dev/null").unwrap().into();
            signal.fds = std::iter::repeat_with(fd).take(fd_count).collect();
            message::encode(&signal)
        };
        let good = answered(signal("x", 0), 0).await.unwrap();
        assert_eq!(good.read().string().unwrap(), "x");
        let with_fds = answered(signal("x", 3), 3).await.unwrap();
        assert!(with_fds.fds.is_empty(), "nobody asked for them");
        for (bytes, fds, expected) in [
            (signal(&"x".repeat(message::MAX_MESSAGE), 0), 0, "too long"),
            (signal("x", 2), 1, "without its file descriptors"),
            (b"not a message at all".to_vec(), 0, "neither byte order"),
            (signal("x", 0)[..20].to_vec(), 0, "closed"),
        ] {
            let error = answered(bytes, fds).await.unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
