//! `skiff token`: the bootstrap tokens by which machines join.

use crate::bundle::{self, Bundle, CertificateKey, Purpose};
use crate::cli::{Output, TokenArgs, TokenCommand};
use crate::cluster::Cluster;
use crate::daemon::{client, existing};
use crate::joining::{BOOTSTRAPPERS, CLUSTER_INFO};
use crate::server_state::ServerState;
use anyhow::{Context, Result, bail};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::api::rbac::v1::{PolicyRule, Role, RoleBinding, RoleRef, Subject};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde::Serialize;
use skiff_client::{ErrorExt, ServerAddress};
use std::net::IpAddr;
use std::time::Duration;

const TYPE: &str = "bootstrap.kubernetes.io/token";
const PREFIX: &str = "bootstrap-token-";
const NAMESPACE: &str = "kube-system";
const DEFAULT_TTL: Duration = Duration::from_secs(24 * 3600);
/// As long as kubeadm offers the keys of a control plane.
const DEFAULT_SERVER_TTL: Duration = Duration::from_secs(2 * 3600);

/// A token: what it is known by, and what proves it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    pub id: String,
    pub secret: String,
}

impl std::str::FromStr for Token {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = |text: &str, length: usize| {
            text.len() == length && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
        };
        match text.split_once('.') {
            Some((id, secret)) if plain(id, 6) && plain(secret, 16) => Ok(Token {
                id: id.to_owned(),
                secret: secret.to_owned(),
            }),
            _ => Err("a token is six lower case letters or digits, a dot, and sixteen more".to_owned()),
        }
    }
}

impl std::fmt::Display for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.id, self.secret)
    }
}

/// Without the secret: what is printed ends up in logs.
impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Token({}.…)", self.id)
    }
}

impl Token {
    fn generate() -> Result<Token> {
        Ok(Token {
            id: random(6)?,
            secret: random(16)?,
        })
    }

    fn secret_object(&self, description: &str, expiration: Option<Timestamp>) -> Secret {
        let mut data = vec![
            ("token-id", self.id.clone()),
            ("token-secret", self.secret.clone()),
            ("usage-bootstrap-authentication", "true".to_owned()),
            ("usage-bootstrap-signing", "true".to_owned()),
            ("auth-extra-groups", BOOTSTRAPPERS.to_owned()),
        ];
        if !description.is_empty() {
            data.push(("description", description.to_owned()));
        }
        if let Some(at) = expiration {
            data.push(("expiration", skiff_meta::time::format_seconds(at)));
        }
        let data = data.into_iter().map(|(key, value)| (key.to_owned(), value));
        let mut secret = Secret {
            type_: Some(TYPE.to_owned()),
            string_data: Some(data.collect()),
            ..Secret::default()
        };
        secret.metadata.name = Some(format!("{PREFIX}{}", self.id));
        secret
    }
}

/// Lower case letters and digits, each as likely as the others.
pub fn random(length: usize) -> Result<String> {
    const ALPHABET: &[u8] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    let source = rustls::crypto::aws_lc_rs::default_provider().secure_random;
    let mut text = String::new();
    while text.len() < length {
        let mut bytes = [0u8; 32];
        source
            .fill(&mut bytes)
            .map_err(|_| anyhow::anyhow!("the system has no random numbers"))?;
        // 252 is seven times 36: what is above would make some letters likelier.
        let fair = bytes.iter().filter(|byte| **byte < 252);
        text.extend(fair.map(|byte| char::from(ALPHABET[usize::from(*byte) % ALPHABET.len()])));
    }
    text.truncate(length);
    Ok(text)
}

pub async fn run(args: &TokenArgs) -> Result<()> {
    let cluster = existing(&args.cluster)?;
    if cluster.agent {
        bail!(
            "this machine is a node of another machine's cluster; run `skiff token` where its API server runs"
        );
    }
    if cluster.running()?.is_none() {
        bail!(
            "cluster {:?} is not running; start it with `skiff up{}`",
            cluster.name,
            cluster.name_flag()
        );
    }
    match &args.command {
        TokenCommand::Create {
            ttl,
            server: false,
            kubeadm,
            description,
        } => create(&cluster, ttl.unwrap_or(DEFAULT_TTL), description, *kubeadm).await,
        TokenCommand::Create { ttl, description, .. } => {
            create_for_server(&cluster, ttl.unwrap_or(DEFAULT_SERVER_TTL), description).await
        }
        TokenCommand::List { output } => list(&cluster, *output).await,
        TokenCommand::Delete { tokens } => delete(&cluster, tokens).await,
    }
}

