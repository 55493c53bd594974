//! Reads HTTP/1.1 strictly in front of hyper, which is lenient where proxies must not be: a request that two servers
//! could cut at different places is never seen by hyper, and its connection is closed.
//!
//! The guard follows the framing of what the client sends, every byte of it, and keeps nothing but the line at hand. At the
//! first byte that is wrong it hands hyper a NUL instead, at which hyper's parser fails too: it answers 400 in its
//! turn, after the responses of earlier requests, and closes. What is only too large is left to hyper's limits (431).
//!
//! Refused beyond what hyper refuses: both lengths, a length twice, any transfer encoding but `chunked`, lines that end
//! in a bare LF or contain a bare CR, folded lines, no Host or two, control characters, CONNECT, and chunks that are
//! not exactly in the grammar.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};

use futures::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes of a request's line and headers. hyper gets the same limit.
pub const MAX_HEAD: usize = 32 * 1024;
/// Bytes of the line with a chunk's size, and of all trailers of a body.
const MAX_CHUNK_LINE: usize = 256;
const MAX_TRAILERS: usize = 8 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before a request; one empty line may come first.
    Start,
    RequestLine,
    Header,
    Body(u64),
    ChunkSize,
    Chunk(u64),
    ChunkEnd,
    Trailer,
    /// Behind a request that asks for another protocol, until its answer is known.
    Undecided,
    /// Another protocol: nothing is read any more.
    Tunnel,
    /// Refused, or left to hyper's limits.
    Over,
}

/// What a head has said so far.
#[derive(Default)]
struct Head {
    bytes: usize,
    is_http_11: bool,
    length: Option<u64>,
    is_chunked: bool,
    hosts: usize,
    upgrade: bool,
}

/// The byte at this index is wrong.
#[derive(Debug, PartialEq, Eq)]
struct Wrong(usize);

pub struct Framing {
    state: State,
    line: Vec<u8>,
    head: Head,
    skipped_line: bool,
    trailer_bytes: usize,
    upgrade: Arc<Upgrade>,
}

/// Whether the request that asked for another protocol got it.
#[derive(Default)]
pub struct Upgrade {
    decision: AtomicU8,
    reader: AtomicWaker,
}

const OPEN: u8 = 0;
const ACCEPTED: u8 = 1;
const DECLINED: u8 = 2;

impl Upgrade {
    fn decide(&self, decision: u8) {
        self.decision.store(decision, Ordering::Release);
        self.reader.wake();
    }

    /// What is not accepted before this is dropped is declined.
    pub fn pending(self: &Arc<Self>) -> PendingUpgrade {
        PendingUpgrade {
            upgrade: self.clone(),
            decision: DECLINED,
        }
    }
}

pub struct PendingUpgrade {
    upgrade: Arc<Upgrade>,
    decision: u8,
}

impl PendingUpgrade {
    pub fn accept(mut self) {
        self.decision = ACCEPTED;
    }
}

impl Drop for PendingUpgrade {
    fn drop(&mut self) {
        self.upgrade.decide(self.decision);
    }
}

impl Framing {
    fn new(upgrade: Arc<Upgrade>) -> Framing {
        Framing {
            state: State::Start,
            line: Vec::new(),
            head: Head::default(),
            skipped_line: false,
            trailer_bytes: 0,
            upgrade,
        }
    }

