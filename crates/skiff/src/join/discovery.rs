//! Finding the cluster behind a URL and making sure that it is the right one, as kubeadm does: `cluster-info` is read
//! without trust, its signature is checked with the token, and its authority by the hash that the user brought. From
//! then on only servers of that authority are spoken to.

use super::problems::{self, Problem};
use crate::token::{Token, read_cluster_info};
use anyhow::{Context, Result, bail};
use aws_lc_rs::hmac;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::Request;
use http_body_util::{BodyExt, Limited};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::client::Body;
use serde_json::Value;
use skiff_client::{Remote, ServerAddress};
use std::time::Duration;

const CLUSTER_INFO: &str = "/api/v1/namespaces/kube-public/configmaps/cluster-info";
/// A server that is not known yet sends no more than this.
const MAX_ANSWER: usize = 1 << 20;
/// So long a new token may take to be known by the signer.
const SIGNER_PATIENCE: Duration = Duration::from_secs(5);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// A cluster that proved who it is.
#[derive(Debug)]
pub struct Found {
    /// PEM of its authority.
    pub ca: String,
    /// The server that was asked, and the one that the cluster names.
    pub servers: Vec<ServerAddress>,
}

/// Reads `cluster-info` and checks it.
pub async fn discover(server: &ServerAddress, token: &Token, ca_hash: &str) -> Result<Found> {
    let untrusting = skiff_pki::insecure_client_config(None)?;
    let remote = Remote::new(vec![server.clone()], untrusting);
    if let Err(error) = remote.check().await {
        bail!(problems::connect(&error));
    }
    let began = tokio::time::Instant::now();
    loop {
        let map = read(&remote, server).await?;
        let data = map.data.unwrap_or_default();
        let kubeconfig = data.get("kubeconfig").context("cluster-info has no kubeconfig")?;
        match check_signature(
            kubeconfig,
            data.get(&format!("jws-kubeconfig-{}", token.id)),
            token,
        ) {
            Ok(()) => return trusted(server, kubeconfig, ca_hash),
            // The signer may not have seen a new token yet.
            Err(Problem::UnknownToken) if began.elapsed() < SIGNER_PATIENCE => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(problem) => bail!(problem),
        }
    }
}

async fn read(remote: &Remote, server: &ServerAddress) -> Result<ConfigMap> {
    let request = Request::get(CLUSTER_INFO).body(Body::empty())?;
    let client = remote.client("skiff-join");
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, client.send(request)).await;
    let answer = answer.with_context(|| format!("{server} does not answer"))?;
    let answer = answer.with_context(|| format!("{server} does not answer as an API server"))?;
    if let Some(problem) = problems::clock(date(answer.headers()), Timestamp::now()) {
        bail!(problem);
    }
    let code = answer.status();
    let body = Limited::new(answer.into_body(), MAX_ANSWER).collect();
    let body = tokio::time::timeout(ANSWER_TIMEOUT, body).await;
    let body = body.with_context(|| format!("{server} does not answer"))?;
    let bytes = body
        .map_err(|error| anyhow::anyhow!("{server}: {error}"))?
        .to_bytes();
    if !code.is_success() {
        bail!(problems::no_cluster_info(server, code.as_u16()));
    }
    serde_json::from_slice(&bytes).with_context(|| format!("{server} does not answer as an API server"))
}

fn date(headers: &http::HeaderMap) -> Option<Timestamp> {
    let text = headers.get(http::header::DATE)?.to_str().ok()?;
    jiff::fmt::rfc2822::parse(text)
        .ok()
        .map(|zoned| zoned.timestamp())
}

