//! The marks of all servers, and how far the clocks of servers and nodes are apart. A machine that gives no answer is
//! named, and the trace goes on without it.

use crate::cluster::Cluster;
use crate::status::{INSTANCE, SERVER_LEASES};
use anyhow::{Context, Result};
use futures::future::join_all;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};
use serde::Serialize;
use skiff_client::{Remote, ServerAddress};
use skiff_pki::Pki;
use skiff_trace::{ClockOffset, Mark, Marks, Source, human, merge, now_us};
use std::collections::BTreeSet;
use std::time::Duration;

/// How long each machine may take.
const PATIENCE: Duration = Duration::from_secs(3);
/// A clock is asked this often, and the fastest answer counts.
const SAMPLES: usize = 3;
/// The most servers, and the most nodes, that are asked.
const MOST: usize = 16;
/// Begins the names of nodes as users.
const NODE_USER: &str = "system:node:";

/// A machine that has part in what is shown.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct TracedMachine {
    name: String,
    role: &'static str,
    /// How far its clock is ahead of this machine's, and by how much that may be wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    ahead_us: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error_us: Option<i64>,
    /// Why nothing is known of it.
    #[serde(skip_serializing_if = "String::is_empty")]
    message: String,
}

impl TracedMachine {
    fn new(name: &str, role: &'static str, clock: &Result<ClockOffset>) -> TracedMachine {
        let known = clock.as_ref().ok();
        TracedMachine {
            name: name.to_owned(),
            role,
            ahead_us: known.map(|clock| clock.ahead_us),
            error_us: known.map(|clock| clock.error_us),
            message: match clock {
                Ok(_) => String::new(),
                Err(error) => format!("{error:#}"),
            },
        }
    }

    /// For people.
    pub(super) fn describe(&self) -> String {
        let clock = match (self.ahead_us, self.error_us) {
            (Some(ahead), Some(error)) => format!("clock {}", offset(ahead, error)),
            _ if self.role == "server" => {
                format!("gives no answer, its part is missing: {}", self.message)
            }
            _ => format!("clock not known: {}", self.message),
        };
        format!("  {:<20} {:<7} {clock}", self.name, self.role)
    }
}

/// `1.20 s ahead, ± 0.31 ms`.
fn offset(ahead_us: i64, error_us: i64) -> String {
    let direction = if ahead_us < 0 { "behind" } else { "ahead" };
    let amount = i64::try_from(ahead_us.unsigned_abs()).unwrap_or(i64::MAX);
    format!("{} {direction}, ± {}", human(amount), human(error_us))
}

/// One API server, by itself.
struct TracedServer {
    name: String,
    client: Client,
}

/// What the servers said.
pub(super) struct Collected {
    /// By this machine's clock.
    pub(super) marks: Vec<Mark>,
    /// All servers, this one first.
    pub(super) servers: Vec<TracedMachine>,
}

/// Asks all servers for their marks.
pub(super) async fn collect(cluster: &Cluster, own: &Client) -> Result<Collected> {
    let servers = servers(cluster, own)
        .await
        .context("the server does not answer; is the cluster up?")?;
    let answers = join_all(servers.iter().map(|server| async {
        // The clock first: reading many marks takes time.
        let clock = clock_of(&server.client, "/debug/skiff/trace?clock", |text| {
            let told: Marks = serde_json::from_str(text)?;
            told.now_us.context("this server is too old to say its clock")
        })
        .await?;
        Ok((clock, ask_marks(&server.client).await?))
    }))
    .await;
    let (mut sources, mut machines) = (Vec::new(), Vec::new());
    for (server, answer) in servers.iter().zip(answers) {
        let clock = match answer {
            Ok((clock, marks)) => {
                sources.push(Source {
                    server: server.name.clone(),
                    ahead_us: clock.ahead_us,
                    marks,
                });
                Ok(clock)
            }
            Err(error) => Err(error),
        };
        machines.push(TracedMachine::new(&server.name, "server", &clock));
    }
    if sources.is_empty() {
        anyhow::bail!("no server answers; is the cluster up?");
    }
    Ok(Collected {
        marks: merge(sources),
        servers: machines,
    })
}