    /// Follows the bytes, and answers how many of them may pass: all, or those before a decision about another protocol.
    fn scan(&mut self, bytes: &[u8]) -> Result<usize, Wrong> {
        let mut at = 0;
        while at < bytes.len() {
            let left = bytes.len() - at;
            match self.state {
                State::Tunnel | State::Over => return Ok(bytes.len()),
                State::Undecided => return Ok(at),
                State::Body(rest) => {
                    let taken = left.min(usize::try_from(rest).unwrap_or(usize::MAX));
                    at += taken;
                    match rest - taken as u64 {
                        0 => self.end_of_message(),
                        rest => self.state = State::Body(rest),
                    }
                }
                State::Chunk(rest) => {
                    let taken = left.min(usize::try_from(rest).unwrap_or(usize::MAX));
                    at += taken;
                    self.state = match rest - taken as u64 {
                        0 => State::ChunkEnd,
                        rest => State::Chunk(rest),
                    };
                }
                _ => match self.plain(&bytes[at..]) {
                    0 => {
                        self.byte(bytes[at]).ok_or(Wrong(at))?;
                        at += 1;
                    }
                    taken => at += taken,
                },
            }
        }
        Ok(at)
    }

    /// Takes what neither ends a line of a head nor is wrong in it, and answers how many bytes that is. It says nothing
    /// that [`Self::byte`] would not, only faster.
    fn plain(&mut self, bytes: &[u8]) -> usize {
        let in_line = matches!(self.state, State::RequestLine | State::Header);
        if !in_line || self.line.last() == Some(&b'\r') {
            return 0;
        }
        let room = bytes.iter().take(MAX_HEAD.saturating_sub(self.head.bytes));
        let plain = |byte: &&u8| matches!(byte, b'\t' | b' '..=b'~' | 0x80..);
        let taken = room.take_while(plain).count();
        self.line.extend_from_slice(&bytes[..taken]);
        self.head.bytes += taken;
        taken
    }

    /// A byte of some line; `None` if it is wrong there.
    fn byte(&mut self, byte: u8) -> Option<()> {
        if self.state == State::Start {
            if byte != b'\r' && self.line.is_empty() {
                self.state = State::RequestLine;
                self.head = Head {
                    bytes: self.head.bytes,
                    ..Head::default()
                };
            } else if std::mem::replace(&mut self.skipped_line, true) && self.line.is_empty() {
                return None;
            }
        }
        let limit = match self.state {
            State::ChunkSize | State::ChunkEnd => MAX_CHUNK_LINE,
            State::Trailer => {
                self.trailer_bytes += 1;
                MAX_TRAILERS.checked_sub(self.trailer_bytes)?;
                MAX_TRAILERS
            }
            _ => {
                self.head.bytes += 1;
                if self.head.bytes > MAX_HEAD {
                    self.state = State::Over;
                    return Some(());
                }
                MAX_HEAD
            }
        };
        let after_cr = self.line.last() == Some(&b'\r');
        match byte {
            b'\n' if after_cr => {
                let mut line = std::mem::take(&mut self.line);
                line.pop();
                let read = self.end_of_line(&line);
                line.clear();
                self.line = line;
                return read;
            }
            b'\n' => return None,
            _ if after_cr => return None,
            b'\r' | b'\t' | b' '..=b'~' | 0x80.. => {}
            _ => return None,
        }
        if self.line.len() >= limit {
            return None;
        }
        self.line.push(byte);
        Some(())
    }

    fn end_of_line(&mut self, line: &[u8]) -> Option<()> {
        match self.state {
            State::Start => line.is_empty().then_some(()),
            State::RequestLine => {
                self.head.is_http_11 = is_http_11(line)?;
                self.state = State::Header;
                Some(())
            }
            State::Header if line.is_empty() => self.end_of_head(),
            State::Header => self.header(line),
            State::ChunkSize => {
                self.state = match chunk_size(line)? {
                    0 => State::Trailer,
                    size => State::Chunk(size),
                };
                Some(())
            }
            State::ChunkEnd => {
                self.state = State::ChunkSize;
                line.is_empty().then_some(())
            }
            State::Trailer if line.is_empty() => {
                self.end_of_message();
                Some(())
            }
            State::Trailer => {
                let (name, _) = field(line)?;
                let framing: [&[u8]; 3] = [b"content-length", b"transfer-encoding", b"host"];
                (!framing.iter().any(|other| name.eq_ignore_ascii_case(other))).then_some(())
            }
            State::Body(_) | State::Chunk(_) | State::Undecided | State::Tunnel | State::Over => None,
        }
    }

