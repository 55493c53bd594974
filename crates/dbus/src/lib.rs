//! D-Bus over a unix socket, as much of it as skiff needs to speak to systemd: calls, replies, signals, and the file
//! descriptors that come with them. No introspection, no objects, no other transport; a message of more than
//! 128 KiB is refused, and ends the connection.

mod connection;
mod message;

pub use connection::Connection;
pub use message::{Body, Kind, Message, Reader};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0:?} is no address of a unix socket")]
    Address(String),
    #[error("cannot connect to the bus at {address}: {source}")]
    Connect { address: String, source: std::io::Error },
    #[error("the bus refuses this user: {0}")]
    Refused(String),
    #[error("the connection to the bus: {0}")]
    Io(#[from] std::io::Error),
    #[error("the bus closed the connection")]
    Closed,
    #[error("a message that cannot be read: {0}")]
    Malformed(&'static str),
    #[error("{member}: {name}: {message}")]
    Failed {
        member: String,
        name: String,
        message: String,
    },
    #[error("{0}: no answer in time")]
    Timeout(String),
}
