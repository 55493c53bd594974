//! Three servers over an etcd of three members, and an agent, as four namespaces of this host. While objects are created
//! without pause, the server that the agent uses is killed: no acknowledged write is lost or done twice, watches and the
//! agent go on elsewhere, and the `kubernetes` endpoints shrink and grow again. Besides, a cluster that is moved to etcd,
//! gets another server, and is moved back by that one; and servers behind a load balancer, one of which is killed.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{ListParams, PostParams};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::{Value, json};
use skiff_client::{Change, InformerFactory, Remote, ServerAddress};
use skiff_testkit::{
    BUSYBOX, Balancer, EtcdMembers, Machine, Switch, busybox_archive, eventually, expect_eq,
};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
const PATIENCE: Duration = Duration::from_secs(60);
/// The lease of a server, and a little for those who look at it.
const LEASE: Duration = Duration::from_secs(20);

/// Both tests at once would be too much for a small machine.
static ALONE: Mutex<()> = Mutex::new(());

/// Dropped in this order: a server that ends says so in etcd.
struct House {
    agent: Machine,
    servers: Vec<Machine>,
    etcd: EtcdMembers,
    switch: Arc<Switch>,
}

impl House {
    fn new() -> Result<House> {
        let switch = Switch::new()?;
        let servers: Result<Vec<Machine>> = ["one", "two", "three"]
            .iter()
            .map(|name| Machine::new(&switch, name, SKIFF))
            .collect();
        let servers = servers?;
        Ok(House {
            agent: Machine::new(&switch, "four", SKIFF)?,
            etcd: EtcdMembers::start(&servers)?,
            servers,
            switch,
        })
    }

    fn url(&self, server: usize) -> String {
        let address = self.servers[server].api_server();
        address.map_or_else(|error| error.to_string(), |address| address.to_string())
    }
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().skip(1).collect()
}

/// The addresses in the Endpoints and in the EndpointSlice of `kubernetes`, which are the same.
fn endpoints(server: &Machine) -> Result<Vec<String>> {
    let texts = |value: &Value, list: &str, field: fn(&Value) -> &Value| -> Vec<String> {
        let items = value[list].as_array().into_iter().flatten();
        let mut found: Vec<String> = items
            .filter_map(|item| field(item).as_str().map(str::to_owned))
            .collect();
        found.sort();
        found
    };
    let object = server.kubectl_json(&["get", "endpoints", "kubernetes"])?;
    let addresses = texts(&object["subsets"][0], "addresses", |one| &one["ip"]);
    let slice = server.kubectl_json(&["get", "endpointslice", "kubernetes"])?;
    expect_eq(
        &texts(&slice, "endpoints", |one| &one["addresses"][0]),
        &addresses,
    )?;
    Ok(addresses)
}

fn servers_are(seen_by: &Machine, expected: &[&Machine], patience: Duration) -> Result<()> {
    let mut expected: Vec<String> = expected.iter().map(|one| one.address().to_string()).collect();
    expected.sort();
    eventually("the kubernetes endpoints", patience, || {
        expect_eq(endpoints(seen_by)?, expected.clone())
    })
}

/// The server that `cluster-info` sends new machines to.
fn named_in_cluster_info(seen_by: &Machine) -> Result<String> {
    let map = seen_by.kubectl_json(&["get", "configmap", "cluster-info", "-n", "kube-public"])?;
    let kubeconfig = map["data"]["kubeconfig"].as_str().unwrap_or_default();
    let server = kubeconfig
        .lines()
        .find_map(|line| line.trim().strip_prefix("server: "));
    Ok(server.with_context(|| kubeconfig.to_owned())?.to_owned())
}

