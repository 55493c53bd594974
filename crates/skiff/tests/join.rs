//! A second machine: a server and an agent as two namespaces of this host, from the token to the departure. What a holder
//! of a token and a node could do to others is tried with their own credentials.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{BUSYBOX, Machine, Switch, busybox_archive, eventually, expect_eq};
use std::process::Command;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

/// Addresses on the machines' link that no machine has.
const POOL: &str = "172.31.77.200-172.31.77.220";

/// The words of the line that `skiff token create` prints, after `skiff`.
fn token_line(server: &Machine) -> Result<Vec<String>> {
    let line = server.skiff(&["token", "create"])?;
    let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    ensure!(words.len() == 7 && words[0] == "skiff", "{line}");
    Ok(words[1..].to_vec())
}

fn texts(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

fn is_ready(node: &Value) -> bool {
    let conditions = node["status"]["conditions"].as_array();
    conditions
        .into_iter()
        .flatten()
        .any(|one| one["type"] == "Ready" && one["status"] == "True")
}

#[test]
fn a_machine_joins_runs_pods_survives_a_kill_and_leaves() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let archive = busybox_archive(dir.path())?;
    let switch = Switch::new()?;
    let server = Machine::new(&switch, "first", SKIFF)?;
    let agent = Machine::new(&switch, "second", SKIFF)?;
    server.skiff(&["up", "--no-kubeconfig-merge", "--load-balancer-pool", POOL])?;
    server.skiff(&["image", "import", &archive.display().to_string()])?;

    joins_that_fail(&server, &agent)?;
    let words = token_line(&server)?;
    let line = texts(&words);
    expect_eq(
        line[1].starts_with(&format!("https://{}:", server.address())),
        true,
    )?;
    let labels = [
        "--node-labels",
        "disk=ssd",
        "--register-with-taints",
        "dedicated=web:PreferNoSchedule",
    ];
    let shown = agent.skiff(&[&line[..], &labels].concat())?;
    ensure!(shown.contains("The node is Ready after"), "{shown}");
    let node = server.kubectl_json(&["get", "node", "second"])?;
    ensure!(is_ready(&node), "{node}");
    expect_eq(node["metadata"]["labels"]["disk"].as_str(), Some("ssd"))?;
    expect_eq(node["spec"]["taints"][0]["key"].as_str(), Some("dedicated"))?;
    let own = node["spec"]["podCIDR"].as_str().context("podCIDR")?;
    let first = server.kubectl_json(&["get", "node", "first"])?;
    ensure!(first["spec"]["podCIDR"].as_str() != Some(own), "both have {own}");
    // The token is not kept anywhere: what runs on has no need of it.
    let secret = line[3].split_once('.').context("a token")?.1;
    let pid = agent.pid()?;
    let command_line = std::fs::read(format!("/proc/{pid}/cmdline"))?;
    ensure!(
        !String::from_utf8_lossy(&command_line).contains(secret),
        "the token is in the process list"
    );

    agent.skiff(&["image", "import", &archive.display().to_string()])?;
    let uid = a_pod_runs_there(&server)?;
    a_claim_is_served_there(&server, &agent)?;
    a_load_balancer_outlives_its_machine(&switch, &server, &agent)?;
    status_shows_the_server(&server, &agent)?;
    a_node_stays_itself(&server, &agent, line[1])?;
    a_kill_leaves_pods_alone(&server, &agent, &uid)?;
    joining_twice_is_refused(&server, &agent)?;
    it_leaves(&server, &agent)
}

