//! The policies of administrators, above and below NetworkPolicy: ClusterNetworkPolicy (v1alpha2 of
//! policy.networking.k8s.io), and AdminNetworkPolicy and BaselineAdminNetworkPolicy (v1alpha1), where their definitions are
//! installed. `read` turns them into one shape, `watch` follows them, `status` tells what became of them. What they mean for
//! pods is `compile`'s business.

mod read;
mod status;
mod watch;

use std::borrow::Cow;

use k8s_openapi::ClusterResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde_json::Value;
use skiff_meta::net::Cidr;
use skiff_meta::selector::LabelSelector;

use super::Direction;
use super::objects::{NamedPort, PodTerm};
use super::ports::PortSet;
pub use status::run as run_status;
pub(super) use watch::Watch;
pub use watch::list as list_tier_policies;

/// The group of all three kinds.
pub const TIER_GROUP: &str = "policy.networking.k8s.io";
/// Their resources.
pub const TIER_RESOURCES: [&str; 3] = [
    "clusternetworkpolicies",
    "adminnetworkpolicies",
    "baselineadminnetworkpolicies",
];

macro_rules! kind {
    ($name:ident, $version:literal, $kind:literal, $plural:literal) => {
        /// The spec stays JSON: a part of it that is not known must be seen, because its rule fails closed.
        #[derive(Clone, Debug, Default, Deserialize)]
        pub struct $name {
            #[serde(default)]
            metadata: ObjectMeta,
            #[serde(default)]
            spec: Value,
            #[serde(default)]
            status: Option<Value>,
        }

        impl kube::Resource for $name {
            type DynamicType = ();
            type Scope = ClusterResourceScope;

            fn kind(_: &()) -> Cow<'_, str> {
                $kind.into()
            }
            fn group(_: &()) -> Cow<'_, str> {
                TIER_GROUP.into()
            }
            fn version(_: &()) -> Cow<'_, str> {
                $version.into()
            }
            fn plural(_: &()) -> Cow<'_, str> {
                $plural.into()
            }
            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }
            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }

        impl TierObject for $name {
            const KIND: TierKind = TierKind::$name;

            fn spec(&self) -> &Value {
                &self.spec
            }
            fn status(&self) -> Option<&Value> {
                self.status.as_ref()
            }
        }
    };
}

/// What the three kinds have in common.
trait TierObject: kube::Resource<DynamicType = ()> {
    const KIND: TierKind;
    fn spec(&self) -> &Value;
    fn status(&self) -> Option<&Value>;

    fn read(&self) -> TierPolicy {
        let name = self.meta().name.as_deref().unwrap_or_default();
        TierPolicy::of(Self::KIND, name, self.spec())
    }
}

kind!(
    ClusterNetworkPolicy,
    "v1alpha2",
    "ClusterNetworkPolicy",
    "clusternetworkpolicies"
);
kind!(
    AdminNetworkPolicy,
    "v1alpha1",
    "AdminNetworkPolicy",
    "adminnetworkpolicies"
);
kind!(
    BaselineAdminNetworkPolicy,
    "v1alpha1",
    "BaselineAdminNetworkPolicy",
    "baselineadminnetworkpolicies"
);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(clippy::enum_variant_names, reason = "they are upstream's names")]
pub(super) enum TierKind {
    ClusterNetworkPolicy,
    AdminNetworkPolicy,
    BaselineAdminNetworkPolicy,
}

impl TierKind {
    fn name(self) -> &'static str {
        match self {
            TierKind::ClusterNetworkPolicy => "ClusterNetworkPolicy",
            TierKind::AdminNetworkPolicy => "AdminNetworkPolicy",
            TierKind::BaselineAdminNetworkPolicy => "BaselineAdminNetworkPolicy",
        }
    }
}

/// Before NetworkPolicies, or where none selects the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    Admin,
    Baseline,
}

impl Tier {
    pub(super) const BOTH: [Tier; 2] = [Tier::Admin, Tier::Baseline];

    pub fn name(self) -> &'static str {
        match self {
            Tier::Admin => "Admin",
            Tier::Baseline => "Baseline",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    Accept,
    Deny,
    /// Nothing else of this tier is looked at.
    Pass,
}

/// A policy of either tier, of whatever kind. They are in force in the order of these fields: first those of a lower
/// priority; of the same one, which is the user's mistake, by kind and name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierPolicy {
    pub(super) tier: Tier,
    pub(super) priority: u32,
    pub(super) kind: TierKind,
    pub(super) name: String,
    pub(super) subject: PodTerm,
    pub(super) ingress: Vec<TierRule>,
    pub(super) egress: Vec<TierRule>,
    /// What is not in force as it is written, for people.
    pub(super) problems: Vec<String>,
}

impl TierPolicy {
    pub(super) fn order(&self) -> (Tier, u32, TierKind, &str) {
        (self.tier, self.priority, self.kind, &self.name)
    }

    pub(super) fn rules(&self, direction: Direction) -> &[TierRule] {
        match direction {
            Direction::Ingress => &self.ingress,
            Direction::Egress => &self.egress,
        }
    }

    /// As people know it.
    pub(super) fn shown(&self) -> String {
        format!("{} {}", self.kind.name(), self.name)
    }

    pub(super) fn names_nodes(&self) -> bool {
        let mut peers = self.egress.iter().flat_map(|rule| &rule.peers);
        peers.any(|peer| matches!(peer, TierPeer::Nodes(_)))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TierRule {
    /// Its name, or its place in the list.
    pub(super) name: String,
    pub(super) action: Action,
    pub(super) peers: Vec<TierPeer>,
    pub(super) ports: PortSet,
    pub(super) named: Vec<NamedPort>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TierPeer {
    Pods(PodTerm),
    Nodes(LabelSelector),
    Network(Cidr),
}