#[test]
fn three_servers_lose_one_and_nothing_else() -> Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir()?;
    let archive = busybox_archive(dir.path())?.display().to_string();
    let began = Instant::now();
    let step = |what: &str| eprintln!("{:6.1} s  {what}", began.elapsed().as_secs_f64());
    let house = House::new()?;
    let [one, two, three] = &house.servers[..] else {
        anyhow::bail!("three servers");
    };
    step("etcd has a leader");
    one.skiff(&[
        "up",
        "--no-kubeconfig-merge",
        "--etcd-servers",
        &house.etcd.endpoints(),
    ])?;
    step("the first server is up");
    node_tokens_get_no_keys(&house)?;
    step("keys are for servers alone");
    for server in [two, three] {
        let line = one.skiff(&["token", "create", "--server"])?;
        server.skiff(&words(&line))?;
        step("a server joined");
    }
    let line = one.skiff(&["token", "create"])?;
    house.agent.skiff(&words(&line))?;
    house.agent.skiff(&["image", "import", &archive])?;
    step("the agent joined");

    servers_are(two, &[one, two, three], PATIENCE)?;
    leases_tell_servers_apart(&house)?;
    tokens_are_good_everywhere(&house)?;
    a_definition_is_served_everywhere(&house)?;
    eventually("the agent knows all servers", PATIENCE, || {
        let state = std::fs::read_to_string(house.agent.data("agent.json"))?;
        for server in 0..3 {
            ensure!(state.contains(&house.url(server)), "{state}");
        }
        Ok(())
    })?;
    step("three servers are one cluster");

    let servers: Result<Vec<_>> = house.servers.iter().map(Machine::api_server).collect();
    let load = Load::start(&house, servers?)?;
    deploy(three, 2)?;
    eventually("pods run", PATIENCE, || running(three, 2))?;
    step("pods run");
    let before = load.acknowledged();
    let pid = one.pid()?;
    one.shell(&format!("kill -9 {pid}"))?;
    step("the first server is killed");
    agent_goes_on(&house, &step)?;
    load.goes_on(before)?;
    servers_are(two, &[two, three], LEASE)?;
    step("the endpoints shrank");
    // The next leader carries on where the first one was.
    deploy(three, 4)?;
    eventually("pods run", PATIENCE, || running(two, 4))?;
    step("another leader scaled up");
    let members = house.etcd.endpoints();
    let up = ["up", "--no-kubeconfig-merge", "--etcd-servers", &members];
    one.skiff(&up)?;
    servers_are(three, &[one, two, three], PATIENCE)?;
    step("the endpoints grew");
    load.check_complete(&house)?;
    running(one, 4)?;
    step("nothing is lost, nothing is doubled");

    // One that stops leaves at once, and machines that join are sent to another one.
    let named = named_in_cluster_info(two)?;
    let stopped = (0..3).find(|at| house.url(*at) == named);
    let stopped = &house.servers[stopped.with_context(|| named.clone())?];
    let stays: Vec<&Machine> = house
        .servers
        .iter()
        .filter(|one| one.address() != stopped.address())
        .collect();
    stopped.skiff(&["down"])?;
    servers_are(stays[0], &stays, Duration::from_secs(2))?;
    eventually("cluster-info names a living server", PATIENCE, || {
        let named = named_in_cluster_info(stays[0])?;
        ensure!(
            stays
                .iter()
                .any(|one| named.contains(&format!("//{}:", one.address()))),
            "{named}"
        );
        Ok(())
    })?;
    stopped.skiff(if stopped.address() == one.address() {
        &up
    } else {
        &up[..1]
    })?;
    servers_are(two, &[one, two, three], PATIENCE)?;
    step("a stop and a start");
    let told = three.skiff(&["leave"])?;
    ensure!(told.contains("This machine has left the cluster."), "{told}");
    ensure!(three.left_behind()?.is_empty(), "{:?}", three.left_behind()?);
    expect_eq(endpoints(two)?.len(), 2)?;
    let nodes = two.kubectl(&["get", "nodes", "-o", "name"])?;
    ensure!(!nodes.contains("three") && nodes.contains("two"), "{nodes}");
    let status = two.status()?;
    expect_eq(status["servers"].as_array().map(Vec::len), Some(2)).with_context(|| status.to_string())?;
    step("one left");
    Ok(())
}

