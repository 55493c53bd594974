//! `make bench-dns`: how many questions a second cluster DNS answers, and what one costs, beside the real CoreDNS under the
//! same load. Both are processes of their own with one API server, which is a list of objects on loopback.
//!
//! `bench-dns SERVICES SECONDS COREDNS`, where COREDNS is a binary, or `no`.
#![allow(clippy::unwrap_used, reason = "a benchmark ends with the first error")]

use hickory_proto::op::{Message, Query};
use hickory_proto::rr::{Name, RecordType};
use skiff_dns::{DnsConfig, Listen, Metrics};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// Questions under way at once.
const CLIENTS: usize = 32;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    if let [mode, api, listen] = args.as_slice()
        && mode == "serve"
    {
        return runtime.block_on(serve(api, listen.parse().unwrap()));
    }
    let number = |nth: usize, default| {
        args.get(nth)
            .and_then(|text| text.parse().ok())
            .unwrap_or(default)
    };
    let (services, seconds) = (number(0, 5000), number(1, 10));
    if cfg!(debug_assertions) {
        println!("a debug build: these figures say little");
    }
    let api = runtime.block_on(start_api(services));
    println!("{services} services, {CLIENTS} questions at once, {seconds} s");
    println!(
        "{:>8} {:>12} {:>14} {:>10} {:>10}",
        "", "queries/s", "CPU a query", "lost", "memory"
    );
    let own = std::env::current_exe().unwrap();
    let address = free_address();
    let child = Command::new(own)
        .args(["serve", &format!("http://{api}"), &address.to_string()])
        .spawn();
    measure("skiff", child.unwrap(), address, services, seconds.into());
    let coredns = args.get(2).map_or("no", String::as_str);
    if coredns == "no" {
        println!("CoreDNS was left out");
        return;
    }
    let address = free_address();
    let corefile = std::env::temp_dir().join(format!("bench-dns-{}.corefile", std::process::id()));
    let port = address.port();
    let text = format!(
        ".:{port} {{
    bind 127.0.0.1
    errors
    kubernetes cluster.local in-addr.arpa ip6.arpa {{
        endpoint http://{api}
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 30
    }}
    prometheus 127.0.0.1:0
    cache 30 {{
        disable success cluster.local
        disable denial cluster.local
    }}
    loadbalance
}}
"
    );
    std::fs::write(&corefile, text).unwrap();
    let child = Command::new(coredns)
        .arg("-conf")
        .arg(&corefile)
        .stdout(Stdio::null())
        .spawn();
    measure("CoreDNS", child.unwrap(), address, services, seconds.into());
    let _ = std::fs::remove_file(corefile);
}

/// Cluster DNS alone.
async fn serve(api: &str, listen: SocketAddr) {
    let client = kube::Client::try_from(kube::Config::new(api.parse().unwrap())).unwrap();
    let config = DnsConfig {
        listen: Listen::On(vec![listen]),
        pods: Vec::new(),
        domain: "cluster.local".to_owned(),
        resolv_conf: PathBuf::from("/nonexistent"),
        own: Vec::new(),
        node_name: String::new(),
        metrics: Arc::new(Metrics::new(&skiff_prometheus::Registry::new())),
    };
    skiff_dns::run(config, client, CancellationToken::new())
        .await
        .unwrap();
}

