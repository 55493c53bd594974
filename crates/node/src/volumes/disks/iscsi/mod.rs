//! iSCSI by the host's `iscsiadm`: discovery, a session for each portal, the disk, and the way back. The order of the calls is upstream's.

mod names;
mod sessions;

pub use names::{Chap, Target};

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::host::{Host, Output, names_in};
use super::note::{Made, Note, Source};
use super::{Disks, scsi};
use crate::volumes::blocking;
use sessions::{Session, same_portal, sessions_with};

/// With so many of several portals it is enough, after `FEW_ATTEMPTS`.
const ENOUGH_PATHS: usize = 2;
const FEW_ATTEMPTS: u32 = 2;
const MAX_ATTEMPTS: u32 = 5;
/// After this no other portal is tried. Others wait for the target meanwhile, and so does the end of the pod.
const MAX_SEARCH: std::time::Duration = std::time::Duration::from_secs(300);
/// What `iscsiadm` ends with: there is such a session, there is none, there is nothing of that name.
const SESSION_EXISTS: i32 = 15;
const NO_SESSION: i32 = 2;
const NOTHING_FOUND: i32 = 21;

async fn admin(host: &Host, arguments: &[&str]) -> Result<Output, String> {
    let output = host.run("iscsiadm", arguments).await;
    output.map_err(|error| format!("iscsi: {error}"))
}

/// One that must succeed. The arguments may be secret, and are not told.
async fn must(host: &Host, what: &str, arguments: &[&str]) -> Result<Output, String> {
    let output = admin(host, arguments).await?;
    match output.succeeded() {
        true => Ok(output),
        false => Err(format!("iscsi: failed to {what}: {}", output.failure())),
    }
}

/// One that takes something away, which may be gone already.
async fn must_be_gone(host: &Host, what: &str, arguments: &[&str]) -> Result<(), String> {
    let output = admin(host, arguments).await?;
    match output.code {
        Some(0 | NO_SESSION | NOTHING_FOUND) => Ok(()),
        _ => Err(format!("iscsi: failed to {what}: {}", output.failure())),
    }
}

/// Brings the disk to the machine by as many portals as answer. Returns its device, or the multipath device above.
pub async fn attach(
    disks: &Arc<Disks>,
    place: &str,
    target: &Target,
    chap: &Chap,
) -> Result<PathBuf, String> {
    let attached = attach_by_all(disks, place, target, chap).await;
    attached.map_err(|error| {
        let transports = disks.host().sys.join("class/iscsi_transport");
        match names_in(&transports).is_empty() {
            true => format!(
                "{error}\nthis node's kernel has no iSCSI transport ({} is empty): load the module iscsi_tcp",
                transports.display()
            ),
            false => error,
        }
    })
}

async fn attach_by_all(
    disks: &Arc<Disks>,
    place: &str,
    target: &Target,
    chap: &Chap,
) -> Result<PathBuf, String> {
    let host = disks.host();
    let what = format!("read iface {}", target.template);
    let shown = must(
        host,
        &what,
        &["-m", "iface", "-I", &target.template, "-o", "show"],
    )
    .await?;
    let transport = transport_of(&shown.stdout)
        .ok_or_else(|| format!("iscsi: could not parse iface file for {}", target.template))?;
    if let Some(initiator) = &target.initiator {
        clone_iface(host, target, initiator, &shown.stdout).await?;
    }
    let mut found: BTreeMap<&str, PathBuf> = BTreeMap::new();
    let mut last_error = String::new();
    let began = tokio::time::Instant::now();
    for attempt in 1..=MAX_ATTEMPTS {
        for portal in &target.portals {
            if found.contains_key(portal.as_str()) || began.elapsed() >= MAX_SEARCH {
                continue;
            }
            match by_portal(disks, place, target, chap, portal, &transport).await {
                Ok(link) => {
                    found.insert(portal, link);
                }
                Err(error) => last_error = error,
            }
        }
        if found.is_empty() {
            break;
        }
        let is_enough = found.len() >= ENOUGH_PATHS && attempt >= FEW_ATTEMPTS;
        if found.len() == target.portals.len() || is_enough {
            break;
        }
    }
    let Some(first) = target
        .portals
        .iter()
        .find_map(|portal| found.get(portal.as_str()))
    else {
        return Err(format!(
            "failed to get any path for iscsi disk, last err seen:\n{last_error}"
        ));
    };
    if !last_error.is_empty() {
        tracing::warn!(
            disk = place,
            error = last_error,
            "not all portals of a disk answer"
        );
    }
    let links: Vec<PathBuf> = found.values().cloned().collect();
    let above = multipath(host, links, target.portals.len() > 1).await;
    let device = above.or_else(|| host.resolve(first));
    device.ok_or_else(|| format!("iscsi: {} leads to no device", first.display()))
}