#[test]
fn a_moved_cluster_gets_another_server() -> Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir()?;
    let switch = Switch::new()?;
    let elsewhere = [Machine::new(&switch, "store", SKIFF)?];
    let etcd = EtcdMembers::start(&elsewhere)?;
    let (one, two) = (
        Machine::new(&switch, "one", SKIFF)?,
        Machine::new(&switch, "two", SKIFF)?,
    );
    let make = |on: &Machine, name: &str| {
        let value = format!("--from-literal=from={name}");
        on.kubectl(&["create", "secret", "generic", name, &value])
    };
    let is_there = |on: &Machine, name: &str| {
        let path = "--template={{.data.from | base64decode}}";
        expect_eq(on.kubectl(&["get", "secret", name, path])?.trim(), name)
    };
    one.skiff(&["up", "--no-kubeconfig-merge"])?;
    make(&one, "embedded")?;
    let to_embedded = ["store", "migrate", "--to", "embedded"];
    let endpoints = etcd.endpoints();
    one.skiff(&["store", "migrate", "--to", "etcd", "--etcd-servers", &endpoints])?;

    // The other server learns of the etcd, and how Secrets are encrypted in it.
    let line = one.skiff(&["token", "create", "--server"])?;
    two.skiff(&words(&line))?;
    servers_are(&two, &[&one, &two], PATIENCE)?;
    is_there(&two, "embedded")?;
    make(&two, "joined")?;
    is_there(&one, "joined")?;
    for server in [&one, &two] {
        let told = server.skiff_fails(&to_embedded)?;
        ensure!(told.contains("the cluster has another server"), "{told}");
    }

    // So do its commands while it does not run.
    two.skiff(&["down"])?;
    let file = folder.path().join("backup").display().to_string();
    two.skiff(&["backup", &file, "--secrets-in-plain-text"])?;
    let backup = std::fs::read(&file)?;
    let found = |word: &[u8]| backup.windows(word.len()).any(|bytes| bytes == word);
    ensure!(found(b"joined") && !found(b"k8s:enc:"));
    two.skiff(&["up"])?;
    servers_are(&two, &[&one, &two], PATIENCE)?;

    one.skiff(&["leave"])?;
    servers_are(&two, &[&two], PATIENCE)?;
    let told = two.skiff(&to_embedded)?;
    ensure!(told.contains("is running again"), "{told}");
    two.skiff(&["down"])?;
    drop(etcd);
    two.skiff(&["up"])?;
    is_there(&two, "embedded")?;
    is_there(&two, "joined")
}

#[test]
fn servers_behind_a_load_balancer_lose_the_one_that_all_use() -> Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir()?;
    let archive = busybox_archive(dir.path())?.display().to_string();
    let house = House::new()?;
    let servers = house.servers.iter().map(|one| (one.address(), 6443));
    let balancer = Balancer::start(&house.switch, 7443, servers.collect())?;
    let (endpoint, members) = (balancer.address(), house.etcd.endpoints());
    let url = format!("https://{endpoint}");
    let (one, two, three) = (&house.servers[0], &house.servers[1], &house.servers[2]);
    let up = format!("_ up --no-kubeconfig-merge --etcd-servers {members} --bind 0.0.0.0:6443");
    one.skiff(&words(&format!("{up} --control-plane-endpoint {endpoint}")))?;
    let token = |words: &[&str]| -> Result<String> {
        let line = one.skiff(&[&["token", "create"], words].concat())?;
        ensure!(line.contains(&url), "not by the balancer: {line}");
        Ok(line)
    };
    two.skiff(&words(&token(&["--server"])?))?;
    three.skiff(&words(&token(&["--server"])?))?;
    house.agent.skiff(&words(&token(&[])?))?;
    house.agent.skiff(&["image", "import", &archive])?;
    servers_are(two, &[one, two, three], PATIENCE)?;
    let load = Load::start(&house, vec![url.parse()?])?;
    deploy(three, 2)?;
    eventually("pods run", PATIENCE, || running(three, 2))?;
    let (before, open) = (load.acknowledged(), balancer.open());
    ensure!(open[0] > 0 && open[1..] == [0, 0], "{open:?}");
    one.shell(&format!("kill -9 {}", one.pid()?))?;
    // By the balancer: the very next command, pods of the agent, and writes and the watch of the load.
    let by_balancer = |args: &[&str]| two.kubectl(&[&["--server", &url], args].concat());
    ensure!(by_balancer(&["get", "nodes", "-o", "name"])?.contains("four"));
    agent_goes_on(&house, &|_| ())?;
    load.goes_on(before)?;
    ensure!(by_balancer(&["exec", "bound", "--", "echo", "there"])?.contains("there"));
    servers_are(two, &[two, three], LEASE)?;
    deploy(three, 4)?;
    eventually("pods run", PATIENCE, || running(two, 4))?;
    let open = balancer.open();
    ensure!(open[0] == 0 && open[1] > 0, "{open:?}");
    load.check_complete(&house)
}