/// The detached JWS: HS256 over the kubeconfig with the token's secret.
fn check_signature(kubeconfig: &str, signature: Option<&String>, token: &Token) -> Result<(), Problem> {
    let signature = signature.ok_or(Problem::UnknownToken)?;
    let bad = || Problem::WrongToken;
    let mut parts = signature.split('.');
    let (Some(header), Some(""), Some(tag), None) = (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(bad());
    };
    let decoded = URL_SAFE_NO_PAD.decode(header).map_err(|_| bad())?;
    let fields: Value = serde_json::from_slice(&decoded).map_err(|_| bad())?;
    if fields["alg"] != "HS256" || fields["kid"] != token.id.as_str() {
        return Err(bad());
    }
    let tag = URL_SAFE_NO_PAD.decode(tag).map_err(|_| bad())?;
    let key = hmac::Key::new(hmac::HMAC_SHA256, token.secret.as_bytes());
    let signed = format!("{header}.{}", URL_SAFE_NO_PAD.encode(kubeconfig));
    hmac::verify(&key, signed.as_bytes(), &tag).map_err(|_| bad())
}

/// What the signed document says, if its authority is the one that is expected.
fn trusted(server: &ServerAddress, kubeconfig: &str, ca_hash: &str) -> Result<Found> {
    let (named, ca) = read_cluster_info(kubeconfig)?;
    let ca = match skiff_pki::pinned_authorities(&ca, ca_hash)? {
        Ok(ca) => ca,
        Err(found) if found.is_empty() => bail!("cluster-info has no certificate authority"),
        Err(found) => bail!(Problem::OtherAuthority {
            found: found.join(", "),
            expected: ca_hash.to_owned()
        }),
    };
    let named: ServerAddress = named.parse().context("cluster-info")?;
    let mut servers = vec![server.clone()];
    if named != *server {
        servers.push(named);
    }
    Ok(Found { ca, servers })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(text: &str) -> Token {
        text.parse().unwrap()
    }

    fn sign(content: &str, token: &Token, header: &str) -> String {
        let header = URL_SAFE_NO_PAD.encode(header);
        let key = hmac::Key::new(hmac::HMAC_SHA256, token.secret.as_bytes());
        let tag = hmac::sign(
            &key,
            format!("{header}.{}", URL_SAFE_NO_PAD.encode(content)).as_bytes(),
        );
        format!("{header}..{}", URL_SAFE_NO_PAD.encode(tag.as_ref()))
    }

    #[test]
    fn who_does_not_know_the_token_cannot_sign() {
        let (ours, theirs) = (token("abcdef.0123456789abcdef"), token("abcdef.0000000000000000"));
        let header = r#"{"alg":"HS256","kid":"abcdef"}"#;
        let good = sign("content", &ours, header);
        assert_eq!(check_signature("content", Some(&good), &ours), Ok(()));
        assert_eq!(
            check_signature("content", None, &ours),
            Err(Problem::UnknownToken)
        );
        for bad in [
            sign("other content", &ours, header),
            sign("content", &theirs, header),
            sign("content", &ours, r#"{"alg":"HS256","kid":"ghijkl"}"#),
            sign("content", &ours, r#"{"alg":"none","kid":"abcdef"}"#),
            good.replace("..", "."),
            format!("{good}.x"),
            String::new(),
        ] {
            let checked = check_signature("content", Some(&bad), &ours);
            assert_eq!(checked, Err(Problem::WrongToken), "{bad}");
        }
    }

    #[test]
    fn the_authority_is_pinned() {
        let dir = tempfile::tempdir().unwrap();
        let pki = skiff_pki::Pki::open(dir.path()).unwrap();
        let kubeconfig =
            serde_json::json!({"clusters": [{"name": "", "cluster": {"server": "https://192.0.2.1:6443",
            "certificate-authority-data": crate::joining::base64(pki.ca_certificate().as_bytes())}}]})
            .to_string();
        let server: ServerAddress = "https://api.example:6443".parse().unwrap();
        let hash = skiff_pki::authority_hash(pki.ca_certificate()).unwrap();
        let found = trusted(&server, &kubeconfig, &hash).unwrap();
        let servers: Vec<String> = found.servers.iter().map(ServerAddress::to_string).collect();
        assert_eq!(servers, ["https://api.example:6443", "https://192.0.2.1:6443"]);
        let other = format!("sha256:{}", "0".repeat(64));
        let error = trusted(&server, &kubeconfig, &other).unwrap_err().to_string();
        assert!(error.contains(&hash) && error.contains(&other), "{error}");
    }
}
