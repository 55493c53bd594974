//! Encrypted tunnels to other nodes, by the kernel's WireGuard. Each node has one key for as long as its state lives,
//! and announces its public half by an annotation of its Node, which only the node itself may write.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use aws_lc_rs::agreement::{PrivateKey, X25519};
use aws_lc_rs::encoding::{AsBigEndian, Curve25519SeedBin};
use nlink::netlink::genl::wireguard::{AllowedIp, PublicKey};
use nlink::netlink::link::WireguardLink;
use nlink::netlink::{Connection, Wireguard};
use serde::{Deserialize, Serialize};
use skiff_meta::net::Cidr;

use super::links::Links;
use super::peers::Peer;
use super::{Error, PodNetworkConfig, WIREGUARD_ANNOTATION};

pub(super) type Key = [u8; 32];

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WireGuardPlan {
    pub(super) port: u16,
    pub(super) mtu: Option<u32>,
    pub(super) gateways: Vec<IpAddr>,
    pub(super) peers: Vec<WireGuardPeer>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WireGuardPeer {
    pub(super) key: Key,
    pub(super) endpoint: SocketAddr,
    /// The only sources that the kernel takes from this peer.
    pub(super) networks: Vec<Cidr>,
}

/// What a node tells others.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Annotation {
    public_key: String,
    port: u16,
}

/// What another node has told.
pub(super) struct Announced {
    pub(super) key: Key,
    pub(super) port: u16,
}

impl Announced {
    pub(super) fn of(peer: &Peer) -> Option<Announced> {
        let annotation: Annotation =
            serde_json::from_str(peer.annotations.get(WIREGUARD_ANNOTATION)?).ok()?;
        let key: PublicKey = annotation.public_key.parse().ok()?;
        (annotation.port > 0).then(|| Announced {
            key: *key.as_bytes(),
            port: annotation.port,
        })
    }
}

/// The value of this node's annotation.
pub(super) fn announcement(config: &PodNetworkConfig) -> Result<String, Error> {
    let (_, public_key) = keys(&config.state_dir)?;
    let annotation = Annotation {
        public_key: PublicKey::from_bytes(public_key).to_string(),
        port: config.wireguard_port,
    };
    serde_json::to_string(&annotation).map_err(|error| Error::Config(error.to_string()))
}

/// The node's private and public key; made if there is none.
fn keys(state_dir: &Path) -> Result<(Key, Key), Error> {
    let path = state_dir.join("wireguard.key");
    let damaged = || Error::Key(path.clone());
    let private: Key = match std::fs::read(&path) {
        Ok(bytes) => bytes.try_into().map_err(|_| damaged())?,
        Err(error) if error.kind() == ErrorKind::NotFound => make_key(&path)?,
        Err(error) => return Err(Error::io(path.display().to_string())(error)),
    };
    let key = PrivateKey::from_private_key(&X25519, &private).map_err(|_| damaged())?;
    let public = key.compute_public_key().map_err(|_| damaged())?;
    let public: Key = public.as_ref().try_into().map_err(|_| damaged())?;
    Ok((private, public))
}

fn make_key(path: &Path) -> Result<Key, Error> {
    let random = |_| Error::Unsupported("cannot make a WireGuard key: no randomness".into());
    let made = PrivateKey::generate(&X25519).map_err(random)?;
    let seed: Curve25519SeedBin<'static> = made.as_be_bytes().map_err(random)?;
    let key: Key = seed
        .as_ref()
        .try_into()
        .map_err(|_| Error::Key(path.to_path_buf()))?;
    let parent = path.parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(parent)
        .and_then(|()| skiff_fs::write_durably(path, &key, 0o600).map_err(std::io::Error::other))
        .map_err(Error::io(path.display().to_string()))?;
    Ok(key)
}

