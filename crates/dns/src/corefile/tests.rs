//! Corefiles that are accepted, and those that are refused.

use super::*;

fn read(text: &str) -> Result<Config, Problem> {
    parse(text, &BTreeMap::new())
}

#[test]
fn kubeadms_corefile_is_accepted() {
    let config = read(&default_corefile("cluster.local")).unwrap();
    let [block] = &config.blocks[..] else {
        panic!("one block")
    };
    assert!(block.errors && block.loadbalance && block.find_loops && block.log.is_empty());
    let kubernetes = block.kubernetes.as_ref().unwrap();
    assert_eq!((kubernetes.ttl, kubernetes.pods), (30, true));
    assert_eq!((kubernetes.zones.len(), kubernetes.reverse.len()), (1, 2));
    let forward = &block.forwards[0];
    assert_eq!(
        (forward.to.as_slice(), forward.max_concurrent),
        (&[Upstreams::ResolvConf][..], Some(1000))
    );
    let cache = block.cache.as_ref().unwrap();
    assert_eq!(
        (cache.positive.max.as_secs(), cache.negative.max.as_secs()),
        (30, 30)
    );
    assert_eq!(cache.positive.except.len(), 1);
    assert_eq!(config.notes.len(), 3);
}

#[test]
fn upstreams_are_read() {
    let forward = |line: &str| -> Result<ForwardConfig, String> {
        let config = read(&format!(". {{\n{line}\n}}")).map_err(|problem| problem.message)?;
        Ok(config.blocks[0].forwards[0].clone())
    };
    let to = |line: &str| -> Vec<String> {
        let told = |upstream: &Upstreams| match upstream {
            Upstreams::ResolvConf => "resolv.conf".to_owned(),
            Upstreams::Address {
                address,
                tls,
                server_name,
            } => {
                format!("{address} {tls} {}", server_name.as_deref().unwrap_or("-"))
            }
        };
        forward(line).unwrap().to.iter().map(told).collect()
    };
    assert_eq!(
        to("forward . 1.1.1.1 [fd00::1]:5353 dns://9.9.9.9:54"),
        [
            "1.1.1.1:53 false -",
            "[fd00::1]:5353 false -",
            "9.9.9.9:54 false -",
        ]
    );
    assert_eq!(
        to("forward . tls://9.9.9.9 tls://1.1.1.1%one.one:8853 tls://[fd00::1]"),
        [
            "9.9.9.9:853 true -",
            "1.1.1.1:8853 true one.one",
            "[fd00::1]:853 true -",
        ]
    );
    let options = forward("forward a.org 1.1.1.1 {\n except b.a.org\n max_fails 5\n health_check 1s no_rec domain a.org\n force_tcp\n expire 1m30s\n policy sequential\n max_concurrent 7\n failover SERVFAIL\n next NXDOMAIN\n}").unwrap();
    assert_eq!(
        (options.max_fails, options.force_tcp, options.max_concurrent),
        (5, true, Some(7))
    );
    assert_eq!(
        (options.health_check.as_secs(), options.health_recursion),
        (1, false)
    );
    assert_eq!(
        (options.expire.as_secs(), options.policy, options.except.len()),
        (90, Policy::Sequential, 1)
    );
    for (line, expected) in [
        ("forward .", "wrong argument count"),
        ("forward . one.one.one.one", "not an IP address or file"),
        (
            "forward . https://1.1.1.1",
            "'https' is not supported as a destination protocol",
        ),
        ("forward . /etc/passwd", "files of the node are not read"),
        ("forward . fe80::1%eth0", "scoped addresses are not supported"),
        ("forward . 1.1.1.1 {\n policy best\n}", "unknown policy 'best'"),
        (
            "forward . 1.1.1.1 {\n tls a b\n}",
            "client certificates are not supported",
        ),
        ("forward . 1.1.1.1 {\n expire soon\n}", "invalid duration"),
        (
            "forward . 1.1.1.1 {\n failover NOERROR\n}",
            "NoError cannot be used",
        ),
        (
            "forward . 1.1.1.1 {\n magic\n}",
            "property 'magic' is not supported",
        ),
    ] {
        let message = forward(line).unwrap_err();
        assert!(message.contains(expected), "{line}: {message}");
    }
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    for (text, expected) in [
        ("", "Corefile:1: no server block"),
        (
            ". {\n etcd\n}",
            "Corefile:2: plugin/etcd: the plugin etcd is not supported",
        ),
        (
            ". {\n autopath @kubernetes\n}",
            "Corefile:2: plugin/autopath: the plugin autopath is not supported",
        ),
        (
            ".:1053 {\n}",
            "Corefile:1: .:1053: cluster DNS serves port 53 only",
        ),
        (
            "tls://. {\n}",
            "Corefile:1: tls://.: cluster DNS does not serve tls",
        ),
        (
            ". {\n}\n.:53 {\n}",
            "Corefile:3: cannot serve dns://.:53 - it is already defined",
        ),
        (
            ". {\n errors\n errors\n}",
            "Corefile:3: plugin/errors: this plugin can only be used once per Server Block",
        ),
        (
            ". {\n errors {\n consolidate 5m x\n }\n}",
            "Corefile:2: plugin/errors: unknown property 'consolidate'",
        ),
        (
            ". {\n kubernetes cluster.local {\n pods verified\n }\n}",
            "Corefile:2: plugin/kubernetes: pods verified is not supported: use insecure or disabled",
        ),
        (
            ". {\n kubernetes cluster.local {\n labels a=b\n }\n}",
            "Corefile:2: plugin/kubernetes: property 'labels' is not supported",
        ),
        (
            ". {\n kubernetes in-addr.arpa\n}",
            "Corefile:2: plugin/kubernetes: non-reverse zone name must be used",
        ),
        (
            ". {\n kubernetes cluster.local {\n ttl 4000\n }\n}",
            "Corefile:2: plugin/kubernetes: ttl must be in range [0, 3600]: 4000",
        ),
        (
            ". {\n cache 0\n}",
            "Corefile:2: plugin/cache: cache TTL can not be zero or negative: 0",
        ),
        (
            ". {\n cache {\n prefetch 10\n }\n}",
            "Corefile:2: plugin/cache: property 'prefetch' is not supported, or its arguments are wrong",
        ),
        (
            ". {\n loadbalance weighted\n}",
            "Corefile:2: plugin/loadbalance: unknown policy: weighted",
        ),
        ("a..b {\n}", "Corefile:1: a..b is not a zone"),
    ] {
        assert_eq!(read(text).unwrap_err().to_string(), expected, "{text}");
    }
}

