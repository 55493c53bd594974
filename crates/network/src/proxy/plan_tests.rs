//! What services become, in nft's words.

use super::*;
use serde_json::{Value, json};

fn config() -> ProxyConfig {
    ProxyConfig {
        table: "skiff-test".into(),
        node_name: "here".into(),
        pod_cidrs: vec!["10.244.0.0/16".parse().unwrap()],
        service_cidrs: vec!["10.96.0.0/12".parse().unwrap()],
        host_ports: vec![6443],
        bridge: Some("skiff0".into()),
    }
}

fn service(spec: Value) -> Arc<Service> {
    Arc::new(
        serde_json::from_value(json!({"metadata": {"namespace": "ns", "name": "web"}, "spec": spec}))
            .unwrap(),
    )
}

fn slice(endpoints: &[(&str, &str)]) -> Arc<EndpointSlice> {
    let endpoints: Vec<Value> = endpoints
        .iter()
        .map(|(address, node)| json!({"addresses": [address], "nodeName": node, "conditions": {"ready": true}}))
        .collect();
    Arc::new(
        serde_json::from_value(json!({
            "metadata": {"namespace": "ns", "name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
            "addressType": "IPv4", "endpoints": endpoints,
            "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        }))
        .unwrap(),
    )
}

/// What the services add to an empty table.
fn added(services: &[Arc<Service>], slices: &[Arc<EndpointSlice>]) -> String {
    let all = plan(&config(), services, slices).to_string();
    let frame = frame(&config()).to_string();
    let frame: Vec<&str> = frame.lines().collect();
    all.lines()
        .filter(|line| !frame.contains(line))
        .map(|line| without_hashes(line) + "\n")
        .collect()
}

/// Names with the word HASH in the place of the hash, which says nothing to a reader.
fn without_hashes(line: &str) -> String {
    let is_hash = |part: &str| part.len() == 8 && part.bytes().all(|b| b.is_ascii_hexdigit());
    line.split('-')
        .map(|part| if is_hash(part) { "HASH" } else { part })
        .collect::<Vec<_>>()
        .join("-")
}

fn check(spec: Value, endpoints: &[(&str, &str)], expected: &str) {
    let got = added(&[service(spec)], &[slice(endpoints)]);
    let expected: String = expected
        .lines()
        .map(|line| line.strip_prefix("        ").unwrap_or(line).to_string() + "\n")
        .collect();
    let expected = expected.trim_start_matches('\n').trim_end().to_string() + "\n";
    assert_eq!(got, expected, "got:\n{got}");
}

fn ports(node_port: Option<u16>) -> Value {
    let mut port = json!({"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080});
    if let Some(node_port) = node_port {
        port["nodePort"] = node_port.into();
    }
    json!([port])
}

#[test]
fn the_frame() {
    let got = plan(&config(), &[], &[]).to_string();
    let expected = "\
set cluster-ips {  }
map host-ports
  tcp . 6443 : return
map no-endpoint-nodeports
map no-endpoint-services
map service-ips
map service-nodeports
chain cluster-ips-check
  ip daddr @cluster-ips reject
  ip daddr 10.96.0.0/12 drop
chain endpoints-check
  fib daddr type local meta l4proto . th dport vmap @host-ports
  fib daddr type local meta l4proto . th dport vmap @no-endpoint-nodeports
  ip daddr . meta l4proto . th dport vmap @no-endpoint-services
chain filter-forward filter forward -110
  ct state new jump endpoints-check
  ct state new jump cluster-ips-check
chain filter-input filter input -110
  ct state new jump endpoints-check
chain filter-output filter output -110
  ct state new jump endpoints-check
chain filter-output-post-dnat filter output -90
  ct state new jump cluster-ips-check
chain guard-loopback filter prerouting -300
  iifname skiff0 ip daddr 127.0.0.0/8 drop
chain masquerading
  meta mark & 0x4000 == 0x4000 meta mark set mark and not 0x4000 masquerade fully-random
chain nat-output nat output -100
  jump services
chain nat-postrouting nat postrouting 100
  jump masquerading
chain nat-prerouting nat prerouting -100
  jump services
chain reject-chain
  reject
chain services
  ip saddr != 10.244.0.0/16 ip daddr @cluster-ips meta mark set mark or 0x4000
  fib daddr type local meta l4proto . th dport vmap @host-ports
  fib daddr type local meta l4proto . th dport vmap @service-nodeports
  ip daddr . meta l4proto . th dport vmap @service-ips
";
    assert_eq!(got, expected, "got:\n{got}");
}

#[test]
fn a_cluster_ip_with_two_endpoints() {
    check(
        json!({"clusterIP": "10.96.0.10", "ports": ports(None)}),
        &[("10.244.0.5", "here"), ("10.244.1.6", "there")],
        "
        set cluster-ips { 10.96.0.10 }
          10.96.0.10 . tcp . 80 : goto service-HASH-ns/web/tcp/http
        map service-pick-HASH-ns/web/tcp/http
          0 : goto endpoint-HASH-ns/web/tcp/http/10.244.0.5/8080
          1 : goto endpoint-HASH-ns/web/tcp/http/10.244.1.6/8080
        chain endpoint-HASH-ns/web/tcp/http/10.244.0.5/8080
          ip saddr 10.244.0.5/32 meta mark set mark or 0x4000
          meta l4proto tcp dnat to 10.244.0.5:8080
        chain endpoint-HASH-ns/web/tcp/http/10.244.1.6/8080
          ip saddr 10.244.1.6/32 meta mark set mark or 0x4000
          meta l4proto tcp dnat to 10.244.1.6:8080
        chain service-HASH-ns/web/tcp/http
          numgen random mod 2 vmap @service-pick-HASH-ns/web/tcp/http",
    );
}

#[test]
fn no_endpoints_are_refused() {
    check(
        json!({"clusterIP": "10.96.0.10", "type": "NodePort", "ports": ports(Some(30080))}),
        &[],
        "
        set cluster-ips { 10.96.0.10 }
          tcp . 30080 : goto reject-chain
          10.96.0.10 . tcp . 80 : goto reject-chain
          tcp . 30080 : return",
    );
}

#[test]
fn a_node_port() {
    check(
        json!({"clusterIP": "10.96.0.10", "type": "NodePort", "ports": ports(Some(30080))}),
        &[("10.244.0.5", "here")],
        "
        set cluster-ips { 10.96.0.10 }
          tcp . 30080 : return
          10.96.0.10 . tcp . 80 : goto service-HASH-ns/web/tcp/http
          tcp . 30080 : goto external-HASH-ns/web/tcp/http
        chain endpoint-HASH-ns/web/tcp/http/10.244.0.5/8080
          ip saddr 10.244.0.5/32 meta mark set mark or 0x4000
          meta l4proto tcp dnat to 10.244.0.5:8080
        chain external-HASH-ns/web/tcp/http
          meta mark set mark or 0x4000
          goto service-HASH-ns/web/tcp/http
        chain service-HASH-ns/web/tcp/http
          goto endpoint-HASH-ns/web/tcp/http/10.244.0.5/8080",
    );
}

#[test]
fn local_policies() {
    // One endpoint here, one there: internal traffic stays, external traffic stays and keeps its source.
    check(
        json!({"clusterIP": "10.96.0.10", "type": "NodePort", "ports": ports(Some(30080)),
            "internalTrafficPolicy": "Local", "externalTrafficPolicy": "Local"}),
        &[("10.244.0.5", "here"), ("10.244.1.6", "there")],
        "
        set cluster-ips { 10.96.0.10 }
          tcp . 30080 : return
          10.96.0.10 . tcp . 80 : goto local-HASH-ns/web/tcp/http
          tcp . 30080 : goto external-HASH-ns/web/tcp/http
        map service-pick-HASH-ns/web/tcp/http
          0 : goto endpoint-HASH-ns/web/tcp/http/10.244.0.5/8080
          1 : goto endpoint-HASH-ns/web/tcp/http/10.244.1.6/8080
        chain endpoint-HASH-ns/web/tcp/http/10.244.0.5/8080
          ip saddr 10.244.0.5/32 meta mark set mark or 0x4000
          meta l4proto tcp dnat to 10.244.0.5:8080
        chain endpoint-HASH-ns/web/tcp/http/10.244.1.6/8080
          ip saddr 10.244.1.6/32 meta mark set mark or 0x4000
          meta l4proto tcp dnat to 10.244.1.6:8080
        chain external-HASH-ns/web/tcp/http
          ip saddr 10.244.0.0/16 goto service-HASH-ns/web/tcp/http
          fib saddr type local meta mark set mark or 0x4000
          fib saddr type local goto service-HASH-ns/web/tcp/http
          goto local-HASH-ns/web/tcp/http
        chain local-HASH-ns/web/tcp/http
          goto endpoint-HASH-ns/web/tcp/http/10.244.0.5/8080
        chain service-HASH-ns/web/tcp/http
          numgen random mod 2 vmap @service-pick-HASH-ns/web/tcp/http",
    );
    // None here: dropped, not refused.
    let got = added(
        &[service(
            json!({"clusterIP": "10.96.0.10", "internalTrafficPolicy": "Local", "ports": ports(None)}),
        )],
        &[slice(&[("10.244.1.6", "there")])],
    );
    assert!(got.contains("  10.96.0.10 . tcp . 80 : drop\n"), "{got}");
}

#[test]
fn session_affinity() {
    let got = added(
        &[service(
            json!({"clusterIP": "10.96.0.10", "sessionAffinity": "ClientIP", "ports": ports(None),
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}}}),
        )],
        &[slice(&[("10.244.0.5", "here"), ("10.244.1.6", "there")])],
    );
    for line in [
        "set affinity-HASH-ns/web/tcp/http/10.244.0.5/8080/60s timeout 60s",
        "  ip saddr @affinity-HASH-ns/web/tcp/http/10.244.0.5/8080/60s goto endpoint-HASH-ns/web/tcp/http/10.244.0.5/8080",
        "  update @affinity-HASH-ns/web/tcp/http/10.244.1.6/8080/60s { ip saddr }",
    ] {
        assert!(got.contains(&format!("{line}\n")), "{line} not in\n{got}");
    }
}

#[test]
fn load_balancers_with_source_ranges() {
    let mut with_status = (*service(
        json!({"clusterIP": "10.96.0.10", "type": "LoadBalancer", "ports": ports(Some(30080)),
        "externalIPs": ["192.0.2.9"], "loadBalancerSourceRanges": ["198.51.100.0/24"]}),
    ))
    .clone();
    with_status.status =
        Some(serde_json::from_value(json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}, {"ip": "192.0.2.2", "ipMode": "Proxy"}]}})).unwrap());
    let got = added(&[Arc::new(with_status)], &[slice(&[("10.244.0.5", "here")])]);
    for line in [
        "  192.0.2.1 . tcp . 80 : goto firewall-HASH-ns/web/tcp/http",
        "  192.0.2.9 . tcp . 80 : goto external-HASH-ns/web/tcp/http",
        "  ip saddr 198.51.100.0/24 goto external-HASH-ns/web/tcp/http",
    ] {
        assert!(got.contains(&format!("{line}\n")), "{line} not in\n{got}");
    }
    assert!(!got.contains("192.0.2.2"), "{got}");
}

