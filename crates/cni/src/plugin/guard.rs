//! What a sandbox may send. Each host end has an nftables chain at its ingress hook, which sees every frame
//! before the bridge, the host's protocol handlers and connection tracking do. The chain accepts IPv4, IPv6 and ARP
//! that carry the sandbox's own hardware and IP address and are meant for the gateway, its only neighbour; all
//! else is dropped: forged ARP, forged sources, a family that the sandbox has no address of, DHCP servers, frames
//! to other sandboxes, frames to the link-local multicast group that a bridge hands to the host unseen.
//!
//! Of IPv6's neighbour discovery nothing passes: router advertisements, redirects and forged neighbours have no
//! good use here, because both ends have permanent neighbour entries of each other.
//!
//! The hook belongs to the port, not to the bridge: a `bridge` table does not see the link-local group, and
//! cannot tell bridges apart on every kernel.

use std::collections::BTreeMap;
use std::net::IpAddr;

use nlink::netlink::nftables::{
    BaseChain, Chain, CmpOp, Expr, Family, FilterHook, MetaKey, NFT_MSG_NEWTABLE, PayloadBase, Policy,
    Priority, RawMessage, Register, Rule, RuleExpr, Verdict,
};
use nlink::netlink::{Connection, Nftables};

use super::bridge::{mac_of, mac_of_pod};
use super::subnet::Subnets;

const FAMILY: Family = Family::Netdev;

/// Before every other chain of the hook: what is forged is nobody's business.
const PRIORITY: i32 = -500;

const NLM_F_CREATE: u16 = 0x400;
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_TABLE_FLAGS: u16 = 2;

/// As the kernel numbers them: the hook, and a policy.
const INGRESS: u32 = 0;
const NF_DROP: u32 = 0;

const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const ETHERTYPE_ARP: [u8; 2] = [0x08, 0x06];

/// The first eight bytes of ARP for IPv4 over Ethernet: hardware, protocol, their lengths, the operation.
const ARP_REQUEST: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1];
const ARP_REPLY: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 2];

const ETHERNET_SOURCE: u32 = 6;
const ARP_SENDER: u32 = 8;
const ARP_TARGET_IP: u32 = 24;
const IPV4_SOURCE: u32 = 12;
const IPV4_DESTINATION: u32 = 16;
const IPV6_SOURCE: u32 = 8;

const ICMPV6: u8 = 58;
/// Router solicitation to redirect, the messages of neighbour discovery.
const NEIGHBOUR_DISCOVERY: (u8, u8) = (133, 137);

/// The chains of one bridge's ports: a table named after the bridge, a chain named after the host end.
pub(super) struct Guard<'a> {
    connection: Connection<Nftables>,
    table: &'a str,
}

