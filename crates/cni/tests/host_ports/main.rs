//! Host ports for real: the plugin as a process, namespaces for the node, its neighbour and two sandboxes, and traffic
//! through the rules. All of it in a network namespace of its own, which takes everything with it.
#![allow(
    clippy::unwrap_used,
    reason = "a test with a main of its own is not seen as a test"
)]

#[path = "../bridge/sandbox.rs"]
#[allow(dead_code, reason = "shared with the bridge's test, which uses all of it")]
mod sandbox;

use std::net::{IpAddr, Ipv4Addr, TcpStream, UdpSocket};
use std::path::Path;
use std::time::Duration;

use nlink::netlink::{Connection, Nftables, Route};
use sandbox::{Sandbox, unshare_network};
use serde_json::{Value, json};
use skiff_cni::{Attachment, BridgeConf, Network};
use skiff_meta::net::Cidr;

/// The node's address on the wire.
const NODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

fn main() {
    if let Some(code) = skiff_cni::plugin_main() {
        std::process::exit(code);
    }
    if !rustix::process::geteuid().is_root() {
        println!("host_ports: skipped, it needs root");
        return;
    }
    unshare_network();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(ports_lead_to_sandboxes());
    println!("host_ports: ok");
}

/// Who answers there says whom it sees.
fn ask(address: IpAddr, port: u16) -> Option<String> {
    use std::io::Read;
    let mut stream = TcpStream::connect_timeout(&(address, port).into(), Duration::from_secs(2)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}

async fn rules() -> usize {
    let connection = Connection::<Nftables>::new().unwrap();
    let family = nlink::netlink::nftables::Family::Ip;
    match connection.list_rules("skiff-hostports", family).await {
        Ok(rules) => rules.len(),
        Err(error) if error.is_not_found() => 0,
        Err(error) => panic!("{error}"),
    }
}

async fn give_the_node_an_address() {
    let host = Connection::<Route>::new().unwrap();
    host.set_link_up("lo").await.unwrap();
    host.add_address_by_name("lo", NODE.into(), 32).await.unwrap();
}

async fn ports_lead_to_sandboxes() {
    let dir = tempfile::tempdir().unwrap();
    let bin = dir.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(std::env::current_exe().unwrap(), bin.join("skiff-bridge")).unwrap();
    let plugin = json!({"type": "skiff-bridge", "bridge": "skiff0", "subnets": ["10.244.7.0/24"],
        "dataDir": dir.path().join("data"), "capabilities": {"portMappings": true}});
    let conf = json!({"cniVersion": "1.1.0", "name": "skiff", "plugins": [plugin]});
    std::fs::write(dir.path().join("10-skiff.conflist"), conf.to_string()).unwrap();
    let network = Network::load(dir.path()).unwrap();
    give_the_node_an_address().await;
    let sandboxes = [Sandbox::new(), Sandbox::new()];
    let attachment =
        |index: usize, ports: Value| attachment(dir.path(), &bin, &sandboxes[index], index, ports);
    let networks: Vec<Cidr> = vec!["10.244.7.0/24".parse().unwrap()];
    let mut conf = BridgeConf::new("skiff0", networks, dir.path().join("data"));
    conf.name = "skiff".into();

    // The same port on one address and on another, and of another protocol: all three are open.
    let first = attachment(
        0,
        json!([{"hostPort": 4000, "containerPort": 8080, "protocol": "tcp", "hostIP": "127.0.0.1"},
            {"hostPort": 4000, "containerPort": 9090, "protocol": "udp", "hostIP": ""}]),
    );
    let second = attachment(
        1,
        json!([{"hostPort": 4000, "containerPort": 8080, "protocol": "tcp", "hostIP": NODE.to_string()}]),
    );
    let mut ips = Vec::new();
    for attachment in [&first, &second] {
        ips.extend(network.add(attachment).await.unwrap().pod_ips());
        network.check(attachment).await.unwrap();
    }
    for (sandbox, ip) in sandboxes.iter().zip(&ips) {
        sandbox.listen(*ip);
    }
    let gateway = "10.244.7.1".to_owned();
    assert_eq!(ask(Ipv4Addr::LOCALHOST.into(), 4000), Some(gateway.clone()));
    assert_eq!(ask(NODE.into(), 4000).as_deref(), Some("192.0.2.1"));
    // From another sandbox by its own address, from the same one by the node's.
    assert_eq!(
        sandboxes[0].run(|| ask(NODE.into(), 4000)).as_deref(),
        Some("10.244.7.2")
    );
    assert_eq!(sandboxes[1].run(|| ask(NODE.into(), 4000)), Some(gateway));
    // Nothing else is open, and the node's loopback stays the node's.
    assert_eq!(ask(NODE.into(), 4001), None);
    assert_eq!(sandboxes[1].run(|| ask(Ipv4Addr::LOCALHOST.into(), 4000)), None);
    let own = ips[0];
    sandboxes[0].run(move || {
        let socket = UdpSocket::bind((own, 9090)).unwrap();
        std::thread::spawn(move || {
            let mut buffer = [0; 16];
            while let Ok((length, peer)) = socket.recv_from(&mut buffer) {
                let _ = socket.send_to(&buffer[..length], peer);
            }
        });
    });
    let client = UdpSocket::bind((NODE, 0)).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    client.send_to(b"hello", (NODE, 4000)).unwrap();
    let mut buffer = [0; 16];
    let (length, _) = client.recv_from(&mut buffer).unwrap();
    assert_eq!(&buffer[..length], b"hello");

    // Whoever reloads the host's firewall takes the rules along; they come back.
    let before = rules().await;
    let nft = Connection::<Nftables>::new().unwrap();
    nft.del_table_if_exists("skiff-hostports", nlink::netlink::nftables::Family::Ip)
        .await
        .unwrap();
    assert_eq!(ask(NODE.into(), 4000), None);
    assert!(network.check(&second).await.is_err());
    assert!(skiff_cni::restore_host_ports(&conf).await.unwrap());
    assert!(!skiff_cni::restore_host_ports(&conf).await.unwrap());
    assert_eq!(rules().await, before);
    assert_eq!(ask(NODE.into(), 4000).as_deref(), Some("192.0.2.1"));
    for change in [
        "flush chain ip skiff-hostports ports",
        "insert rule ip skiff-hostports ports accept",
        "flush chain ip skiff-hostports postrouting",
        "chain ip skiff-hostports prerouting { policy drop; }",
        "table ip skiff-hostports { flags dormant; }",
    ] {
        let done = std::process::Command::new("nft").arg(change).status();
        if !done.is_ok_and(|status| status.success()) {
            println!("host_ports: nft {change} is not to be had, skipped");
            continue;
        }
        assert!(skiff_cni::restore_host_ports(&conf).await.unwrap(), "{change}");
        assert!(!skiff_cni::restore_host_ports(&conf).await.unwrap(), "{change}");
        assert_eq!(ask(NODE.into(), 4000).as_deref(), Some("192.0.2.1"), "{change}");
    }

    // A port that is closed is closed, and only that one; DEL may come twice.
    for _ in 0..2 {
        let gone = Attachment {
            netns: None,
            ..second.clone()
        };
        network.del(&gone).await.unwrap();
    }
    assert_eq!(ask(NODE.into(), 4000), None);
    assert!(ask(Ipv4Addr::LOCALHOST.into(), 4000).is_some());
    // Flows of UDP end with the port.
    let bin_dirs = [bin.clone()];
    network
        .gc(&bin_dirs, &dir.path().join("cache"), &[])
        .await
        .unwrap();
    assert_eq!(rules().await, 0);
    client.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let _ = client.send_to(b"again", (NODE, 4000));
    assert!(client.recv_from(&mut buffer).is_err());

    let bad = attachment(
        1,
        json!([{"hostPort": 4000, "containerPort": 8080, "protocol": "icmp"}]),
    );
    let error = network.add(&bad).await.unwrap_err().to_string();
    assert!(error.contains("unknown protocol"), "{error}");
    network.del(&bad).await.unwrap();
    skiff_cni::remove_host_ports(&conf).await.unwrap();
    skiff_cni::remove_bridge("skiff0").await.unwrap();
    assert!(!dir.path().join("data/host-ports/skiff").exists());
}

fn attachment(dir: &Path, bin: &Path, sandbox: &Sandbox, index: usize, ports: Value) -> Attachment {
    let runtime_config = json!({"portMappings": ports});
    Attachment {
        bin_dirs: vec![bin.to_path_buf()],
        cache_dir: dir.join("cache"),
        container_id: format!("sandbox{index}"),
        netns: Some(sandbox.path.clone()),
        ifname: "eth0".into(),
        runtime_config: runtime_config.as_object().unwrap().clone(),
        ..Default::default()
    }
}
