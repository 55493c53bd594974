//! Go's gRPC clients that dial a unix socket by a dialer of their own, as device plugins do, send its path as `:authority`.
//! That is no authority by the rules, and the HTTP/2 server here resets such requests. On a unix socket nobody reads it, so it is
//! replaced on the way in by a name of the same length: entries of HPACK's table then keep their size on both sides.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::{Connected, UdsConnectInfo};

const PREFACE: usize = 24;
const FRAME_HEADER: usize = 9;
const HEADERS: u8 = 1;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// HTTP/2's default, which this server does not raise. Larger frames are left to it to refuse.
const MAX_FRAME: usize = 16384;
/// In HPACK's static table.
const AUTHORITY: usize = 1;

/// How many codes of HPACK's Huffman code have each number of bits. The code is canonical, so that this is all it takes to
/// count symbols.
const CODES: [u32; 31] = [
    0, 0, 0, 0, 0, 10, 26, 32, 6, 0, 5, 3, 2, 6, 2, 3, 0, 0, 0, 3, 8, 13, 26, 29, 12, 4, 15, 19, 29, 0, 4,
];

/// How long a Huffman-coded string is when it is decoded.
fn decoded_length(coded: &[u8]) -> Option<usize> {
    let (mut symbols, mut code, mut first, mut bits) = (0, 0u32, 0u32, 0);
    for bit in coded
        .iter()
        .flat_map(|byte| (0..8).rev().map(move |at| (byte >> at) & 1))
    {
        code = (code << 1) | u32::from(bit);
        first <<= 1;
        bits += 1;
        let count = *CODES.get(bits)?;
        if code.wrapping_sub(first) < count {
            symbols += 1;
            (code, first, bits) = (0, 0, 0);
        } else {
            first += count;
        }
    }
    // The rest is padding.
    (bits < 8).then_some(symbols)
}

/// Reads an integer with a prefix of so many bits; returns it and what follows.
fn integer(block: &[u8], prefix: u32) -> Option<(usize, &[u8])> {
    let (head, mut rest) = block.split_first()?;
    let mask = (1usize << prefix) - 1;
    let mut value = usize::from(*head) & mask;
    if value < mask {
        return Some((value, rest));
    }
    for shift in [0, 7, 14, 21] {
        let (byte, more) = rest.split_first()?;
        rest = more;
        value += (usize::from(*byte) & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some((value, rest));
        }
    }
    None
}

fn push_integer(block: &mut Vec<u8>, mut value: usize, prefix: u32) {
    let mask = (1usize << prefix) - 1;
    let low = |value: usize| u8::try_from(value & 0xff).unwrap_or(0);
    if value < mask {
        return block.push(low(value));
    }
    block.push(low(mask));
    value -= mask;
    while value >= 0x80 {
        block.push(low(value & 0x7f) | 0x80);
        value >>= 7;
    }
    block.push(low(value));
}

/// A string: whether it is Huffman-coded, its bytes, and what follows.
fn string(block: &[u8]) -> Option<(bool, &[u8], &[u8])> {
    let coded = block.first()? & 0x80 != 0;
    let (length, rest) = integer(block, 7)?;
    let (bytes, rest) = rest.split_at_checked(length)?;
    Some((coded, bytes, rest))
}

/// The block with another authority; `None` if there is none in it as a literal.
fn rewritten(block: &[u8]) -> Option<Vec<u8>> {
    let mut rest = block;
    while let Some(first) = rest.first() {
        let prefix = match first {
            0x80.. => 7,
            0x40..0x80 => 6,
            0x20..0x40 => 5,
            _ => 4,
        };
        let (index, after) = integer(rest, prefix)?;
        if prefix == 7 || prefix == 5 {
            rest = after;
            continue;
        }
        let value = if index == 0 { string(after)?.2 } else { after };
        let (coded, bytes, next) = string(value)?;
        if index == AUTHORITY {
            let length = if coded {
                decoded_length(bytes)?
            } else {
                bytes.len()
            };
            let mut made = block[..block.len() - value.len()].to_vec();
            push_integer(&mut made, length, 7);
            made.resize(made.len() + length, b'a');
            made.extend_from_slice(next);
            return Some(made);
        }
        rest = next;
    }
    None
}

/// A whole HEADERS frame with another authority; the frame itself where nothing is to be done.
fn rewritten_frame(frame: &[u8]) -> Option<Vec<u8>> {
    let (header, payload) = frame.split_at_checked(FRAME_HEADER)?;
    let flags = header[4];
    let padding = if flags & PADDED == 0 {
        0
    } else {
        usize::from(*payload.first()?)
    };
    let start = usize::from(flags & PADDED != 0) + if flags & PRIORITY == 0 { 0 } else { 5 };
    let end = payload.len().checked_sub(padding)?;
    let block = rewritten(payload.get(start..end)?)?;
    let length = start + block.len() + padding;
    if length > MAX_FRAME {
        return None;
    }
    let mut made = u32::try_from(length).ok()?.to_be_bytes()[1..].to_vec();
    made.extend_from_slice(&header[3..]);
    made.extend_from_slice(&payload[..start]);
    made.extend_from_slice(&block);
    made.extend_from_slice(&payload[end..]);
    Some(made)
}