#[test]
fn services_that_have_no_rules() {
    for spec in [
        json!({"clusterIP": "None", "ports": ports(None)}),
        json!({"type": "ExternalName", "externalName": "example.com"}),
        json!({"ports": ports(None)}),
        json!({"clusterIP": "fd00::1", "ports": ports(None)}),
        json!({"clusterIP": "10.96.0.10"}),
    ] {
        let got = added(&[service(spec.clone())], &[slice(&[("10.244.0.5", "here")])]);
        assert!(!got.contains("chain"), "{spec}: {got}");
    }
    for value in ["", "other"] {
        let mut labelled = (*service(json!({"clusterIP": "10.96.0.10", "ports": ports(None)}))).clone();
        let label = "service.kubernetes.io/service-proxy-name";
        labelled.metadata.labels = Some([(label.to_string(), value.to_string())].into());
        assert_eq!(
            added(&[Arc::new(labelled)], &[slice(&[("10.244.0.5", "here")])]),
            ""
        );
    }
}

/// Endpoints that are marked as headless are for DNS, also those of a service with an address.
#[test]
fn headless_slices_take_no_traffic() {
    let service = service(json!({"clusterIP": "10.96.0.10", "ports": ports(None)}));
    let plain = slice(&[("10.244.0.5", "here")]);
    let mut headless = (*plain).clone();
    let labels = headless.metadata.labels.get_or_insert_default();
    labels.insert("service.kubernetes.io/headless".to_string(), String::new());
    assert!(added(std::slice::from_ref(&service), &[plain]).contains("10.244.0.5"));
    assert!(!added(&[service], &[Arc::new(headless)]).contains("10.244.0.5"));
}