impl<'a> Guard<'a> {
    pub(super) fn open(bridge: &'a str) -> nlink::Result<Guard<'a>> {
        Ok(Guard {
            connection: Connection::<Nftables>::new()?,
            table: bridge,
        })
    }

    /// Makes the table; having it is fine. A kernel without ingress hooks fails here.
    pub(super) async fn ensure_table(&self) -> nlink::Result<()> {
        let transaction = self.connection.transaction().raw(self.table_message());
        transaction.commit(&self.connection).await
    }

    /// Creates the table or leaves it as it is, but for its flags: it must not sleep. A transaction that failed because it
    /// exists would cost a grace period of the kernel, some milliseconds a pod.
    fn table_message(&self) -> RawMessage {
        let length = 4 + self.table.len() + 1;
        let mut attributes = (length as u16).to_ne_bytes().to_vec();
        attributes.extend(NFTA_TABLE_NAME.to_ne_bytes());
        attributes.extend(self.table.as_bytes());
        attributes.resize(length.next_multiple_of(4), 0);
        attributes.extend(8u16.to_ne_bytes());
        attributes.extend(NFTA_TABLE_FLAGS.to_ne_bytes());
        attributes.extend(0u32.to_be_bytes());
        RawMessage::new(NFT_MSG_NEWTABLE, FAMILY)
            .flags(NLM_F_CREATE)
            .attrs(attributes)
    }

    /// Limits the host end to what the sandbox with these addresses may send, in one step: there is no moment
    /// with half of the rules. The host end must exist.
    pub(super) async fn protect(
        &self,
        host_ifname: &str,
        addresses: &[IpAddr],
        subnets: &Subnets,
    ) -> nlink::Result<()> {
        let base = BaseChain::filter(FilterHook::ingress([host_ifname]), Priority::Custom(PRIORITY))
            .policy(Policy::Drop);
        let chain = Chain::new(self.table, host_ifname)?.family(FAMILY).base(base);
        let mut transaction = self
            .connection
            .transaction()
            // Whoever flushes the host's rules takes the table too.
            .raw(self.table_message())
            .update_chain(chain)
            .flush_chain(self.table, host_ifname, FAMILY);
        for expressions in rules(addresses, subnets) {
            let rule = Rule::new(self.table, host_ifname).family(FAMILY);
            transaction = transaction.add_rule(rule.expressions(expressions));
        }
        transaction.commit(&self.connection).await
    }

    /// What the kernel has.
    pub(super) async fn standing(&self) -> nlink::Result<StandingGuards> {
        let tables = self.connection.list_tables_in(FAMILY).await?;
        // A table that sleeps (`flags dormant`) guards nothing.
        if !tables
            .iter()
            .any(|table| table.name == self.table && table.flags == 0)
        {
            return Ok(StandingGuards::default());
        }
        let read = async {
            let chains = self.connection.list_chains_in(self.table, FAMILY).await?;
            Ok::<_, nlink::Error>((chains, self.connection.list_rules(self.table, FAMILY).await?))
        };
        let (chains, listed) = match read.await {
            Err(error) if error.is_not_found() => return Ok(StandingGuards::default()),
            read => read?,
        };
        let guarding = chains.into_iter().filter(|chain| {
            let on_its_device = chain.device.as_deref() == Some(&chain.name);
            let hook = (chain.hook, chain.priority, chain.policy);
            on_its_device && hook == (Some(INGRESS), Some(PRIORITY), Some(NF_DROP))
        });
        let mut chains: BTreeMap<String, Vec<Vec<RuleExpr>>> =
            guarding.map(|chain| (chain.name, Vec::new())).collect();
        for rule in listed {
            if let Some(rules) = chains.get_mut(&rule.chain) {
                rules.push(rule.expressions());
            }
        }
        Ok(StandingGuards(chains))
    }

    /// Forgets a host end that is gone; older kernels have done so already.
    pub(super) async fn forget(&self, host_ifname: &str) -> nlink::Result<()> {
        self.connection
            .del_chain_if_exists(self.table, host_ifname, FAMILY)
            .await
            .map(drop)
    }

    pub(super) async fn remove_table(&self) -> nlink::Result<()> {
        self.connection
            .del_table_if_exists(self.table, FAMILY)
            .await
            .map(drop)
    }
}

/// The chains that the kernel has on their devices, with their rules.
#[derive(Default)]
pub(super) struct StandingGuards(BTreeMap<String, Vec<Vec<RuleExpr>>>);

impl StandingGuards {
    /// Whether the host end is limited to what the sandbox with these addresses may send.
    pub(super) fn protect(&self, host_ifname: &str, addresses: &[IpAddr], subnets: &Subnets) -> bool {
        let Some(found) = self.0.get(host_ifname) else {
            return false;
        };
        let wanted = rules(addresses, subnets);
        let same = |found: &Vec<RuleExpr>, wanted: &Vec<Expr>| {
            found.len() == wanted.len() && found.iter().zip(wanted).all(|(found, wanted)| is(found, wanted))
        };
        found.len() == wanted.len()
            && found
                .iter()
                .zip(&wanted)
                .all(|(found, wanted)| same(found, wanted))
    }
}

/// Whether the kernel shows the expression, of those that are used here.
fn is(found: &RuleExpr, wanted: &Expr) -> bool {
    match (found, wanted) {
        (
            RuleExpr::Payload {
                dreg,
                base,
                offset,
                len,
                ..
            },
            Expr::Payload {
                dreg: in_register,
                base: of,
                offset: at,
                len: bytes,
            },
        ) => (dreg, base, offset, len) == (in_register, of, at, bytes),
        (
            RuleExpr::Cmp { sreg, op, data, .. },
            Expr::Cmp {
                sreg: register,
                op: how,
                data: with,
            },
        ) => (sreg, op, data) == (register, how, with),
        (
            RuleExpr::Meta { dreg, key, .. },
            Expr::Meta {
                dreg: register,
                key: of,
            },
        ) => (dreg, key) == (register, of),
        (RuleExpr::Verdict(found), Expr::Verdict(wanted)) => found == wanted,
        _ => false,
    }
}

/// Bytes of a frame and what they must (or must not) be.
struct Field {
    base: PayloadBase,
    offset: u32,
    is: CmpOp,
    value: Vec<u8>,
}

impl Field {
    fn new(base: PayloadBase, offset: u32, parts: &[&[u8]]) -> Field {
        Field {
            base,
            offset,
            is: CmpOp::Eq,
            value: parts.concat(),
        }
    }