async fn create(cluster: &Cluster, ttl: Duration, description: &str, kubeadm: bool) -> Result<()> {
    let client = client(cluster).await?;
    let (server, hash) = destination(cluster, &client).await?;
    let expiration = match ttl {
        Duration::ZERO => None,
        ttl => Some(Timestamp::now().checked_add(SignedDuration::try_from(ttl)?)?),
    };
    let token = Token::generate()?;
    let secrets: Api<Secret> = Api::namespaced(client, NAMESPACE);
    secrets
        .create(
            &PostParams::default(),
            &token.secret_object(description, expiration),
        )
        .await?;
    match kubeadm {
        // It takes no URL.
        true => {
            let server = server.parse::<ServerAddress>()?.authority();
            say!("kubeadm join {server} --token {token} --discovery-token-ca-cert-hash {hash}");
        }
        false => say!("skiff join {server} --token {token} --ca-hash {hash}"),
    }
    Ok(())
}

/// Where other machines reach the cluster, and the hash of its authority.
async fn destination(cluster: &Cluster, client: &kube::Client) -> Result<(String, String)> {
    let (named, ca) = cluster_info(client).await?;
    let own = ServerState::find(cluster)?.and_then(|state| state.reached_at().ok());
    let server = own.map_or(named, |own| own.to_string());
    Ok((server, skiff_pki::authority_hash(&ca)?))
}

/// A token whose holder may fetch the keys of the cluster, sealed by a key that is printed here and kept nowhere.
async fn create_for_server(cluster: &Cluster, ttl: Duration, description: &str) -> Result<()> {
    if ttl.is_zero() {
        bail!("a token for servers must end; choose a --ttl, such as 2h");
    }
    let state = ServerState::find(cluster)?.with_context(|| {
        format!(
            "the server was started by an older skiff; restart it with `skiff down{0}` and `skiff up{0}`",
            cluster.name_flag()
        )
    })?;
    check_store(cluster, &state.settings.etcd_servers)?;
    let client = client(cluster).await?;
    let (server, ca_hash) = destination(cluster, &client).await?;
    let expiration = Timestamp::now().checked_add(SignedDuration::try_from(ttl)?)?;
    let expires = skiff_meta::time::format_seconds(expiration);
    let (token, key) = (Token::generate()?, CertificateKey::generate()?);
    let purpose = Purpose {
        token_id: &token.id,
        ca_hash: &ca_hash,
        expires: &expires,
    };
    let sealed = Bundle::collect(cluster, &state)?.seal(&key, purpose)?;
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let description = match description {
        "" => "joins a server",
        text => text,
    };
    let made = secrets
        .create(
            &PostParams::default(),
            &token.secret_object(description, Some(expiration)),
        )
        .await?;
    let offered = offer(&client, &token, &made, sealed, &expires).await;
    if let Err(error) = offered {
        // What was made for it goes with it.
        let name = format!("{PREFIX}{}", token.id);
        let _ = secrets.delete(&name, &DeleteParams::default()).await;
        return Err(error.context("the keys of the cluster cannot be offered"));
    }
    say!("skiff join {server} --token {token} --ca-hash {ca_hash} --server --certificate-key {key}");
    Ok(())
}

/// Several servers need a store that all of them reach.
fn check_store(cluster: &Cluster, etcd_servers: &[String]) -> Result<()> {
    if etcd_servers.is_empty() {
        bail!(
            "cluster {:?} keeps its state in the embedded store of this machine, which no other server can reach; several servers need an etcd: move the cluster to one with `skiff store migrate --to etcd --etcd-servers URL,URL,URL{}`",
            cluster.name,
            cluster.name_flag()
        );
    }
    if let Some(server) = etcd_servers.iter().find(|server| is_local(server)) {
        bail!(
            "other machines do not reach the etcd server {server}; restart this one with `skiff down{0}` and `skiff up{0} --etcd-servers` with addresses that all servers reach",
            cluster.name_flag()
        );
    }
    Ok(())
}