    fn header(&mut self, line: &[u8]) -> Option<()> {
        let (name, value) = field(line)?;
        let head = &mut self.head;
        if name.eq_ignore_ascii_case(b"content-length") {
            let digits = !value.is_empty() && value.len() < 19 && value.iter().all(u8::is_ascii_digit);
            if !digits || head.length.is_some() || head.is_chunked {
                return None;
            }
            head.length = Some(std::str::from_utf8(value).ok()?.parse().ok()?);
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            let known = value.eq_ignore_ascii_case(b"chunked");
            if !known || head.is_chunked || head.length.is_some() || !head.is_http_11 {
                return None;
            }
            head.is_chunked = true;
        } else if name.eq_ignore_ascii_case(b"host") {
            head.hosts += 1;
            if head.hosts > 1 {
                return None;
            }
        } else if name.eq_ignore_ascii_case(b"upgrade") {
            head.upgrade = head.is_http_11;
        }
        Some(())
    }

    fn end_of_head(&mut self) -> Option<()> {
        if self.head.is_http_11 && self.head.hosts != 1 {
            return None;
        }
        if self.head.upgrade {
            self.upgrade.decision.store(OPEN, Ordering::Release);
        }
        match (self.head.is_chunked, self.head.length) {
            (true, _) => {
                self.trailer_bytes = 0;
                self.state = State::ChunkSize;
            }
            (false, Some(length)) if length > 0 => self.state = State::Body(length),
            _ => self.end_of_message(),
        }
        Some(())
    }

    fn end_of_message(&mut self) {
        self.state = match self.head.upgrade {
            true => State::Undecided,
            false => State::Start,
        };
        self.head.bytes = 0;
        self.skipped_line = false;
    }

    /// Whether bytes may be read: not while it is undecided what they are.
    fn is_open(&mut self, context: &mut Context<'_>) -> bool {
        if self.state != State::Undecided {
            return true;
        }
        self.upgrade.reader.register(context.waker());
        self.state = match self.upgrade.decision.load(Ordering::Acquire) {
            ACCEPTED => State::Tunnel,
            DECLINED => State::Start,
            _ => return false,
        };
        true
    }
}

/// `GET /path HTTP/1.1`; whether it is 1.1 or 1.0.
fn is_http_11(line: &[u8]) -> Option<bool> {
    let mut words = line.split(|byte| *byte == b' ');
    let (method, target, version) = (words.next()?, words.next()?, words.next()?);
    let known_form = target.starts_with(b"/")
        || target.starts_with(b"http://")
        || target.starts_with(b"https://")
        || (target == b"*" && method == b"OPTIONS");
    let plain = target
        .iter()
        .all(|byte| matches!(byte, b'!'..=b'~') && *byte != b'#');
    let is_sound = is_token(method) && method != b"CONNECT" && known_form && plain && words.next().is_none();
    match version {
        b"HTTP/1.1" if is_sound => Some(true),
        b"HTTP/1.0" if is_sound => Some(false),
        _ => None,
    }
}

/// The name and the value of a header's line.
fn field(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let colon = line.iter().position(|byte| *byte == b':')?;
    let (name, value) = (&line[..colon], &line[colon + 1..]);
    is_token(name).then(|| (name, value.trim_ascii()))
}

fn is_token(text: &[u8]) -> bool {
    let of_token = |byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte);
    !text.is_empty() && text.iter().all(of_token)
}

fn chunk_size(line: &[u8]) -> Option<u64> {
    let digits = line.split(|byte| *byte == b';').next()?;
    let sound = (1..=15).contains(&digits.len()) && digits.iter().all(u8::is_ascii_hexdigit);
    let text = std::str::from_utf8(digits).ok().filter(|_| sound)?;
    u64::from_str_radix(text, 16).ok()
}

