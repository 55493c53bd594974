//! What `kubeadm join` reads of a skiff server, with the credentials that it has: nothing first, then a token.
//! `make mix` runs kubeadm itself.

use anyhow::{Context, Result, ensure};
use aws_lc_rs::hmac;
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::{Value, json};
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{Cluster, eventually, expect_eq};
use std::process::Command;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
const MAPS: &str = "/api/v1/namespaces/kube-system/configmaps";
const BOOTSTRAPPERS: &str = "system:bootstrappers:kubeadm:default-node-token";

/// An answer to who has this token, or none: its code and the object.
fn get(url: &str, token: Option<&str>) -> Result<(u16, Value)> {
    let mut command = Command::new("curl");
    // The authority is not known yet; kubeadm does not check it at first either.
    command.args(["-sS", "-k", "-w", "\n%{http_code}", url]);
    if let Some(token) = token {
        command.args(["-H", &format!("authorization: Bearer {token}")]);
    }
    let output = command.output().context("curl")?;
    let text = String::from_utf8(output.stdout)?;
    let (body, code) = text.rsplit_once('\n').with_context(|| text.clone())?;
    Ok((code.parse()?, serde_json::from_str(body)?))
}

fn document(map: &Value, key: &str) -> Result<Value> {
    let text = map["data"][key]
        .as_str()
        .with_context(|| format!("{key}: {map}"))?;
    serde_saphyr::from_str(text).with_context(|| text.to_owned())
}

#[test]
fn kubeadm_finds_what_it_reads() -> Result<()> {
    let cluster = Cluster::start(SKIFF, &["--components", "api,controllers"])?;
    let line = cluster.skiff(&["token", "create", "--kubeadm"])?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let [
        "kubeadm",
        "join",
        server,
        "--token",
        token,
        "--discovery-token-ca-cert-hash",
        hash,
    ] = words[..]
    else {
        anyhow::bail!("{line}");
    };
    ensure!(!server.contains('/'), "kubeadm takes no URL: {line}");
    let view = ["config", "view", "-o", "jsonpath={.clusters[0].cluster.server}"];
    let url = cluster.kubectl().run(&view)?.trim().to_owned();

    the_token_signs_the_authority(&url, token, hash)?;
    a_token_reads_the_configurations(&cluster, &url, token)?;
    roles(&cluster, token)?;
    what_was_edited_stays(&cluster)
}

/// Everybody reads cluster-info; who knows the token knows that it is genuine.
fn the_token_signs_the_authority(url: &str, token: &str, hash: &str) -> Result<()> {
    let (id, secret) = token.split_once('.').context("a token")?;
    let path = "/api/v1/namespaces/kube-public/configmaps/cluster-info";
    let map = eventually("the signature", PATIENCE, || {
        let (code, map) = get(&format!("{url}{path}"), None)?;
        expect_eq(code, 200).with_context(|| map.to_string())?;
        ensure!(map["data"][format!("jws-kubeconfig-{id}")].is_string(), "{map}");
        Ok(map)
    })?;
    let content = map["data"]["kubeconfig"].as_str().context("kubeconfig")?;
    let signature = map["data"][format!("jws-kubeconfig-{id}")]
        .as_str()
        .unwrap_or_default();
    let (header, tag) = signature.split_once("..").context("a detached signature")?;
    let fields: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(header)?)?;
    expect_eq(fields, json!({"alg": "HS256", "kid": id}))?;
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
    let signed = format!("{header}.{}", URL_SAFE_NO_PAD.encode(content));
    let verified = hmac::verify(&key, signed.as_bytes(), &URL_SAFE_NO_PAD.decode(tag)?);
    ensure!(verified.is_ok(), "the token did not sign {content}");
    let cluster = &document(&map, "kubeconfig")?["clusters"][0]["cluster"];
    let ca = cluster["certificate-authority-data"].as_str().context("its CA")?;
    let ca = String::from_utf8(STANDARD.decode(ca)?)?;
    expect_eq(skiff_pki::authority_hash(&ca)?.as_str(), hash)
}