/// Every way to fail has its sentence, and leaves nothing on the machine.
fn joins_that_fail(server: &Machine, agent: &Machine) -> Result<()> {
    let words = token_line(server)?;
    let [_, url, _, token, _, hash] = &texts(&words)[..] else {
        anyhow::bail!("{words:?}");
    };
    let (url, token, hash) = (*url, *token, *hash);
    let (id, secret) = token.split_once('.').context("a token")?;
    let wrong: String = secret
        .bytes()
        .map(|b| if b == b'a' { 'b' } else { 'a' })
        .collect();
    let closed = format!("https://{}:1", server.address());
    let zeros = format!("sha256:{}", "0".repeat(64));
    let nobody = format!(
        "https://172.31.77.99:{}",
        url.rsplit(':').next().unwrap_or_default()
    );
    let name = ["--hostname-override", "first"];
    for (url, token, hash, flags, sentence) in [
        (
            url,
            token.to_owned(),
            zeros.as_str(),
            &[][..],
            "the cluster's authority is sha256:",
        ),
        (url, format!("{id}.{wrong}"), hash, &[], "the token is wrong"),
        (
            url,
            "zzzzzz.0123456789abcdef".to_owned(),
            hash,
            &[],
            "the token is unknown to the cluster, or has expired",
        ),
        (
            &closed,
            token.to_owned(),
            hash,
            &[],
            "nothing listens there (connection refused)",
        ),
        (&nobody, token.to_owned(), hash, &[], "https://172.31.77.99"),
        (
            url,
            token.to_owned(),
            hash,
            &name,
            "there is a Ready node \"first\" in the cluster already",
        ),
    ] {
        let args = ["join", url, "--token", &token, "--ca-hash", hash];
        let told = agent.skiff_fails(&[&args[..], flags].concat())?;
        ensure!(told.contains(sentence), "{args:?}: {told}");
    }
    a_token_is_for_new_nodes_alone(agent, url, token)?;
    // The embedded store is this machine's alone.
    let key = "0a".repeat(32);
    let args = [
        "join",
        url,
        "--token",
        token,
        "--ca-hash",
        hash,
        "--server",
        "--certificate-key",
        &key,
    ];
    for told in [
        server.skiff_fails(&["token", "create", "--server"])?,
        agent.skiff_fails(&args)?,
    ] {
        ensure!(
            told.contains("embedded store") && told.contains("--etcd-servers"),
            "{told}"
        );
    }
    // A token that was deleted, and how tokens are listed.
    ensure!(server.skiff(&["token", "list"])?.contains(id), "it is not listed");
    ensure!(
        !server.skiff(&["token", "list", "-o", "json"])?.contains(secret),
        "secrets are not shown"
    );
    server.skiff(&["token", "delete", id])?;
    let told = agent.skiff_fails(&["join", url, "--token", token, "--ca-hash", hash])?;
    ensure!(told.contains("unknown to the cluster, or has expired"), "{told}");
    let left = agent.left_behind()?;
    ensure!(left.is_empty(), "left behind: {left:?}");
    Ok(())
}

#[test]
fn a_cluster_that_lets_nobody_in_says_why() -> Result<()> {
    let switch = Switch::new()?;
    let server = Machine::new(&switch, "first", SKIFF)?;
    let agent = Machine::new(&switch, "second", SKIFF)?;
    let unsigned = "*,bootstrapsigner,tokencleaner,-csrsigning";
    let parts = ["--components", "api,controllers", "--controllers", unsigned];
    server.skiff(&[&["up", "--no-kubeconfig-merge"], &parts[..]].concat())?;
    let fails = |line: &[String], sentence: &str| -> Result<()> {
        let told = agent.skiff_fails(&texts(line))?;
        ensure!(told.contains(sentence), "{line:?}: {told}");
        ensure!(agent.left_behind()?.is_empty(), "{:?}", agent.left_behind()?);
        Ok(())
    };
    let line = token_line(&server)?;
    fails(&line, "nobody signed the certificate node-csr-")?;
    let requests = server.kubectl(&["get", "csr"])?;
    ensure!(
        requests.contains("Approved") && !requests.contains("Issued"),
        "{requests}"
    );

    let brief = server.skiff(&["token", "create", "--ttl", "1s"])?;
    let brief: Vec<String> = brief.split_whitespace().skip(1).map(str::to_owned).collect();
    std::thread::sleep(std::time::Duration::from_millis(1500));
    fails(&brief, "the token is unknown to the cluster, or has expired")?;

    for (what, code) in [
        ("configmap/cluster-info", "answers 404 for cluster-info"),
        (
            "rolebinding/kubeadm:bootstrap-signer-clusterinfo",
            "answers 403 for cluster-info",
        ),
    ] {
        server.kubectl(&["delete", "-n", "kube-public", what])?;
        fails(&line, code)?;
    }
    Ok(())
}

