//! docs/operations.md, as it is typed: its commands are run on machines that are namespaces of this host, or stand in
//! [`NOT_RUN`] with the reason. A command that the page shows and no step runs fails the test, and so does a step
//! whose command the page no longer shows.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use skiff_testkit::{BUSYBOX, Machine, Switch, busybox_archive, eventually, expect_eq};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
const PATIENCE: Duration = Duration::from_secs(90);
/// Programs whose calls count as commands.
const PROGRAMS: [&str; 9] = [
    "skiff",
    "kubectl",
    "etcd",
    "etcdctl",
    "systemctl",
    "apt",
    "install",
    "kubeadm",
    "make",
];

/// What the page shows and this test leaves to others, and why.
const NOT_RUN: [(&str, &str); 39] = [
    ("make release", "it builds for minutes"),
    ("make mix", "it builds upstream's programs for minutes"),
    (
        "apt install ./skiff_0.1.0_amd64.deb",
        "`make release` makes the package",
    ),
    ("apt remove skiff", "`make release` makes the package"),
    (
        "install -m 0755 skiff-0.1.0-linux-amd64 /usr/bin/skiff",
        "the machines share /usr",
    ),
    ("systemctl enable --now skiff", "a namespace has no systemd"),
    ("systemctl restart skiff", "a namespace has no systemd"),
    (
        "etcdctl member remove",
        "etcd's own, and Debian has it in another package",
    ),
    ("skiff token create --kubeadm", "tests/mix/kubeadm.sh"),
    (
        "kubeadm join 192.0.2.1:6443 --token abcdef.0123456789abcdef --discovery-token-ca-cert-hash sha256:…",
        "tests/mix/kubeadm.sh",
    ),
    (
        "kubeadm init phase addon kube-proxy --print-manifest",
        "upstream's own",
    ),
    ("kubeadm init --pod-network-cidr", "upstream's own"),
    ("kubeadm reset", "upstream's own"),
    ("kubectl drain", "upstream's own, for upstream's nodes"),
    (
        "kubectl certificate approve",
        "upstream's own, for upstream's nodes",
    ),
    ("skiff runtime", "tests/mix/runtime.sh and tests/cri/run.sh"),
    ("skiff runtime &", "tests/mix/runtime.sh"),
    ("skiff runtime --delete", "tests/cri/run.sh"),
    ("skiff runtime --help", "the same help as that of all commands"),
    ("skiff runtime --import ARCHIVE", "tests/mix/runtime.sh"),
    (
        "kubeadm join … --cri-socket unix:///run/skiff-runtime/cri.sock",
        "tests/mix/runtime.sh",
    ),
    (
        "skiff up --pod-manifest-path /etc/kubernetes/manifests",
        "crates/skiff/tests/static_pods.rs",
    ),
    ("skiff node-roles | kubectl apply -f -", "tests/mix/agent.sh"),
    ("kubeadm token create --print-join-command", "tests/mix/agent.sh"),
    (
        "skiff join 192.0.2.1:6443 --token abcdef.0123456789abcdef --discovery-token-ca-cert-hash sha256:…",
        "tests/mix/agent.sh",
    ),
    (
        "skiff up --components api,controllers,scheduler,node,dns,metrics",
        "tests/mix/proxy.sh",
    ),
    ("skiff up --pod-network none", "tests/mix/flannel.sh"),
    (
        "skiff up --container-runtime-endpoint unix:///run/containerd/containerd.sock",
        "crates/skiff/tests/other_parts.rs",
    ),
    (
        "skiff store migrate --to etcd --etcd-servers https://192.0.2.7:2379 --etcd-cafile ca.crt --etcd-certfile skiff.crt --etcd-keyfile skiff.key",
        "without TLS below, with it in crates/store/tests/etcd.rs",
    ),
    (
        "skiff store import --from-etcd --etcd-servers https://127.0.0.1:2379 --etcd-cafile /etc/kubernetes/pki/etcd/ca.crt --etcd-certfile /etc/kubernetes/pki/etcd/peer.crt --etcd-keyfile /etc/kubernetes/pki/etcd/peer.key --service-cluster-ip-range 10.96.0.0/12",
        "crates/skiff/tests/backup.rs",
    ),
    (
        "skiff store import --from-kine /var/lib/rancher/k3s/server/db/state.db --cluster-cidr 10.42.0.0/16 --service-cluster-ip-range 10.43.0.0/16",
        "crates/skiff/tests/backup.rs",
    ),
    (
        "skiff up --runtime-config storagemigration.k8s.io/v1beta1=true",
        "crates/server/tests/runtime_config.rs",
    ),
    (
        "skiff up --runtime-config scheduling.k8s.io/v1alpha2=true",
        "crates/skiff/tests/gangs.rs",
    ),
    ("kubectl get podgroup", "crates/skiff/tests/gangs.rs"),
    (
        "kubectl wait --for=condition=Succeeded storageversionmigration/secrets-to-the-new-key",
        "crates/controllers/tests/whole/migrations.rs",
    ),
    (
        "skiff up --cpu-manager-policy static --reserved-cpus 0",
        "crates/skiff/tests/cpus.rs",
    ),
    ("kubectl logs --previous", "crates/skiff/tests/lifecycle.rs"),
    ("kubectl create token", "upstream's own"),
    ("skiff join", "with its arguments below"),
];

