//! Packet sockets: frames of one ethertype, on whichever device of this machine.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::wire::{ETHERTYPE_IPV6, Frame, Hardware};

/// Longer packets are none of those that are looked for.
const LARGEST: usize = 256;

pub(super) struct PacketSocket {
    ethertype: u16,
    socket: AsyncFd<OwnedFd>,
}

/// A packet that arrived.
pub(super) struct Received {
    pub(super) device: u32,
    pub(super) from: Hardware,
    pub(super) payload: Vec<u8>,
}

impl PacketSocket {
    pub(super) fn open(ethertype: u16) -> io::Result<PacketSocket> {
        let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // No packets until there is a filter.
        // SAFETY: no pointers are passed.
        let descriptor = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else's.
        let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
        if ethertype == ETHERTYPE_IPV6 {
            attach_filter(&socket)?;
        }
        let mut address = link_address(ethertype, 0);
        address.sll_protocol = ethertype.to_be();
        // SAFETY: `address` is a sockaddr_ll of the length that is given, and lives until the call returns.
        let bound = unsafe {
            libc::bind(
                socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of::<libc::sockaddr_ll>() as u32,
            )
        };
        if bound < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: an `OwnedFd` is open and its own, and it stays inside the `AsyncFd` until that is dropped.
        let socket = unsafe { AsyncFd::register(socket) }.map_err(|error| error.into_parts().1)?;
        Ok(PacketSocket { ethertype, socket })
    }

    pub(super) fn send(&self, device: u32, frame: &Frame) -> io::Result<()> {
        let mut address = link_address(self.ethertype, device);
        address.sll_halen = 6;
        address.sll_addr[..6].copy_from_slice(&frame.to);
        // SAFETY: both pointers are valid for the lengths that are given, and live until the call returns.
        let sent = unsafe {
            libc::sendto(
                self.socket.as_raw_fd(),
                frame.payload.as_ptr().cast(),
                frame.payload.len(),
                0,
                (&raw const address).cast(),
                size_of::<libc::sockaddr_ll>() as u32,
            )
        };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    pub(super) async fn receive(&self) -> io::Result<Received> {
        self.socket.async_io(Interest::READABLE, receive).await
    }
}

fn receive(socket: &OwnedFd) -> io::Result<Received> {
    let mut buffer = [0u8; LARGEST];
    let mut address = link_address(0, 0);
    let mut length = size_of::<libc::sockaddr_ll>() as u32;
    // SAFETY: the buffer and the address are valid for the lengths that are given, and live until the call returns.
    let read = unsafe {
        libc::recvfrom(
            socket.as_raw_fd(),
            buffer.as_mut_ptr().cast(),
            LARGEST,
            0,
            (&raw mut address).cast(),
            &raw mut length,
        )
    };
    let Ok(read) = usize::try_from(read) else {
        return Err(io::Error::last_os_error());
    };
    let mut from = [0; 6];
    from.copy_from_slice(&address.sll_addr[..6]);
    Ok(Received {
        device: u32::try_from(address.sll_ifindex).unwrap_or(0),
        from,
        payload: buffer[..read].to_vec(),
    })
}

fn link_address(ethertype: u16, device: u32) -> libc::sockaddr_ll {
    libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: ethertype.to_be(),
        sll_ifindex: i32::try_from(device).unwrap_or(0),
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    }
}

/// Of IPv6 only neighbour advertisements that come from the link: all else is the machine's traffic.
fn attach_filter(socket: &OwnedFd) -> io::Result<()> {
    const LOAD_BYTE: u16 = 0x30;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut program = [
        // Next header: ICMPv6.
        step(LOAD_BYTE, 0, 0, 6),
        step(JUMP_IF_EQUAL, 0, 5, 58),
        // Hop limit.
        step(LOAD_BYTE, 0, 0, 7),
        step(JUMP_IF_EQUAL, 0, 3, 255),
        // Type of the message.
        step(LOAD_BYTE, 0, 0, 40),
        step(JUMP_IF_EQUAL, 0, 1, 136),
        step(RETURN, 0, 0, LARGEST as u32),
        step(RETURN, 0, 0, 0),
    ];
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the program is as long as it says, and the kernel copies it before the call returns.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const filter).cast(),
            size_of::<libc::sock_fprog>() as u32,
        )
    };
    if set < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