/// Whether an address means this machine, whichever that is.
fn is_local(server: &str) -> bool {
    let host = server.split_once("://").map_or(server, |(_, host)| host);
    let host = match host.strip_prefix('[') {
        Some(host) => host.split(']').next().unwrap_or_default(),
        None => host.split([':', '/']).next().unwrap_or_default(),
    };
    host == "localhost"
        || host
            .parse::<IpAddr>()
            .is_ok_and(|ip| ip.is_loopback() || ip.is_unspecified())
}

/// The Secret with the sealed keys of the cluster, for the holder of this token.
pub fn keys_secret(token: &Token) -> String {
    format!("skiff-server-keys-{}", token.id)
}

/// Puts the sealed keys where this token, and no other, may read them. All of it belongs to the token's Secret: it goes
/// when the token ends or is deleted.
async fn offer(
    client: &kube::Client,
    token: &Token,
    made: &Secret,
    sealed: Vec<u8>,
    expires: &str,
) -> Result<()> {
    let name = keys_secret(token);
    let metadata = ObjectMeta {
        name: Some(name.clone()),
        namespace: Some(NAMESPACE.to_owned()),
        owner_references: Some(vec![OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Secret".to_owned(),
            name: made.metadata.name.clone().unwrap_or_default(),
            uid: made.metadata.uid.clone().unwrap_or_default(),
            ..OwnerReference::default()
        }]),
        ..ObjectMeta::default()
    };
    let keys = Secret {
        metadata: metadata.clone(),
        type_: Some("skiff.io/server-keys".to_owned()),
        immutable: Some(true),
        data: Some(
            [
                (bundle::SEALED.to_owned(), ByteString(sealed)),
                (
                    bundle::EXPIRES.to_owned(),
                    ByteString(expires.as_bytes().to_vec()),
                ),
            ]
            .into(),
        ),
        ..Secret::default()
    };
    let role = Role {
        metadata: metadata.clone(),
        rules: Some(vec![PolicyRule {
            api_groups: Some(vec![String::new()]),
            resources: Some(vec!["secrets".to_owned()]),
            resource_names: Some(vec![name.clone()]),
            verbs: vec!["get".to_owned()],
            ..PolicyRule::default()
        }]),
    };
    let group = "rbac.authorization.k8s.io".to_owned();
    let binding = RoleBinding {
        metadata,
        role_ref: RoleRef {
            api_group: Some(group.clone()),
            kind: "Role".to_owned(),
            name,
        },
        subjects: Some(vec![Subject {
            api_group: Some(group),
            kind: "User".to_owned(),
            name: format!("system:bootstrap:{}", token.id),
            namespace: None,
        }]),
    };
    let post = PostParams::default();
    Api::namespaced(client.clone(), NAMESPACE)
        .create(&post, &keys)
        .await?;
    Api::namespaced(client.clone(), NAMESPACE)
        .create(&post, &role)
        .await?;
    Api::namespaced(client.clone(), NAMESPACE)
        .create(&post, &binding)
        .await?;
    Ok(())
}

/// Where other machines reach the cluster, and its authority.
async fn cluster_info(client: &kube::Client) -> Result<(String, String)> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "kube-public");
    let map = maps.get(CLUSTER_INFO).await?;
    let text = map.data.as_ref().and_then(|data| data.get("kubeconfig"));
    read_cluster_info(text.context("the ConfigMap cluster-info has no kubeconfig")?)
}

/// The server and the authority (PEM) that the kubeconfig in `cluster-info` names.
pub fn read_cluster_info(text: &str) -> Result<(String, String)> {
    use base64::Engine;
    let config = kube::config::Kubeconfig::from_yaml(text).context("the kubeconfig in cluster-info")?;
    let cluster = config.clusters.into_iter().next().and_then(|named| named.cluster);
    let cluster = cluster.context("cluster-info names no cluster")?;
    let ca = cluster.certificate_authority_data.unwrap_or_default();
    let ca = base64::engine::general_purpose::STANDARD
        .decode(ca.trim())
        .ok()
        .and_then(|ca| String::from_utf8(ca).ok())
        .filter(|ca| !ca.is_empty())
        .context("cluster-info has no certificate authority")?;
    let server = cluster.server.context("cluster-info names no server")?;
    Ok((server, ca))
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    id: String,
    /// Absent: it never ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires: Option<String>,
    usages: Vec<&'static str>,
    description: String,
}