/// A connection whose incoming bytes are followed.
pub struct Guard<T> {
    io: T,
    framing: Framing,
    /// Read together with a request that asks for another protocol.
    held: Vec<u8>,
    refused: bool,
}

impl<T> Guard<T> {
    pub fn new(io: T) -> (Guard<T>, Arc<Upgrade>) {
        let upgrade: Arc<Upgrade> = Arc::default();
        let guard = Guard {
            io,
            framing: Framing::new(upgrade.clone()),
            held: Vec::new(),
            refused: false,
        };
        (guard, upgrade)
    }

    /// Takes what may pass of the bytes that were read behind `before`.
    fn check(&mut self, buffer: &mut ReadBuf<'_>, before: usize) {
        match self.framing.scan(&buffer.filled()[before..]) {
            Ok(passed) => {
                self.held.extend_from_slice(&buffer.filled()[before + passed..]);
                buffer.set_filled(before + passed);
            }
            Err(Wrong(at)) => {
                buffer.filled_mut()[before + at] = 0;
                buffer.set_filled(before + at + 1);
                self.refused = true;
            }
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Guard<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.refused {
            return Poll::Ready(Ok(()));
        }
        if !this.framing.is_open(context) {
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        if this.held.is_empty() {
            ready!(Pin::new(&mut this.io).poll_read(context, buffer))?;
        } else {
            let taken = this.held.len().min(buffer.remaining());
            buffer.put_slice(&this.held[..taken]);
            this.held.drain(..taken);
        }
        let rest = std::mem::take(&mut this.held);
        this.check(buffer, before);
        this.held.extend_from_slice(&rest);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Guard<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many bytes pass before the first that is wrong; all of them in one read and one by one.
    fn scan(text: &str) -> Result<usize, Wrong> {
        let whole = Framing::new(Arc::default()).scan(text.as_bytes());
        let mut framing = Framing::new(Arc::default());
        let mut passed = 0;
        for (at, byte) in text.bytes().enumerate() {
            match framing.scan(&[byte]) {
                Ok(0) => break,
                Ok(_) => passed += 1,
                Err(Wrong(_)) => {
                    assert_eq!(whole, Err(Wrong(at)), "{text:?}");
                    return whole;
                }
            }
        }
        assert_eq!(whole, Ok(passed), "{text:?}");
        whole
    }

    #[test]
    fn what_is_in_the_grammar_passes() {
        for text in [
            "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
            "GET / HTTP/1.0\r\n\r\n",
            "\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\nGET /b HTTP/1.1\r\nHost:a\r\n\r\n",
            "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
            "GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n\r\n\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n3;a=b\r\n\n\r\n\r\n0\r\nT: v\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: b\r\n\r\n",
        ] {
            assert_eq!(scan(text), Ok(text.len()), "{text:?}");
        }
    }

    #[test]
    fn what_is_too_large_is_left_to_hyper() {
        let text = format!("GET / HTTP/1.1\r\nA: {}", "a".repeat(2 * MAX_HEAD));
        assert_eq!(scan(&text), Ok(text.len()));
    }

    #[test]
    fn bytes_behind_a_request_for_another_protocol_wait() {
        let head = "GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\n\r\n";
        let text = format!("{head}\0\0");
        assert_eq!(scan(&text), Ok(head.len()));
        for (accept, expected) in [(true, Ok(2)), (false, Err(Wrong(0)))] {
            let upgrade: Arc<Upgrade> = Arc::default();
            let mut framing = Framing::new(upgrade.clone());
            assert_eq!(framing.scan(text.as_bytes()), Ok(head.len()));
            let context = &mut Context::from_waker(std::task::Waker::noop());
            assert!(!framing.is_open(context));
            let pending = upgrade.pending();
            if accept {
                pending.accept();
            } else {
                drop(pending);
            }
            assert!(framing.is_open(context));
            assert_eq!(framing.scan(b"\0\0"), expected);
        }
    }
}
