//! The ServiceCIDR controller: a ServiceCIDR keeps a finalizer for as long as services have addresses that are in no
//! other one, and says in a condition whether services get addresses of it.
//! The API servers allocate from all that are ready and stay (`registry/src/hooks/services/addresses.rs`).

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::networking::v1::{IPAddress, ServiceCIDR};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile, reference};

use crate::{Context, Error, seconds_until};

const FINALIZER: &str = "networking.k8s.io/service-cidr-finalizer";
const MANAGER: &str = "service-cidr-controller";
const MANAGED_BY: &str = "ipaddress.kubernetes.io/managed-by";
const ALLOCATOR: &str = "ipallocator.k8s.io";
/// Allocators may learn a little later that a ServiceCIDR is going away.
const DELETION_GRACE: SignedDuration = SignedDuration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    base: u128,
    is_ipv4: bool,
    prefix: u32,
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(u32::from(address)),
        IpAddr::V6(address) => u128::from(address),
    }
}

impl Block {
    fn parse(text: &str) -> Option<Block> {
        let (address, prefix) = text.split_once('/')?;
        let (address, prefix): (IpAddr, u32) = (address.parse().ok()?, prefix.parse().ok()?);
        let is_ipv4 = address.is_ipv4();
        (prefix <= if is_ipv4 { 32 } else { 128 }).then(|| Block {
            base: number(address),
            is_ipv4,
            prefix,
        })
    }

    fn contains(&self, address: IpAddr) -> bool {
        let host_bits = if self.is_ipv4 { 32 } else { 128 } - self.prefix;
        let network = |number: u128| number.checked_shr(host_bits).unwrap_or(0);
        self.is_ipv4 == address.is_ipv4() && network(self.base) == network(number(address))
    }

    fn contains_block(&self, other: &Block) -> bool {
        let address = match other.is_ipv4 {
            true => IpAddr::V4((other.base as u32).into()),
            false => IpAddr::V6(other.base.into()),
        };
        self.prefix <= other.prefix && self.contains(address)
    }

    /// Services get neither the address of the network nor IPv4's broadcast.
    fn hands_out(&self, address: IpAddr) -> bool {
        let host_bits = if self.is_ipv4 { 32 } else { 128 } - self.prefix;
        let mask = 1u128.checked_shl(host_bits).map_or(u128::MAX, |size| size - 1);
        let host = number(address) & mask;
        self.contains(address) && host != 0 && !(self.is_ipv4 && host == mask)
    }

    fn overlaps(&self, other: &Block) -> bool {
        self.contains_block(other) || other.contains_block(self)
    }
}

fn blocks(cidr: &ServiceCIDR) -> Vec<Block> {
    let texts = cidr.spec.iter().flat_map(|spec| spec.cidrs.iter().flatten());
    texts.filter_map(|text| Block::parse(text)).collect()
}

fn name(cidr: &ServiceCIDR) -> &str {
    cidr.metadata.name.as_deref().unwrap_or_default()
}

/// COMPAT: also those that are being deleted themselves, as upstream.
fn others<'a>(
    cidr: &'a ServiceCIDR,
    all: &'a [Arc<ServiceCIDR>],
) -> impl Iterator<Item = &'a Arc<ServiceCIDR>> {
    all.iter().filter(|other| name(other) != name(cidr))
}

/// Whether no service would be left with an address that is in no ServiceCIDR.
fn may_go(cidr: &ServiceCIDR, all: &[Arc<ServiceCIDR>], addresses: &[IpAddr]) -> bool {
    let own = blocks(cidr);
    let covers =
        |found: &dyn Fn(&Block) -> bool| others(cidr, all).any(|other| blocks(other).iter().any(found));
    let has_parents = own
        .iter()
        .all(|block| covers(&|other: &Block| other.contains_block(block)));
    has_parents
        || addresses
            .iter()
            .filter(|address| own.iter().any(|block| block.hands_out(**address)))
            .all(|address| covers(&|other: &Block| other.hands_out(*address)))
}

#[derive(Debug, PartialEq)]
enum Plan {
    Wait(Timestamp),
    RemoveFinalizer,
    /// A finalizer if it is missing, and the condition Ready if it differs.
    Keep {
        add_finalizer: bool,
        ready: Option<Box<Condition>>,
    },
}