#[test]
fn stub_domains_are_blocks() {
    let config = read(".:53 {\n forward . /etc/resolv.conf\n}\nacme.local:53 10.0.0.0/8 {\n errors\n cache 30 {\n success 100 60 1\n denial 50\n servfail 1s\n keepttl\n }\n forward . 10.1.2.3\n}\n").unwrap();
    let zones: Vec<String> = config.blocks[1]
        .zones
        .iter()
        .map(|zone| zone.to_ascii())
        .collect();
    assert_eq!(zones, ["acme.local.", "10.in-addr.arpa."]);
    let cache = config.blocks[1].cache.as_ref().unwrap();
    assert_eq!(
        (
            cache.positive.entries,
            cache.positive.max.as_secs(),
            cache.positive.min.as_secs()
        ),
        (100, 60, 1)
    );
    assert_eq!(
        (
            cache.negative.entries,
            cache.negative.max.as_secs(),
            cache.servfail.as_secs()
        ),
        (50, 30, 1)
    );
    assert!(cache.keep_ttl);
}

#[test]
fn it_is_bounded() {
    assert!(read(&format!(". {{\n# {}\n}}", "x".repeat(MAX_BYTES))).is_err());
    let many: String = (0..=MAX_BLOCKS).map(|n| format!("z{n}.org {{\n}}\n")).collect();
    assert!(read(&many).is_err());
    let patterns = "rewrite name regex a b\n".repeat(MAX_PATTERNS + 1);
    assert!(read(&format!(". {{\n{patterns}}}")).is_err());
    assert!(read(". {\n rewrite name regex (a{1000}){1000} b\n}").is_err());
}
