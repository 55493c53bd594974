//! What a skiff and its holder say to each other: one packet a message, with sockets beside it.
//!
//! The two may be of different versions, because a holder outlives an upgrade: what is here never changes. Another
//! protocol needs another path.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

/// Sockets that one holder keeps; all of them fit into one packet.
pub const MAX_SOCKETS: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// A socket comes with it.
    Keep(u16),
    Forget(u16),
    /// Answered with the ports, and their sockets in the same order.
    List,
    /// Answered when all sockets are closed.
    End,
}

impl Message {
    pub fn encode(self) -> [u8; 3] {
        let (kind, port) = match self {
            Message::Keep(port) => (b'K', port),
            Message::Forget(port) => (b'F', port),
            Message::List => (b'L', 0),
            Message::End => (b'E', 0),
        };
        let [high, low] = port.to_be_bytes();
        [kind, high, low]
    }

    pub fn decode(bytes: &[u8]) -> Option<Message> {
        let [kind, high, low] = *bytes else { return None };
        let port = u16::from_be_bytes([high, low]);
        match kind {
            b'K' => Some(Message::Keep(port)),
            b'F' => Some(Message::Forget(port)),
            b'L' => Some(Message::List),
            b'E' => Some(Message::End),
            _ => None,
        }
    }
}

pub fn send(socket: impl AsFd, bytes: &[u8], sockets: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_SOCKETS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !sockets.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(sockets)) {
        return Err(io::Error::other("too many sockets"));
    }
    rustix::net::sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// The next packet; an empty one: the other side has ended.
pub fn receive(socket: impl AsFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = [0; 2 * MAX_SOCKETS];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_SOCKETS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let sockets = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(sockets) => Some(sockets),
        _ => None,
    });
    Ok((bytes[..received.bytes].to_vec(), sockets.flatten().collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        for message in [
            Message::Keep(443),
            Message::Forget(80),
            Message::List,
            Message::End,
        ] {
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
        for bytes in ["", "K", "K00x", "x00"] {
            assert_eq!(Message::decode(bytes.as_bytes()), None, "{bytes}");
        }
    }
}