fn plan(cidr: &ServiceCIDR, all: &[Arc<ServiceCIDR>], addresses: &[IpAddr], now: Timestamp) -> Plan {
    let deleted = cidr.metadata.deletion_timestamp.as_ref();
    let may_go = deleted.is_some() && may_go(cidr, all, addresses);
    if let (Some(deleted), true) = (deleted, may_go) {
        let at = deleted.0.saturating_add(DELETION_GRACE).unwrap_or(Timestamp::MAX);
        return if at > now {
            Plan::Wait(at)
        } else {
            Plan::RemoveFinalizer
        };
    }
    let (status, reason, message) = if deleted.is_some() {
        (
            "False",
            "Terminating",
            "There are still IPAddresses referencing the ServiceCIDR, please remove them or create a new ServiceCIDR",
        )
    } else {
        ("True", "", "Kubernetes Service CIDR is ready")
    };
    let found = cidr
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    let found = found.into_iter().find(|one| one.type_ == "Ready");
    let same = found
        .is_some_and(|found| found.status == status && found.reason == reason && found.message == message);
    let mut finalizers = cidr.metadata.finalizers.iter().flatten();
    Plan::Keep {
        add_finalizer: deleted.is_none() && !finalizers.any(|one| one == FINALIZER),
        ready: (!same).then(|| {
            Box::new(Condition {
                type_: "Ready".into(),
                status: status.into(),
                reason: reason.into(),
                message: message.into(),
                last_transition_time: Time(now),
                observed_generation: None,
            })
        }),
    }
}

struct ServiceCidrs {
    context: Context,
    cidrs: Informer<ServiceCIDR>,
    addresses: Informer<IPAddress>,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(ServiceCidrs {
        cidrs: context.informers.informer(),
        addresses: context.informers.informer(),
        context: context.clone(),
    });
    context
        .controller("ipaddresses", reconciler)
        .workers(5)
        .watches(|r| &r.cidrs, ServiceCidrs::woken_by_cidr)
        .watches(|r| &r.addresses, ServiceCidrs::woken_by_address)
        .run()
        .await;
}

fn managed(address: &IPAddress) -> Option<IpAddr> {
    let labels = address.metadata.labels.as_ref();
    let ours = labels
        .and_then(|labels| labels.get(MANAGED_BY))
        .is_some_and(|by| by == ALLOCATOR);
    address.metadata.name.as_deref().filter(|_| ours)?.parse().ok()
}

impl ServiceCidrs {
    fn woken_by_cidr(&self, change: &Change<ServiceCIDR>) -> BTreeSet<Key> {
        let cidr = change.object();
        let mut keys = BTreeSet::from([Key::of(&**cidr)]);
        let (own, added) = (
            blocks(cidr),
            !matches!(change, Change::Applied { old: Some(_), .. }),
        );
        for other in self.cidrs.list().iter().filter(|_| added) {
            let touches = blocks(other)
                .iter()
                .any(|block| own.iter().any(|own| own.overlaps(block)));
            if touches {
                keys.insert(Key::of(&**other));
            }
        }
        keys
    }

    /// Only a ServiceCIDR that is being deleted cares.
    fn woken_by_address(&self, change: &Change<IPAddress>) -> Vec<Key> {
        let Some(address) = managed(change.object()) else {
            return Vec::new();
        };
        let cidrs = self.cidrs.list();
        let concerned = cidrs.iter().filter(|cidr| {
            cidr.metadata.deletion_timestamp.is_some()
                && blocks(cidr).iter().any(|block| block.contains(address))
        });
        concerned.map(|cidr| Key::of(&**cidr)).collect()
    }

    async fn patch(&self, key: &Key, patch: serde_json::Value) -> Result<(), Error> {
        let api: Api<ServiceCIDR> = Api::all(self.context.client.clone());
        match api
            .patch(&key.name, &PatchParams::default(), &Patch::Strategic(patch))
            .await
        {
            Err(error) if !error.is_not_found() => Err(error.into()),
            _ => Ok(()),
        }
    }
}