/// A service with a name and an age; its endpoint is the pod with the number.
fn claimant(name: &str, created: &str, spec: Value, pod: u8) -> (Arc<Service>, Arc<EndpointSlice>) {
    let mut object = (*service(spec)).clone();
    object.metadata.name = Some(name.into());
    object.metadata.creation_timestamp = serde_json::from_value(json!(created)).unwrap();
    let mut endpoints = (*slice(&[(&format!("10.244.0.{pod}"), "here")])).clone();
    endpoints.metadata.labels = Some([("kubernetes.io/service-name".to_string(), name.to_string())].into());
    (Arc::new(object), Arc::new(endpoints))
}

#[test]
fn nobody_takes_an_address_that_is_anothers() {
    let external =
        |ips: &[&str]| json!({"clusterIP": "10.96.0.99", "externalIPs": ips, "ports": ports(None)});
    let own = |ip: &str| json!({"clusterIP": ip, "ports": ports(None)});
    let check = |services: &[(Arc<Service>, Arc<EndpointSlice>)], owner: &str, key: &str, why: &[&str]| {
        let (services, slices): (Vec<_>, Vec<_>) = services.iter().cloned().unzip();
        let (ruleset, refusals) = plan_with_refusals(&config(), &services, &slices);
        let owned: Vec<String> = [SERVICE_IPS, NO_ENDPOINT_SERVICES]
            .iter()
            .flat_map(|map| &ruleset.maps[*map].elements)
            .filter(|(found, _)| found.to_string() == key)
            .map(|(_, verdict)| verdict.to_string())
            .collect();
        match owned.as_slice() {
            [] => assert_eq!(owner, ""),
            [one] => assert!(
                !owner.is_empty() && one.contains(owner),
                "{key}: {one}, not {owner}"
            ),
            more => panic!("{key}: {more:?}"),
        }
        let told: Vec<String> = refusals.into_iter().map(|refusal| refusal.message).collect();
        assert_eq!(told, why);
    };
    let (old, new) = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z");
    // A cluster IP, whoever is older, and also on a port that its service does not have.
    let dns = claimant("dns", new, own("10.96.0.10"), 1);
    let thief = claimant("thief", old, external(&["10.96.0.10"]), 2);
    let refused =
        ["spec.externalIPs: 10.96.0.10:80/tcp is not served: it is the cluster IP of service ns/dns"];
    check(
        &[dns.clone(), thief.clone()],
        "ns/dns",
        "10.96.0.10 . tcp . 80",
        &refused,
    );
    check(
        &[thief.clone(), dns.clone()],
        "ns/dns",
        "10.96.0.10 . tcp . 80",
        &refused,
    );
    let mut idle = dns.clone();
    idle.1 = slice(&[]);
    check(
        &[thief.clone(), idle],
        "reject",
        "10.96.0.10 . tcp . 80",
        &refused,
    );
    let mut elsewhere = (*dns.0).clone();
    elsewhere.metadata.labels = Some([(PROXY_NAME.to_string(), "other".to_string())].into());
    check(
        &[thief, (Arc::new(elsewhere), dns.1)],
        "",
        "10.96.0.10 . tcp . 80",
        &refused,
    );
    // Addresses of the cluster that no service has.
    for (address, why) in [
        ("10.97.1.1", "in the service network"),
        ("10.244.0.1", "in the pod network"),
        ("127.0.0.1", "not an address that others reach"),
    ] {
        let message = format!("spec.externalIPs: {address}:80/tcp is not served: it is {why}");
        let thief = claimant("thief", old, external(&[address]), 2);
        check(&[thief], "", &format!("{address} . tcp . 80"), &[&message]);
    }
    // The API server, wherever it is.
    let mut api = (*slice(&[("192.0.2.7", "")])).clone();
    api.metadata.namespace = Some("default".into());
    api.metadata.labels = Some([("kubernetes.io/service-name".to_string(), "kubernetes".to_string())].into());
    api.ports = serde_json::from_value(json!([{"name": "https", "port": 80, "protocol": "TCP"}])).unwrap();
    let (thief, endpoints) = claimant("thief", old, external(&["192.0.2.7"]), 2);
    check(
        &[(thief.clone(), Arc::new(api)), (thief, endpoints)],
        "",
        "192.0.2.7 . tcp . 80",
        &["spec.externalIPs: 192.0.2.7:80/tcp is not served: it is the API server's"; 2],
    );
    // Of two that want the same, the older one; a load balancer's comes first.
    let a = claimant("a", new, external(&["192.0.2.9", "192.0.2.9"]), 1);
    let b = claimant("b", old, external(&["192.0.2.9"]), 2);
    check(
        &[a.clone(), b.clone()],
        "ns/b",
        "192.0.2.9 . tcp . 80",
        &["spec.externalIPs: 192.0.2.9:80/tcp is not served: service ns/b has it already"; 2],
    );
    let mut balanced = (*claimant(
        "lb",
        new,
        json!({"clusterIP": "10.96.0.98", "type": "LoadBalancer", "ports": ports(None)}),
        3,
    )
    .0)
        .clone();
    balanced.status =
        serde_json::from_value(json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.9"}]}})).unwrap();
    let balanced = (Arc::new(balanced), claimant("lb", new, json!({}), 3).1);
    check(
        &[b, balanced],
        "ns/lb",
        "192.0.2.9 . tcp . 80",
        &["spec.externalIPs: 192.0.2.9:80/tcp is not served: service ns/lb has it already"],
    );
}

#[test]
fn names_stay_within_the_kernels_limits() {
    let long = "x".repeat(300);
    assert_eq!(chain_name("endpoint", &long).len(), 120);
    assert_ne!(
        chain_name("endpoint", &long),
        chain_name("endpoint", &(long.clone() + "y"))
    );
}
