//! How many connections one pod of this node may have in the kernel's connection tracking, whose table all share: who fills it
//! takes away the network of all others. What a pod opens beyond its limit is dropped.
//!
//! The kernel counts by the source's address, in a table of its own: a table that is made anew has counted nothing.

use std::net::IpAddr;
use std::time::Duration;

use nlink::netlink::nftables::{
    BaseChain, Chain, CtState, DynsetExpr, DynsetOp, ElementStatement, Expr, Family, FilterHook,
    NFT_MSG_NEWTABLE, Object, ObjectState, ObjectType, ObjrefExpr, PayloadBase, Priority, RawMessage,
    Register, Rule, Set, SetKeyType, Transaction,
};

use super::Error;
use super::firewall::{NFPROTO_IPV4, NFPROTO_IPV6, only_family};
use crate::nft::{Look, OwnConnection, Standing, Touched, Watch};

pub(super) const FAMILY: Family = Family::Inet;
const NLM_F_CREATE: u16 = 0x400;
const NFTA_TABLE_NAME: u16 = 1;

/// Behind connection tracking, before services' addresses are translated.
const PRIORITY: i32 = -150;
const CHAIN: &str = "limit-connections";
const REFUSED: &str = "refused";
const FAMILIES: [PodFamily; 2] = [
    PodFamily {
        number: NFPROTO_IPV4,
        key: SetKeyType::Ipv4Addr,
        source: (12, 4),
        connections: "connections-ipv4",
        limited: "limited-ipv4",
    },
    PodFamily {
        number: NFPROTO_IPV6,
        key: SetKeyType::Ipv6Addr,
        source: (8, 16),
        connections: "connections-ipv6",
        limited: "limited-ipv6",
    },
];

/// Pods of a node are fewer: guards let them send from their own addresses only.
const MAX_PODS: u32 = 1 << 16;
/// How long a pod is listed after a connection of its was refused.
const LISTED: Duration = Duration::from_secs(60);

/// The part of all tracked connections that one pod may have.
const SHARE: u32 = 8;
const TRACKED_MAX: &str = "/proc/sys/net/netfilter/nf_conntrack_max";

struct PodFamily {
    number: u8,
    key: SetKeyType,
    /// Where a packet has its source, and how many bytes that is.
    source: (u32, u32),
    connections: &'static str,
    limited: &'static str,
}

/// The connections that one pod may have, if it is limited: `given` is 0 for no limit. An eighth of the kernel's own limit if it
/// is not given.
fn wanted(given: Option<u32>) -> Option<u32> {
    let connections = match given {
        Some(connections) => connections,
        // It is not there before the kernel tracks connections.
        None => {
            std::fs::read_to_string(TRACKED_MAX)
                .ok()?
                .trim()
                .parse::<u32>()
                .ok()?
                / SHARE
        }
    };
    (connections > 0).then_some(connections)
}

pub(super) struct Connections {
    table: String,
    bridge: String,
    given: Option<u32>,
    connection: OwnConnection,
    applied: Option<u32>,
    standing: Standing,
    /// The kernel has no such counts, which was said.
    unsupported: bool,
    /// What the kernel's counter said last.
    counted: u64,
}

/// The table of a network.
pub(super) fn table_of(network: &str) -> String {
    format!("{network}-connections")
}

impl Connections {
    pub(super) fn open(network: &str, bridge: &str, given: Option<u32>) -> Result<Connections, Error> {
        Ok(Connections {
            table: table_of(network),
            bridge: bridge.to_owned(),
            given,
            connection: OwnConnection::open().map_err(Error::netlink("open netlink"))?,
            applied: None,
            standing: Standing::default(),
            unsupported: false,
            counted: 0,
        })
    }

    /// Makes the table if it is not that of the limit.
    pub(super) async fn apply(&mut self, watch: &mut Watch) -> Result<(), Error> {
        let wanted = wanted(self.given);
        if self.unsupported || (self.applied == wanted && wanted.is_some()) {
            return Ok(());
        }
        let Some(connections) = wanted else {
            self.applied = None;
            return self.remove().await;
        };
        match self.load(connections).await {
            Ok(()) => {
                self.applied = Some(connections);
                self.counted = 0;
                self.standing.rules_changed();
                let table = [(FAMILY, self.table.as_str())];
                self.standing.prime(&self.connection, &table, watch).await;
                Ok(())
            }
            Err(error) if matches!(error.errno(), Some(libc::ENOENT | libc::EOPNOTSUPP)) => {
                tracing::warn!(
                    %error,
                    "the kernel cannot count the connections of a pod (nftables' `ct count`, CONFIG_NFT_CONNLIMIT): one pod can take all of connection tracking"
                );
                self.unsupported = true;
                Ok(())
            }
            Err(error) => Err(Error::netlink("limit the connections of pods")(error)),
        }
    }