/// With several portals there should be a device that joins the paths, where the machine has multipath.
async fn multipath(host: &Arc<Host>, links: Vec<PathBuf>, wait: bool) -> Option<PathBuf> {
    let began = tokio::time::Instant::now();
    loop {
        let (searched, links) = (host.clone(), links.clone());
        let above = blocking(move || links.iter().find_map(|link| scsi::multipath_of(&searched, link))).await;
        if above.is_some() || !wait || began.elapsed() >= host.patience.multipath {
            return above;
        }
        tokio::time::sleep(host.patience.poll).await;
    }
}

/// Logs in by one portal, if nobody has, and waits for the disk. Returns its link.
async fn by_portal(
    disks: &Arc<Disks>,
    place: &str,
    target: &Target,
    chap: &Chap,
    portal: &str,
    transport: &str,
) -> Result<PathBuf, String> {
    let host = disks.host();
    let number = match session_by(host, target, portal).await {
        Some(session) => session.host,
        None => {
            log_in(disks, place, target, chap, portal).await?;
            let session = session_by(host, target, portal).await;
            session
                .ok_or_else(|| format!("iscsi: no SCSI host for portal {portal} after logging in"))?
                .host
        }
    };
    let (scanned, lun) = (host.clone(), target.lun);
    blocking(move || scsi::scan_lun(&scanned, number, lun))
        .await
        .map_err(|error| format!("iscsi: cannot scan for lun {lun}: {error}"))?;
    wait_for_link(host, target, portal, transport).await
}

async fn session_by(host: &Arc<Host>, target: &Target, portal: &str) -> Option<Session> {
    let (host, iqn, portal) = (host.clone(), target.iqn.clone(), portal.to_owned());
    blocking(move || {
        sessions_with(&host, &iqn)
            .into_iter()
            .find(|one| one.is_by(&portal))
    })
    .await
}

async fn log_in(
    disks: &Arc<Disks>,
    place: &str,
    target: &Target,
    chap: &Chap,
    portal: &str,
) -> Result<(), String> {
    let host = disks.host();
    let discovery = [
        "-m",
        "discoverydb",
        "-t",
        "sendtargets",
        "-p",
        portal,
        "-I",
        &target.iface,
    ];
    let node = ["-m", "node", "-p", portal, "-T", &target.iqn, "-I", &target.iface];
    // There may be such a record.
    admin(host, &with(&discovery, &["-o", "new"])).await?;
    if let Some(settings) = &chap.discovery {
        let method = [
            "-o",
            "update",
            "-n",
            "discovery.sendtargets.auth.authmethod",
            "-v",
            "CHAP",
        ];
        must(host, "update discoverydb with CHAP", &with(&discovery, &method)).await?;
        for (key, value) in settings {
            let what = format!("update discoverydb key {key:?}");
            must(
                host,
                &what,
                &with(&discovery, &["-o", "update", "-n", key, "-v", value]),
            )
            .await?;
        }
    }
    let what = format!("sendtargets to portal {portal}");
    let discovered = must(host, &what, &with(&discovery, &["--discover"])).await;
    if let Err(error) = discovered {
        let _ = admin(host, &with(&discovery, &["-o", "delete"])).await;
        return Err(error);
    }
    // Only the disk that is asked for is to appear. Older versions do not know the setting.
    let manual = ["-o", "update", "-n", "node.session.scan", "-v", "manual"];
    let scan = admin(host, &with(&node, &manual)).await?;
    if !scan.succeeded() {
        tracing::warn!(
            portal,
            said = scan.failure(),
            "iscsiadm does not know node.session.scan: all disks of the target appear"
        );
    }
    if let Some(settings) = &chap.session {
        let method = ["-o", "update", "-n", "node.session.auth.authmethod", "-v", "CHAP"];
        must(host, "update node with CHAP", &with(&node, &method)).await?;
        for (key, value) in settings {
            let what = format!("update node session key {key:?}");
            must(
                host,
                &what,
                &with(&node, &["-o", "update", "-n", key, "-v", value]),
            )
            .await?;
        }
    }
    let made = Made {
        portal: portal.to_owned(),
        iface: target.iface.clone(),
        own_iface: target.has_own_iface(),
    };
    let noted = made.clone();
    disks
        .change(place, |note| {
            if !note.made.contains(&noted) {
                note.made.push(noted);
            }
        })
        .await?;
    let output = admin(host, &with(&node, &["--login"])).await?;
    if !output.succeeded() {
        disks
            .change(place, |note| note.made.retain(|one| *one != made))
            .await?;
        if output.code == Some(SESSION_EXISTS) {
            // Somebody else was faster, and has it.
            return Ok(());
        }
        let _ = admin(host, &with(&node, &["-o", "delete"])).await;
        return Err(format!("iscsi: failed to attach disk: {}", output.failure()));
    }
    // So that a machine does not wait for it when it boots.
    let startup = ["-o", "update", "-n", "node.startup", "-v", "manual"];
    let any_iface = ["-m", "node", "-p", portal, "-T", &target.iqn];
    if let Ok(output) = admin(host, &with(&any_iface, &startup)).await
        && !output.succeeded()
    {
        tracing::warn!(
            portal,
            said = output.failure(),
            "cannot set node.startup to manual"
        );
    }
    Ok(())
}