/// The page, and which of its commands have been run.
struct Page {
    commands: BTreeSet<String>,
    run: RefCell<BTreeSet<String>>,
}

impl Page {
    fn read() -> Result<Page> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operations.md");
        let text = std::fs::read_to_string(path)?;
        let (mut found, mut prose, mut line_so_far) = (Vec::new(), String::new(), String::new());
        let mut in_block = false;
        for line in text.lines() {
            if line.starts_with("```") {
                in_block = !in_block;
            } else if in_block {
                line_so_far.push_str(line.trim());
                match line_so_far.strip_suffix('\\') {
                    Some(more) => line_so_far = more.to_owned(),
                    None => found.push(std::mem::take(&mut line_so_far)),
                }
            } else {
                prose.push_str(line);
                prose.push(' ');
            }
        }
        found.extend(prose.split('`').skip(1).step_by(2).map(str::to_owned));
        let is_command = |code: &String| {
            let first = code.split(' ').next().unwrap_or_default();
            PROGRAMS.contains(&first) && code.contains(' ')
        };
        let commands = found.iter().map(|code| {
            let words: Vec<&str> = code.split_whitespace().collect();
            words.join(" ")
        });
        let page = Page {
            commands: commands.filter(is_command).collect(),
            run: RefCell::default(),
        };
        ensure!(page.commands.len() > 40, "only {:?}", page.commands);
        Ok(page)
    }

    /// Takes note that a command of the page is run.
    fn runs(&self, shown: &str) -> Result<()> {
        ensure!(self.commands.contains(shown), "the page does not show `{shown}`");
        self.run.borrow_mut().insert(shown.to_owned());
        Ok(())
    }
}

/// A machine with the environment of somebody who types.
struct Desk<'a> {
    page: &'a Page,
    machine: Machine,
    home: TempDir,
}

