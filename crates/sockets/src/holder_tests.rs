//! A holder in a thread, with real sockets.

use super::*;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread::JoinHandle;

fn started(path: &Path, abandoned: Duration) -> JoinHandle<io::Result<()>> {
    let listener = packet_socket().unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&listener, 16).unwrap();
    std::thread::spawn(move || serve(&listener, abandoned))
}

fn listening() -> (u16, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    (listener.local_addr().unwrap().port(), listener)
}

#[test]
fn connections_wait_for_the_next_process() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ports.sock");
    let serving = started(&path, Duration::from_secs(600));
    let (port, listener) = listening();
    let (other_port, other) = listening();
    let (mut first, kept) = Holder::find(&path);
    assert!(kept.is_empty());
    let all = BTreeMap::from([(port, listener), (other_port, other)]);
    first.keep(port, &all).unwrap();
    first.keep(other_port, &all).unwrap();
    first.forget(other_port, false).unwrap();
    // An answer: it has read what was sent before.
    list(first.connection.as_ref().unwrap()).unwrap();
    // It is killed.
    drop((first, all));
    let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
    client.write_all(b"hello").unwrap();
    assert!(
        TcpStream::connect(("127.0.0.1", other_port)).is_err(),
        "a forgotten port is kept"
    );
    let (_second, mut kept) = Holder::find(&path);
    let (kept_port, socket) = kept.pop().unwrap();
    assert_eq!((kept_port, kept.len()), (port, 0));
    assert!(crate::usable(port + 1, socket.try_clone().unwrap()).is_err());
    let listener = crate::usable(port, socket).unwrap();
    listener.set_nonblocking(false).unwrap();
    let mut accepted = listener.accept().unwrap().0;
    let mut heard = [0; 5];
    accepted.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"hello");
    // The end closes the port, and leaves no file.
    drop(listener);
    end(&path).unwrap();
    serving.join().unwrap().unwrap();
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
    assert!(!path.exists());
    end(&path).unwrap();
}

#[test]
fn an_abandoned_holder_ends() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ports.sock");
    let serving = started(&path, Duration::from_millis(1));
    serving.join().unwrap().unwrap();
    // What it left does not keep the next one from starting.
    assert!(path.exists());
    let (holder, kept) = Holder::find(&path);
    assert!(holder.connection.is_none() && kept.is_empty());
    end(&path).unwrap();
    assert!(!path.exists());
}

#[test]
fn who_speaks_nonsense_is_not_heard() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ports.sock");
    let serving = started(&path, Duration::from_secs(600));
    let stranger = connect(&path).unwrap();
    wire::send(&stranger, b"nonsense", &[]).unwrap();
    assert_eq!(
        wire::receive(&stranger).unwrap().0,
        b"",
        "the connection is closed"
    );
    // A socket that is not one is kept, and refused by whoever takes it.
    let file = tempfile::tempfile().unwrap();
    let client = connect(&path).unwrap();
    wire::send(&client, &Message::Keep(80).encode(), &[file.as_fd()]).unwrap();
    let (_, socket) = list(&client).unwrap().pop().unwrap();
    assert!(crate::usable(80, socket).is_err());
    end(&path).unwrap();
    serving.join().unwrap().unwrap();
}
