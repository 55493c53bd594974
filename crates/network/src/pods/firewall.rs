//! The pod network's nftables table: who may send packets as a pod from where, and which packets leave the cluster
//! under the node's address. It knows nothing of services; those are the proxy's table.

use std::collections::BTreeSet;
use std::net::IpAddr;

use nlink::netlink::nftables::{
    BaseChain, Chain, CmpOp, Expr, Family, FibFlags, FilterHook, MetaKey, NFT_MSG_NEWTABLE, NatHook,
    NatStatement, PacketField, PayloadBase, Priority, RawMessage, Register, Rule, Set, SetElement,
    SetKeyType,
};
use nlink::netlink::types::route::RouteType;
use skiff_meta::net::Cidr;

use super::Error;
use crate::nft::{Elements, Look, OwnConnection, Standing, Touched, Watch, element_of, elements_of};

pub(super) const FAMILY: Family = Family::Inet;
const NLM_F_CREATE: u16 = 0x400;
const NFTA_TABLE_NAME: u16 = 1;
/// Elements a message; a list of them must stay below 64 KiB.
const ELEMENTS_A_MESSAGE: usize = 200;

const SOURCES: &str = "sources";
const MASQUERADE: &str = "masquerade";
const NODES: [&str; 2] = ["nodes-ipv4", "nodes-ipv6"];
const FAMILIES_OF_NODES: [(&str, bool); 2] = [(NODES[0], true), (NODES[1], false)];

/// Before connection tracking: what is forged is nobody's connection.
const RAW_PRIORITY: i32 = -300;
/// The kernel's place for source translation.
const SOURCE_NAT_PRIORITY: i32 = 100;

const UDP: u8 = 17;
/// Where the virtual network's number is, behind the UDP header.
const VNI_OFFSET: u32 = 12;
pub(super) const NFPROTO_IPV4: u8 = 2;
pub(super) const NFPROTO_IPV6: u8 = 10;

/// What the table is made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rules {
    pub(super) bridge: String,
    /// Devices that lead to other nodes, there or not.
    pub(super) tunnels: Vec<String>,
    pub(super) own: Vec<Cidr>,
    pub(super) cluster: Vec<Cidr>,
    /// Addresses of all nodes.
    pub(super) nodes: BTreeSet<IpAddr>,
    pub(super) vni: u32,
    pub(super) vxlan_port: u16,
    pub(super) wireguard_port: u16,
}

impl Rules {
    /// The elements of the set of nodes of a family, true for IPv4.
    fn nodes_of(&self, ipv4: bool) -> Vec<SetElement> {
        let nodes = self.nodes.iter().filter(|address| address.is_ipv4() == ipv4);
        let element = |address: &IpAddr| match address {
            IpAddr::V4(address) => SetElement::ipv4(*address),
            IpAddr::V6(address) => SetElement::ipv6(*address),
        };
        nodes.map(element).collect()
    }
}

pub(super) struct Firewall {
    name: String,
    connection: OwnConnection,
    applied: Option<Rules>,
    standing: Standing,
}

impl Firewall {
    pub(super) fn open(name: &str) -> Result<Firewall, Error> {
        Ok(Firewall {
            name: name.to_owned(),
            connection: OwnConnection::open().map_err(Error::netlink("open netlink"))?,
            applied: None,
            standing: Standing::default(),
        })
    }

    /// Compares the rules, and the elements that somebody else has `touched`, with what was applied, and applies that again if it is
    /// not there any more. `watch` is that of the table.
    pub(super) async fn restore(&mut self, touched: &Touched, watch: &mut Watch) -> Result<(), Error> {
        let Some(applied) = self.applied.take() else {
            return Ok(());
        };
        let stands = self.stands(&applied, touched, watch).await;
        if stands.map_err(Error::netlink("list the pod network's rules"))? {
            self.applied = Some(applied);
            return Ok(());
        }
        tracing::warn!(
            table = self.name,
            "somebody changed the pod network's rules; restoring them"
        );
        self.apply(&applied, watch).await
    }

