//! The plugin for real: processes, namespaces, devices. All of it happens inside a network namespace of
//! its own, which stands for the host and takes everything with it when the test ends.
#![allow(
    clippy::unwrap_used,
    reason = "a test with a main of its own is not seen as a test"
)]

mod sandbox;
mod spoofing;

use std::net::IpAddr;

use sandbox::{Sandbox, ask, unshare_network};
use skiff_cni::{Attachment, BridgeConf, Network, PodArgs};
use skiff_meta::net::Cidr;

fn main() {
    if let Some(code) = skiff_cni::plugin_main() {
        std::process::exit(code);
    }
    if !rustix::process::geteuid().is_root() {
        println!("bridge: skipped, it needs root");
        return;
    }
    for subnets in [
        &["10.244.7.0/24"][..],
        &["10.244.7.0/24", "fd00:7::/64"],
        &["fd00:7::/64"],
    ] {
        unshare_network();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(sandboxes_reach_each_other(subnets));
        println!("bridge: ok with {subnets:?}");
    }
}

fn links() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_to_string("/proc/thread-self/net/dev")
        .unwrap()
        .lines()
        .skip(2)
        .map(|line| line.split(':').next().unwrap().trim().to_string())
        .collect();
    names.sort();
    names
}

/// All addresses of a sandbox with this number, in the order of the networks.
fn addresses(subnets: &[&str], number: u128) -> Vec<IpAddr> {
    let networks = subnets.iter().map(|text| text.parse::<Cidr>().unwrap());
    networks.map(|network| network.nth(number).unwrap()).collect()
}

async fn sandboxes_reach_each_other(subnets: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let bin = dir.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(std::env::current_exe().unwrap(), bin.join("skiff-bridge")).unwrap();
    let conf = dir.path().join("10-skiff.conflist");
    std::fs::write(
        &conf,
        format!(
            r#"{{"cniVersion":"1.1.0","name":"skiff","plugins":[{{"type":"skiff-bridge","bridge":"skiff0",
                "subnets":{subnets:?},"mtu":1450,"dataDir":"{}"}}]}}"#,
            dir.path().join("data").display()
        ),
    )
    .unwrap();
    let network = Network::load(dir.path()).unwrap();
    let sandboxes = [Sandbox::new(), Sandbox::new()];
    let attachment = |index: usize| Attachment {
        bin_dirs: vec![bin.clone()],
        cache_dir: dir.path().join("cache"),
        container_id: format!("sandbox{index}"),
        netns: Some(sandboxes[index].path.clone()),
        ifname: "eth0".into(),
        pod: PodArgs {
            namespace: "default".into(),
            name: format!("pod{index}"),
            uid: "u".into(),
        },
        runtime_config: Default::default(),
    };

    network.status(std::slice::from_ref(&bin)).await.unwrap();
    let mut ips: Vec<Vec<IpAddr>> = Vec::new();
    for index in 0..2 {
        let start = std::time::Instant::now();
        let result = network.add(&attachment(index)).await.unwrap();
        println!("bridge: ADD took {:?}", start.elapsed());
        assert_eq!(result.interfaces[2].name, "eth0");
        ips.push(result.pod_ips());
        network.check(&attachment(index)).await.unwrap();
    }
    let gateways = addresses(subnets, 1);
    assert_eq!(ips, [addresses(subnets, 2), addresses(subnets, 3)]);

    // From the host, from sandbox to sandbox (through the host, with its own address), and to itself.
    for family in 0..subnets.len() {
        let (own, target) = (ips[0][family], ips[1][family]);
        sandboxes[1].listen(target);
        assert_eq!(ask(target), gateways[family].to_string());
        assert_eq!(sandboxes[0].run(move || ask(target)), own.to_string());
        assert_eq!(sandboxes[1].run(move || ask(target)), target.to_string());
    }
    assert_eq!(sandboxes[0].run(links), ["eth0", "lo"]);
    assert!(links().iter().any(|name| name == "skiff0"));

    let networks: Vec<Cidr> = subnets.iter().map(|text| text.parse().unwrap()).collect();
    let mut bridge = BridgeConf::new("skiff0", networks, dir.path().join("data"));
    bridge.name = "skiff".into();
    spoofing::is_prevented(&bridge, &sandboxes, [&ips[0], &ips[1]]).await;
    for (own, target) in ips[0].iter().zip(ips[1].clone()) {
        assert_eq!(sandboxes[0].run(move || ask(target)), own.to_string());
    }

    // Adding again gives the same address back only if the device can be made; here it is in use.
    let again = network.add(&attachment(0)).await;
    assert_eq!(again.unwrap().pod_ips(), ips[0]);

    // A namespace that does not exist is the plugin's error, and costs no address.
    let missing = Attachment {
        netns: Some("/nowhere".into()),
        container_id: "x".into(),
        ..attachment(0)
    };
    let error = network.add(&missing).await.unwrap_err().to_string();
    assert!(error.contains("failed to open netns /nowhere"), "{error}");

    // DEL, twice, without the namespace; then GC for the one nobody deletes.
    for _ in 0..2 {
        network
            .del(&Attachment {
                netns: None,
                ..attachment(0)
            })
            .await
            .unwrap();
    }
    assert!(network.check(&attachment(0)).await.is_err());
    network
        .gc(std::slice::from_ref(&bin), &dir.path().join("cache"), &[])
        .await
        .unwrap();
    assert_eq!(links(), ["lo", "skiff0"]);
    skiff_cni::ensure_bridge(&bridge).await.unwrap();
    moves_to_other_networks(&bridge).await;
    skiff_cni::remove_bridge("skiff0").await.unwrap();
    skiff_cni::remove_bridge("skiff0").await.unwrap();
    assert_eq!(links(), ["lo"]);
    assert!(spoofing::tables().await.is_empty());
    let left = std::fs::read_dir(dir.path().join("data/skiff"))
        .unwrap()
        .filter(|entry| {
            let name = entry.as_ref().unwrap().file_name();
            name.to_str().unwrap().parse::<IpAddr>().is_ok()
        })
        .count();
    assert_eq!(left, 0);
}

/// A node that registers again may get other networks: the bridge then has their gateways alone.
async fn moves_to_other_networks(bridge: &BridgeConf) {
    let mut moved = bridge.clone();
    moved.subnets = vec!["10.9.9.0/24".parse().unwrap(), "fd00:9::/64".parse().unwrap()];
    moved.mtu = Some(1400);
    skiff_cni::ensure_bridge(&moved).await.unwrap();
    let host = nlink::netlink::Connection::<nlink::netlink::Route>::new().unwrap();
    let link = host.get_link_by_name("skiff0").await.unwrap().unwrap();
    assert_eq!(link.mtu(), Some(1400));
    assert_eq!(link.address().unwrap(), [0x0a, 0x58, 10, 9, 9, 1]);
    let found = host.get_addresses_by_index(link.ifindex()).await.unwrap();
    let mut found: Vec<IpAddr> = found
        .iter()
        .filter_map(|a| a.primary_address().copied())
        .collect();
    found.sort();
    assert_eq!(found, [IpAddr::from([10, 9, 9, 1]), "fd00:9::1".parse().unwrap()]);
}
