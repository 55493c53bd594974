//! Ingress with a real cluster: hosts and paths, TLS by name, another protocol, status and events, and a rolling update
//! under load in which no request fails.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use skiff_testkit::{BUSYBOX, Cluster, Kubectl, busybox_archive, eventually, expect_eq, free_port};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
const PATIENCE: Duration = Duration::from_secs(90);
/// Requests that must pass after each step of the rolling update.
const LOAD: usize = 200;

#[test]
fn ingress_from_outside_to_pods() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (http, https) = (free_port()?, free_port()?);
    let flags = [
        format!("--ingress-http-port={http}"),
        format!("--ingress-https-port={https}"),
    ];
    let cluster = Cluster::start(SKIFF, &[flags[0].as_str(), flags[1].as_str()])?;
    cluster.import(&busybox_archive(dir.path())?)?;
    let kubectl = cluster.kubectl();
    let class = kubectl.json(&["get", "ingressclass", "skiff"])?;
    expect_eq(
        class["metadata"]["annotations"]["ingressclass.kubernetes.io/is-default-class"].as_str(),
        Some("true"),
    )?;
    demo(&kubectl, "one")?;
    demo(&kubectl, "two")?;
    echo(&kubectl)?;
    let identity = certificate(dir.path(), &["one.example"])?;
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tls"}, "type": "kubernetes.io/tls",
        "stringData": {"tls.crt": identity.certificate, "tls.key": identity.key}});
    kubectl.apply(&secret.to_string())?;
    let path = |path: &str, service: &str| json!({"path": path, "pathType": "Prefix", "backend": {"service": {"name": service, "port": {"name": "http"}}}});
    let mut exact = path("/", "one");
    exact["pathType"] = "Exact".into();
    let ingress = json!({"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": {"name": "web"}, "spec": {
    "tls": [{"hosts": ["one.example"], "secretName": "tls"}],
    "rules": [
        {"host": "one.example", "http": {"paths": [exact, path("/", "nobody"), path("/healthz", "two")]}},
        {"host": "*.wild.example", "http": {"paths": [path("/", "two"), path("/echo", "echo"), path("/nobody", "nobody")]}},
    ]}});
    // Without an Ingress the ports are others'.
    ensure!(TcpStream::connect(("127.0.0.1", http)).is_err(), "it listens");
    kubectl.apply(&ingress.to_string())?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod", "--all", "--timeout=90s"])?;

    // Hosts and paths.
    let wild = |path: &str| get(http, "a.wild.example", path);
    eventually("a wildcard host answers", PATIENCE, || {
        expect_served(&wild("/")?, "two-")
    })?;
    expect_eq(status(&get(http, "b.a.wild.example", "/")?), "404")?;
    expect_eq(status(&get(http, "unknown.example", "/")?), "404")?;
    expect_eq(status(&wild("/nobody")?), "503")?;

    // TLS by name; who comes without is sent there.
    let redirect = get(http, "one.example", "/healthz?x=1")?;
    expect_eq(status(&redirect), "308")?;
    ensure!(
        redirect.contains(&format!("location: https://one.example:{https}/healthz?x=1\r\n")),
        "{redirect}"
    );
    let ca = dir.path().join("ca.crt");
    let trusted = ["--cacert", &ca.display().to_string()];
    for (path, expected, version) in [
        ("/", "Hello from one-", "--http2"),
        ("/", "Hello from one-", "--http1.1"),
        ("/healthz", "ok", "--http2"),
    ] {
        let answer = curl(https, "one.example", path, &[trusted[0], trusted[1], version])?;
        ensure!(answer.starts_with(expected), "{path}: {answer}");
    }
    let nobody = curl(https, "one.example", "/other", &trusted);
    ensure!(format!("{nobody:?}").contains("503"), "{nobody:?}");
    // Another name gets the default certificate, which nobody signed.
    let refused = curl(
        https,
        "a.wild.example",
        "/",
        &["--cacert", &ca.display().to_string()],
    );
    ensure!(refused.is_err(), "{refused:?}");
    expect_served(
        &format!("200\r\n\r\n{}", curl(https, "a.wild.example", "/", &["-k"])?),
        "two-",
    )?;

    switches_protocols(http)?;
    a_load_balancer_has_the_nodes_address(&kubectl)?;
    status_and_events(&kubectl)?;
    a_rolling_update_fails_no_request(&kubectl, http)?;
    a_new_certificate_is_shown(&kubectl, dir.path(), https)?;

    kubectl.run(&["delete", "ingress", "--all"])?;
    eventually("the ports are given back", PATIENCE, || {
        for port in [http, https] {
            ensure!(TcpStream::connect(("127.0.0.1", port)).is_err(), "{port} is open");
        }
        Ok(())
    })?;
    kubectl.apply(&ingress.to_string())?;
    eventually("and taken again", PATIENCE, || expect_served(&wild("/")?, "two-"))
}

