//! Services that come, go and come back, with real pods, from a pod and from the node: what the official suite's
//! "should be able to up and down services", "should work after the service has been recreated" and the tests of
//! the labels service-proxy-name and headless do. And that pods cannot forge what they send, over a crash of skiff.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use skiff_testkit::{BUSYBOX, Cluster, Kubectl, busybox_archive, eventually, expect_eq};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream, UdpSocket};
use std::process::Command;
use std::time::Duration;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
const PATIENCE: Duration = Duration::from_secs(90);
const REPLICAS: usize = 2;

#[test]
fn services_up_down_and_up_again() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let cluster = Cluster::start(SKIFF, &[])?;
    cluster.import(&busybox_archive(dir.path())?)?;
    let kubectl = cluster.kubectl();
    // A pod with all that a default container may do, and more: NET_RAW to forge, NET_ADMIN to take addresses.
    kubectl.apply(
        &json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "client"}, "spec": {
            "terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": BUSYBOX,
                "command": ["sleep", "3600"],
                "securityContext": {"capabilities": {"add": ["NET_RAW", "NET_ADMIN"]}}}]}})
        .to_string(),
    )?;
    let one = start(&kubectl, "one", None)?;
    let two = start(&kubectl, "two", None)?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod", "--all", "--timeout=90s"])?;
    is_up(&kubectl, "one", one)?;
    is_up(&kubectl, "two", two)?;
    the_node_resolves(&kubectl)?;
    the_way_of_a_packet(&cluster, &kubectl)?;

    // Down with its pods; the other one stays, and a third does not inherit its address.
    kubectl.run(&["delete", "service,deployment", "one", "--wait=false"])?;
    is_down(&kubectl, one)?;
    is_up(&kubectl, "two", two)?;
    let three = start(&kubectl, "three", None)?;
    ensure!(three != two, "two services have {two}");
    is_up(&kubectl, "three", three)?;

    // Recreated with the address it had, over pods that stayed.
    kubectl.run(&["delete", "service", "two"])?;
    is_down(&kubectl, two)?;
    kubectl.apply(&service("two", Some(two)))?;
    is_up(&kubectl, "two", two)?;

    // A service of another proxy is left alone. The label of headless services counts on EndpointSlices only.
    let of_another = "service.kubernetes.io/service-proxy-name";
    kubectl.run(&["label", "service", "two", &format!("{of_another}=other")])?;
    is_down(&kubectl, two)?;
    kubectl.run(&["label", "service", "two", &format!("{of_another}-")])?;
    is_up(&kubectl, "two", two)?;
    kubectl.run(&["label", "service", "two", "service.kubernetes.io/headless=other"])?;
    is_up(&kubectl, "two", two)?;

    an_external_ip_is_refused(&kubectl, two)?;
    is_up(&kubectl, "two", two)?;
    forging_is_prevented(&cluster, &kubectl)
}