impl Desk<'_> {
    fn new<'a>(page: &'a Page, switch: &std::sync::Arc<Switch>, name: &str) -> Result<Desk<'a>> {
        Ok(Desk {
            page,
            machine: Machine::new(switch, name, SKIFF)?,
            home: tempfile::tempdir()?,
        })
    }

    fn command(&self, line: &str) -> Result<Command> {
        let bin = Path::new(SKIFF).parent().context("the binary has no folder")?;
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
        let mut command = self.machine.command("sh");
        command
            .args(["-c", line])
            .env("PATH", path)
            .env("HOME", self.home.path())
            .env("KUBECONFIG", self.home.path().join("config"))
            .env("SKIFF_NAME", self.machine.cluster());
        Ok(command)
    }

    /// Types a line that is not the page's.
    fn types(&self, line: &str) -> Result<String> {
        let output = self.command(line)?.output()?;
        let (said, error) = (text(&output.stdout), text(&output.stderr));
        ensure!(
            output.status.success(),
            "{}: {line}: {}\n{said}{error}",
            self.machine.host_name(),
            output.status
        );
        Ok(said)
    }

    /// Types a command of the page.
    fn shown(&self, shown: &str) -> Result<String> {
        self.page.runs(shown)?;
        self.types(shown)
    }

    /// The same, with this in place of what the page shows.
    fn with(&self, shown: &str, replaced: &[(&str, &str)]) -> Result<String> {
        self.page.runs(shown)?;
        let line = replaced
            .iter()
            .fold(shown.to_owned(), |line, (old, new)| line.replace(old, new));
        self.types(&line)
    }

    /// The same, with something after it.
    fn and(&self, shown: &str, more: &str) -> Result<String> {
        self.page.runs(shown)?;
        self.types(&format!("{shown} {more}"))
    }

    /// Types the line that `skiff token create` has printed, which must be what the page shows but for its values.
    fn joins(&self, line: &str, shown: &str) -> Result<String> {
        self.page.runs(shown)?;
        let flags = |line: &str| -> Vec<String> {
            let words = line.split_whitespace().filter(|word| word.starts_with("--"));
            words.map(str::to_owned).collect()
        };
        expect_eq(flags(line), flags(shown))?;
        expect_eq(line.split_whitespace().count(), shown.split_whitespace().count())?;
        self.types(line.trim())
    }

    /// Starts a command of the page that stays in the foreground.
    fn starts(&self, shown: &str, line: &str) -> Result<Foreground> {
        self.page.runs(shown)?;
        let mut command = self.command(&format!("exec {line}"))?;
        let log = std::fs::File::create(self.home.path().join("foreground.log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(Foreground(command.spawn()?))
    }

    fn nodes(&self) -> Result<Vec<String>> {
        let names = self.types("kubectl get nodes -o jsonpath='{.items[*].metadata.name}'")?;
        Ok(names.split_whitespace().map(str::to_owned).collect())
    }

    fn node_is_ready(&self, node: &str) -> Result<()> {
        eventually("the node is Ready", PATIENCE, || {
            let wait = format!("kubectl wait --for=condition=Ready node/{node} --timeout=5s");
            self.types(&wait).map(drop)
        })
    }
}

/// Ends, as by Ctrl-C, when it is dropped.
struct Foreground(Child);

impl Drop for Foreground {
    fn drop(&mut self) {
        let _ = Command::new("kill")
            .args(["-TERM", &self.0.id().to_string()])
            .status();
        let _ = self.0.wait();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The one pod of the workload, as soon as it is Ready: its name, node and container.
fn pod(desk: &Desk) -> Result<(String, String, String)> {
    eventually("the pod is Ready", PATIENCE, || {
        let list = desk.types("kubectl get pods -l app=web -o json")?;
        let list: Value = serde_json::from_str(&list)?;
        let is_alive = |pod: &&Value| pod["metadata"]["deletionTimestamp"].is_null();
        let pods: Vec<&Value> = list["items"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(is_alive)
            .collect();
        ensure!(pods.len() == 1, "{} pods", pods.len());
        let status = &pods[0]["status"]["containerStatuses"][0];
        ensure!(status["ready"] == true, "{status}");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Ok((
            text(&pods[0]["metadata"]["name"]),
            text(&pods[0]["spec"]["nodeName"]),
            text(&status["containerID"]),
        ))
    })
}

fn deploy(desk: &Desk) -> Result<()> {
    let labels = json!({"app": "web"});
    let pod = json!({"terminationGracePeriodSeconds": 0,
        "containers": [{"name": "c", "image": BUSYBOX, "command": ["sleep", "3600"]}]});
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}}});
    let file = desk.home.path().join("web.json");
    std::fs::write(&file, deployment.to_string())?;
    desk.types(&format!("kubectl apply -f {}", file.display()))
        .map(drop)
}

