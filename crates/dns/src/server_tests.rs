//! Who is answered, with real sockets in network namespaces.

use super::*;
use crate::zone::tests::Fixture;
use hickory_proto::op::{Message, Query};
use hickory_proto::rr::{Name, RecordType};
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::sync::mpsc;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);
const PORT: u16 = 53;

fn server() -> Arc<Server<Fixture>> {
    let settings = Settings {
        domain: "cluster.local".to_owned(),
        resolv_conf: PathBuf::from("/nonexistent"),
        own: Vec::new(),
        metrics: Arc::new(Metrics::new(&skiff_prometheus::Registry::new())),
    };
    let config = settings.default_config().unwrap();
    let active = respond::Active::new(config, "", &[], &settings.metrics).unwrap();
    let responder = Responder::new(Fixture, active, settings.metrics);
    Arc::new(Server::new(responder, vec!["10.1.0.0/24".parse().unwrap()]))
}

fn question() -> Vec<u8> {
    let mut question = Message::query();
    let name = Name::from_ascii("cluster.local.").unwrap();
    question.add_query(Query::query(name, RecordType::A));
    question.to_vec().unwrap()
}

fn answered() -> [bool; 2] {
    answered_from("0.0.0.0")
}

/// Whether there is an answer, by UDP and by TCP.
fn answered_from(source: &str) -> [bool; 2] {
    let (question, limit) = (question(), Duration::from_secs(2));
    let by_udp = || -> std::io::Result<usize> {
        let socket = std::net::UdpSocket::bind((source, 0))?;
        socket.set_read_timeout(Some(limit))?;
        socket.connect((ADDRESS, PORT))?;
        socket.send(&question)?;
        socket.recv(&mut [0; 512])
    };
    let by_tcp = || -> std::io::Result<()> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        let source: IpAddr = source.parse().map_err(std::io::Error::other)?;
        socket.bind(&SocketAddr::new(source, 0).into())?;
        socket.connect_timeout(&SocketAddr::from((ADDRESS, PORT)).into(), limit)?;
        let mut stream = std::net::TcpStream::from(socket);
        stream.set_read_timeout(Some(limit))?;
        stream.write_all(&(question.len() as u16).to_be_bytes())?;
        stream.write_all(&question)?;
        stream.read_exact(&mut [0; 12])
    };
    [by_udp().is_ok(), by_tcp().is_ok()]
}

fn ip(args: &str) {
    let done = std::process::Command::new("ip")
        .args(args.split_whitespace())
        .output();
    let done = done.unwrap();
    assert!(
        done.status.success(),
        "ip {args}: {}",
        String::from_utf8_lossy(&done.stderr)
    );
}

/// Runs `job` in a network namespace of its own; its thread's number comes first.
fn in_namespace<T: Send + 'static>(
    job: impl FnOnce() -> T + Send + 'static,
) -> (i32, std::thread::JoinHandle<T>) {
    let (tell, told) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        // SAFETY: only the network namespace of this thread changes.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
        tell.send(rustix::thread::gettid().as_raw_nonzero().get())
            .unwrap();
        job()
    });
    (told.recv().unwrap(), thread)
}

#[test]
fn only_the_cluster_is_answered() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped, it needs root");
        return;
    }
    let (_, machine) = in_namespace(|| {
        ip("link set lo up");
        ip("link add bridge type bridge");
        ip("address add 10.1.0.1/24 dev bridge");
        ip("link set bridge up");
        // A pod, and somebody outside who takes this machine for a router.
        let (go, gone) = (mpsc::channel(), mpsc::channel());
        let neighbour = |address: &'static str, gateway: &'static str, go: mpsc::Receiver<()>| {
            in_namespace(move || {
                go.recv().unwrap();
                ip(&format!("address add {address}/24 dev eth0"));
                ip("link set eth0 up");
                if !gateway.is_empty() {
                    ip(&format!("route add 10.1.0.0/24 via {gateway}"));
                }
                answered()
            })
        };
        let (pod, in_pod) = neighbour("10.1.0.2", "", go.1);
        let (outside, is_outside) = neighbour("192.0.2.2", "192.0.2.1", gone.1);
        ip(&format!("link add port type veth peer name eth0 netns {pod}"));
        ip("link set port master bridge up");
        ip(&format!(
            "link add uplink type veth peer name eth0 netns {outside}"
        ));
        ip("address add 192.0.2.1/24 dev uplink");
        ip("link set uplink up");

        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let bind = SocketAddr::from((ADDRESS, PORT));
            let (udp, tcp) = (listen_udp(bind).unwrap(), listen_tcp(bind).unwrap());
            let asked = tokio::task::spawn_blocking(move || {
                go.0.send(()).unwrap();
                gone.0.send(()).unwrap();
                (in_pod.join().unwrap(), is_outside.join().unwrap())
            });
            let ours = tokio::task::spawn_blocking(|| {
                // By the bridge's address and by another one of this machine.
                let from = ["0.0.0.0", "192.0.2.1", "127.0.0.1"];
                from.map(answered_from)
            });
            tokio::select! {
                () = serve(server(), udp, tcp) => panic!("it ended"),
                (asked, ours) = async { (asked.await.unwrap(), ours.await.unwrap()) } => {
                    assert_eq!(asked.0, [true, true], "a pod");
                    assert_eq!(ours, [[true, true]; 3], "this machine");
                    assert_eq!(asked.1, [false, false], "somebody outside");
                }
            }
        });
    });
    machine.join().unwrap();
}

