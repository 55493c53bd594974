//! Policies of administrators with a real cluster: definitions that come and go while it runs, what pods reach by real
//! connections, what `skiff net check` names, and what users are told of rules that cannot be enforced.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use skiff_testkit::{Cluster, Kubectl, eventually, expect_eq};
use std::process::Command;
use std::time::Duration;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
const PATIENCE: Duration = Duration::from_secs(90);
const GROUP: &str = "policy.networking.k8s.io";

#[test]
fn policies_of_administrators() -> Result<()> {
    let cluster = Cluster::start(SKIFF, &[])?;
    let kubectl = cluster.kubectl();
    for name in ["web", "client"] {
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}},
            "spec": {"terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "skiff.local/demo:v1"}]}});
        kubectl.apply(&pod.to_string())?;
    }
    kubectl.run(&["wait", "--for=condition=Ready", "pod", "--all", "--timeout=90s"])?;
    let way = Way { cluster: &cluster };
    way.passes("no policy selects default/web")?;

    define(
        &kubectl,
        "ClusterNetworkPolicy",
        "clusternetworkpolicies",
        "v1alpha2",
    )?;
    admin_tier(&kubectl, &way)?;
    rules_that_cannot_be_enforced(&kubectl)?;

    // Without the definition, the NetworkPolicy of `admin_tier` has the word.
    kubectl.run(&["delete", "crd", &format!("clusternetworkpolicies.{GROUP}")])?;
    way.is_stopped("default/closed selects default/web and no rule allows")?;
    kubectl.run(&["delete", "networkpolicy", "closed"])?;
    way.passes("no policy selects default/web")?;

    define(
        &kubectl,
        "BaselineAdminNetworkPolicy",
        "baselineadminnetworkpolicies",
        "v1alpha1",
    )?;
    baseline(&kubectl, &way)
}

fn admin_tier(kubectl: &Kubectl, way: &Way) -> Result<()> {
    guard(kubectl, "Deny", "ingress", json!({"pods": pods("client")}))?;
    way.is_stopped("ClusterNetworkPolicy guard, ingress[0] \"clients\" (Admin tier) denies")?;
    accepted(kubectl, "True/Accepted")?;
    network_policy(kubectl, "closed", json!([]))?;
    guard(kubectl, "Accept", "ingress", json!({"pods": pods("client")}))?;
    way.passes("ClusterNetworkPolicy guard, ingress[0] \"clients\" (Admin tier) accepts")?;
    guard(kubectl, "Pass", "ingress", json!({"pods": pods("client")}))?;
    way.is_stopped("default/closed selects default/web and no rule allows")
}

fn rules_that_cannot_be_enforced(kubectl: &Kubectl) -> Result<()> {
    guard(
        kubectl,
        "Accept",
        "egress",
        json!({"domainNames": ["example.com"]}),
    )?;
    accepted(kubectl, "False/UnsupportedRules")?;
    let words = "to[0]: domainNames is not supported; the rule matches nothing";
    eventually("an event tells why", PATIENCE, || {
        let selector = "--field-selector=involvedObject.kind=ClusterNetworkPolicy,reason=UnsupportedRules";
        let events = kubectl.json(&["get", "events", selector])?;
        let mut events = events["items"].as_array().into_iter().flatten();
        let told = |event: &Value| event["type"] == "Warning" && event["message"].to_string().contains(words);
        ensure!(events.any(told), "no event");
        Ok(())
    })?;
    let policy = kubectl.json(&["get", "clusternetworkpolicy", "guard"])?;
    let message = policy["status"]["conditions"][0]["message"].to_string();
    ensure!(message.contains(words), "{policy}");
    guard(kubectl, "Deny", "ingress", json!({"pods": pods("client")}))?;
    accepted(kubectl, "True/Accepted")
}

fn baseline(kubectl: &Kubectl, way: &Way) -> Result<()> {
    let policy = json!({"apiVersion": format!("{GROUP}/v1alpha1"), "kind": "BaselineAdminNetworkPolicy",
        "metadata": {"name": "default"}, "spec": {"subject": {"namespaces": {}},
            "ingress": [{"action": "Deny", "from": [{"namespaces": {}}]}]}});
    kubectl.apply(&policy.to_string())?;
    way.is_stopped("BaselineAdminNetworkPolicy default, ingress[0] (Baseline tier) denies")?;
    network_policy(kubectl, "open", json!([{}]))?;
    way.passes("allowed by default/open")
}