/// Makes the device with its peers, or completes the one that is there; answers its index. Peers that do not change
/// keep their sessions.
pub(super) async fn apply(
    links: &Links,
    name: &str,
    state_dir: &Path,
    plan: &WireGuardPlan,
) -> Result<u32, Error> {
    let missing = |error: nlink::Error| {
        Error::Unsupported(format!(
            "--pod-network wireguard needs a kernel with WireGuard (CONFIG_WIREGUARD, or the module wireguard): {error}"
        ))
    };
    let (private, _) = keys(state_dir)?;
    if links.find(name).await?.is_none() {
        match links.route.add_link(WireguardLink::new(name)).await {
            Err(error) if error.is_not_supported() => return Err(missing(error)),
            added => added.map_err(Error::netlink(format!("add {name}")))?,
        }
    }
    let link = links.find(name).await?;
    let link = link.ok_or_else(|| Error::Unsupported(format!("{name} vanished")))?;
    if link.kind() != Some("wireguard") {
        return Err(Error::Unsupported(format!(
            "{name} already exists and is not WireGuard's"
        )));
    }
    let wireguard = Connection::<Wireguard>::new_async().await.map_err(missing)?;
    let failed = |error| Error::netlink(format!("configure {name}"))(error);
    let device = wireguard.get_device_by_name(name).await.map_err(failed)?;
    if device.private_key != Some(private) || device.listen_port != Some(plan.port) {
        wireguard
            .set_device_by_name(name, |device| device.private_key(private).listen_port(plan.port))
            .await
            .map_err(failed)?;
    }
    let wanted: BTreeMap<Key, &WireGuardPeer> = plan.peers.iter().map(|peer| (peer.key, peer)).collect();
    for peer in &device.peers {
        if !wanted.contains_key(&peer.public_key) {
            wireguard
                .del_peer_by_name(name, peer.public_key)
                .await
                .map_err(failed)?;
        }
    }
    for (key, peer) in wanted {
        let networks: Vec<AllowedIp> = peer.networks.iter().map(|network| allowed(*network)).collect();
        let there = device.peers.iter().find(|present| present.public_key == key);
        if there
            .is_some_and(|there| there.endpoint == Some(peer.endpoint) && same(&there.allowed_ips, &networks))
        {
            continue;
        }
        wireguard
            .set_peer_by_name(name, key, |set| {
                set.endpoint(peer.endpoint)
                    .replace_allowed_ips()
                    .allowed_ips(networks)
            })
            .await
            .map_err(failed)?;
    }
    links.set_up(&link, name, plan.mtu, &plan.gateways).await?;
    Ok(link.ifindex())
}

fn allowed(network: Cidr) -> AllowedIp {
    match network.address() {
        IpAddr::V4(address) => AllowedIp::v4(address, network.prefix()),
        IpAddr::V6(address) => AllowedIp::v6(address, network.prefix()),
    }
}

fn same(a: &[AllowedIp], b: &[AllowedIp]) -> bool {
    let sorted = |list: &[AllowedIp]| {
        let mut list: Vec<(IpAddr, u8)> = list.iter().map(|ip| (ip.addr, ip.cidr)).collect();
        list.sort();
        list
    };
    sorted(a) == sorted(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::{Mode, plan::tests::config};

    #[test]
    fn a_key_is_made_once_and_announced() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config(&["10.244.0.0/16"], Mode::WireGuard);
        config.state_dir = dir.path().join("new");
        let told = announcement(&config).unwrap();
        assert_eq!(announcement(&config).unwrap(), told);
        let peer = Peer {
            annotations: [(WIREGUARD_ANNOTATION.to_owned(), told)].into(),
            ..Peer::default()
        };
        let announced = Announced::of(&peer).unwrap();
        assert_eq!(
            (announced.key, announced.port),
            (keys(&config.state_dir).unwrap().1, 51820)
        );
        let path = config.state_dir.join("wireguard.key");
        let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600);
        std::fs::write(&path, "short").unwrap();
        assert!(matches!(announcement(&config), Err(Error::Key(_))));
        for bad in ["", "{}", r#"{"publicKey":"x","port":1}"#] {
            let peer = Peer {
                annotations: [(WIREGUARD_ANNOTATION.to_owned(), bad.to_owned())].into(),
                ..Peer::default()
            };
            assert!(Announced::of(&peer).is_none(), "{bad}");
        }
    }

    /// The public half is the one that every other implementation makes of the private one.
    #[test]
    fn keys_are_curve25519() {
        let dir = tempfile::tempdir().unwrap();
        let private: Vec<u8> = (1..=32).collect();
        std::fs::write(dir.path().join("wireguard.key"), &private).unwrap();
        let (kept, public) = keys(dir.path()).unwrap();
        assert_eq!(kept.to_vec(), private);
        let hex: String = public.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            "07a37cbc142093c8b755dc1b10e86cb426374ad16aa853ed0bdfc0b2b86d1c7c"
        );
    }
}