const NODE_LINE: &str =
    "skiff join https://192.0.2.1:6443 --token abcdef.0123456789abcdef --ca-hash sha256:…";
const SERVER_LINE: &str = "skiff join https://192.0.2.1:6443 --token abcdef.0123456789abcdef --ca-hash sha256:… --server --certificate-key …";

#[test]
fn every_command_of_the_page_is_run() -> Result<()> {
    let page = Page::read()?;
    let dir = tempfile::tempdir()?;
    let archive = busybox_archive(dir.path())?.display().to_string();
    let began = Instant::now();
    let step = |what: &str| eprintln!("{:6.1} s  {what}", began.elapsed().as_secs_f64());
    // To try one part; only the whole proves that nothing is missing.
    let only = std::env::var("SKIFF_OPERATIONS").unwrap_or_default();
    if only != "servers" {
        two_machines(&page, &archive, &step)?;
    }
    if only != "nodes" {
        three_servers(&page, &step)?;
    }
    if !only.is_empty() {
        return Ok(());
    }
    let run = page.run.borrow();
    let excused: BTreeSet<&str> = NOT_RUN.iter().map(|(command, _)| *command).collect();
    for (command, reason) in NOT_RUN {
        ensure!(
            page.commands.contains(command),
            "the page does not show `{command}`"
        );
        ensure!(!reason.is_empty() && !run.contains(command), "`{command}` is run");
    }
    let missing: Vec<&String> = page
        .commands
        .iter()
        .filter(|command| !run.contains(*command) && !excused.contains(command.as_str()))
        .collect();
    ensure!(missing.is_empty(), "no step runs {missing:#?}");
    step(&format!("{} commands were run", run.len()));
    Ok(())
}