/// `skiff net check` says what stops a connection, and what the kernel does is what it says.
fn the_way_of_a_packet(cluster: &Cluster, kubectl: &Kubectl) -> Result<()> {
    let check = |target: &str| -> Result<(Option<i32>, Value)> {
        let output = Command::new(SKIFF)
            .args([
                "net",
                "check",
                "pod/client",
                target,
                "-o",
                "json",
                "--name",
                cluster.name(),
            ])
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let walk = serde_json::from_str(&text)
            .with_context(|| format!("{text}{}", String::from_utf8_lossy(&output.stderr)))?;
        Ok((output.status.code(), walk))
    };
    let stops = |walk: &Value| -> Vec<(String, String)> {
        let steps = walk["steps"].as_array().into_iter().flatten();
        let text = |step: &Value, key: &str| step[key].as_str().unwrap_or_default().to_owned();
        steps
            .filter(|step| step["outcome"] == "stops")
            .map(|step| (text(step, "step"), text(step, "detail")))
            .collect()
    };
    // A step that stops it, with these words in it.
    let stopped = |target: &str, step: &str, words: &str| {
        eventually(&format!("{target} is stopped by the {step}"), PATIENCE, || {
            let (code, walk) = check(target)?;
            let found = stops(&walk);
            let named = |(name, detail): &(String, String)| name == step && detail.contains(words);
            ensure!(found.iter().any(named), "{walk:#}");
            expect_eq(code, Some(3))
        })
    };
    let passes = |target: &str| {
        eventually(&format!("{target} is reached"), PATIENCE, || {
            let (code, walk) = check(target)?;
            ensure!(code == Some(0) && walk["verdict"] == "passes", "{walk:#}");
            Ok(walk)
        })
    };
    let walk = passes("service/one:http")?;
    let steps = walk["steps"].as_array().context("steps")?;
    let count = |name: &str| steps.iter().filter(|step| step["step"] == name).count();
    for (name, times) in [
        ("source", 1),
        ("dns", 1),
        ("service", 1),
        ("endpoint", REPLICAS),
        ("egress policy", REPLICAS),
        ("route", REPLICAS),
        ("ingress policy", REPLICAS),
        ("listener", REPLICAS),
        ("reply", REPLICAS),
        ("connection", 1),
    ] {
        expect_eq(count(name), times).with_context(|| format!("{name}: {walk:#}"))?;
    }
    passes("service/default/kubernetes:443")?;
    stopped(
        "service/one:81",
        "service",
        "it has no port 81/tcp; it has 80/TCP",
    )?;
    stopped(
        "service/nobody:80",
        "service",
        "there is no service/default/nobody",
    )?;
    let pod = kubectl.run(&["get", "pods", "-l", "app=one", "-o", "name"])?;
    let pod = pod.lines().next().context("a pod")?;
    passes(&format!("{pod}:8080"))?;
    stopped(&format!("{pod}:81"), "listener", "nothing listens on 81/tcp")?;

    let policy = |name: &str, spec: Value| {
        let object = json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"name": name}, "spec": spec});
        kubectl.apply(&object.to_string())
    };
    policy("closed", json!({"podSelector": {}, "policyTypes": ["Egress"]}))?;
    stopped("service/one:80", "dns", "default/closed selects default/client")?;
    let dns = json!({"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}});
    policy(
        "closed",
        json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"to": [dns]}]}),
    )?;
    stopped(
        "service/one:80",
        "egress policy",
        "default/closed selects default/client and no rule allows",
    )?;
    stopped("service/one:80", "connection", "does not connect")?;
    kubectl.run(&["delete", "networkpolicy", "closed"])?;
    policy(
        "private",
        json!({"podSelector": {"matchLabels": {"app": "one"}}, "policyTypes": ["Ingress"]}),
    )?;
    stopped(
        "service/one:80",
        "ingress policy",
        "default/private selects default/one-",
    )?;
    passes("service/two:80")?;
    kubectl.run(&["delete", "networkpolicy", "private"])?;
    passes("service/one:80")?;

    let words = cluster.skiff(&["net", "check", "pod/client", "service/one:80"])?;
    ensure!(words.contains("Nothing stops it."), "{words}");
    eventually("the status shows services", PATIENCE, || {
        let status = cluster.status()?;
        let number = |key: &str| status["proxy"][key].as_u64().unwrap_or_default();
        ensure!(number("services") >= 3 && number("endpoints") >= 4, "{status:#}");
        ensure!(number("programmedRevision") > 0, "{status:#}");
        Ok(())
    })
}

/// A deployment and its service; the service's address.
fn start(kubectl: &Kubectl, name: &str, address: Option<IpAddr>) -> Result<IpAddr> {
    let container = json!({"name": "web", "image": "skiff.local/demo:v1",
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "ports": [{"name": "http", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 1}});
    kubectl.apply(
        &json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": {
            "replicas": REPLICAS, "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}},
                "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]}}}})
        .to_string(),
    )?;
    kubectl.apply(&service(name, address))?;
    let service = kubectl.json(&["get", "service", name])?;
    Ok(service["spec"]["clusterIP"]
        .as_str()
        .context("clusterIP")?
        .parse()?)
}

fn service(name: &str, address: Option<IpAddr>) -> String {
    let mut object = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {
        "selector": {"app": name}, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]}});
    if let Some(address) = address {
        object["spec"]["clusterIP"] = address.to_string().into();
    }
    object.to_string()
}

/// All pods of the service answer at its address, to the node and to a pod.
fn is_up(kubectl: &Kubectl, name: &str, address: IpAddr) -> Result<()> {
    let check = |who: &str, answers: &dyn Fn() -> Result<String>| {
        let mut seen = BTreeSet::new();
        eventually(&format!("{name} at {address} is up for {who}"), PATIENCE, || {
            let answers = answers()?;
            let names = answers
                .lines()
                .filter_map(|line| line.strip_prefix("Hello from ")?.split(',').next());
            seen.extend(names.map(str::to_owned));
            ensure!(
                seen.iter().all(|pod| pod.starts_with(&format!("{name}-"))),
                "{seen:?}"
            );
            expect_eq(seen.len(), REPLICAS)
        })
    };
    check("the node", &|| (0..10).map(|_| ask(address)).collect())?;
    let asks = format!("for i in 0 1 2 3 4 5 6 7 8 9; do wget -q -O - http://{address}/; done");
    check("a pod", &|| {
        kubectl.run(&["exec", "client", "--", "sh", "-c", &asks])
    })
}

/// Nobody answers there, neither the node nor a pod.
fn is_down(kubectl: &Kubectl, address: IpAddr) -> Result<()> {
    eventually(&format!("{address} is down"), PATIENCE, || {
        ensure!(ask(address).is_err(), "it answers the node");
        let connect = format!("busybox nc -w 1 {address} 80 </dev/null && echo connected; true");
        let answer = kubectl.run(&["exec", "client", "--", "sh", "-c", &connect])?;
        ensure!(!answer.contains("connected"), "it answers a pod");
        Ok(())
    })
}