/// A pod that asks as fast as it can and holds more connections than there are at all: another pod is answered as ever.
#[test]
fn a_flood_from_one_pod_leaves_another_its_share() {
    const QUESTIONS: usize = 100;
    if !rustix::process::geteuid().is_root() {
        println!("skipped, it needs root");
        return;
    }
    let (_, machine) = in_namespace(|| {
        ip("link set lo up");
        ip("link add bridge type bridge");
        ip("address add 10.1.0.1/24 dev bridge");
        ip("link set bridge up");
        let up = |address: &str| {
            ip(&format!("address add {address}/24 dev eth0"));
            ip("link set eth0 up");
        };
        let (go, begins) = mpsc::channel::<()>();
        let (flooding, flooded) = mpsc::channel::<()>();
        let (end, ends) = mpsc::channel::<()>();
        let (flooder, floods) = in_namespace(move || {
            begins.recv().unwrap();
            up("10.1.0.2");
            // They say nothing, and stay.
            let connect = |_| {
                let to = SocketAddr::from((ADDRESS, PORT));
                std::net::TcpStream::connect_timeout(&to, Duration::from_secs(2)).ok()
            };
            let held: Vec<_> = (0..MAX_CONNECTIONS + 50).map(connect).collect();
            let socket = std::net::UdpSocket::bind(("0.0.0.0", 0)).unwrap();
            socket.connect((ADDRESS, PORT)).unwrap();
            let (question, mut sent) = (question(), 0_u64);
            while ends.try_recv().is_err() {
                for _ in 0..1000 {
                    sent += u64::from(socket.send(&question).is_ok());
                }
                if sent > 50_000 {
                    let _ = flooding.send(());
                }
            }
            drop(held);
            sent
        });
        let (other, asks) = in_namespace(move || {
            flooded.recv().unwrap();
            up("10.1.0.3");
            let socket = std::net::UdpSocket::bind(("0.0.0.0", 0)).unwrap();
            socket.connect((ADDRESS, PORT)).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
            let question = question();
            let answered = |_: &usize| {
                let sent = socket.send(&question).is_ok();
                sent && socket.recv(&mut [0; 512]).is_ok()
            };
            let by_udp = (0..QUESTIONS).filter(answered).count();
            let [_, by_tcp] = self::answered();
            end.send(()).unwrap();
            (by_udp, by_tcp)
        });
        for (port, pod) in [("one", flooder), ("two", other)] {
            ip(&format!("link add {port} type veth peer name eth0 netns {pod}"));
            ip(&format!("link set {port} master bridge up"));
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let bind = SocketAddr::from((ADDRESS, PORT));
            let (udp, tcp) = (listen_udp(bind).unwrap(), listen_tcp(bind).unwrap());
            go.send(()).unwrap();
            let both = tokio::task::spawn_blocking(|| (asks.join().unwrap(), floods.join().unwrap()));
            tokio::select! {
                () = serve(server(), udp, tcp) => panic!("it ended"),
                both = both => {
                    let ((by_udp, by_tcp), sent) = both.unwrap();
                    println!("{by_udp} of {QUESTIONS} answered at once beside {sent} others");
                    // A machine that has no processor to spare loses some; without limits it is nearly all.
                    assert!(by_udp >= QUESTIONS / 2, "{by_udp} beside {sent}");
                    assert!(by_tcp, "by TCP");
                }
            }
        });
    });
    machine.join().unwrap();
}