    async fn stands(&mut self, applied: &Rules, touched: &Touched, watch: &mut Watch) -> nlink::Result<bool> {
        let table = [(FAMILY, self.name.as_str())];
        let look = self
            .standing
            .look(&self.connection, &table, touched.rules, Some(watch));
        if look.await? == Look::Lost {
            return Ok(false);
        }
        for (name, ipv4) in FAMILIES_OF_NODES {
            if !touched.all_sets && !touched.sets.contains(name) {
                continue;
            }
            let expected: Elements = applied.nodes_of(ipv4).iter().map(element_of).collect();
            if elements_of(&self.connection, FAMILY, &self.name, name).await? != expected {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Replaces the table in one step, if it is not what is wanted.
    pub(super) async fn apply(&mut self, wanted: &Rules, watch: &mut Watch) -> Result<(), Error> {
        if self.applied.as_ref() == Some(wanted) {
            return Ok(());
        }
        self.applied = None;
        let failed = |error| Error::netlink("load the pod network's rules (nftables with NAT)")(error);
        let table = self.name.as_str();
        // Deleting needs a table that exists, and creating first makes sure of it.
        let create = RawMessage::new(NFT_MSG_NEWTABLE, FAMILY)
            .flags(NLM_F_CREATE)
            .attrs(crate::proxy::string_attribute(NFTA_TABLE_NAME, table));
        let mut transaction = self
            .connection
            .transaction()
            .raw(create)
            .del_table(table, FAMILY)
            .add_table(table, FAMILY);
        for (name, ipv4) in FAMILIES_OF_NODES {
            let kind = if ipv4 {
                SetKeyType::Ipv4Addr
            } else {
                SetKeyType::Ipv6Addr
            };
            let set = Set::new(table, name).family(FAMILY).key_type(kind);
            let elements = wanted.nodes_of(ipv4);
            transaction = transaction.add_set(set.clone());
            for elements in elements.chunks(ELEMENTS_A_MESSAGE) {
                transaction = transaction.add_set_elements(&set, elements);
            }
        }
        let sources = BaseChain::filter(FilterHook::Prerouting, Priority::Custom(RAW_PRIORITY));
        let masquerade = BaseChain::nat(NatHook::Postrouting, Priority::Custom(SOURCE_NAT_PRIORITY));
        for (name, base) in [(SOURCES, sources), (MASQUERADE, masquerade)] {
            let chain = Chain::new(table, name).map_err(failed)?.family(FAMILY).base(base);
            transaction = transaction.add_chain(chain);
        }
        let rule = |chain: &str| Rule::new(table, chain).family(FAMILY);
        for source in source_rules(wanted, || rule(SOURCES)) {
            transaction = transaction.add_rule(source);
        }
        for masqueraded in masquerade_rules(wanted, || rule(MASQUERADE)) {
            transaction = transaction.add_rule(masqueraded);
        }
        transaction.commit(&self.connection).await.map_err(failed)?;
        self.applied = Some(wanted.clone());
        self.standing.rules_changed();
        let standing = &mut self.standing;
        standing.prime(&self.connection, &[(FAMILY, table)], watch).await;
        Ok(())
    }

    pub(super) async fn remove(&self) -> Result<(), Error> {
        let removed = self
            .connection
            .del_table_if_exists(self.name.as_str(), FAMILY)
            .await;
        removed
            .map(drop)
            .map_err(Error::netlink("remove the pod network's rules"))
    }
}

/// What is dropped before anything else looks at it.
fn source_rules(wanted: &Rules, rule: impl Fn() -> Rule) -> Vec<Rule> {
    let mut rules = Vec::new();
    for own in &wanted.own {
        // Pods of this node come by the bridge. Who comes another way under such an address is none of them.
        rules.push(
            rule()
                .match_iif_not(&wanted.bridge)
                .match_iif_not("lo")
                .match_saddr(own.address(), own.prefix())
                .drop(),
        );
    }
    for tunnel in &wanted.tunnels {
        // Through a tunnel come pods and gateways of other nodes, and nobody else.
        for (family, ipv4) in [(NFPROTO_IPV4, true), (NFPROTO_IPV6, false)] {
            let cluster = wanted.cluster.iter().find(|cidr| cidr.is_ipv4() == ipv4);
            let from_tunnel = rule().match_iif(tunnel);
            rules.push(match cluster {
                Some(cluster) => from_tunnel
                    .match_saddr_not(cluster.address(), cluster.prefix())
                    .drop(),
                None => only_family(from_tunnel, family).drop(),
            });
        }
    }
    // A pod's packets leave under the node's address: it must not make others of them.
    for port in [wanted.vxlan_port, wanted.wireguard_port] {
        let from_pod = || rule().match_iif(&wanted.bridge).match_udp_dport(port);
        rules.push(from_pod().match_in_set(PacketField::Ip4Daddr, NODES[0]).drop());
        rules.push(from_pod().match_in_set(PacketField::Ip6Daddr, NODES[1]).drop());
        rules.push(
            from_pod()
                .match_fib_type(FibFlags::DADDR, RouteType::Local)
                .drop(),
        );
    }
    // VXLAN itself asks nobody who he is.
    for (field, nodes) in [
        (PacketField::Ip4Saddr, NODES[0]),
        (PacketField::Ip6Saddr, NODES[1]),
    ] {
        let encapsulated = rule()
            .match_udp_dport(wanted.vxlan_port)
            .match_fib_type(FibFlags::DADDR, RouteType::Local);
        rules.push(
            of_virtual_network(encapsulated, wanted.vni)
                .match_not_in_set(field, nodes)
                .drop(),
        );
    }
    rules
}

/// Pods keep their addresses inside the cluster and borrow the node's outside of it.
fn masquerade_rules(wanted: &Rules, rule: impl Fn() -> Rule) -> Vec<Rule> {
    let masquerade = |own: &Cidr| {
        let mut from_pod = rule().match_saddr(own.address(), own.prefix());
        for cluster in wanted.cluster.iter().filter(|cluster| cluster.same_family(*own)) {
            from_pod = from_pod.match_daddr_not(cluster.address(), cluster.prefix());
        }
        from_pod
            .match_oif_not(&wanted.bridge)
            .nat(NatStatement::masquerade().fully_random())
    };
    wanted.own.iter().map(masquerade).collect()
}

pub(super) fn only_family(rule: Rule, family: u8) -> Rule {
    rule.expr(Expr::Meta {
        dreg: Register::R0,
        key: MetaKey::NfProto,
    })
    .expr(Expr::Cmp {
        sreg: Register::R0,
        op: CmpOp::Eq,
        data: vec![family],
    })
}

/// Matches VXLAN packets of one virtual network: other clusters of the machine share the port.
fn of_virtual_network(rule: Rule, vni: u32) -> Rule {
    let [_, a, b, c] = vni.to_be_bytes();
    rule.match_l4proto(UDP)
        .expr(Expr::Payload {
            dreg: Register::R0,
            base: PayloadBase::Transport,
            offset: VNI_OFFSET,
            len: 3,
        })
        .expr(Expr::Cmp {
            sreg: Register::R0,
            op: CmpOp::Eq,
            data: vec![a, b, c],
        })
}
