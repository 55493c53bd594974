//! `skiff certs`: which certificates a cluster has, when they end, and their renewal. Works on the files, whether or not
//! the cluster is running; a server that runs takes over what is renewed.

use crate::certificates::RENEWAL_INTERVAL;
use crate::cli::{CertsArgs, CertsCommand, Output};
use crate::daemon::existing;
use crate::preflight;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use skiff_pki::{CertificateFacts, Pki};
use std::path::Path;

/// One certificate, as `-o json` prints it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    name: String,
    common_name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    organization: Option<String>,
    usage: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    hosts: Vec<String>,
    not_before: String,
    not_after: String,
    /// From when on a running server renews it.
    renew_at: String,
    state: &'static str,
    #[serde(skip)]
    left: String,
}

pub fn run(args: &CertsArgs) -> Result<()> {
    preflight::check_root()?;
    let cluster = existing(&args.cluster)?;
    let folder = cluster.pki_dir();
    match &args.command {
        None => show(&folder, args.output),
        Some(CertsCommand::Renew { .. }) if cluster.agent => bail!(
            "the agent renews the certificates of a node by itself; for new ones at once, run `skiff down{0}` and the line of `skiff token create` again",
            cluster.name_flag()
        ),
        Some(CertsCommand::Renew { names }) => {
            for name in renew(&folder, names)? {
                println!("renewed {name}");
            }
            match cluster.running()? {
                Some(_) => println!(
                    "The running server uses them within {} seconds.",
                    RENEWAL_INTERVAL.as_secs()
                ),
                None => println!("The next `skiff up` uses them."),
            }
            Ok(())
        }
    }
}

fn show(folder: &Path, output: Option<Output>) -> Result<()> {
    let now = jiff::Timestamp::now().as_second();
    let certificates: Vec<Shown> = list(folder)?
        .into_iter()
        .map(|(name, facts)| Shown::new(name, facts, now))
        .collect();
    if output == Some(Output::Json) {
        println!("{}", serde_json::to_string_pretty(&certificates)?);
        return Ok(());
    }
    let width = |of: fn(&Shown) -> &str| {
        certificates
            .iter()
            .map(|shown| of(shown).len())
            .max()
            .unwrap_or(0)
    };
    let (names, subjects) = (
        width(|shown| &shown.name).max(4),
        width(|shown| &shown.common_name).max(7),
    );
    println!(
        "{:names$}  {:subjects$}  {:9}  {:20}  {:>13}  RENEWED FROM",
        "NAME", "SUBJECT", "USE", "ENDS", "LEFT"
    );
    for shown in &certificates {
        println!(
            "{:names$}  {:subjects$}  {:9}  {:20}  {:>13}  {}",
            shown.name, shown.common_name, shown.usage, shown.not_after, shown.left, shown.renew_at
        );
    }
    Ok(())
}

fn list(folder: &Path) -> Result<Vec<(String, CertificateFacts)>> {
    Pki::list(folder).with_context(|| format!("cannot read the certificates in {}", folder.display()))
}

impl Shown {
    fn new(name: String, facts: CertificateFacts, now: i64) -> Shown {
        let time = |seconds: i64| {
            jiff::Timestamp::from_second(seconds)
                .map_or_else(|_| seconds.to_string(), skiff_meta::time::format_seconds)
        };
        let state = if now < facts.not_before {
            "notYetValid"
        } else if now > facts.not_after {
            "expired"
        } else {
            "valid"
        };
        Shown {
            usage: match (facts.is_authority, facts.for_servers) {
                (true, _) => "authority",
                (false, true) => "server",
                (false, false) => "client",
            },
            left: match state {
                "valid" => skiff_meta::time::human_duration(facts.not_after - now),
                "expired" => "expired".to_owned(),
                _ => "not yet valid".to_owned(),
            },
            not_before: time(facts.not_before),
            not_after: time(facts.not_after),
            renew_at: time(facts.renew_at),
            state,
            name,
            common_name: facts.common_name,
            organization: facts.organization,
            hosts: facts.hosts,
        }
    }
}

/// Renews these certificates, or all; authorities only if they are named or due. Returns what was renewed.
fn renew(folder: &Path, names: &[String]) -> Result<Vec<String>> {
    let before = list(folder)?;
    if let Some(unknown) = names
        .iter()
        .find(|name| before.iter().all(|(known, _)| known != *name))
    {
        let known: Vec<&str> = before.iter().map(|(name, _)| name.as_str()).collect();
        bail!(
            "there is no certificate {unknown:?}; there are {}",
            known.join(", ")
        );
    }
    // Opening renews the cluster's authority if it is due.
    let mut pki = Pki::open(folder)?;
    pki.front_proxy()?;
    for (name, _) in before
        .iter()
        .filter(|(name, facts)| facts.is_authority && names.contains(name))
    {
        pki.renew_authority(name)?;
    }
    for (name, _) in before.iter().filter(|(_, facts)| !facts.is_authority) {
        if names.is_empty() || names.contains(name) {
            pki.renewed(name, true)?;
        }
    }
    let after = list(folder)?;
    let changed = after.into_iter().filter(|new| !before.contains(new));
    Ok(changed.map(|(name, _)| name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::{Duration, SystemTime};

    #[test]
    fn renewal_heals_a_wrong_clock_and_takes_names() {
        let dir = tempfile::tempdir().unwrap();
        let long_ago = || SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        let pki = Pki::open_at(dir.path(), Arc::new(long_ago)).unwrap();
        pki.client("admin", "kubernetes-admin", None).unwrap();
        pki.front_proxy().unwrap();
        let now = jiff::Timestamp::now().as_second();
        assert!(
            list(dir.path())
                .unwrap()
                .iter()
                .all(|(_, facts)| !facts.is_valid(now))
        );
        let mut renewed = renew(dir.path(), &[]).unwrap();
        renewed.sort();
        assert_eq!(renewed, ["admin", "ca", "front-proxy-ca", "front-proxy-client"]);
        assert!(
            list(dir.path())
                .unwrap()
                .iter()
                .all(|(_, facts)| facts.is_valid(now))
        );
        assert_eq!(renew(dir.path(), &["ca".to_owned()]).unwrap(), ["ca"]);
        assert_eq!(renew(dir.path(), &["admin".to_owned()]).unwrap(), ["admin"]);
        let error = renew(dir.path(), &["nope".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("there are ca, front-proxy-ca, admin"), "{error}");
    }
}
