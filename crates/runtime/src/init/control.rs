//! The helper's end of its control socket: length-prefixed JSON, and a file descriptor that may ride
//! along. Blocking, because the helper has one thread and no runtime.

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

pub const MAX_MESSAGE: usize = 16 * 1024 * 1024;

pub fn encode<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let body = serde_json::to_vec(message).map_err(io::Error::other)?;
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    let mut framed = Vec::with_capacity(body.len() + 4);
    framed.extend_from_slice(&length.to_be_bytes());
    framed.extend_from_slice(&body);
    Ok(framed)
}

pub fn receive<T: DeserializeOwned>(socket: &mut File) -> io::Result<T> {
    let mut length = [0u8; 4];
    socket.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length) as usize;
    if length > MAX_MESSAGE {
        return Err(io::Error::other("message too large"));
    }
    let mut body = vec![0u8; length];
    socket.read_exact(&mut body)?;
    serde_json::from_slice(&body).map_err(io::Error::other)
}

pub fn send<T: Serialize>(socket: &mut File, message: &T) -> io::Result<()> {
    socket.write_all(&encode(message)?)
}

/// One byte, with a descriptor beside it if there is one.
pub fn send_byte(socket: impl AsFd, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("no room for a file descriptor"));
    }
    let byte = [IoSlice::new(b"1")];
    rustix::net::sendmsg(socket, &byte, &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

pub fn send_with_fd<T: Serialize>(socket: &File, message: &T, fd: BorrowedFd<'_>) -> io::Result<()> {
    let framed = encode(message)?;
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    if !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("no room for a file descriptor"));
    }
    let sent = rustix::net::sendmsg(
        socket.as_fd(),
        &[IoSlice::new(&framed)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    // Control messages are small; the socket's buffer takes one whole.
    if sent != framed.len() {
        return Err(io::Error::other("short write on the control socket"));
    }
    Ok(())
}