fn two_machines(page: &Page, archive: &str, step: &dyn Fn(&str)) -> Result<()> {
    let switch = Switch::new()?;
    let one = Desk::new(page, &switch, "one")?;
    let two = Desk::new(page, &switch, "two")?;
    one.shown("skiff up --help")?;
    one.shown("skiff completion bash")?;
    one.shown("skiff up")?;
    let line = one.shown("skiff token create")?;
    two.joins(&line, NODE_LINE)?;
    expect_eq(one.nodes()?, vec!["one".to_owned(), "two".to_owned()])?;
    ensure!(one.shown("kubectl get nodes")?.contains("two"));
    let status = one.shown("skiff status")?;
    ensure!(status.contains("one") && status.contains("two"), "{status}");
    step("two machines");

    let listed = one.shown("skiff token list")?;
    let token = line
        .split_whitespace()
        .skip_while(|word| *word != "--token")
        .nth(1);
    let id = token.and_then(|token| token.split('.').next());
    let id = id.context("the line has a token")?;
    ensure!(listed.contains(id), "{listed}");
    one.and("skiff token delete", id)?;
    ensure!(!one.types("skiff token list")?.contains(id));
    ensure!(one.shown("skiff list")?.contains(one.machine.cluster()));
    ensure!(!one.shown("skiff logs")?.is_empty());
    let status: Value = serde_json::from_str(&one.shown("skiff status -o json")?)?;
    expect_eq(status["state"].as_str(), Some("running"))?;
    ensure!(
        one.shown("skiff kubeconfig")?
            .contains("certificate-authority-data")
    );
    ensure!(one.shown("skiff certs")?.contains("apiserver"));

    for desk in [&one, &two] {
        desk.types(&format!("skiff image import {archive}"))?;
    }
    one.types("kubectl cordon one")?;
    deploy(&one)?;
    let before = pod(&one)?;
    one.types("kubectl uncordon one")?;
    expect_eq(&*before.1, "two")?;
    one.and("skiff trace", "deployment/web")?;
    one.with("skiff trace pod/NAME", &[("NAME", &before.0)])?;
    one.with("kubectl describe pod NAME", &[("NAME", &before.0)])?;
    step("a pod runs on the node");

    // Upgrade, and certificates: the server first, then the node. Pods run on.
    one.shown("skiff certs renew")?;
    for desk in [&one, &two] {
        desk.shown("skiff down")?;
        desk.shown("skiff up")?;
    }
    one.node_is_ready("two")?;
    one.shown("skiff restart")?;
    one.node_is_ready("two")?;
    two.types("skiff down")?;
    {
        let _agent = two.starts("skiff server", "skiff server")?;
        one.node_is_ready("two")?;
    }
    two.types("skiff up")?;
    one.node_is_ready("two")?;
    expect_eq(&pod(&one)?, &before)?;
    step("both were restarted, and the pod runs on");

    let passphrase = one.home.path().join("passphrase");
    std::fs::write(&passphrase, "a passphrase for tests\n")?;
    let here = one.home.path().display().to_string();
    let places = [("/backup", here.as_str()), ("/etc/skiff", here.as_str())];
    let file = format!("{here}/monday.skiff");
    one.with(
        "skiff backup /backup/monday.skiff --with-keys --passphrase-file /etc/skiff/passphrase",
        &places,
    )?;
    one.with(
        "skiff backup /backup/$(date +%F).skiff --with-keys --passphrase-file /etc/skiff/passphrase",
        &places,
    )?;
    let plain = format!("{here}/plain.skiff --secrets-in-plain-text");
    one.with("skiff backup FILE", &[("FILE", &plain)])?;
    step("backups");

    // What nodes say of themselves.
    let two_is = [("NODE", "two")];
    let said = one.with("kubectl get --raw /api/v1/nodes/NODE/proxy/configz", &two_is)?;
    ensure!(said.contains("kubeletconfig"), "{said}");
    let handlers = "kubectl get node NODE -o jsonpath={.status.runtimeHandlers}";
    let said = one.with(handlers, &two_is)?;
    ensure!(said.contains("userNamespaces"), "{said}");

    // Losing a node: it leaves, or is made to.
    two.shown("skiff leave")?;
    eventually("the node is gone", PATIENCE, || expect_eq(one.nodes()?.len(), 1))?;
    eventually("the pod moves", PATIENCE, || expect_eq(&*pod(&one)?.1, "one"))?;
    two.types(&one.types("skiff token create")?)?;
    two.shown("skiff leave --force")?;
    eventually("the node is gone", PATIENCE, || expect_eq(one.nodes()?.len(), 1))?;
    step("the node was lost in two ways");

    one.shown("skiff down --delete")?;
    one.with(
        "skiff restore /backup/monday.skiff --passphrase-file /etc/skiff/passphrase",
        &places,
    )?;
    one.types("skiff up")?;
    one.with("kubectl delete node OLD", &[("OLD", "two")])?;
    expect_eq(one.nodes()?, vec!["one".to_owned()])?;
    // Its pod, which the old Node had, follows some 40 seconds later.
    one.types("kubectl get deployment web")?;
    let secret = format!("{file} --passphrase-file {here}/passphrase");
    two.with("skiff restore FILE --name try", &[("FILE", &secret)])?;
    two.types("skiff down --delete --name try")?;
    page.runs("skiff restore FILE")?;
    one.types("skiff down --delete")?;
    step("restored");
    Ok(())
}