/// The nodes among these users, with their clocks; those that are servers are known already.
pub(super) async fn nodes(
    client: &Client,
    users: impl Iterator<Item = &str>,
    known: &[TracedMachine],
) -> Vec<TracedMachine> {
    let names: BTreeSet<&str> = users
        .filter_map(|user| user.strip_prefix(NODE_USER))
        .filter(|name| known.iter().all(|machine| machine.name != *name))
        .take(MOST)
        .collect();
    let asked = names.into_iter().map(|name| async move {
        let path = format!("/api/v1/nodes/{name}/proxy/skiff/clock");
        let clock = clock_of(client, &path, |text| Ok(text.trim().parse()?)).await;
        TracedMachine::new(name, "node", &clock)
    });
    join_all(asked).await
}

/// The servers that have a lease, this machine's first. Leases may be old: whoever does not answer is named.
async fn servers(cluster: &Cluster, own: &Client) -> Result<Vec<TracedServer>> {
    let leases = Api::<Lease>::namespaced(own.clone(), "kube-system");
    let of_servers = ListParams::default().labels(SERVER_LEASES);
    let listed = tokio::time::timeout(PATIENCE, leases.list(&of_servers))
        .await
        .context("no answer")??;
    let id = cluster.server_id()?;
    let (own_leases, others): (Vec<Lease>, Vec<Lease>) = listed
        .items
        .into_iter()
        .partition(|lease| lease.annotations().get(INSTANCE) == Some(&id));
    let host = |lease: &Lease| lease.labels().get("kubernetes.io/hostname").cloned();
    let mut servers = vec![TracedServer {
        name: own_leases
            .first()
            .and_then(host)
            .unwrap_or_else(|| "this server".to_owned()),
        client: own.clone(),
    }];
    if others.is_empty() {
        return Ok(servers);
    }
    let pki = Pki::open(&cluster.pki_dir())?;
    let admin = pki.client("admin", "kubernetes-admin", Some("system:masters"))?;
    let tls = skiff_pki::api_client_config(pki.ca_certificate(), Some(&admin))?;
    for lease in others.iter().take(MOST) {
        let address = lease.annotations().get("kubernetes.io/peer-advertise-address");
        let Some(address) = address.and_then(|address| address.parse::<ServerAddress>().ok()) else {
            continue;
        };
        servers.push(TracedServer {
            name: host(lease).unwrap_or_else(|| address.to_string()),
            client: Remote::new(vec![address], tls.clone()).client("skiff-trace"),
        });
    }
    Ok(servers)
}

async fn ask(client: &Client, path: &str) -> Result<String> {
    let request = http::Request::get(path).body(Vec::new())?;
    let answer = tokio::time::timeout(PATIENCE, client.request_text(request)).await;
    Ok(answer.context("no answer")??)
}

async fn ask_marks(client: &Client) -> Result<Vec<Mark>> {
    let text = ask(client, "/debug/skiff/trace").await?;
    let Marks { marks, .. } = serde_json::from_str(&text).context("the server sent no marks")?;
    Ok(marks)
}

/// Asks a machine for its time; the first answer also made the connection, so the fastest one counts.
async fn clock_of(client: &Client, path: &str, read: fn(&str) -> Result<i64>) -> Result<ClockOffset> {
    let mut best: Option<ClockOffset> = None;
    for _ in 0..SAMPLES {
        let sent = now_us();
        let text = ask(client, path).await?;
        let measured = ClockOffset::measured(sent, read(&text)?, now_us());
        if best.is_none_or(|best| measured.error_us < best.error_us) {
            best = Some(measured);
        }
    }
    best.context("the clock was not asked")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_read_well() {
        let check = |ahead, error, expected: &str| assert_eq!(offset(ahead, error), expected);
        check(3_600_000_000, 310, "3600.0 s ahead, ± 0.31 ms");
        check(-1_250_000, 2_000, "1.25 s behind, ± 2.00 ms");
        check(0, 0, "0.00 ms ahead, ± 0.00 ms");
        check(i64::MIN, 0, "9223372036854.7 s behind, ± 0.00 ms");
    }
}