/// A deployment of the demo server, and its service.
fn demo(kubectl: &Kubectl, name: &str) -> Result<()> {
    let container = json!({"name": "web", "image": "skiff.local/demo:v1",
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "ports": [{"name": "http", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 1}});
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": {
        "replicas": 2, "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": {"containers": [container]}}}});
    kubectl.apply(&deployment.to_string())?;
    kubectl.apply(&service(name, "http"))?;
    Ok(())
}

/// A pod that answers any request for another protocol with what it is sent.
fn echo(kubectl: &Kubectl) -> Result<()> {
    let answer = r"while read line; do [ ${#line} -gt 1 ] || break; done; printf 'HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n'; exec busybox cat";
    let script = format!(
        "busybox cat >/tmp/answer <<'EOF'\n{answer}\nEOF\nexec busybox nc -ll -p 8080 -e /bin/sh /tmp/answer"
    );
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "echo", "labels": {"app": "echo"}}, "spec": {
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "c", "image": BUSYBOX, "command": ["sh", "-c", script],
            "ports": [{"name": "http", "containerPort": 8080}]}]}});
    kubectl.apply(&pod.to_string())?;
    kubectl.apply(&service("echo", "http"))?;
    Ok(())
}

fn service(name: &str, port: &str) -> String {
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {
        "selector": {"app": name}, "ports": [{"name": port, "port": 80, "targetPort": port}]}})
    .to_string()
}

/// Signed by an authority whose certificate is `ca.crt` of the folder.
fn certificate(dir: &Path, hosts: &[&str]) -> Result<skiff_pki::Identity> {
    let pki = skiff_pki::Pki::open(&dir.join("pki"))?;
    std::fs::write(dir.join("ca.crt"), pki.ca_certificate())?;
    let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
    Ok(pki.serving(&hosts.join("-"), "test", &hosts)?)
}

/// The whole response to a GET over HTTP.
fn get(port: u16, host: &str, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn status(answer: &str) -> &str {
    answer.get(9..12).unwrap_or(answer)
}

fn expect_served(answer: &str, pod: &str) -> Result<()> {
    ensure!(answer.contains(&format!("\r\n\r\nHello from {pod}")), "{answer}");
    Ok(())
}

fn curl(port: u16, host: &str, path: &str, flags: &[&str]) -> Result<String> {
    let resolve = format!("{host}:{port}:127.0.0.1");
    let url = format!("https://{host}:{port}{path}");
    let output = Command::new("curl")
        .args(["-sS", "--fail", "--max-time", "60", "--resolve", &resolve, &url])
        .args(flags)
        .output()
        .context("curl: install Debian's curl")?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8(output.stdout)?)
}

fn switches_protocols(port: u16) -> Result<()> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(
        b"GET /echo HTTP/1.1\r\nHost: a.wild.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    )?;
    let mut answer = Vec::new();
    let mut byte = [0];
    while !answer.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte)?;
        answer.push(byte[0]);
    }
    let answer = String::from_utf8(answer)?;
    ensure!(answer.starts_with("HTTP/1.1 101"), "{answer}");
    for words in ["\0\x01 no HTTP\n", "and so forth"] {
        let words = words.as_bytes();
        stream.write_all(words)?;
        let mut echoed = vec![0; words.len()];
        stream.read_exact(&mut echoed)?;
        expect_eq(echoed.as_slice(), words)?;
    }
    Ok(())
}