/// The line for a server has a key in it that no token and no node can do without, and only its own token reads the
/// sealed keys.
fn node_tokens_get_no_keys(house: &House) -> Result<()> {
    let (one, two) = (&house.servers[0], &house.servers[1]);
    let line = one.skiff(&["token", "create", "--server"])?;
    let server = words(&line);
    let [_, url, _, token, _, hash, _, _, key] = server[..] else {
        anyhow::bail!("{line}");
    };
    let id = token.split('.').next().unwrap_or_default();
    let node = one.skiff(&["token", "create"])?;
    let node = words(&node)[3];
    let path = format!("{url}/api/v1/namespaces/kube-system/secrets/skiff-server-keys-{id}");
    let get = |token: &str| -> Result<String> {
        let bearer = format!("authorization: Bearer {token}");
        let script = format!("curl -sk -o /dev/null -w '%{{http_code}}' -H '{bearer}' {path}");
        two.shell(&script)
    };
    expect_eq(get(node)?.as_str(), "403")?;
    expect_eq(get("zzzzzz.0123456789abcdef")?.as_str(), "401")?;
    expect_eq(get(token)?.as_str(), "200")?;
    let kept = one.kubectl(&["get", "secrets", "-A", "-o", "yaml"])?;
    ensure!(!kept.contains(key), "the certificate key is kept");
    let other = "0a".repeat(32);
    for (token, key, sentence) in [
        (token, other.as_str(), "the certificate key does not open"),
        (node, key, "this token is for nodes"),
    ] {
        let args = [
            "join",
            url,
            "--token",
            token,
            "--ca-hash",
            hash,
            "--server",
            "--certificate-key",
            key,
        ];
        let told = two.skiff_fails(&args)?;
        ensure!(told.contains(sentence), "{told}");
        ensure!(two.left_behind()?.is_empty(), "{:?}", two.left_behind()?);
    }
    // All of it goes with the token.
    one.skiff(&["token", "delete", id])?;
    eventually("the keys are gone", PATIENCE, || {
        for kind in ["secrets", "roles", "rolebindings"] {
            let left = one.kubectl(&["get", kind, "-n", "kube-system", "-o", "name"])?;
            ensure!(!left.contains("skiff-server-keys"), "{left}");
        }
        Ok(())
    })
}

fn leases_tell_servers_apart(house: &House) -> Result<()> {
    let (one, two) = (&house.servers[0], &house.servers[1]);
    let selector = "apiserver.kubernetes.io/identity=kube-apiserver";
    eventually("identity leases", PATIENCE, || {
        let leases = one.kubectl_json(&["get", "leases", "-n", "kube-system", "-l", selector])?;
        let leases = leases["items"].as_array().context("a list")?;
        expect_eq(leases.len(), 3)
    })?;
    let shown = two.status()?;
    let servers = shown["servers"].as_array().context("servers")?;
    expect_eq(servers.len(), 3)?;
    for server in servers {
        ensure!(server["version"].is_string(), "{server}");
        ensure!(
            server["leaseAgeSeconds"].as_u64().is_some_and(|age| age < 30),
            "{server}"
        );
    }
    Ok(())
}