impl Reconcile for ServiceCidrs {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(cidr) = self.cidrs.get("", &key.name) else {
            return Ok(Action::Done);
        };
        let now = Timestamp::now();
        // Only what is being deleted asks for the addresses.
        let addresses: Vec<IpAddr> = match cidr.metadata.deletion_timestamp {
            Some(_) => self
                .addresses
                .list()
                .iter()
                .filter_map(|address| managed(address))
                .collect(),
            None => Vec::new(),
        };
        match plan(&cidr, &self.cidrs.list(), &addresses, now) {
            Plan::Wait(at) => {
                return Ok(Action::RequeueAfter(
                    seconds_until(at, now) + Duration::from_millis(10),
                ));
            }
            Plan::RemoveFinalizer => {
                let patch = json!({"metadata": {"$deleteFromPrimitiveList/finalizers": [FINALIZER]}});
                self.patch(&key, patch).await?;
            }
            Plan::Keep { add_finalizer, ready } => {
                if add_finalizer {
                    self.patch(&key, json!({"metadata": {"finalizers": [FINALIZER]}}))
                        .await?;
                }
                if let Some(ready) = ready {
                    let apply = json!({"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
                        "metadata": {"name": key.name}, "status": {"conditions": [ready]}});
                    let api: Api<ServiceCIDR> = Api::all(self.context.client.clone());
                    let params = PatchParams::apply(MANAGER).force();
                    let written = api.patch_status(&key.name, &params, &Patch::Apply(apply)).await;
                    if let Err(error) = written {
                        let message = "The ServiceCIDR Status can not be set to Ready=True".to_owned();
                        let about = reference(&*cidr);
                        self.context
                            .events
                            .event(&about, "Warning", "KubernetesServiceCIDRError", message);
                        return Err(error.into());
                    }
                }
            }
        }
        Ok(Action::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidr(name: &str, cidrs: &[&str], deleted: Option<&str>) -> Arc<ServiceCIDR> {
        let value = json!({"metadata": {"name": name, "finalizers": [FINALIZER], "deletionTimestamp": deleted}, "spec": {"cidrs": cidrs}});
        Arc::new(serde_json::from_value(value).unwrap())
    }

    #[test]
    fn containment() {
        let check = |outer: &str, inner: &str, contains: bool, overlaps: bool| {
            let (outer, inner) = (Block::parse(outer).unwrap(), Block::parse(inner).unwrap());
            assert_eq!(
                (outer.contains_block(&inner), outer.overlaps(&inner)),
                (contains, overlaps)
            );
        };
        check("10.96.0.0/12", "10.100.0.0/16", true, true);
        check("10.100.0.0/16", "10.96.0.0/12", false, true);
        check("10.96.0.0/12", "10.112.0.0/16", false, false);
        check("fd00::/108", "fd00::/112", true, true);
        check("0.0.0.0/0", "fd00::/112", false, false);
        assert_eq!(Block::parse("10.0.0.0/33"), None);
        assert_eq!(Block::parse("x/8"), None);
    }

    #[test]
    fn a_range_in_use_stays() {
        let now: Timestamp = "2026-01-01T00:01:00Z".parse().unwrap();
        let check = |others: &[Arc<ServiceCIDR>], deleted: &str, addresses: &[&str], expected: &str| {
            let own = cidr("own", &["10.1.0.0/24"], Some(deleted));
            let mut all = others.to_vec();
            all.push(own.clone());
            let addresses: Vec<IpAddr> = addresses.iter().map(|address| address.parse().unwrap()).collect();
            let seen = match plan(&own, &all, &addresses, now) {
                Plan::Wait(_) => "wait".to_owned(),
                Plan::RemoveFinalizer => "remove".to_owned(),
                Plan::Keep { ready, .. } => ready.unwrap().reason,
            };
            assert_eq!(seen, expected, "{addresses:?}");
        };
        let long_ago = "2026-01-01T00:00:00Z";
        check(&[], long_ago, &["10.1.0.7"], "Terminating");
        check(&[], long_ago, &["10.2.0.7"], "remove");
        check(&[], "2026-01-01T00:00:55Z", &[], "wait");
        check(
            &[cidr("parent", &["10.0.0.0/8"], None)],
            long_ago,
            &["10.1.0.7"],
            "remove",
        );
        check(&[], long_ago, &["10.1.0.255"], "remove");
        check(
            &[cidr("part", &["10.1.0.0/28"], None)],
            long_ago,
            &["10.1.0.7"],
            "remove",
        );
        check(
            &[cidr("part", &["10.1.0.0/28"], None)],
            long_ago,
            &["10.1.0.77"],
            "Terminating",
        );
    }

    #[test]
    fn whatever_stays_is_ready() {
        let now = Timestamp::UNIX_EPOCH;
        let own = cidr("own", &["10.1.0.0/16"], None);
        let all = [cidr("kubernetes", &["10.96.0.0/12"], None), own.clone()];
        let Plan::Keep {
            ready: Some(ready),
            add_finalizer: false,
        } = plan(&own, &all, &[], now)
        else {
            panic!()
        };
        assert_eq!(ready.status, "True");
        let mut told = (*own).clone();
        told.status.get_or_insert_default().conditions = Some(vec![*ready]);
        let again = plan(&told, &all, &[], now);
        assert_eq!(
            again,
            Plan::Keep {
                add_finalizer: false,
                ready: None
            }
        );
    }
}