fn a_token_reads_the_configurations(cluster: &Cluster, url: &str, token: &str) -> Result<()> {
    let read = |name: &str| -> Result<Value> {
        let (code, _) = get(&format!("{url}{MAPS}/{name}"), None)?;
        expect_eq(code, 403).with_context(|| format!("{name} without a token"))?;
        let (code, map) = get(&format!("{url}{MAPS}/{name}"), Some(token))?;
        expect_eq(code, 200).with_context(|| map.to_string())?;
        Ok(map)
    };
    let config = document(&read("kubeadm-config")?, "ClusterConfiguration")?;
    expect_eq(config["apiVersion"].as_str(), Some("kubeadm.k8s.io/v1beta4"))?;
    let kubelet = document(&read("kubelet-config")?, "kubelet")?;
    expect_eq(
        kubelet["apiVersion"].as_str(),
        Some("kubelet.config.k8s.io/v1beta1"),
    )?;
    let dns = ["-n", "kube-system", "get", "service", "kube-dns"];
    let dns = cluster.kubectl().json(&dns)?;
    expect_eq(&kubelet["clusterDNS"], &json!([dns["spec"]["clusterIP"]]))?;
    expect_eq(
        kubelet["clusterDomain"].as_str(),
        config["networking"]["dnsDomain"].as_str(),
    )?;
    // The API server talks to no kubelet whose certificate the cluster did not sign.
    expect_eq(kubelet["serverTLSBootstrap"].as_bool(), Some(true))?;
    expect_eq(
        kubelet["authentication"]["anonymous"]["enabled"].as_bool(),
        Some(false),
    )?;
    let proxy = read("kube-proxy")?;
    expect_eq(
        document(&proxy, "config.conf")?["clusterCIDR"].as_str(),
        config["networking"]["podSubnet"].as_str(),
    )?;
    document(&proxy, "kubeconfig.conf")?;
    for (path, expected) in [
        // Whether the name is taken.
        ("/api/v1/nodes/nobody".to_owned(), 404),
        ("/api/v1/nodes".to_owned(), 403),
        (MAPS.to_owned(), 403),
        (format!("{MAPS}/extension-apiserver-authentication"), 403),
        ("/api/v1/namespaces/kube-system/secrets".to_owned(), 403),
    ] {
        let (code, answer) = get(&format!("{url}{path}"), Some(token))?;
        expect_eq(code, expected).with_context(|| format!("{path}: {answer}"))?;
    }
    Ok(())
}

/// Who may what of the way to a node's certificate, and of upstream's kube-proxy.
fn roles(cluster: &Cluster, token: &str) -> Result<()> {
    let kubectl = cluster.kubectl();
    let bootstrap = format!("system:bootstrap:{}", token.split('.').next().unwrap_or_default());
    let proxy = "system:serviceaccount:kube-system:kube-proxy";
    let requests = "certificatesigningrequests.certificates.k8s.io";
    let (token, node) = (bootstrap.as_str(), "system:node:n");
    let (nodes, accounts) = ("system:nodes", "system:serviceaccounts");
    for (user, group, verb, resource, part, expected) in [
        (token, BOOTSTRAPPERS, "create", requests, "", "yes"),
        (token, BOOTSTRAPPERS, "create", requests, "nodeclient", "yes"),
        (token, BOOTSTRAPPERS, "create", requests, "selfnodeclient", "no"),
        (node, nodes, "create", requests, "selfnodeclient", "yes"),
        (
            proxy,
            accounts,
            "watch",
            "endpointslices.discovery.k8s.io",
            "",
            "yes",
        ),
        (proxy, accounts, "list", "services", "", "yes"),
        (proxy, accounts, "list", "secrets", "", "no"),
        (
            "kube-apiserver-kubelet-client",
            "system:authenticated",
            "create",
            "nodes",
            "proxy",
            "yes",
        ),
    ] {
        let subresource = format!("--subresource={part}");
        let args = [
            "auth",
            "can-i",
            verb,
            resource,
            &subresource,
            "--as",
            user,
            "--as-group",
            group,
            "-A",
        ];
        let (_, said) = kubectl.try_run(&args)?;
        ensure!(
            said.lines()
                .any(|line| line.trim().split(' ').next() == Some(expected)),
            "{user} {verb} {resource}/{part}: {said}"
        );
    }
    Ok(())
}

/// An administrator may say more to kubelets; a restart leaves that alone.
fn what_was_edited_stays(cluster: &Cluster) -> Result<()> {
    let kubectl = cluster.kubectl();
    let get = ["-n", "kube-system", "get", "configmap", "kubelet-config"];
    let text = kubectl.json(&get)?["data"]["kubelet"]
        .as_str()
        .context("kubelet")?
        .to_owned();
    let edited = format!("{}\nfailCgroupV1: false\n", text.trim_end());
    let patch = json!({"data": {"kubelet": edited}}).to_string();
    kubectl.run(&[
        "-n",
        "kube-system",
        "patch",
        "configmap",
        "kubelet-config",
        "-p",
        &patch,
    ])?;
    cluster.skiff(&["down"])?;
    cluster.up()?;
    let map = kubectl.json(&get)?;
    expect_eq(document(&map, "kubelet")?["failCgroupV1"].as_bool(), Some(false))
}