/// A pod on the agent: its logs and an exec go through the API server to that kubelet. The uid is returned.
fn a_pod_runs_there(server: &Machine) -> Result<String> {
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "there"}, "spec": {
        "nodeSelector": {"kubernetes.io/hostname": "second"}, "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "c", "image": BUSYBOX, "command": ["sh", "-c", "echo hello from there; sleep 3600"]}]}});
    server.kubectl_feed(&["apply", "-f", "-"], &pod.to_string())?;
    server.kubectl(&["wait", "--for=condition=Ready", "pod/there", "--timeout=90s"])?;
    let logs = eventually("logs", PATIENCE, || {
        let logs = server.kubectl(&["logs", "there"])?;
        ensure!(!logs.is_empty(), "no logs");
        Ok(logs)
    })?;
    expect_eq(logs.trim(), "hello from there")?;
    let told = server.kubectl(&["exec", "there", "--", "sh", "-c", "echo $((6*7))"])?;
    expect_eq(told.trim(), "42")?;
    let pod = server.kubectl_json(&["get", "pod", "there"])?;
    let address = pod["status"]["hostIP"].as_str();
    expect_eq(address, Some("172.31.77.2"))?;
    Ok(pod["status"]["containerStatuses"][0]["containerID"]
        .as_str()
        .context("containerID")?
        .to_owned())
}

/// A claim's directory is made on the node of its pod, by that node, and goes with the claim.
fn a_claim_is_served_there(server: &Machine, agent: &Machine) -> Result<()> {
    let objects = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "keeper"}, "spec": {
            "nodeSelector": {"kubernetes.io/hostname": "second"}, "terminationGracePeriodSeconds": 0,
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
            "containers": [{"name": "c", "image": BUSYBOX, "command": ["sh", "-c", "echo kept > /data/file; sleep 3600"],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}]}]}},
    ]});
    server.kubectl_feed(&["apply", "-f", "-"], &objects.to_string())?;
    let waited = server.kubectl(&["wait", "--for=condition=Ready", "pod/keeper", "--timeout=90s"]);
    if waited.is_err() {
        let told = server.kubectl(&["describe", "pod,pvc,pv"])?;
        waited.with_context(|| told)?;
    }
    let claim = server.kubectl_json(&["get", "pvc", "data"])?;
    let volume = claim["spec"]["volumeName"].as_str().context("volumeName")?;
    let directory = format!("volumes/{volume}");
    eventually("the file is on the agent's disk", PATIENCE, || {
        let file = std::fs::read_to_string(agent.data(&directory).join("file"))?;
        expect_eq(file.as_str(), "kept\n")
    })?;
    ensure!(!server.data(&directory).exists(), "it is on the server's disk");
    server.kubectl(&["delete", "pod/keeper", "pvc/data", "--timeout=60s"])?;
    eventually("the volume and its directory are gone", PATIENCE, || {
        ensure!(!agent.data(&directory).exists(), "{directory} is there");
        expect_eq(server.kubectl(&["get", "pv", "-o", "name"])?.trim(), "")
    })
}