fn with<'a>(arguments: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [arguments, more].concat()
}

/// How `udev` names the disk. Other transports than TCP have the adapter's address before that.
fn is_link(name: &str, target: &Target, portal: &str, transport: &str) -> bool {
    let address = portal.replace(['[', ']'], "");
    let expected = format!("ip-{address}-iscsi-{}-lun-{}", target.iqn, target.lun);
    match transport {
        "tcp" => name == expected,
        _ => name
            .strip_suffix(&expected)
            .is_some_and(|adapter| adapter.starts_with("pci-") && adapter.len() > "pci--".len()),
    }
}

async fn wait_for_link(
    host: &Arc<Host>,
    target: &Target,
    portal: &str,
    transport: &str,
) -> Result<PathBuf, String> {
    let folder = host.dev.join("disk/by-path");
    let began = tokio::time::Instant::now();
    loop {
        let (searched, names) = (host.clone(), folder.clone());
        let (target, portal, transport) = (target.clone(), portal.to_owned(), transport.to_owned());
        let link = blocking(move || {
            let mut names = names_in(&names).into_iter();
            let name = names.find(|name| is_link(name, &target, &portal, &transport))?;
            let link = searched.dev.join("disk/by-path").join(name);
            searched.resolve(&link).is_some().then_some(link)
        });
        if let Some(link) = link.await {
            return Ok(link);
        }
        if began.elapsed() >= host.patience.device {
            break;
        }
        tokio::time::sleep(host.patience.poll).await;
    }
    Err(format!(
        "Timed out waiting for device at path {}/…ip-{}-iscsi-{}-lun-{} after {}s",
        folder.display(),
        portal.replace(['[', ']'], ""),
        target.iqn,
        target.lun,
        host.patience.device.as_secs()
    ))
}

fn transport_of(shown: &str) -> Option<String> {
    let mut lines = shown.lines();
    let value = lines.find_map(|line| line.strip_prefix("iface.transport_name = "))?;
    Some(match value.trim() {
        "<empty>" => "tcp".to_owned(),
        name => name.to_owned(),
    })
}

/// The settings of an iface, but for its name.
fn iface_settings(shown: &str) -> Result<BTreeMap<&str, &str>, String> {
    let mut settings = BTreeMap::new();
    for line in shown.lines() {
        if !line.starts_with("iface.") || line.contains("<empty>") {
            continue;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["iface.iscsi_ifacename", "=", _] => {}
            [key, "=", value] => {
                settings.insert(key, value);
            }
            _ => return Err(format!("error: invalid iface setting: {line:?}")),
        }
    }
    Ok(settings)
}

/// Makes the iface of a volume that has a name for the initiator.
async fn clone_iface(host: &Host, target: &Target, initiator: &str, shown: &str) -> Result<(), String> {
    let mut settings =
        iface_settings(shown).map_err(|error| format!("iscsi: failed to parse iface records: {error}"))?;
    settings.insert("iface.initiatorname", initiator);
    let iface = ["-m", "iface", "-I", &target.iface];
    let made = admin(host, &with(&iface, &["-o", "new"])).await?;
    if !matches!(made.code, Some(0 | SESSION_EXISTS)) {
        return Err(format!("iscsi: failed to create new iface: {}", made.failure()));
    }
    for (key, value) in settings {
        let update = with(&iface, &["-o", "update", "-n", key, "-v", value]);
        if let Err(error) = must(host, "update iface records", &update).await {
            let _ = admin(host, &with(&iface, &["-o", "delete"])).await;
            return Err(error);
        }
    }
    Ok(())
}

async fn sessions_by(host: &Arc<Host>, target: &Target, made: &[Made]) -> Vec<Session> {
    let (host, iqn, made) = (host.clone(), target.iqn.clone(), made.to_vec());
    blocking(move || {
        let mut sessions = sessions_with(&host, &iqn);
        sessions.retain(|session| made.iter().any(|made| session.is_by(&made.portal)));
        sessions
    })
    .await
}