/// At the node's own address, for the older one of two that want the same port.
fn a_load_balancer_has_the_nodes_address(kubectl: &Kubectl) -> Result<()> {
    let port = free_port()?;
    let balanced = |name: &str| {
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {"type": "LoadBalancer",
            "selector": {"app": "one"}, "ports": [{"port": port, "targetPort": "http"}]}})
        .to_string()
    };
    let address_of = |name: &str| -> Result<Value> {
        let service = kubectl.json(&["get", "service", name])?;
        Ok(service["status"]["loadBalancer"]["ingress"][0]["ip"].clone())
    };
    kubectl.apply(&balanced("balanced"))?;
    let address = eventually("the service has an address", PATIENCE, || {
        let address = address_of("balanced")?;
        address.as_str().map(str::to_owned).context("pending")
    })?;
    let nodes = kubectl.json(&["get", "nodes", "-o", "json"])?;
    ensure!(
        nodes["items"][0]["status"]["addresses"]
            .to_string()
            .contains(&address),
        "{address}"
    );
    eventually("it answers there", PATIENCE, || {
        let limit = Duration::from_secs(1);
        let mut stream = TcpStream::connect_timeout(&format!("{address}:{port}").parse()?, limit)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        expect_served(&answer, "one-")
    })?;
    kubectl.apply(&balanced("late"))?;
    eventually("the second service hears why it has none", PATIENCE, || {
        let events = kubectl.run(&["get", "events", "--field-selector=involvedObject.name=late"])?;
        ensure!(events.contains("belongs to Service default/balanced"), "{events}");
        Ok(())
    })?;
    expect_eq(address_of("late")?, Value::Null)?;
    kubectl.run(&["delete", "service", "balanced"])?;
    eventually("the second service gets it when it is free", PATIENCE, || {
        expect_eq(address_of("late")?.as_str(), Some(address.as_str()))
    })?;
    kubectl.run(&["delete", "service", "late"]).map(drop)
}

fn status_and_events(kubectl: &Kubectl) -> Result<()> {
    let nodes = kubectl.json(&["get", "nodes"])?;
    let addresses = nodes["items"][0]["status"]["addresses"]
        .as_array()
        .context("addresses")?;
    let internal: Vec<&Value> = addresses
        .iter()
        .filter(|address| address["type"] == "InternalIP")
        .map(|address| &address["address"])
        .collect();
    eventually("the status says where it is reached", PATIENCE, || {
        let ingress = kubectl.json(&["get", "ingress", "web"])?;
        let shown = ingress["status"]["loadBalancer"]["ingress"]
            .as_array()
            .context("no status")?;
        expect_eq(shown.iter().map(|entry| &entry["ip"]).collect(), internal.clone())
    })?;
    eventually("the missing service is reported", PATIENCE, || {
        let events = kubectl.run(&["get", "events", "--field-selector=involvedObject.name=web"])?;
        ensure!(events.contains("ServiceNotFound"), "{events}");
        Ok(())
    })
}

fn a_rolling_update_fails_no_request(kubectl: &Kubectl, port: u16) -> Result<()> {
    let (done, passed) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| -> Result<()> {
                    while !done.load(Ordering::Relaxed) {
                        expect_served(&get(port, "a.wild.example", "/")?, "two-")?;
                        passed.fetch_add(1, Ordering::Relaxed);
                    }
                    Ok(())
                })
            })
            .collect();
        let updated = (|| {
            for version in ["2", "3"] {
                let before = passed.load(Ordering::Relaxed);
                kubectl.run(&["set", "env", "deployment/two", &format!("VERSION={version}")])?;
                kubectl.run(&["rollout", "status", "deployment/two", "--timeout=90s"])?;
                eventually("requests pass", PATIENCE, || {
                    ensure!(
                        passed.load(Ordering::Relaxed) >= before + LOAD
                            || clients.iter().any(|client| client.is_finished()),
                        "{passed:?}"
                    );
                    Ok(())
                })?;
            }
            Ok(())
        })();
        done.store(true, Ordering::Relaxed);
        for client in clients {
            client
                .join()
                .map_err(|_| anyhow::anyhow!("a client panicked"))??;
        }
        updated
    })
}

fn a_new_certificate_is_shown(kubectl: &Kubectl, dir: &Path, port: u16) -> Result<()> {
    let other = tempfile::tempdir_in(dir)?;
    let identity = certificate(other.path(), &["one.example"])?;
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tls"}, "type": "kubernetes.io/tls",
        "stringData": {"tls.crt": identity.certificate, "tls.key": identity.key}});
    kubectl.apply(&secret.to_string())?;
    let ca = other.path().join("ca.crt").display().to_string();
    eventually("the new certificate is shown", PATIENCE, || {
        curl(port, "one.example", "/", &["--cacert", &ca]).map(drop)
    })
}