fn ask(address: IpAddr) -> Result<String> {
    let limit = Duration::from_millis(500);
    let mut stream = TcpStream::connect_timeout(&(address, 80).into(), limit)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"GET / HTTP/1.0\r\nHost: web\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Cluster DNS answers the node at the service's address, where the question comes from another of its addresses.
fn the_node_resolves(kubectl: &Kubectl) -> Result<()> {
    let dns = kubectl.json(&["get", "service", "kube-dns", "-n", "kube-system"])?;
    let address = dns["spec"]["clusterIP"].as_str().context("clusterIP")?;
    let question = b"\x12\x34\x01\x00\0\x01\0\0\0\0\0\0\x07cluster\x05local\0\0\x01\0\x01";
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    socket.set_read_timeout(Some(Duration::from_secs(2)))?;
    socket.connect((address, 53))?;
    eventually("DNS answers the node", PATIENCE, || {
        socket.send(question)?;
        let mut answer = [0; 512];
        let length = socket.recv(&mut answer)?;
        ensure!(
            length >= question.len() && answer[..2] == question[..2],
            "{answer:?}"
        );
        Ok(())
    })
}

/// A service that names another's address as its own is told so, and gets nothing.
fn an_external_ip_is_refused(kubectl: &Kubectl, address: IpAddr) -> Result<()> {
    let patch = json!({"spec": {"externalIPs": [address.to_string()]}}).to_string();
    kubectl.run(&["patch", "service", "three", "-p", &patch])?;
    eventually("the refusal is told", PATIENCE, || {
        let events = kubectl.run(&["get", "events", "--field-selector", "reason=ExternalIPRefused"])?;
        ensure!(
            events.contains("it is the cluster IP of service default/two"),
            "{events}"
        );
        Ok(())
    })
}

/// A pod that takes the address of another one is not heard under it; nor after skiff was killed, somebody removed
/// the rules, and skiff was started again. (The plugin's own tests try every sort of frame.)
fn forging_is_prevented(cluster: &Cluster, kubectl: &Kubectl) -> Result<()> {
    let in_client = |script: &str| kubectl.run(&["exec", "client", "--", "sh", "-c", script]);
    let pods = kubectl.json(&["get", "pods"])?;
    let pods = pods["items"].as_array().context("pods")?;
    let address_of = |prefix: &str| {
        let named = |pod: &&Value| {
            let name = pod["metadata"]["name"].as_str();
            name.is_some_and(|name| name.starts_with(prefix))
        };
        let pod = pods.iter().find(named).context("a pod")?;
        let address = pod["status"]["podIP"].as_str();
        address.map(str::to_owned).context("podIP")
    };
    let (own, victim) = (address_of("client")?, address_of("two")?);
    let route = in_client("busybox ip route")?;
    let gateway = route.split_whitespace().nth(2).context("a gateway")?;
    let socket = UdpSocket::bind((gateway, 0))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let port = socket.local_addr()?.port();
    // A datagram under the address that the route names as the source.
    let send = |from: &str| {
        format!(
            "busybox ip route replace default via {gateway} dev eth0 onlink src {from}; \
             busybox timeout 1 busybox tftp -g -r x -l /dev/null {gateway} {port};"
        )
    };
    let both = format!("{} {} true", send(&victim), send(&own));
    // Who is heard, up to the pod itself, which speaks last.
    let heard = || -> Result<Vec<IpAddr>> {
        // A node that has just started may not take an exec yet.
        eventually("the client sends", PATIENCE, || in_client(&both).map(drop))?;
        let mut heard = Vec::new();
        while heard.last() != Some(&own.parse()?) {
            heard.push(socket.recv_from(&mut [0; 16])?.1.ip());
        }
        Ok(heard)
    };
    in_client(&format!("busybox ip address add {victim}/32 dev eth0"))?;
    expect_eq(heard()?, vec![own.parse()?])?;
    let skiff = i32::try_from(cluster.pid()?)?;
    let skiff = rustix::process::Pid::from_raw(skiff).context("a pid")?;
    rustix::process::kill_process(skiff, rustix::process::Signal::KILL)?;
    nft(&["delete", "table", "netdev", &guard_table(&own)?])?;
    cluster.up()?;
    expect_eq(heard()?, vec![own.parse()?])
}

/// The table that names the hardware address of a pod.
fn guard_table(address: &str) -> Result<String> {
    let octets = address
        .split('.')
        .map(str::parse)
        .collect::<Result<Vec<u8>, _>>()?;
    let wanted: String = octets.iter().map(|octet| format!("{octet:02x}")).collect();
    let rules = nft(&["-j", "list", "ruleset"])?;
    let rules: Value = serde_json::from_str(&rules)?;
    let rules = rules["nftables"].as_array().context("a list")?;
    let named = rules
        .iter()
        .map(|entry| &entry["rule"])
        .find(|rule| rule["family"] == "netdev" && rule.to_string().contains(&wanted));
    Ok(named
        .and_then(|rule| rule["table"].as_str())
        .context("no guard")?
        .to_owned())
}

fn nft(args: &[&str]) -> Result<String> {
    let output = Command::new("nft").args(args).output()?;
    ensure!(
        output.status.success(),
        "nft: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}
