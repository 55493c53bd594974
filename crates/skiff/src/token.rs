//! `skiff token`: the bootstrap tokens by which machines join.

use crate::cli::{Output, TokenArgs, TokenCommand};
use crate::cluster::Cluster;
use crate::daemon::{client, existing};
use crate::joining::{BOOTSTRAPPERS, CLUSTER_INFO};
use anyhow::{Context, Result, bail};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde::Serialize;
use skiff_client::ErrorExt;
use std::time::Duration;

const TYPE: &str = "bootstrap.kubernetes.io/token";
const PREFIX: &str = "bootstrap-token-";
const NAMESPACE: &str = "kube-system";

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
fn random(length: usize) -> Result<String> {
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
        TokenCommand::Create { ttl, description } => create(&cluster, *ttl, description).await,
        TokenCommand::List { output } => list(&cluster, *output).await,
        TokenCommand::Delete { tokens } => delete(&cluster, tokens).await,
    }
}

async fn create(cluster: &Cluster, ttl: Duration, description: &str) -> Result<()> {
    let client = client(cluster).await?;
    let (server, ca) = cluster_info(&client).await?;
    let hash = skiff_pki::authority_hash(&ca)?;
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
    say!("skiff join {server} --token {token} --ca-hash {hash}");
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
