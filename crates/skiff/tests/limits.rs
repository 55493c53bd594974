//! What docs/limits.md says is refused, is refused. Each case quotes the page, so that a sentence that is taken off the
//! page, or a limit that is lifted, makes a test fail.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{BUSYBOX, Cluster, Kubectl, busybox_archive, eventually};
use std::path::Path;
use std::process::Command;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

/// Fails unless the page says so. Lines of the page may break anywhere.
fn page_says(quote: &str) -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/limits.md");
    let page = std::fs::read_to_string(path)?;
    let page: Vec<&str> = page.split_whitespace().collect();
    ensure!(
        page.join(" ").contains(quote),
        "docs/limits.md does not say {quote:?}"
    );
    Ok(())
}

/// A configuration file, and the flag that names it.
struct Configured {
    page: &'static str,
    flag: &'static str,
    file: &'static str,
    refusal: &'static str,
}

const WEBHOOKS: &str = "Kubeconfigs of webhooks take no exec, no auth-provider and no proxy";
const KUBECONFIG: &str = "apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'PROXY}}]
users: [{name: u, user: {USER}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
";

#[test]
fn configurations_are_refused() -> Result<()> {
    let token_webhook = "--authentication-token-webhook-config-file";
    for case in [
        Configured {
            page: "and of their configurations only that of PodSecurity; others are refused by name",
            flag: "--admission-control-config-file",
            file: "apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins:\n- name: EventRateLimit\n  configuration: {}\n",
            refusal: "EventRateLimit",
        },
        Configured {
            page: "KMS v2 only (v1 is refused",
            flag: "--encryption-provider-config",
            file: "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n- resources: [secrets]\n  providers:\n  - kms: {apiVersion: v1, name: k, endpoint: 'unix:///nowhere.sock'}\n  - identity: {}\n",
            refusal: "KMSv1",
        },
        Configured {
            page: "an AuthorizationConfiguration no InClusterConfig",
            flag: "--authorization-config",
            file: "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\nauthorizers:\n- type: Webhook\n  name: w\n  webhook:\n    authorizedTTL: 30s\n    unauthorizedTTL: 30s\n    timeout: 3s\n    subjectAccessReviewVersion: v1\n    matchConditionSubjectAccessReviewVersion: v1\n    failurePolicy: NoOpinion\n    connectionInfo: {type: InClusterConfig}\n",
            refusal: "InClusterConfig is not built",
        },
        Configured {
            page: "no egress selectors",
            flag: "--authentication-config",
            file: "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\njwt:\n- issuer: {url: 'https://issuer.example', audiences: [a], egressSelectorType: cluster}\n  claimMappings: {username: {claim: sub, prefix: ''}}\n",
            refusal: "egressSelectorType",
        },
        Configured {
            page: WEBHOOKS,
            flag: token_webhook,
            file: "USER=exec: {apiVersion: client.authentication.k8s.io/v1, command: 'true'}",
            refusal: "exec and auth-provider are not supported",
        },
        Configured {
            page: WEBHOOKS,
            flag: token_webhook,
            file: "USER=auth-provider: {name: oidc}",
            refusal: "exec and auth-provider are not supported",
        },
        Configured {
            page: WEBHOOKS,
            flag: token_webhook,
            file: "PROXY=, proxy-url: 'http://127.0.0.1:2'",
            refusal: "proxy-url is not supported",
        },
    ] {
        page_says(case.page)?;
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("file.yaml");
        let fill = |part: &str| {
            case.file
                .strip_prefix(part)
                .and_then(|value| value.strip_prefix('='))
                .unwrap_or_default()
                .to_owned()
        };
        let text = if case.flag == token_webhook {
            KUBECONFIG
                .replace("USER", &fill("USER"))
                .replace("PROXY", &fill("PROXY"))
        } else {
            case.file.to_owned()
        };
        std::fs::write(&path, text)?;
        let path = path.to_string_lossy().into_owned();
        refused_to_start(&[case.flag, &path], case.refusal)?;
    }
    for (page, flags, refusal) in [
        (
            "of their configurations only that of PodSecurity; others are refused by name",
            &["--enable-admission-plugins", "ImagePolicyWebhook"][..],
            "ImagePolicyWebhook",
        ),
        ("no `legacy` format", &["--audit-log-format", "legacy"], "legacy"),
        (
            "no ES512",
            &[
                "--oidc-issuer-url",
                "https://issuer.example",
                "--oidc-client-id",
                "a",
                "--oidc-signing-algs",
                "ES512",
            ],
            "ES512",
        ),
    ] {
        page_says(page)?;
        refused_to_start(flags, refusal)?;
    }
    Ok(())
}

/// `skiff up` with these flags fails and says why.
fn refused_to_start(flags: &[&str], refusal: &str) -> Result<()> {
    let name = Cluster::new_name();
    let cluster = ["--name", name.as_str()];
    let up = Command::new(SKIFF)
        .arg("up")
        .args(cluster)
        .args(["--no-kubeconfig-merge", "--components", "api"])
        .args(flags)
        .output()?;
    // What the server finds out is found out after the cluster was made.
    Command::new(SKIFF)
        .args(["down", "--delete"])
        .args(cluster)
        .output()?;
    let said = String::from_utf8_lossy(&up.stderr).into_owned();
    ensure!(!up.status.success(), "{flags:?} is accepted");
    ensure!(
        said.contains(refusal),
        "{flags:?} is not refused for {refusal:?}: {said}"
    );
    ensure!(
        !Cluster::data_dir(&name).exists(),
        "{flags:?}: the cluster is left behind"
    );
    Ok(())
}

#[test]
fn commands_that_are_not_built_are_unknown() -> Result<()> {
    page_says("`skiff kubectl` and `why` do not exist yet")?;
    for command in ["kubectl", "why"] {
        let output = Command::new(SKIFF).arg(command).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(
            output.status.code() == Some(2) && said.contains("unrecognized subcommand"),
            "skiff {command}: {said}"
        );
    }
    Ok(())
}

#[test]
fn requests_are_refused() -> Result<()> {
    let cluster = Cluster::start(SKIFF, &["--components", "api"])?;
    let kubectl = cluster.kubectl();
    let dir = tempfile::tempdir()?;
    let post = |path: &str, body: &str| -> Result<(i32, String)> {
        let file = dir.path().join("body.json");
        std::fs::write(&file, body)?;
        kubectl.try_run(&["create", "--raw", path, "-f", &file.to_string_lossy()])
    };

    page_says("Objects and patches nest up to 100 levels")?;
    let nested = |levels: usize| {
        let value = format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        format!(
            r#"{{"apiVersion":"v1","kind":"ConfigMap","metadata":{{"name":"n{levels}"}},"unknown":{value}}}"#
        )
    };
    let (code, said) = post("/api/v1/namespaces/default/configmaps", &nested(101))?;
    ensure!(code != 0 && said.contains("max depth"), "{said}");
    let (code, said) = post("/api/v1/namespaces/default/configmaps", &nested(90))?;
    ensure!(code == 0, "{said}");

    page_says("A request URI has up to 64 KiB, and over HTTP/1.1 a request up to 100 headers")?;
    let config = kubectl.run(&["config", "view", "-o", "jsonpath={.clusters[0].cluster.server}"])?;
    let code = |headers: usize, address: usize| -> Result<String> {
        let mut curl = Command::new("curl");
        curl.args(["-sk", "--http1.1", "-o", "/dev/null", "-w", "%{http_code}"]);
        for header in 0..headers {
            curl.arg("-H").arg(format!("x-{header}: 1"));
        }
        curl.arg(format!("{config}/livez?{}", "a".repeat(address)));
        let output = curl.output().context("curl")?;
        Ok(String::from_utf8(output.stdout)?)
    };
    ensure!(code(90, 60_000)? == "200", "{}", code(90, 60_000)?);
    ensure!(code(110, 0)? == "431", "{}", code(110, 0)?);
    ensure!(
        matches!(code(0, 70_000)?.as_str(), "414" | "431"),
        "{}",
        code(0, 70_000)?
    );
    Ok(())
}

/// A pod that is not run as it asks, and the event that says so.
struct Unbuilt {
    page: &'static str,
    name: &'static str,
    /// Merged into the pod's spec.
    spec: serde_json::Value,
    reason: &'static str,
    message: &'static str,
}

fn has_event(kubectl: &Kubectl, pod: &str, reason: &str, message: &str) -> Result<()> {
    eventually(&format!("{pod} has the event {reason}"), PATIENCE, || {
        let selector = format!("involvedObject.name={pod}");
        let events = kubectl.json(&["get", "events", "--field-selector", &selector])?;
        let found = events["items"].as_array().into_iter().flatten().any(|event| {
            event["reason"] == reason && event["message"].as_str().is_some_and(|m| m.contains(message))
        });
        let told: Vec<String> = events["items"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|event| format!("{}: {}", event["reason"], event["message"]))
            .collect();
        ensure!(found, "{told:#?}");
        Ok(())
    })
}

#[test]
fn pods_that_ask_for_what_is_not_built_are_told_so() -> Result<()> {
    let cluster = Cluster::start(SKIFF, &[])?;
    let dir = tempfile::tempdir()?;
    cluster.import(&busybox_archive(dir.path())?)?;
    let kubectl = cluster.kubectl();
    let volume = |source: serde_json::Value| {
        let mut volume = json!({"name": "v"});
        if let (Some(volume), Some(source)) = (volume.as_object_mut(), source.as_object()) {
            volume.extend(source.clone());
        }
        json!({"volumes": [volume], "containers": [{"name": "c", "image": BUSYBOX, "command": ["sleep", "1000"],
            "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]})
    };
    for Unbuilt {
        page,
        name,
        spec,
        reason,
        message,
    } in [
        Unbuilt {
            page: "Others (rbd, cephfs, …) end in a FailedMount event",
            name: "rbd",
            spec: volume(json!({"rbd": {"monitors": ["127.0.0.1"], "image": "a"}})),
            reason: "FailedMount",
            message: "rbd",
        },
        Unbuilt {
            page: "Others (rbd, cephfs, …) end in a FailedMount event",
            name: "cephfs",
            spec: volume(json!({"cephfs": {"monitors": ["127.0.0.1"]}})),
            reason: "FailedMount",
            message: "cephfs",
        },
        Unbuilt {
            page: "a volume on a file system without id-mapped mounts is refused when the container starts",
            name: "unmapped",
            spec: json!({"hostUsers": false, "volumes": [{"name": "v", "hostPath": {"path": "/proc/sys"}}],
                "containers": [{"name": "c", "image": BUSYBOX, "command": ["sleep", "1000"],
                    "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]}),
            reason: "Failed",
            message: "failed to set MOUNT_ATTR_IDMAP on /proc/sys",
        },
    ] {
        page_says(page)?;
        let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {"terminationGracePeriodSeconds": 0,
                "containers": [{"name": "c", "image": BUSYBOX, "command": ["sleep", "1000"]}]}});
        if let (Some(into), Some(more)) = (pod["spec"].as_object_mut(), spec.as_object()) {
            into.extend(more.clone());
        }
        kubectl.create(&pod.to_string())?;
        has_event(&kubectl, name, reason, message)?;
    }
    Ok(())
}