fn three_servers(page: &Page, step: &dyn Fn(&str)) -> Result<()> {
    let switch = Switch::new()?;
    let desks: Result<Vec<Desk>> = ["one", "two", "three"]
        .iter()
        .map(|name| Desk::new(page, &switch, name))
        .collect();
    let desks = desks?;
    let [one, two, three] = &desks[..] else {
        anyhow::bail!("three machines");
    };
    // The page's addresses by those of the machines.
    let addressed = |line: &str| {
        desks
            .iter()
            .enumerate()
            .fold(line.to_owned(), |line, (at, desk)| {
                let (shown, real) = (format!("192.0.2.{}", at + 1), desk.machine.address().to_string());
                line.replace(&shown, &real)
            })
    };
    let etcd = page
        .commands
        .iter()
        .find(|command| command.starts_with("etcd --name one"))
        .context("the page starts etcd")?;
    let (own, all) = etcd
        .split_once("--initial-cluster ")
        .context("--initial-cluster is last")?;
    let mut members = Vec::new();
    for (at, desk) in desks.iter().enumerate() {
        let (name, folder) = (desk.machine.host_name(), desk.home.path().join("etcd"));
        let own = own
            .replace("--name one", &format!("--name {name}"))
            .replace("192.0.2.1", &format!("192.0.2.{}", at + 1))
            .replace("/var/lib/etcd/skiff", &folder.display().to_string());
        let line = addressed(&format!("{own}--initial-cluster {all}"));
        members.push(desk.starts(etcd, &line)?);
    }
    let up = "skiff up --etcd-servers http://192.0.2.1:2379,http://192.0.2.2:2379,http://192.0.2.3:2379";
    let up_here = addressed(up);
    eventually("etcd has a leader", PATIENCE, || {
        let health = format!("curl -sf http://{}:2379/health", one.machine.address());
        one.types(&health).map(drop)
    })?;
    page.runs(up)?;
    one.types(&up_here)?;
    for desk in [two, three] {
        let line = one.shown("skiff token create --server")?;
        desk.joins(&line, SERVER_LINE)?;
    }
    page.runs("skiff join --server")?;
    let servers = |desk: &Desk| -> Result<String> {
        let status: Value = serde_json::from_str(&desk.types("skiff status -o json")?)?;
        let servers = status["servers"].as_array().into_iter().flatten();
        let mut names: Vec<String> = servers
            .map(|server| server["hostname"].as_str().unwrap_or_default().to_owned())
            .collect();
        names.sort();
        Ok(names.join(" "))
    };
    expect_eq(&*servers(two)?, "one three two")?;
    step("three servers");

    // Upgrade one after the other; another one answers meanwhile.
    for (desk, other) in [(one, two), (two, three), (three, one)] {
        desk.types("skiff down")?;
        other.types("kubectl get nodes")?;
        let line = if desk.machine.host_name() == "one" {
            &up_here
        } else {
            "skiff up"
        };
        desk.types(line)?;
        one.node_is_ready(desk.machine.host_name())?;
    }
    step("each server was restarted");

    // Losing servers, and back to one machine.
    three.types("skiff leave")?;
    expect_eq(one.nodes()?, vec!["one".to_owned(), "two".to_owned()])?;
    expect_eq(&*servers(one)?, "one two")?;
    step("a server left");
    // It comes back as a node, and is gone for good.
    three.types(&one.types("skiff token create")?)?;
    three.types("skiff down --delete")?;
    one.with("kubectl delete node NAME", &[("NAME", "three")])?;
    page.runs("kubectl delete node")?;
    expect_eq(one.nodes()?, vec!["one".to_owned(), "two".to_owned()])?;
    step("a node was lost for good");
    two.types("skiff leave")?;
    one.types("kubectl create configmap kept")?;
    one.shown("skiff store migrate --to embedded")?;
    one.types("kubectl get configmap kept")?;
    let fresh = format!(
        "--etcd-servers http://{}:2379 --etcd-prefix /again",
        one.machine.address()
    );
    one.and("skiff store migrate --to etcd", &fresh)?;
    one.types("kubectl get configmap kept")?;
    one.types("skiff down --delete")?;
    step("moved to the embedded store and to etcd");
    Ok(())
}
