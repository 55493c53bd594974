//! The plugin's part in network policies: before a sandbox is attached, whoever enforces them on this node is told which
//! pod gets which addresses, and says when its policies are in force. A pod whose policies are not in force gets no network.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout_at};

use crate::result::CniError;

/// What the plugin sends, as one line of JSON. The answer is one line too: [`POLICY_IN_FORCE`], or why not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyRequest {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub addresses: Vec<IpAddr>,
}

pub const POLICY_IN_FORCE: &str = "in force";

/// At a start of the node the socket is not there before all policies have been read.
const PATIENCE: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(20);

/// Returns when the policies of the pod that is being attached are in force under `addresses`.
pub(super) async fn wait_in_force(socket: &Path, addresses: &[IpAddr]) -> Result<(), CniError> {
    let request = request(&std::env::var("CNI_ARGS").unwrap_or_default(), addresses)?;
    let line = format!("{}\n", serde_json::json!(request));
    let deadline = Instant::now() + PATIENCE;
    loop {
        // What breaks off on the way is asked again: skiff may just be restarted.
        let why = match timeout_at(deadline, ask(socket, &line)).await {
            Ok(Ok(answer)) if answer == POLICY_IN_FORCE => return Ok(()),
            Ok(Ok(answer)) if !answer.is_empty() => return Err(refused(&answer)),
            Ok(Ok(_)) => "it hung up".to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer in time".to_owned(),
        };
        if Instant::now() + POLL >= deadline {
            return Err(refused(&format!("{}: {why} (does skiff run?)", socket.display())));
        }
        tokio::time::sleep(POLL).await;
    }
}

fn refused(why: &str) -> CniError {
    CniError::new(
        CniError::TRY_AGAIN_LATER,
        format!("the pod's network policies are not in force: {why}"),
    )
}

async fn ask(socket: &Path, line: &str) -> std::io::Result<String> {
    let mut stream = UnixStream::connect(socket).await?;
    stream.write_all(line.as_bytes()).await?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).await?;
    Ok(answer.trim().to_owned())
}

/// Reads which pod it is from what runtimes pass.
fn request(args: &str, addresses: &[IpAddr]) -> Result<PolicyRequest, CniError> {
    let value = |key: &str| {
        let pairs = args.split(';').filter_map(|pair| pair.split_once('='));
        let found = pairs.into_iter().find(|(name, _)| *name == key);
        found.map(|(_, value)| value.to_owned()).ok_or_else(|| {
            CniError::new(
                CniError::INVALID_ENVIRONMENT,
                format!("CNI_ARGS does not have {key}: network policies need to know the pod"),
            )
        })
    };
    Ok(PolicyRequest {
        namespace: value("K8S_POD_NAMESPACE")?,
        name: value("K8S_POD_NAME")?,
        uid: value("K8S_POD_UID")?,
        addresses: addresses.to_vec(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pod_is_read_from_the_arguments() {
        let args = "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=web;K8S_POD_UID=u-1";
        let address = "10.0.0.1".parse().unwrap();
        let request = request(args, &[address]).unwrap();
        assert_eq!(
            (
                request.namespace.as_str(),
                request.name.as_str(),
                request.uid.as_str()
            ),
            ("ns", "web", "u-1")
        );
        let error = super::request("IgnoreUnknown=1", &[]).unwrap_err().to_string();
        assert!(error.contains("K8S_POD_NAMESPACE"), "{error}");
    }
}
