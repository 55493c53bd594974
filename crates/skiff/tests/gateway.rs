//! Gateway API with a real cluster: the definitions that `--gateway-api` installs, a Gateway at a port of its own, routes
//! with weights and filters, what users are told, and ports that are given back.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use skiff_testkit::{Cluster, Kubectl, eventually, expect_eq, free_port};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
const PATIENCE: Duration = Duration::from_secs(90);

#[test]
fn gateways_from_outside_to_pods() -> Result<()> {
    let (http, own) = (free_port()?, free_port()?);
    let flag = format!("--ingress-http-port={http}");
    let cluster = Cluster::start(SKIFF, &["--gateway-api", &flag])?;
    let kubectl = cluster.kubectl();
    eventually("the class is accepted", PATIENCE, || {
        let class = kubectl.json(&["get", "gatewayclass", "skiff"])?;
        expect_eq(
            condition(&class["status"]["conditions"], "Accepted"),
            "True/Accepted".to_owned(),
        )
    })?;
    for name in ["one", "two"] {
        demo(&kubectl, name)?;
    }
    let listener = |name: &str, port: u16| json!({"name": name, "port": port, "protocol": "HTTP"});
    let gateway = json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway", "metadata": {"name": "web"}, "spec": {
        "gatewayClassName": "skiff", "listeners": [listener("shared", 80), listener("own", own)]}});
    ensure!(TcpStream::connect(("127.0.0.1", own)).is_err(), "it listens");
    kubectl.apply(&gateway.to_string())?;
    let prefix = |path: &str| json!([{"path": {"type": "PathPrefix", "value": path}}]);
    let service = |name: &str| json!([{"name": name, "port": 80}]);
    let route = json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute", "metadata": {"name": "web"}, "spec": {
    "parentRefs": [{"name": "web"}], "hostnames": ["*.example"],
    "rules": [
        {"matches": prefix("/"), "backendRefs": service("one")},
        {"matches": [{"path": {"value": "/"}, "headers": [{"name": "X-Two", "value": "1"}]}], "backendRefs": service("two")},
        {"matches": prefix("/moved"), "filters": [{"type": "RequestRedirect", "requestRedirect": {"hostname": "new.example", "statusCode": 301}}]},
        {"matches": prefix("/check"), "backendRefs": service("one"),
            "filters": [{"type": "URLRewrite", "urlRewrite": {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/healthz"}}}]},
        {"matches": prefix("/nobody"), "backendRefs": service("nobody")},
    ]}});
    kubectl.apply(&route.to_string())?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod", "--all", "--timeout=90s"])?;
    for port in [http, own] {
        eventually("the route answers", PATIENCE, || {
            let answer = get(port, "a.b.example", "/", "")?;
            ensure!(answer.contains("Hello from one-"), "{answer}");
            Ok(())
        })?;
        let two = get(port, "a.example", "/", "X-Two: 1\r\n")?;
        ensure!(two.contains("Hello from two-"), "{two}");
        let moved = get(port, "a.example", "/moved/x", "")?;
        ensure!(
            moved.starts_with("HTTP/1.1 301") && moved.contains("://new.example"),
            "{moved}"
        );
        let check = get(port, "a.example", "/check", "")?;
        ensure!(check.trim_end().ends_with("ok"), "{check}");
        for (host, path, expected) in [("a.example", "/nobody", "500"), ("other", "/", "404")] {
            let answer = get(port, host, path, "")?;
            ensure!(
                answer.starts_with(&format!("HTTP/1.1 {expected}")),
                "{host}{path}: {answer}"
            );
        }
    }
    eventually("the status tells", PATIENCE, || {
        let gateway = kubectl.json(&["get", "gateway", "web"])?;
        let status = &gateway["status"];
        expect_eq(
            condition(&status["conditions"], "Programmed"),
            "True/Programmed".to_owned(),
        )?;
        expect_eq(status["listeners"][1]["attachedRoutes"].as_i64(), Some(1))?;
        ensure!(status["addresses"][0]["value"].is_string(), "{status}");
        let route = kubectl.json(&["get", "httproute", "web"])?;
        let parent = &route["status"]["parents"][0]["conditions"];
        expect_eq(condition(parent, "Accepted"), "True/Accepted".to_owned())?;
        expect_eq(
            condition(parent, "ResolvedRefs"),
            "False/BackendNotFound".to_owned(),
        )
    })?;
    // The rules of the definitions hold.
    let mut wrong = route.clone();
    wrong["metadata"]["name"] = "wrong".into();
    wrong["spec"]["rules"][0]["matches"][0]["path"]["value"] = "/a//b".into();
    let refused = kubectl.apply(&wrong.to_string());
    ensure!(
        format!("{refused:?}").contains("must not contain '//'"),
        "{refused:?}"
    );
    let asked = while_asking(&[http, own], || cluster.skiff(&["restart"]).map(drop))?;
    ensure!(asked.iter().all(|count| *count > 10), "{asked:?}");
    kubectl.run(&["delete", "gateway", "web"])?;
    eventually("the ports are given back", PATIENCE, || {
        for port in [http, own] {
            ensure!(TcpStream::connect(("127.0.0.1", port)).is_err(), "{port} is open");
        }
        Ok(())
    })
}

/// Asks at all of these ports without a break while something is done: each is answered each time. Says how often.
fn while_asking(ports: &[u16], done: impl FnOnce() -> Result<()>) -> Result<Vec<usize>> {
    let over = AtomicBool::new(false);
    let ask = |port: u16| -> Result<usize> {
        let mut count = 0;
        while !over.load(Ordering::Relaxed) {
            let answer = get(port, "a.b.example", "/", "")?;
            ensure!(answer.contains("Hello from one-"), "port {port}: {answer}");
            count += 1;
        }
        Ok(count)
    };
    std::thread::scope(|scope| {
        let asking: Vec<_> = ports.iter().map(|port| scope.spawn(|| ask(*port))).collect();
        let done = done();
        over.store(true, Ordering::Relaxed);
        let asked = asking.into_iter().map(|thread| match thread.join() {
            Ok(count) => count,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        let asked: Result<Vec<usize>> = asked.collect();
        done.and(asked)
    })
}

/// `Status/Reason`.
fn condition(list: &Value, type_: &str) -> String {
    let mut all = list.as_array().into_iter().flatten();
    let found = all.find(|each| each["type"] == type_);
    let text = |name: &str| found.and_then(|each| each[name].as_str()).unwrap_or_default();
    format!("{}/{}", text("status"), text("reason"))
}

/// A pod of the demo server, and its service.
fn demo(kubectl: &Kubectl, name: &str) -> Result<()> {
    let container = json!({"name": "web", "image": "skiff.local/demo:v1",
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": format!("{name}-0"), "labels": {"app": name}},
        "spec": {"containers": [container]}});
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8080}]}});
    kubectl.apply(&pod.to_string())?;
    kubectl.apply(&service.to_string())?;
    Ok(())
}

fn get(port: u16, host: &str, path: &str, headers: &str) -> Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {host}\r\n{headers}Connection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
