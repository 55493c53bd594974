//! `skiff net check`: walks the way of a packet from a pod, step by step, and names what stops it. It asks the kernel of this
//! node what its maps say, the API for what is on other nodes, and changes nothing; from a pod of this node it asks
//! cluster DNS and opens a TCP connection, as the pod would.

mod dns;
mod inside;
mod names;
mod objects;
mod target;
mod walk;
mod way;

use std::path::PathBuf;

use futures::future::BoxFuture;
use serde::Serialize;

pub use target::{ObjectName, Source, Target, TargetError};
pub use walk::walk;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Proxy(#[from] crate::proxy::Error),
    #[error(transparent)]
    Policy(#[from] crate::policy::Error),
    #[error("netlink: {0}")]
    Netlink(#[from] nlink::Error),
}

/// Finds the network namespace of a pod of this node by its uid.
pub type FindNamespace = Box<dyn Fn(String) -> BoxFuture<'static, Option<PathBuf>> + Send + Sync>;

pub struct CheckConfig {
    /// The node that this machine is.
    pub node_name: String,
    /// Of objects that are named without one.
    pub namespace: String,
    /// nftables tables of the service proxy and of network policies.
    pub proxy_table: String,
    pub policy_table: String,
    pub cluster_domain: String,
    pub find_namespace: FindNamespace,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    Passes,
    Stops,
    /// It cannot be seen from this machine.
    Unseen,
}

/// One step on the way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Step {
    pub step: &'static str,
    /// The endpoint that the step is about, if it is about one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    pub outcome: Outcome,
    pub detail: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Verdict {
    Passes,
    /// Some endpoints are reached, and some are not.
    Partly,
    Stopped,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Walk {
    pub from: String,
    pub to: String,
    pub protocol: &'static str,
    pub verdict: Verdict,
    pub steps: Vec<Step>,
}

/// The step at the end, which is what really happens.
const CONNECTION: &str = "connection";

/// What the steps come to. A connection that was made or refused counts more than what was to be expected.
fn conclude(steps: &[Step]) -> Verdict {
    let stops = |step: &&Step| step.outcome == Outcome::Stops;
    let mut general = steps.iter().filter(|step| step.endpoint.is_none());
    let connection = steps.iter().find(|step| step.step == CONNECTION);
    if general.any(|step| stops(&step)) {
        return Verdict::Stopped;
    }
    let endpoints: std::collections::BTreeSet<&String> =
        steps.iter().filter_map(|step| step.endpoint.as_ref()).collect();
    let stopped = endpoints.iter().filter(|endpoint| {
        let of = |step: &&Step| step.endpoint.as_ref() == Some(**endpoint);
        steps.iter().filter(of).any(|step| stops(&step))
    });
    match stopped.count() {
        0 => Verdict::Passes,
        count if count == endpoints.len() && connection.is_none() => Verdict::Stopped,
        _ => Verdict::Partly,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steps_come_to() {
        use Outcome::{Passes, Stops, Unseen};
        let step = |step: &'static str, endpoint: Option<&str>, outcome| Step {
            step,
            endpoint: endpoint.map(str::to_owned),
            outcome,
            detail: String::new(),
        };
        let check = |steps: &[Step], expected| assert_eq!(conclude(steps), expected, "{steps:?}");
        let (a, b) = (Some("a"), Some("b"));
        check(
            &[step("dns", None, Passes), step("route", a, Unseen)],
            Verdict::Passes,
        );
        check(
            &[step("dns", None, Stops), step("route", a, Passes)],
            Verdict::Stopped,
        );
        check(
            &[step("egress policy", a, Stops), step("egress policy", b, Passes)],
            Verdict::Partly,
        );
        check(
            &[step("egress policy", a, Stops), step("egress policy", b, Stops)],
            Verdict::Stopped,
        );
        check(
            &[step("egress policy", a, Passes), step(CONNECTION, None, Stops)],
            Verdict::Stopped,
        );
    }
}