fn pods(app: &str) -> Value {
    json!({"podSelector": {"matchLabels": {"app": app}}})
}

/// A ClusterNetworkPolicy of the pod `web` with one rule.
fn guard(kubectl: &Kubectl, action: &str, direction: &str, peer: Value) -> Result<()> {
    let peers = if direction == "ingress" { "from" } else { "to" };
    let rule = json!({"name": "clients", "action": action, peers: [peer]});
    let policy = json!({"apiVersion": format!("{GROUP}/v1alpha2"), "kind": "ClusterNetworkPolicy", "metadata": {"name": "guard"},
        "spec": {"tier": "Admin", "priority": 10, "subject": {"pods": pods("web")}, direction: [rule]}});
    kubectl.apply(&policy.to_string()).map(drop)
}

fn network_policy(kubectl: &Kubectl, name: &str, ingress: Value) -> Result<()> {
    let policy = json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": name},
        "spec": {"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"], "ingress": ingress}});
    kubectl.apply(&policy.to_string()).map(drop)
}

/// Waits for the condition, of the policy as it was last written.
fn accepted(kubectl: &Kubectl, expected: &str) -> Result<()> {
    eventually("the policy's condition", PATIENCE, || {
        let policy = kubectl.json(&["get", "clusternetworkpolicy", "guard"])?;
        let condition = &policy["status"]["conditions"][0];
        let text = |field: &str| condition[field].as_str().unwrap_or_default().to_owned();
        expect_eq(
            &condition["observedGeneration"],
            &policy["metadata"]["generation"],
        )?;
        expect_eq(text("type"), "Accepted".to_owned())?;
        expect_eq(
            format!("{}/{}", text("status"), text("reason")),
            expected.to_owned(),
        )
    })
}

/// Installs a definition that takes every spec: what it may say is not this test's business.
fn define(kubectl: &Kubectl, kind: &str, plural: &str, version: &str) -> Result<()> {
    let any = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let schema = json!({"openAPIV3Schema": {"type": "object", "properties": {"spec": any, "status": any}}});
    let versions = json!([{"name": version, "served": true, "storage": true, "schema": schema, "subresources": {"status": {}}}]);
    let name = format!("{plural}.{GROUP}");
    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": name, "annotations": {"api-approved.kubernetes.io": "unapproved, a test"}},
        "spec": {"group": GROUP, "scope": "Cluster", "versions": versions,
            "names": {"kind": kind, "plural": plural, "singular": kind.to_lowercase(), "listKind": format!("{kind}List")}}});
    kubectl.apply(&definition.to_string())?;
    let crd = format!("crd/{name}");
    kubectl
        .run(&["wait", "--for=condition=Established", &crd, "--timeout=60s"])
        .map(drop)
}

/// From the pod `client` to the pod `web`.
struct Way<'a> {
    cluster: &'a Cluster,
}

impl Way<'_> {
    /// What `skiff net check` found: the outcome and words of the ingress policy, and whether the pod really connects.
    fn walk(&self) -> Result<(String, String, bool)> {
        let output = Command::new(SKIFF)
            .args(["net", "check", "pod/client", "pod/web:8080", "-o", "json"])
            .args(["--name", self.cluster.name()])
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let walk: Value = serde_json::from_str(&text)
            .with_context(|| format!("{text}{}", String::from_utf8_lossy(&output.stderr)))?;
        let step = |name: &str| {
            let mut steps = walk["steps"].as_array().into_iter().flatten();
            steps
                .find(|step| step["step"] == name)
                .with_context(|| format!("no step {name}: {walk:#}"))
        };
        let (policy, connection) = (step("ingress policy")?, step("connection")?);
        let text = |field: &str| policy[field].as_str().unwrap_or_default().to_owned();
        Ok((text("outcome"), text("detail"), connection["outcome"] == "passes"))
    }

    fn is(&self, expected: &str, connects: bool, words: &str) -> Result<()> {
        eventually(&format!("the ingress policy: {words}"), PATIENCE, || {
            let (outcome, detail, connected) = self.walk()?;
            ensure!(detail.contains(words), "{outcome}: {detail}");
            expect_eq((outcome.as_str(), connected), (expected, connects))
        })
    }

    fn passes(&self, words: &str) -> Result<()> {
        self.is("passes", true, words)
    }

    fn is_stopped(&self, words: &str) -> Result<()> {
        self.is("stops", false, words)
    }
}