fn tokens_are_good_everywhere(house: &House) -> Result<()> {
    let token = house.servers[0].kubectl(&["create", "token", "default"])?;
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"});
    for server in 0..3 {
        let url = house.url(server);
        let told = house.agent.shell(&format!(
            "curl -sk -X POST -H 'authorization: Bearer {}' -H 'content-type: application/json' -d '{review}' {url}/apis/authentication.k8s.io/v1/selfsubjectreviews",
            token.trim()
        ))?;
        let told: Value = serde_json::from_str(&told).with_context(|| told.clone())?;
        let user = told["status"]["userInfo"]["username"].as_str();
        expect_eq(user, Some("system:serviceaccount:default:default")).with_context(|| url.clone())?;
    }
    Ok(())
}

fn a_definition_is_served_everywhere(house: &House) -> Result<()> {
    let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "boats.example.org"}, "spec": {"group": "example.org", "scope": "Namespaced",
        "names": {"plural": "boats", "singular": "boat", "kind": "Boat"},
        "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}}]}});
    house.servers[0].kubectl_feed(&["create", "-f", "-"], &definition.to_string())?;
    for server in &house.servers {
        eventually("the definition is served", PATIENCE, || {
            let boats = server.kubectl(&["get", "--raw", "/apis/example.org/v1/boats"])?;
            ensure!(boats.contains("BoatList"), "{boats}");
            Ok(())
        })?;
    }
    Ok(())
}

/// A Deployment whose pods run on the agent.
fn deploy(server: &Machine, replicas: u32) -> Result<()> {
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {
        "replicas": replicas, "selector": {"matchLabels": {"app": "web"}}, "template": {"metadata": {"labels": {"app": "web"}},
        "spec": {"terminationGracePeriodSeconds": 0, "nodeSelector": {"kubernetes.io/hostname": "four"},
            "containers": [{"name": "c", "image": BUSYBOX, "command": ["sleep", "3600"]}]}}}});
    server
        .kubectl_feed(&["apply", "-f", "-"], &deployment.to_string())
        .map(drop)
}

/// Exactly so many pods are there, and run.
fn running(server: &Machine, count: usize) -> Result<()> {
    let pods = server.kubectl_json(&["get", "pods", "-l", "app=web"])?;
    let pods = pods["items"].as_array().context("a list")?;
    let phases: Vec<&str> = pods
        .iter()
        .filter_map(|pod| pod["status"]["phase"].as_str())
        .collect();
    expect_eq(phases, vec!["Running"; count])
}

/// A pod that is bound to the agent runs soon, although the server that the agent used is gone.
fn agent_goes_on(house: &House, step: &dyn Fn(&str)) -> Result<()> {
    let two = &house.servers[1];
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bound"}, "spec": {"nodeName": "four",
        "terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": BUSYBOX, "command": ["sleep", "3600"]}]}});
    two.kubectl_feed(&["create", "-f", "-"], &pod.to_string())?;
    two.kubectl(&["wait", "--for=condition=Ready", "pod/bound", "--timeout=15s"])?;
    step("the agent goes on at another server");
    Ok(())
}

/// Creates ConfigMaps from the agent's machine without pause, each once and never again, and watches them.
struct Load {
    stop: Arc<AtomicBool>,
    created: Arc<AtomicUsize>,
    thread: Option<std::thread::JoinHandle<Result<Outcome>>>,
}

struct Outcome {
    /// Numbers whose creation was acknowledged.
    acknowledged: Vec<usize>,
    /// How often the watch told of each number's creation.
    seen: BTreeMap<usize, usize>,
    /// The longest time without an acknowledged write.
    longest: Duration,
}

fn number(map: &ConfigMap) -> usize {
    let text = map.data.as_ref().and_then(|data| data.get("number"));
    text.and_then(|text| text.parse().ok()).unwrap_or_default()
}