/// Takes the disk from the machine, and ends the sessions that were made for it. What others need is left to them.
/// A session of which somebody has a disk stays: that is an error, as it is to be tried again.
pub async fn detach(disks: &Arc<Disks>, place: &str, target: &Target, made: Vec<Made>) -> Result<(), String> {
    let host = disks.host();
    let same_target = |note: &Note| matches!(&note.source, Source::Iscsi(other) if other.iqn == target.iqn);
    let same_disk = |note: &Note| matches!(&note.source, Source::Iscsi(other) if other.iqn == target.iqn && other.lun == target.lun);
    // Without the tool nothing was begun.
    if made.is_empty() && host.program("iscsiadm").is_none() {
        return Ok(());
    }
    if disks.another(place, same_disk).is_none() && !made.is_empty() {
        let sessions = sessions_by(host, target, &made).await;
        let devices = sessions
            .iter()
            .filter_map(|session| session.disk(host, target.lun));
        disks.remove_devices(place, devices.collect()).await?;
    }
    let mut ifaces: Vec<&str> = Vec::new();
    if target.has_own_iface() {
        ifaces.push(&target.iface);
    }
    for session in &made {
        if session.own_iface && !ifaces.contains(&session.iface.as_str()) {
            ifaces.push(&session.iface);
        }
        let needs = |note: &Note| {
            same_target(note)
                && matches!(&note.source, Source::Iscsi(other)
                    if other.portals.iter().any(|portal| same_portal(portal, &session.portal)))
        };
        if let Some(other) = disks.another(place, needs) {
            // Whoever is last ends it.
            disks
                .change(&other, |note| {
                    if !note.made.contains(session) {
                        note.made.push(session.clone());
                    }
                })
                .await?;
        } else {
            // All disks of the session go with it, and not all of them need be this cluster's.
            let sessions = sessions_by(host, target, std::slice::from_ref(session)).await;
            let came: Vec<PathBuf> = sessions.iter().flat_map(|one| one.disks(host)).collect();
            if let Some(device) = scsi::first_in_use(host, &came).await? {
                return Err(format!(
                    "device {} of the session is still in use",
                    device.display()
                ));
            }
            let (portal, iface) = (session.portal.as_str(), session.iface.as_str());
            let node = ["-m", "node", "-p", portal, "-T", &target.iqn, "-I", iface];
            must_be_gone(host, "log out", &with(&node, &["--logout"])).await?;
            must_be_gone(host, "delete node record", &with(&node, &["-o", "delete"])).await?;
        }
        disks
            .change(place, |note| note.made.retain(|one| one != session))
            .await?;
    }
    for iface in ifaces {
        let uses = |note: &Note| note.made.iter().any(|made| made.iface == iface);
        if disks.another(place, uses).is_none() {
            let arguments = ["-m", "iface", "-I", iface, "-o", "delete"];
            must_be_gone(host, "delete iface", &arguments).await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::ISCSIPersistentVolumeSource;

    const SHOWN: &str = "# BEGIN RECORD 2.1.8\niface.iscsi_ifacename = default\niface.net_ifacename = <empty>\n\
        iface.transport_name = tcp\niface.initiatorname = <empty>\niface.mtu = 0\n# END RECORD\n";

    #[test]
    fn ifaces_are_read() {
        assert_eq!(transport_of(SHOWN).as_deref(), Some("tcp"));
        assert_eq!(
            transport_of("iface.transport_name = <empty>\n").as_deref(),
            Some("tcp")
        );
        assert_eq!(
            transport_of("iface.transport_name = bnx2i\n").as_deref(),
            Some("bnx2i")
        );
        assert_eq!(transport_of("iface.mtu = 0\n"), None);
        assert_eq!(
            iface_settings(SHOWN).unwrap(),
            BTreeMap::from([("iface.transport_name", "tcp"), ("iface.mtu", "0")])
        );
        assert!(iface_settings("iface.mtu 0\n").is_err());
        assert!(iface_settings("iface.mtu = 0 1\n").is_err());
    }

    #[test]
    fn links_are_udevs() {
        let source = ISCSIPersistentVolumeSource {
            target_portal: "fd00::1".to_owned(),
            iqn: "iqn.2026-01.example:a".to_owned(),
            lun: 1,
            ..Default::default()
        };
        let target = Target::new(&source, "v").unwrap();
        let check = |name: &str, transport: &str, expected: bool| {
            assert_eq!(
                is_link(name, &target, &target.portals[0], transport),
                expected,
                "{name}"
            );
        };
        let link = "ip-fd00::1:3260-iscsi-iqn.2026-01.example:a-lun-1";
        check(link, "tcp", true);
        check(&format!("{link}-part1"), "tcp", false);
        check(&format!("{link}0"), "tcp", false);
        check(&format!("pci-0000:01:00.0-{link}"), "tcp", false);
        check(&format!("pci-0000:01:00.0-{link}"), "bnx2i", true);
        check(link, "bnx2i", false);
    }
}