    /// Makes the table again if it is not what it was. `touched` and `watch` are as for the firewall.
    pub(super) async fn restore(&mut self, touched: &Touched, watch: &mut Watch) -> Result<(), Error> {
        if self.applied.is_none() {
            return Ok(());
        }
        let table = [(FAMILY, self.table.as_str())];
        let look = self
            .standing
            .look(&self.connection, &table, touched.rules, Some(watch));
        let look = look
            .await
            .map_err(Error::netlink("list the limits of pods' connections"))?;
        if look == Look::Lost {
            tracing::warn!(
                table = self.table,
                "somebody changed the limits of pods' connections; restoring them"
            );
            self.applied = None;
            self.apply(watch).await?;
        }
        Ok(())
    }

    /// Says in the log what was refused since the last time, and whose it was.
    pub(super) async fn report(&mut self) {
        let Some(limit) = self.applied else { return };
        let refused = match self.refused().await {
            Ok(refused) => refused,
            Err(error) => {
                tracing::debug!(%error, "cannot read how many connections of pods were refused");
                return;
            }
        };
        let more = refused.checked_sub(self.counted).unwrap_or(refused);
        self.counted = refused;
        if more == 0 {
            return;
        }
        let mut pods: Vec<IpAddr> = Vec::new();
        for family in &FAMILIES {
            let listed = self
                .connection
                .list_set_elements(&self.table, family.limited, FAMILY);
            for element in listed.await.unwrap_or_default() {
                pods.extend(<[u8; 4]>::try_from(element.key()).map(IpAddr::from));
                pods.extend(<[u8; 16]>::try_from(element.key()).map(IpAddr::from));
            }
        }
        tracing::warn!(
            ?pods,
            limit,
            packets = more,
            "pods have as many tracked connections as one may have; more were refused"
        );
    }

    async fn refused(&self) -> nlink::Result<u64> {
        let objects = self.connection.list_objects_in(&self.table, FAMILY).await?;
        let counters = objects.into_iter().filter_map(|object| match object.state {
            ObjectState::Counter { packets, .. } if object.name == REFUSED => Some(packets),
            _ => None,
        });
        Ok(counters.sum())
    }

    async fn load(&self, connections: u32) -> nlink::Result<()> {
        let table = self.table.as_str();
        // Deleting needs a table that exists, and creating first makes sure of it.
        let create = RawMessage::new(NFT_MSG_NEWTABLE, FAMILY)
            .flags(NLM_F_CREATE)
            .attrs(crate::proxy::string_attribute(NFTA_TABLE_NAME, table));
        let base = BaseChain::filter(FilterHook::Prerouting, Priority::Custom(PRIORITY));
        let mut t = self
            .connection
            .transaction()
            .raw(create)
            .del_table(table, FAMILY)
            .add_table(table, FAMILY)
            .add_object(&Object::counter(table, REFUSED))
            .add_chain(Chain::new(table, CHAIN)?.family(FAMILY).base(base));
        for family in &FAMILIES {
            t = self.limit_family(t, family, connections);
        }
        t.commit(&self.connection).await
    }

    fn limit_family(&self, t: Transaction, family: &PodFamily, connections: u32) -> Transaction {
        let set = |name: &str| {
            Set::new(&self.table, name)
                .family(FAMILY)
                .key_type(family.key.clone())
                .dynamic()
                .size(MAX_PODS)
        };
        let (offset, len) = family.source;
        let over = ElementStatement::Connlimit {
            count: connections,
            over: true,
        };
        let refused = ObjrefExpr::Named {
            object_type: ObjectType::Counter,
            name: REFUSED.to_owned(),
        };
        let rule = Rule::new(&self.table, CHAIN)
            .family(FAMILY)
            .match_iif(&self.bridge);
        let rule = only_family(rule.match_ct_state(CtState::NEW), family.number)
            .expr(Expr::Payload {
                dreg: Register::R0,
                base: PayloadBase::Network,
                offset,
                len,
            })
            .expr(DynsetExpr::new(DynsetOp::Add, family.connections, Register::R0).statement(over))
            .expr(DynsetExpr::new(DynsetOp::Update, family.limited, Register::R0))
            .expr(refused)
            .drop();
        t.add_set(set(family.connections))
            .add_set(set(family.limited).timeout(LISTED))
            .add_rule(rule)
    }

    pub(super) async fn remove(&self) -> Result<(), Error> {
        let removed = self.connection.del_table_if_exists(self.table.as_str(), FAMILY);
        removed
            .await
            .map(drop)
            .map_err(Error::netlink("remove the limits of pods' connections"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_given_is_a_part_of_what_there_is() {
        assert_eq!((wanted(Some(0)), wanted(Some(7))), (None, Some(7)));
        if let Ok(max) = std::fs::read_to_string(TRACKED_MAX) {
            assert_eq!(wanted(None), Some(max.trim().parse::<u32>().unwrap() / 8));
        }
    }
}