impl Load {
    fn start(house: &House, servers: Vec<ServerAddress>) -> Result<Load> {
        let tls = house.servers[0].admin_tls()?;
        let namespace = house.agent.network_namespace();
        let (stop, created) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stopped, counted) = (stop.clone(), created.clone());
        let thread = std::thread::spawn(move || -> Result<Outcome> {
            let namespace = std::fs::File::open(namespace)?;
            // Only this thread moves, and what it opens.
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            runtime.block_on(run_load(Remote::new(servers, tls), &stopped, &counted))
        });
        Ok(Load {
            stop,
            created,
            thread: Some(thread),
        })
    }

    fn acknowledged(&self) -> usize {
        self.created.load(Ordering::Relaxed)
    }

    fn goes_on(&self, before: usize) -> Result<()> {
        eventually("writes go on", PATIENCE, || {
            let now = self.acknowledged();
            ensure!(now > before + 50, "{now} writes, {before} before");
            Ok(())
        })
    }

    /// Ends the load and compares what was acknowledged, what is stored and what the watch told.
    fn check_complete(mut self, house: &House) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("it runs")?;
        let outcome = thread
            .join()
            .map_err(|_| anyhow::anyhow!("the load panicked"))??;
        let stored = house.servers[1].kubectl_json(&["get", "configmaps", "-l", "load=yes"])?;
        let mut counts = BTreeMap::<usize, usize>::new();
        for map in stored["items"].as_array().context("a list")? {
            let number: usize = map["data"]["number"].as_str().context("number")?.parse()?;
            *counts.entry(number).or_default() += 1;
        }
        eprintln!(
            "          {} creates acknowledged, {} stored, longest pause {:?}",
            outcome.acknowledged.len(),
            counts.len(),
            outcome.longest
        );
        let doubled: Vec<_> = counts.iter().filter(|(_, count)| **count > 1).collect();
        ensure!(doubled.is_empty(), "doubled: {doubled:?}");
        let lost: Vec<_> = outcome
            .acknowledged
            .iter()
            .filter(|number| !counts.contains_key(number))
            .collect();
        ensure!(lost.is_empty(), "acknowledged and lost: {lost:?}");
        expect_eq(&outcome.seen, &counts).context("what the watch told")
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn run_load(remote: Remote, stop: &AtomicBool, created: &AtomicUsize) -> Result<Outcome> {
    let client = remote.client("load");
    let (shutdown, seen) = (
        CancellationToken::new(),
        Arc::new(Mutex::new(BTreeMap::<usize, usize>::new())),
    );
    let _end = shutdown.clone().drop_guard();
    let informers = InformerFactory::new(client.clone(), shutdown);
    let told = informers.filtered::<ConfigMap>(Some("load=yes"), None);
    let counts = seen.clone();
    told.subscribe(move |change| {
        if let (Change::Applied { old: None, new }, Ok(mut counts)) = (change, counts.lock()) {
            *counts.entry(number(new)).or_default() += 1;
        }
    });
    told.synced().await;
    let maps: Api<ConfigMap> = Api::namespaced(client, "default");
    let (mut acknowledged, mut longest, mut last) = (Vec::new(), Duration::ZERO, Instant::now());
    let mut next = 1;
    while !stop.load(Ordering::Relaxed) {
        let map = json!({"metadata": {"generateName": "load-", "labels": {"load": "yes"}}, "data": {"number": next.to_string()}});
        let map: ConfigMap = serde_json::from_value(map)?;
        let post = PostParams::default();
        let creating = maps.create(&post, &map);
        if let Ok(Ok(_)) = tokio::time::timeout(Duration::from_secs(5), creating).await {
            acknowledged.push(next);
            created.fetch_add(1, Ordering::Relaxed);
            longest = longest.max(last.elapsed());
            last = Instant::now();
        }
        next += 1;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // The watch has told of everything when it shows as much as there is.
    let stored = maps
        .list(&ListParams::default().labels("load=yes"))
        .await?
        .items
        .len();
    let began = Instant::now();
    while told.len() < stored && began.elapsed() < Duration::from_secs(10) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let seen = seen.lock().map(|seen| seen.clone()).unwrap_or_default();
    Ok(Outcome {
        acknowledged,
        seen,
        longest,
    })
}