/// A client on the link reaches a pod of the agent at an address of the pool, by the server; then the server's cable is pulled,
/// and with it the API server is gone.
fn a_load_balancer_outlives_its_machine(switch: &Switch, server: &Machine, agent: &Machine) -> Result<()> {
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "labels": {"app": "web"}}, "spec": {
        "nodeSelector": {"kubernetes.io/hostname": "second"}, "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "c", "image": BUSYBOX, "command": ["sh", "-c",
            "mkdir /www; echo hello > /www/index.html; exec httpd -f -p 8080 -h /www"]}]}});
    server.kubectl_feed(&["apply", "-f", "-"], &pod.to_string())?;
    server.kubectl(&["wait", "--for=condition=Ready", "pod/web", "--timeout=90s"])?;
    let ask = |address: &str| -> Result<()> {
        let mut command = switch.command("curl");
        let output = command
            .args(["-s", "--connect-timeout", "0.2", "-m", "2"])
            .arg(format!("http://{address}/"))
            .output()?;
        expect_eq(String::from_utf8_lossy(&output.stdout).trim(), "hello")
    };
    let holds = |machine: &Machine, address: &str| -> Result<bool> {
        let shown = machine.shell("ip -o -4 addr show dev eth0")?;
        Ok(shown.contains(&format!(" {address}/32 ")))
    };
    // Which of the two announces an address follows from their names; the server has half of them.
    for number in 201..=220 {
        let address = format!("172.31.77.{number}");
        let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": {
            "type": "LoadBalancer", "loadBalancerIP": address, "selector": {"app": "web"},
            "ports": [{"port": 80, "targetPort": 8080}]}});
        server.kubectl_feed(&["apply", "-f", "-"], &service.to_string())?;
        eventually("the address is announced", PATIENCE, || {
            let found = server.kubectl_json(&["get", "service", "web"])?;
            expect_eq(
                found["status"]["loadBalancer"]["ingress"][0]["ip"].as_str(),
                Some(&*address),
            )?;
            let (one, two) = (holds(server, &address)?, holds(agent, &address)?);
            ensure!(one != two, "server: {one}, agent: {two}");
            ask(&address)
        })?;
        if !holds(server, &address)? {
            continue;
        }
        server.connect(false)?;
        let start = std::time::Instant::now();
        let moved = eventually("the agent takes over", PATIENCE, || ask(&address));
        println!("{address} moved in {} ms", start.elapsed().as_millis());
        let held = holds(agent, &address);
        server.connect(true)?;
        moved?;
        expect_eq(held?, true)?;
        eventually("one of them has it", PATIENCE, || {
            let (one, two) = (holds(server, &address)?, holds(agent, &address)?);
            ensure!(one != two, "server: {one}, agent: {two}");
            ask(&address)
        })?;
        server.kubectl(&["delete", "service/web", "pod/web", "--timeout=60s"])?;
        return eventually("nobody has it", PATIENCE, || {
            ensure!(
                !holds(server, &address)? && !holds(agent, &address)?,
                "{address} is there"
            );
            Ok(())
        });
    }
    anyhow::bail!("the server announced none of 20 addresses")
}