async fn list(cluster: &Cluster, output: Option<Output>) -> Result<()> {
    let secrets: Api<Secret> = Api::namespaced(client(cluster).await?, NAMESPACE);
    let found = secrets
        .list(&ListParams::default().fields(&format!("type={TYPE}")))
        .await?;
    let shown: Vec<Shown> = found.items.iter().filter_map(shown).collect();
    if output == Some(Output::Json) {
        say!("{}", serde_json::to_string_pretty(&shown)?);
        return Ok(());
    }
    say!("{:<8} {:<22} {:<24} DESCRIPTION", "TOKEN", "EXPIRES", "USAGES");
    for one in shown {
        let expires = one.expires.as_deref().unwrap_or("never");
        say!(
            "{:<8} {expires:<22} {:<24} {}",
            one.id,
            one.usages.join(","),
            one.description
        );
    }
    Ok(())
}

/// What is shown of a token: never its secret.
fn shown(secret: &Secret) -> Option<Shown> {
    let text = |key: &str| {
        let value = secret.data.as_ref().and_then(|data| data.get(key));
        value.map(|value| String::from_utf8_lossy(&value.0).into_owned())
    };
    let usages = [
        ("usage-bootstrap-authentication", "authentication"),
        ("usage-bootstrap-signing", "signing"),
    ];
    Some(Shown {
        id: text("token-id")?,
        expires: text("expiration"),
        usages: usages
            .iter()
            .filter(|(key, _)| text(key).as_deref() == Some("true"))
            .map(|(_, name)| *name)
            .collect(),
        description: text("description").unwrap_or_default(),
    })
}

async fn delete(cluster: &Cluster, tokens: &[String]) -> Result<()> {
    let secrets: Api<Secret> = Api::namespaced(client(cluster).await?, NAMESPACE);
    for token in tokens {
        // An id, or the whole token.
        let id = token.split('.').next().unwrap_or_default();
        match secrets
            .delete(&format!("{PREFIX}{id}"), &DeleteParams::default())
            .await
        {
            Ok(_) => say!("token {id} is deleted"),
            Err(error) if error.is_not_found() => bail!("there is no token {id:?}"),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_well_formed_and_differ() {
        let (one, two) = (Token::generate().unwrap(), Token::generate().unwrap());
        assert_ne!(one.to_string(), two.to_string());
        assert_eq!(one.to_string().parse::<Token>().as_ref(), Ok(&one));
        assert!(!format!("{one:?}").contains(&one.secret), "{one:?}");
        for bad in [
            "",
            "abcdef",
            "abcde.0123456789abcdef",
            "abcdef.0123456789ABCDEF",
            "abcdef.0123456789abcde",
        ] {
            assert!(bad.parse::<Token>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_store_that_others_reach() {
        for (server, local) in [
            ("http://127.0.0.1:2379", true),
            ("localhost:2379", true),
            ("https://[::1]:2379", true),
            ("https://[fd00::1]:2379", false),
            ("https://etcd.example:2379", false),
            ("192.0.2.1:2379", false),
        ] {
            assert_eq!(is_local(server), local, "{server}");
        }
    }

    #[test]
    fn a_token_is_for_nodes_alone() {
        let token: Token = "abcdef.0123456789abcdef".parse().unwrap();
        let at = "2026-01-02T03:04:05Z".parse().unwrap();
        let secret = token.secret_object("a rack", Some(at));
        let data = secret.string_data.unwrap();
        assert_eq!(data["auth-extra-groups"], BOOTSTRAPPERS);
        assert_eq!(data["expiration"], "2026-01-02T03:04:05Z");
        assert_eq!(secret.metadata.name.as_deref(), Some("bootstrap-token-abcdef"));
        let forever = token.secret_object("", None).string_data.unwrap();
        assert!(!forever.contains_key("expiration") && !forever.contains_key("description"));
    }
}