    /// A frame that is too short for the field does not match the rule.
    fn expressions(self) -> [Expr; 2] {
        let load = Expr::Payload {
            dreg: Register::R0,
            base: self.base,
            offset: self.offset,
            len: self.value.len() as u32,
        };
        let compare = Expr::Cmp {
            sreg: Register::R0,
            op: self.is,
            data: self.value,
        };
        [load, compare]
    }
}

/// The rules of a sandbox's chain. What none of them accepts is dropped.
fn rules(addresses: &[IpAddr], subnets: &Subnets) -> Vec<Vec<Expr>> {
    let mut rules = Vec::new();
    if addresses.iter().any(IpAddr::is_ipv6) {
        let mut forbidden = neighbour_discovery();
        forbidden.push(Expr::Verdict(Verdict::Drop));
        rules.push(forbidden);
    }
    for fields in allowed(addresses, subnets) {
        let mut rule: Vec<Expr> = fields.into_iter().flat_map(Field::expressions).collect();
        rule.push(Expr::Verdict(Verdict::Accept));
        rules.push(rule);
    }
    rules
}

/// Matches neighbour discovery, behind whatever extension headers.
fn neighbour_discovery() -> Vec<Expr> {
    let (dreg, sreg) = (Register::R0, Register::R0);
    let kind = |op, value: u8| Expr::Cmp {
        sreg,
        op,
        data: vec![value],
    };
    let [load, compare] = Field::new(PayloadBase::LinkLayer, 12, &[&ETHERTYPE_IPV6]).expressions();
    vec![
        load,
        compare,
        Expr::Meta {
            dreg,
            key: MetaKey::L4Proto,
        },
        kind(CmpOp::Eq, ICMPV6),
        Expr::Payload {
            dreg,
            base: PayloadBase::Transport,
            offset: 0,
            len: 1,
        },
        kind(CmpOp::Gte, NEIGHBOUR_DISCOVERY.0),
        kind(CmpOp::Lte, NEIGHBOUR_DISCOVERY.1),
    ]
}

/// The frames that pass, one list of conditions each. The type in the Ethernet header is that of the frame as
/// sent, so tagged frames (VLAN) do not pass.
fn allowed(addresses: &[IpAddr], subnets: &Subnets) -> Vec<Vec<Field>> {
    use PayloadBase::{LinkLayer, Network};
    let (own_mac, gateway_mac) = (mac_of_pod(addresses), mac_of(subnets.first_gateway()));
    let mut allowed = Vec::new();
    for address in addresses {
        match (*address, subnets.gateway_of(*address)) {
            (IpAddr::V4(own), Some(IpAddr::V4(gateway))) => {
                let (own_ip, gateway_ip) = (own.octets(), gateway.octets());
                allowed.push(vec![
                    Field::new(LinkLayer, 0, &[&gateway_mac, &own_mac, &ETHERTYPE_IPV4]),
                    Field::new(Network, IPV4_SOURCE, &[&own_ip]),
                    // The bridge routes loopback addresses for the sake of node ports; sandboxes have no part in
                    // that.
                    Field {
                        is: CmpOp::Neq,
                        ..Field::new(Network, IPV4_DESTINATION, &[&[127]])
                    },
                ]);
                // A request for the gateway, and an answer to the host, which may have asked from any of its
                // addresses: the target's is not looked at.
                allowed.push(vec![
                    Field::new(LinkLayer, ETHERNET_SOURCE, &[&own_mac, &ETHERTYPE_ARP]),
                    Field::new(Network, 0, &[&ARP_REQUEST, &own_mac]),
                    Field::new(Network, ARP_SENDER + 6, &[&own_ip]),
                    Field::new(Network, ARP_TARGET_IP, &[&gateway_ip]),
                ]);
                allowed.push(vec![
                    Field::new(LinkLayer, 0, &[&gateway_mac, &own_mac, &ETHERTYPE_ARP]),
                    Field::new(Network, 0, &[&ARP_REPLY, &own_mac]),
                    Field::new(Network, ARP_SENDER + 6, &[&own_ip]),
                ]);
            }
            (IpAddr::V6(own), Some(_)) => allowed.push(vec![
                Field::new(LinkLayer, 0, &[&gateway_mac, &own_mac, &ETHERTYPE_IPV6]),
                Field::new(Network, IPV6_SOURCE, &[&own.octets()]),
            ]),
            // Of a network that the node no longer has.
            _ => {}
        }
    }
    allowed
}