fn status_shows_the_server(server: &Machine, agent: &Machine) -> Result<()> {
    let status = agent.status()?;
    expect_eq(status["servers"][0]["reachable"].as_bool(), Some(true))?;
    let url = status["servers"][0]["url"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    ensure!(url.contains(&server.address().to_string()), "{status}");
    let names: Vec<&str> = status["components"]
        .as_array()
        .context("components")?
        .iter()
        .filter_map(|one| one["name"].as_str())
        .collect();
    for name in [
        "network",
        "policy",
        "runtime",
        "node",
        "proxy",
        "certificates",
        "servers",
    ] {
        ensure!(names.contains(&name), "{name} is not among {names:?}");
    }
    ensure!(!names.contains(&"api"), "{names:?}");
    expect_eq(status["nodes"][0]["ready"].as_bool(), Some(true))
}

/// Who has a token could ask for the certificate of a node that is at work, or for more than certificates.
fn a_token_is_for_new_nodes_alone(agent: &Machine, url: &str, token: &str) -> Result<()> {
    let as_token = |method: &str, path: &str, body: &Value| {
        let bearer = format!("authorization: Bearer {token}");
        ask(
            agent,
            &["-k", "-H", &bearer],
            method,
            &format!("{url}{path}"),
            body,
        )
    };
    let requests = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
    let request = json!({"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
        "metadata": {"name": "bad-token"}, "spec": {"usages": ["digital signature", "client auth"],
        "request": signing_request("/O=system:nodes/CN=system:node:first", "")?,
        "signerName": "kubernetes.io/kube-apiserver-client-kubelet"}});
    let (code, answer) = as_token("POST", requests, &request)?;
    expect_eq(code, 201).with_context(|| answer.to_string())?;
    for path in [
        "/api/v1/secrets",
        "/api/v1/pods",
        "/api/v1/nodes",
        "/api/v1/namespaces/kube-system/configmaps",
    ] {
        let (code, answer) = as_token("GET", path, &Value::Null)?;
        expect_eq(code, 403).with_context(|| format!("{path}: {answer}"))?;
    }
    Ok(())
}

/// A request to the API server with the node's own certificate: the code and the answer.
fn as_node(agent: &Machine, url: &str, method: &str, path: &str, body: &Value) -> Result<(u16, Value)> {
    let pki = agent.data("pki");
    let file = |name: &str| pki.join(name).display().to_string();
    let (ca, certificate, key) = (
        file("ca.crt"),
        file("kubelet-client.crt"),
        file("kubelet-client.key"),
    );
    let credentials = ["--cacert", &ca, "--cert", &certificate, "--key", &key];
    ask(agent, &credentials, method, &format!("{url}{path}"), body)
}

fn ask(agent: &Machine, credentials: &[&str], method: &str, url: &str, body: &Value) -> Result<(u16, Value)> {
    let mut command = agent.command("curl");
    command
        .args([
            "-s",
            "-X",
            method,
            "-w",
            "\n%{http_code}",
            "-H",
            "content-type: application/json",
        ])
        .args(credentials);
    if !body.is_null() {
        command.args(["-d", &body.to_string()]);
    }
    let output = command.arg(url).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (answer, code) = text.rsplit_once('\n').with_context(|| text.clone())?;
    Ok((code.parse()?, serde_json::from_str(answer).unwrap_or(Value::Null)))
}

/// A signing request in base64, made by openssl.
fn signing_request(subject: &str, names: &str) -> Result<String> {
    let script = format!(
        "openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout /dev/null -subj '{subject}' {} 2>/dev/null | base64 -w0",
        if names.is_empty() {
            String::new()
        } else {
            format!("-addext 'subjectAltName={names}'")
        }
    );
    let output = Command::new("sh").args(["-c", &script]).output()?;
    let text = String::from_utf8(output.stdout)?;
    ensure!(text.len() > 100, "openssl made no request: {text}");
    Ok(text)
}

/// What a node could try in order to become somebody else.
fn a_node_stays_itself(server: &Machine, agent: &Machine, url: &str) -> Result<()> {
    let create = |name: &str, signer: &str, subject: &str, names: &str| -> Result<u16> {
        let usage = if signer.ends_with("serving") {
            "server auth"
        } else {
            "client auth"
        };
        let request = json!({"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
            "metadata": {"name": name}, "spec": {"request": signing_request(subject, names)?,
            "signerName": signer, "usages": ["digital signature", usage]}});
        let path = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
        Ok(as_node(agent, url, "POST", path, &request)?.0)
    };
    let (own, other) = (
        "/O=system:nodes/CN=system:node:second",
        "/O=system:nodes/CN=system:node:first",
    );
    let serving = "kubernetes.io/kubelet-serving";
    let client = "kubernetes.io/kube-apiserver-client-kubelet";
    let address = server.address();
    // The good ones last: when they are issued, the bad ones were looked at.
    for (name, signer, subject, names) in [
        ("bad-name", serving, own, "DNS:first".to_owned()),
        ("bad-address", serving, own, format!("IP:{address}")),
        (
            "bad-service",
            serving,
            own,
            "DNS:kubernetes.default.svc".to_owned(),
        ),
        ("bad-subject", serving, other, "DNS:second".to_owned()),
        ("bad-node", client, other, String::new()),
        (
            "good-serving",
            serving,
            own,
            format!("DNS:second,IP:{}", agent.address()),
        ),
        ("good-client", client, own, String::new()),
    ] {
        let code = create(name, signer, subject, &names)?;
        ensure!(code == 201 || name.starts_with("bad"), "{name}: {code}");
    }
    let issued = |name: &str| -> Result<bool> {
        let all = server.kubectl_json(&["get", "csr", name, "--ignore-not-found"]);
        Ok(all.is_ok_and(|request| request["status"]["certificate"].is_string()))
    };
    for good in ["good-serving", "good-client"] {
        eventually(good, PATIENCE, || {
            ensure!(issued(good)?, "{good} is not issued");
            Ok(())
        })?;
    }
    for bad in [
        "bad-token",
        "bad-name",
        "bad-address",
        "bad-service",
        "bad-subject",
        "bad-node",
    ] {
        ensure!(!issued(bad)?, "{bad} was issued");
    }
    // It reads all pods, because network policies are about their labels, and changes none but its own.
    for (method, path) in [
        ("DELETE", "/api/v1/nodes/first"),
        ("DELETE", "/api/v1/nodes/second"),
        ("GET", "/api/v1/secrets"),
        ("DELETE", "/api/v1/namespaces/default/pods"),
        ("GET", "/api/v1/namespaces/kube-system/secrets"),
    ] {
        let (code, answer) = as_node(agent, url, method, path, &Value::Null)?;
        expect_eq(code, 403).with_context(|| format!("{method} {path}: {answer}"))?;
    }
    Ok(())
}

fn a_kill_leaves_pods_alone(server: &Machine, agent: &Machine, container: &str) -> Result<()> {
    let before = agent.pid()?;
    agent.shell(&format!("kill -9 {before}"))?;
    agent.skiff(&["up"])?;
    ensure!(agent.pid()? != before, "it is the same process");
    // The kubelet may have another port now, which the Node tells a moment later.
    eventually("exec after the kill", PATIENCE, || {
        let told = server.kubectl(&["exec", "there", "--", "echo", "still"])?;
        expect_eq(told.trim(), "still")
    })?;
    let pod = server.kubectl_json(&["get", "pod", "there"])?;
    let status = &pod["status"]["containerStatuses"][0];
    expect_eq(status["containerID"].as_str(), Some(container))?;
    expect_eq(status["restartCount"].as_i64(), Some(0))?;
    // Flags of a server would have no effect here, and are refused.
    agent.skiff(&["down"])?;
    let told = agent.skiff_fails(&["up", "--bind", "0.0.0.0:7000"])?;
    ensure!(told.contains("--bind"), "{told}");
    agent.skiff(&["up"]).map(drop)
}

fn joining_twice_is_refused(server: &Machine, agent: &Machine) -> Result<()> {
    let words = token_line(server)?;
    let told = agent.skiff_fails(&texts(&words))?;
    ensure!(told.contains("this machine is a node of https://"), "{told}");
    let told = server.skiff_fails(&texts(&words))?;
    ensure!(told.contains("there is a cluster"), "{told}");
    Ok(())
}

fn it_leaves(server: &Machine, agent: &Machine) -> Result<()> {
    // A pod without a controller would be lost.
    let told = agent.skiff_fails(&["leave"])?;
    ensure!(
        told.contains("no controller would make these pods again: default/there"),
        "{told}"
    );
    server.kubectl(&["delete", "pod", "there", "--wait=true", "--timeout=60s"])?;
    server.kubectl(&["uncordon", "second"])?;
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {
        "replicas": 2, "selector": {"matchLabels": {"app": "web"}}, "template": {"metadata": {"labels": {"app": "web"}},
        "spec": {"terminationGracePeriodSeconds": 0, "topologySpreadConstraints": [{"maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "web"}}}],
        "containers": [{"name": "c", "image": BUSYBOX, "command": ["sleep", "3600"]}]}}}});
    // The taint of its registration is an administrator's: with it the Node would stay.
    server.kubectl(&["taint", "node", "second", "dedicated-"])?;
    server.kubectl_feed(&["apply", "-f", "-"], &deployment.to_string())?;
    server.kubectl(&["rollout", "status", "deployment/web", "--timeout=90s"])?;
    let nodes = |server: &Machine| -> Result<Vec<String>> {
        let pods = server.kubectl_json(&["get", "pods", "-l", "app=web"])?;
        let pods = pods["items"].as_array().context("a list")?.iter();
        let mut nodes: Vec<String> = pods
            .filter_map(|pod| pod["spec"]["nodeName"].as_str())
            .map(str::to_owned)
            .collect();
        nodes.sort();
        Ok(nodes)
    };
    expect_eq(nodes(server)?, vec!["first".to_owned(), "second".to_owned()])?;
    let told = agent.skiff(&["leave"])?;
    ensure!(told.contains("This machine has left the cluster."), "{told}");
    let left = server.kubectl(&["get", "nodes", "-o", "name"])?;
    expect_eq(left.trim(), "node/first")?;
    eventually("pods are on the other node", PATIENCE, || {
        expect_eq(nodes(server)?, vec!["first".to_owned(), "first".to_owned()])
    })?;
    let left = agent.left_behind()?;
    ensure!(left.is_empty(), "left behind: {left:?}");
    Ok(())
}
