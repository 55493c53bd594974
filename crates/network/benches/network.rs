//! `make bench-network`: how long the service proxy takes to load many services into the kernel, and what one
//! endpoint's change costs then. It runs in a network namespace of its own and leaves nothing behind.
//!
//! `bench-network [SERVICES...]`, by default 1000, 5000 and 10000, with five endpoints each. `bench-network follow KUBECONFIG`
//! is the service proxy alone, as a client of an API server, for tools/bench-network.sh, which measures it beside kube-proxy.
#![allow(clippy::unwrap_used, reason = "a benchmark ends with the first error")]

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use skiff_client::Key;
use skiff_network::proxy::{self, Index, Metrics, ProxyConfig, ProxySlice, ServiceFacts, Table};
use tokio_util::sync::CancellationToken;

const ENDPOINTS: u32 = 5;
const CHANGES: u32 = 200;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [command, kubeconfig] = &arguments[..]
        && command == "follow"
    {
        return follow(std::path::Path::new(kubeconfig));
    }
    let mut sizes: Vec<u32> = std::env::args()
        .skip(1)
        .filter_map(|size| size.parse().ok())
        .collect();
    if sizes.is_empty() {
        sizes = vec![1000, 5000, 10000];
    }
    if cfg!(debug_assertions) {
        println!("a debug build: these figures say little");
    }
    // SAFETY: only the network namespace changes, before there are other threads.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    println!(
        "{:>8} {:>9} {:>10} {:>10} {:>10} {:>12} {:>12} {:>12} {:>12} {:>10}",
        "services",
        "endpoints",
        "decode",
        "plan",
        "load",
        "change p50",
        "change p99",
        "change CPU",
        "scale CPU",
        "check"
    );
    for size in sizes {
        runtime.block_on(measure(size));
    }
}

/// Follows an API server until it is killed, with as many threads as skiff has.
fn follow(kubeconfig: &std::path::Path) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    let config = ProxyConfig {
        pod_cidrs: vec!["10.244.0.0/15".parse().unwrap()],
        service_cidrs: vec!["10.96.0.0/12".parse().unwrap()],
        ..config()
    };
    runtime.block_on(async {
        let client = skiff_client::remote(kubeconfig, None).await.unwrap();
        let metrics = Metrics::new(Arc::default());
        proxy::run(config, client, metrics, CancellationToken::new())
            .await
            .unwrap();
    });
}

fn config() -> ProxyConfig {
    ProxyConfig {
        table: "skiff-bench".into(),
        node_name: "here".into(),
        pod_cidrs: vec!["10.0.0.0/9".parse().unwrap()],
        service_cidrs: vec!["10.128.0.0/9".parse().unwrap()],
        host_ports: vec![6443, 10250],
        bridge: None,
        node_port_addresses: Vec::new(),
        healthz: None,
        metrics: None,
    }
}

fn service(number: u32) -> String {
    let ip = Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 128, 1, 0)) + number);
    json!({"metadata": {"namespace": "default", "name": format!("service-{number}")},
        "spec": {"clusterIP": ip.to_string(), "clusterIPs": [ip.to_string()], "type": "ClusterIP",
            "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080}]}})
    .to_string()
}

/// A slice; the first endpoint has the version in its address, and `more` are added to the usual ones.
fn slice(number: u32, version: u32, more: u32) -> String {
    let pod = |index: u32| {
        let version = if index == 0 { version % 2 } else { 0 };
        Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 1, 0, 0)) + number * 16 + index * 2 + version)
    };
    let endpoint = |index: u32| {
        json!({"addresses": [pod(index).to_string()], "nodeName": format!("node-{}", index % 3),
            "conditions": {"ready": true, "serving": true, "terminating": false},
            "targetRef": {"kind": "Pod", "namespace": "default", "name": format!("pod-{number}-{index}")}})
    };
    let endpoints: Vec<_> = (0..ENDPOINTS + more).map(endpoint).collect();
    let name = format!("service-{number}");
    json!({"metadata": {"namespace": "default", "name": format!("{name}-1"), "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4", "endpoints": endpoints, "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}]})
    .to_string()
}

fn tell(index: &mut Index, number: u32, text: &str) {
    let slice: ProxySlice = serde_json::from_str(text).unwrap();
    let key = Key::new("default", format!("service-{number}"));
    index.set_slice(&key, &format!("service-{number}-1"), Some(Arc::new(slice)));
}

/// User and system time of this thread, which does all the work, the kernel's part included.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(stat.split(' ').next().unwrap().parse().unwrap())
}

async fn sync(index: &mut Index, table: &mut Table) {
    let delta = index.compile();
    table.apply(&delta, index.wanted()).await.unwrap();
}

async fn measure(size: u32) {
    let config = config();
    let networks = config.networks();
    let mut table = Table::open(&config, &networks.families()).unwrap();
    let mut index = Index::new(&config.node_name, networks);
    let objects: Vec<_> = (0..size)
        .map(|number| (service(number), slice(number, 0, 0)))
        .collect();
    let start = Instant::now();
    for (number, (service, slice)) in (0..).zip(&objects) {
        let key = Key::new("default", format!("service-{number}"));
        let service = serde_json::from_str(service).unwrap();
        index.set_service(&key, Some(ServiceFacts::of(&service)));
        tell(&mut index, number, slice);
    }
    let decoded = start.elapsed();
    let start = Instant::now();
    let delta = index.compile();
    let planned = start.elapsed();
    let start = Instant::now();
    table.apply(&delta, index.wanted()).await.unwrap();
    let loaded = start.elapsed();
    drop(delta);
    table.look().await.unwrap();

    // One endpoint is replaced by another.
    let changes: Vec<_> = (0..CHANGES)
        .map(|n| (n * 37 % size, slice(n * 37 % size, 1, 0)))
        .collect();
    let mut took = Vec::new();
    let before = cpu();
    for (number, text) in &changes {
        let start = Instant::now();
        tell(&mut index, *number, text);
        sync(&mut index, &mut table).await;
        took.push(start.elapsed());
    }
    let change_cpu = (cpu() - before) / CHANGES;
    took.sort();
    // One endpoint more: the count changes, too.
    let changes: Vec<_> = (0..CHANGES)
        .map(|n| (n * 37 % size, slice(n * 37 % size, 1, 1)))
        .collect();
    let before = cpu();
    for (number, text) in &changes {
        tell(&mut index, *number, text);
        sync(&mut index, &mut table).await;
    }
    let scale_cpu = (cpu() - before) / CHANGES;
    // The full check, as it is when somebody else has changed something.
    nlink::netlink::Connection::<nlink::netlink::Nftables>::new()
        .unwrap()
        .add_table("skiff-bench-other", nlink::netlink::nftables::Family::Ip)
        .await
        .ok();
    let start = Instant::now();
    assert!(
        !table.check(index.wanted()).await.unwrap(),
        "the kernel has something else"
    );
    let checked = start.elapsed();
    println!(
        "{size:>8} {:>9} {decoded:>10.1?} {planned:>10.1?} {loaded:>10.1?} {:>12.1?} {:>12.1?} {change_cpu:>12.1?} {scale_cpu:>12.1?} {checked:>10.1?}",
        size * ENDPOINTS,
        took[took.len() / 2],
        took[took.len() * 99 / 100],
    );
    skiff_network::proxy::remove(&config).await.unwrap();
}