fn free_address() -> SocketAddr {
    UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

fn question(name: &str, kind: RecordType) -> Vec<u8> {
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
    message.to_vec().unwrap()
}

/// What a client in a pod asks: mostly names that exist, IPv6 addresses that do not, and names of the search path.
fn questions(services: u32) -> Vec<Vec<u8>> {
    let name = |n: u32| format!("service-{n}.default.svc.cluster.local.");
    let all = (0..services).map(|n| match n % 7 {
        0 => question(&name(n), RecordType::AAAA),
        1 => question(&format!("host-{n}.org.default.svc.cluster.local."), RecordType::A),
        _ => question(&name(n), RecordType::A),
    });
    all.collect()
}

fn ask(socket: &UdpSocket, question: &[u8], buffer: &mut [u8]) -> bool {
    socket.send(question).is_ok() && socket.recv(buffer).is_ok()
}

/// CPU seconds and resident bytes of a process.
fn usage(child: &Child) -> (f64, f64) {
    let text = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
    let fields: Vec<&str> = text.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let number = |nth: usize| fields[nth].parse::<f64>().unwrap();
    ((number(11) + number(12)) / 100.0, number(21) * 4096.0)
}

fn measure(what: &str, mut child: Child, address: SocketAddr, services: u32, seconds: u64) {
    let questions = Arc::new(questions(services));
    let connect = move || {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        socket.connect(address).unwrap();
        socket
    };
    // It is ready when it knows the last service.
    let last = question(
        &format!("service-{}.default.svc.cluster.local.", services - 1),
        RecordType::A,
    );
    let began = Instant::now();
    loop {
        let mut buffer = [0; 4096];
        let known = ask(&connect(), &last, &mut buffer) && buffer[3] & 15 == 0 && buffer[7] == 1;
        if known {
            break;
        }
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "{what} does not get ready"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    let (answered, lost) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let stop = Arc::new(AtomicBool::new(false));
    let (before, began) = (usage(&child).0, Instant::now());
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let (questions, stop, socket) = (questions.clone(), stop.clone(), connect());
            let (answered, lost) = (answered.clone(), lost.clone());
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                let mut nth = client * 131;
                while !stop.load(Ordering::Relaxed) {
                    nth += 37;
                    let count = match ask(&socket, &questions[nth % questions.len()], &mut buffer) {
                        true => &answered,
                        false => &lost,
                    };
                    count.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    std::thread::sleep(Duration::from_secs(seconds));
    stop.store(true, Ordering::Relaxed);
    clients.into_iter().for_each(|client| client.join().unwrap());
    let (after, memory) = usage(&child);
    let (count, took) = (
        answered.load(Ordering::Relaxed) as f64,
        began.elapsed().as_secs_f64(),
    );
    println!(
        "{what:>8} {:>12.0} {:>11.1} µs {:>10} {:>6.0} MiB",
        count / took,
        (after - before) * 1e6 / count,
        lost.load(Ordering::Relaxed),
        memory / f64::from(1 << 20)
    );
    let _ = child.kill();
    let _ = child.wait();
}

/// An API server that has `services` services with two endpoints each, and never a change.
async fn start_api(services: u32) -> SocketAddr {
    let list = |kind: &str, version: &str, items: Vec<String>| {
        format!(
            "{{\"kind\":\"{kind}List\",\"apiVersion\":\"{version}\",\"metadata\":{{\"resourceVersion\":\"5\"}},\"items\":[{}]}}",
            items.join(",")
        )
    };
    let meta = |name: &str, more: &str| {
        format!(
            "\"metadata\":{{\"name\":\"{name}\",\"namespace\":\"default\",\"uid\":\"{name}\",\"resourceVersion\":\"1\"{more}}}"
        )
    };
    let service = |n: u32| {
        let ip = Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 96, 0, 0)) + 256 + n);
        format!(
            "{{{},\"spec\":{{\"clusterIP\":\"{ip}\",\"clusterIPs\":[\"{ip}\"],\"type\":\"ClusterIP\",\"ports\":[{{\"name\":\"http\",\"port\":80,\"protocol\":\"TCP\"}}]}}}}",
            meta(&format!("service-{n}"), "")
        )
    };
    let slice = |n: u32| {
        let ip = |i: u32| Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 244, 0, 0)) + 2 * n + i);
        let labels = format!(",\"labels\":{{\"kubernetes.io/service-name\":\"service-{n}\"}}");
        let endpoint = |i: u32| {
            format!(
                "{{\"addresses\":[\"{}\"],\"conditions\":{{\"ready\":true}}}}",
                ip(i)
            )
        };
        format!(
            "{{{},\"addressType\":\"IPv4\",\"ports\":[{{\"name\":\"http\",\"port\":8080,\"protocol\":\"TCP\"}}],\"endpoints\":[{},{}]}}",
            meta(&format!("service-{n}-x"), &labels),
            endpoint(0),
            endpoint(1)
        )
    };
    let namespace =
        "{\"metadata\":{\"name\":\"default\",\"uid\":\"d\",\"resourceVersion\":\"1\"}}".to_owned();
    let lists = Arc::new([
        (
            "/api/v1/services",
            list("Service", "v1", (0..services).map(service).collect()),
        ),
        ("/api/v1/namespaces", list("Namespace", "v1", vec![namespace])),
        (
            "/apis/discovery.k8s.io/v1/endpointslices",
            list(
                "EndpointSlice",
                "discovery.k8s.io/v1",
                (0..services).map(slice).collect(),
            ),
        ),
        (
            "/api/v1/namespaces/kube-system/configmaps",
            list("ConfigMap", "v1", Vec::new()),
        ),
    ]);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer_api(stream, lists.clone()));
        }
    });
    address
}

async fn answer_api(mut stream: TcpStream, lists: Arc<[(&'static str, String); 4]>) -> Option<()> {
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.ok()?);
        }
        let head = String::from_utf8(head).ok()?;
        let target = head.split(' ').nth(1)?.to_owned();
        let path = target.split('?').next()?;
        let (status, body) = if target.contains("sendInitialEvents") {
            // Clients fall back to a list.
            let body = "{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"status\":\"Failure\",\"reason\":\"Invalid\",\"code\":422}";
            ("422 Unprocessable Entity", body)
        } else if target.contains("watch=") {
            let begin =
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
            stream.write_all(begin.as_bytes()).await.ok()?;
            // Open until the client goes.
            return stream.read_u8().await.ok().map(|_| ());
        } else {
            match lists.iter().find(|(of, _)| *of == path) {
                Some((_, body)) => ("200 OK", body.as_str()),
                None => (
                    "404 Not Found",
                    "{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"status\":\"Failure\",\"reason\":\"NotFound\",\"code\":404}",
                ),
            }
        };
        let begin = format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(begin.as_bytes()).await.ok()?;
        stream.write_all(body.as_bytes()).await.ok()?;
    }
}