/// What a client sends, frame by frame.
struct Rewriter {
    input: Vec<u8>,
    output: Vec<u8>,
    /// Bytes that go on as they are.
    pass: usize,
}

impl Rewriter {
    fn new() -> Self {
        Rewriter {
            input: Vec::new(),
            output: Vec::new(),
            pass: PREFACE,
        }
    }

    fn push(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
        let mut at = 0;
        while at < self.input.len() {
            let left = &self.input[at..];
            if self.pass > 0 {
                let count = self.pass.min(left.len());
                self.output.extend_from_slice(&left[..count]);
                self.pass -= count;
                at += count;
                continue;
            }
            if left.len() < FRAME_HEADER {
                break;
            }
            let length = usize::from(left[0]) << 16 | usize::from(left[1]) << 8 | usize::from(left[2]);
            let whole = FRAME_HEADER + length;
            if left[3] != HEADERS || length > MAX_FRAME {
                self.pass = whole;
                continue;
            }
            let Some(frame) = left.get(..whole) else { break };
            match rewritten_frame(frame) {
                Some(made) => self.output.extend_from_slice(&made),
                None => self.output.extend_from_slice(frame),
            }
            at += whole;
        }
        self.input.drain(..at);
    }
}

/// A connection whose requests have an authority that HTTP/2 allows.
pub struct Connection {
    stream: UnixStream,
    rewriter: Rewriter,
}

impl Connection {
    pub fn new(stream: UnixStream) -> Self {
        Connection {
            stream,
            rewriter: Rewriter::new(),
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> UdsConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.rewriter.output.is_empty() {
            let mut bytes = [0; 4096];
            let mut read = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut self.stream).poll_read(cx, &mut read))?;
            if read.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            self.rewriter.push(read.filled());
        }
        let output = &mut self.rewriter.output;
        let count = output.len().min(buf.remaining());
        buf.put_slice(&output[..count]);
        output.drain(..count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 7541, C.4.1: `www.example.com`.
    const HUFFMAN: [u8; 12] = [
        0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff,
    ];

    #[test]
    fn huffman_strings_are_counted() {
        assert_eq!(decoded_length(&HUFFMAN), Some(15));
        // RFC 7541, C.4.2 and C.4.3: `no-cache`, `custom-value`.
        assert_eq!(decoded_length(&[0xa8, 0xeb, 0x10, 0x64, 0x9c, 0xbf]), Some(8));
        assert_eq!(
            decoded_length(&[0x25, 0xa8, 0x49, 0xe9, 0x5b, 0xb8, 0xe8, 0xb4, 0xbf]),
            Some(12)
        );
    }

    #[test]
    fn an_authority_is_replaced_by_one_of_its_length() {
        let mut coded = vec![0x82, 0x86, 0x84, 0x41, 0x8c];
        coded.extend(HUFFMAN);
        coded.push(0x88);
        let mut expected = vec![0x82, 0x86, 0x84, 0x41, 15];
        expected.extend([b'a'; 15]);
        expected.push(0x88);
        assert_eq!(rewritten(&coded), Some(expected));
        let path = format!("/{}", "x".repeat(199));
        let mut plain = vec![0x40, 1, b'k', 1, b'v', 0x01];
        push_integer(&mut plain, path.len(), 7);
        plain.extend(path.bytes());
        let made = rewritten(&plain).unwrap();
        assert_eq!(made.len(), plain.len());
        assert!(made.ends_with(&[b'a'; 200]) && made.starts_with(&plain[..8]));
        // By its place in the table, or not at all.
        assert_eq!(rewritten(&[0x82, 0xbe, 0x87]), None);
        assert_eq!(rewritten(&[0x41, 0x8c, 0xf1]), None, "cut off");
    }

    #[test]
    fn frames_are_rewritten_whatever_the_pieces() {
        let mut sent = vec![b'p'; PREFACE];
        sent.extend([0, 0, 0, 4, 0, 0, 0, 0, 0]);
        let payload = [0x41, 0x04, b'/', b's', b'/', b's', 0x82];
        sent.extend([0, 0, 7, HEADERS, 4, 0, 0, 0, 1]);
        sent.extend(payload);
        sent.extend([0, 0, 2, 0, 1, 0, 0, 0, 1, 0x41, 0x01]);
        let mut expected = sent.clone();
        let at = PREFACE + 9 + 9 + 2;
        expected[at..at + 4].copy_from_slice(b"aaaa");
        for size in [1, 5, 1000] {
            let mut rewriter = Rewriter::new();
            sent.chunks(size).for_each(|piece| rewriter.push(piece));
            assert_eq!(rewriter.output, expected, "pieces of {size}");
        }
    }
}
