//! The policies' nftables table. Whatever changes together is one transaction, so that every packet sees either the old
//! table or the new one.
//!
//! A packet that opens a connection is looked up by its pod's address in a map, which leads to the chain of the pod's
//! isolation; there by the other side's address in a second map, which leads to a set of ports; and where that does not
//! let it pass, in one set of address blocks with ports. That is the same work for one policy and for thousands.
//!
//! Policies of administrators come before and after that, with as much work: by the pod's address a packet comes to the
//! chain of its class; there by the other side's address to a verdict or to a map of verdicts by port, or else to a map of
//! address ranges and ports. Which rule comes first was settled when these were made (`compile::classes`). Who is not
//! decided about returns: from the Admin tier to the isolation, and from the Baseline tier, which is in the place of the
//! isolation where there is none, to the end of the hook, and passes.

use std::collections::BTreeMap;
use std::net::IpAddr;

use nlink::netlink::nftables::{
    BaseChain, Chain, ChainName, CmpOp, CtState, Expr, Family, FilterHook, LookupExpr, MetaKey,
    NFT_MSG_NEWTABLE, PayloadBase, Priority, RawMessage, Register, Rule, Set, SetElement, SetKeyType,
    Transaction, Verdict,
};

use super::compile::{ACCEPTS, ALL_PORTS, DENIES, Delta, Element, OPEN, UNDECIDED};
use super::ports::PortBox;
use super::{Direction, Error, PolicyConfig};
use crate::nft::{OwnConnection, Standing};

pub(super) const FAMILY: Family = Family::Inet;
const NLM_F_CREATE: u16 = 0x400;
const NFTA_TABLE_NAME: u16 = 1;

/// A transaction is one datagram, and the kernel takes none that is larger than the send buffer. This
/// is a limit and costs nothing until it is used.
const SEND_BUFFER: usize = 256 << 20;

/// Elements a message; a list of them must stay below 64 KiB.
const ELEMENTS_A_MESSAGE: usize = 200;

/// The kernel's place for filters: service addresses are translated by then, and sources are not yet. What a pod may
/// send is decided before what the other one may receive; who passes the first chain comes to the second.
const EGRESS_PRIORITY: i32 = 0;
const INGRESS_PRIORITY: i32 = 1;

const FORWARD_EGRESS: &str = "forward-egress";
const FORWARD_INGRESS: &str = "forward-ingress";
const INPUT_EGRESS: &str = "input-egress";

const FAMILIES: [bool; 2] = [true, false];

type NlResult<T> = Result<T, nlink::Error>;

pub(super) struct Table {
    pub(super) name: String,
    bridge: String,
    pub(super) connection: OwnConnection,
    /// What is known of the table if the kernel has all that was handed to `apply`.
    pub(super) standing: Option<Standing>,
}

impl Table {
    pub(super) fn open(config: &PolicyConfig) -> Result<Table, Error> {
        let connection = OwnConnection::open()?;
        if let Err(error) =
            rustix::net::sockopt::set_socket_send_buffer_size_force(connection.socket(), SEND_BUFFER)
        {
            tracing::warn!(%error, "cannot raise the netlink send buffer; large policies will not load");
        }
        Ok(Table {
            name: config.table.clone(),
            bridge: config.bridge.clone(),
            connection,
            standing: None,
        })
    }

    /// Whether the kernel has all that was handed to `apply`; else the next one makes the table anew.
    pub(super) fn stands(&self) -> bool {
        self.standing.is_some()
    }

    /// Brings a change into the kernel; if the table does not stand, `all` of it instead.
    pub(super) async fn apply(
        &mut self,
        delta: &Delta,
        all: impl Iterator<Item = (Element, u32)>,
    ) -> Result<(), Error> {
        if self.stands() && delta.is_empty() {
            return Ok(());
        }
        let transaction = self.connection.transaction();
        // Taken out: after an error the next attempt starts from scratch.
        let (transaction, standing) = match self.standing.take() {
            Some(mut standing) => {
                let added = delta.added.iter().map(|(element, _)| element);
                if delta.removed.iter().chain(added).any(is_chain) {
                    standing.rules_changed();
                }
                let t = self.change(transaction, &delta.removed, &delta.added)?;
                (t, standing)
            }
            None => {
                // Deleting needs a table that exists, and creating first makes sure of it.
                let create = RawMessage::new(NFT_MSG_NEWTABLE, FAMILY)
                    .flags(NLM_F_CREATE)
                    .attrs(crate::proxy::string_attribute(NFTA_TABLE_NAME, &self.name));
                let fresh = transaction
                    .raw(create)
                    .del_table(&self.name, FAMILY)
                    .add_table(&self.name, FAMILY);
                let all: Vec<(Element, u32)> = all.collect();
                (self.change(self.frame(fresh)?, &[], &all)?, Standing::default())
            }
        };
        transaction.commit(&self.connection).await?;
        self.standing = Some(standing);
        Ok(())
    }

    pub(super) async fn remove(self) -> Result<(), Error> {
        let name = self.name.as_str();
        self.connection.del_table_if_exists(name, FAMILY).await?;
        Ok(())
    }

    /// What is there whatever policies exist.
    fn frame(&self, mut t: Transaction) -> NlResult<Transaction> {
        for ipv4 in FAMILIES {
            t = t.add_set(self.set(SetKind::Own(ipv4)));
            for direction in Direction::BOTH {
                t = t.add_set(self.set(SetKind::Isolated(direction, ipv4)));
                t = t.add_set(self.set(SetKind::Admin(direction, ipv4)));
            }
        }
        let base = |hook, priority| BaseChain::filter(hook, Priority::Custom(priority));
        for (name, base) in [
            (FORWARD_EGRESS, base(FilterHook::Forward, EGRESS_PRIORITY)),
            (FORWARD_INGRESS, base(FilterHook::Forward, INGRESS_PRIORITY)),
            (INPUT_EGRESS, base(FilterHook::Input, EGRESS_PRIORITY)),
        ] {
            t = t.add_chain(self.chain(name)?.base(base));
        }
        for direction in Direction::BOTH {
            t = t.add_chain(self.chain(direction.name())?);
        }
        for chain in [FORWARD_EGRESS, FORWARD_INGRESS, INPUT_EGRESS] {
            let known = CtState::ESTABLISHED | CtState::RELATED;
            t = t.add_rule(self.rule(chain).match_ct_state(known).accept());
        }
        // Who comes by the bridge is a pod of this node, and so is who is reached by it.
        for (chain, direction) in [
            (FORWARD_EGRESS, Direction::Egress),
            (FORWARD_INGRESS, Direction::Ingress),
            (INPUT_EGRESS, Direction::Egress),
        ] {
            let rule = match direction {
                Direction::Egress => self.rule(chain).match_iif(&self.bridge),
                Direction::Ingress => self.rule(chain).match_oif(&self.bridge),
            };
            let decide = Verdict::JumpTo(ChainName::new(direction.name())?);
            t = t.add_rule(rule.expr(Expr::Verdict(decide)));
        }
        for direction in Direction::BOTH {
            let sets = [SetKind::Admin, SetKind::Isolated];
            for (set, ipv4) in sets.into_iter().flat_map(|set| FAMILIES.map(|ipv4| (set, ipv4))) {
                let rule = only_family(self.rule(direction.name()), ipv4);
                let rule = load_address(rule, Side::of_pod(direction), ipv4, 0);
                t = t.add_rule(verdict_of(rule, set(direction, ipv4)));
            }
            // Who is not known has not been looked at, and gets nothing.
            t = t.add_rule(self.rule(direction.name()).drop());
        }
        Ok(t)
    }

    /// The steps of a change, in an order in which every step finds what it refers to and nothing that still refers to
    /// what it removes.
    fn change(
        &self,
        mut t: Transaction,
        removed: &[Element],
        added: &[(Element, u32)],
    ) -> NlResult<Transaction> {
        for (element, _) in added {
            match *element {
                Element::Ports(id) => t = self.add_ports(t, id)?,
                Element::Decisions(id) => t = self.add_decisions(t, id)?,
                Element::Isolation(direction, id) => t = self.add_isolation(t, direction, id)?,
                Element::Class(direction, id) => t = self.add_class(t, direction, id)?,
                _ => {}
            }
        }
        let mut by_set: BTreeMap<SetKind, (Vec<SetElement>, Vec<SetElement>)> = BTreeMap::new();
        for element in removed {
            if let Some((kind, element)) = nft_element(*element, 0)? {
                by_set.entry(kind).or_default().0.push(element);
            }
        }
        for (element, value) in added {
            if let Some((kind, element)) = nft_element(*element, *value)? {
                by_set.entry(kind).or_default().1.push(element);
            }
        }
        for (kind, (removed, _)) in &by_set {
            for elements in removed.chunks(ELEMENTS_A_MESSAGE) {
                t = t.del_set_elements(&self.set(*kind), elements);
            }
        }
        for (kind, (_, added)) in &by_set {
            for elements in added.chunks(ELEMENTS_A_MESSAGE) {
                t = t.add_set_elements(&self.set(*kind), elements);
            }
        }
        // Isolations refer to ports, and classes to decisions.
        for element in removed.iter().rev() {
            let (chain, sets) = match *element {
                Element::Ports(id) => (ports_chain(id), vec![SetKind::Ports(id)]),
                Element::Decisions(id) => (decisions_chain(id), vec![SetKind::Decisions(id)]),
                Element::Isolation(direction, id) => (isolation_chain(direction, id), sets_of(direction, id)),
                Element::Class(direction, id) => (class_chain(direction, id), maps_of(direction, id)),
                _ => continue,
            };
            t = t
                .flush_chain(&self.name, &chain, FAMILY)
                .del_chain(&self.name, &chain, FAMILY);
            for set in sets {
                t = t.del_set(&self.name, &set.name(), FAMILY);
            }
        }
        Ok(t)
    }

    fn add_ports(&self, t: Transaction, id: u32) -> NlResult<Transaction> {
        let (set, chain) = (SetKind::Ports(id), ports_chain(id));
        let rule = look_up(load_ports(self.rule(&chain), 0), set).accept();
        Ok(t.add_set(self.set(set))
            .add_chain(self.chain(&chain)?)
            .add_rule(rule))
    }

    fn add_isolation(&self, mut t: Transaction, direction: Direction, id: u32) -> NlResult<Transaction> {
        for set in sets_of(direction, id) {
            t = t.add_set(self.set(set));
        }
        let chain = isolation_chain(direction, id);
        t = t.add_chain(self.chain(&chain)?);
        let other = Side::of_pod(direction).other();
        for ipv4 in FAMILIES {
            let of_family = || load_address(only_family(self.rule(&chain), ipv4), other, ipv4, 0);
            t = t.add_rule(verdict_of(of_family(), SetKind::Allowed(direction, id, ipv4)));
            let by_block = load_ports(of_family(), address_words(ipv4));
            let by_block = look_up(by_block, SetKind::AllowedBlock(direction, id, ipv4));
            t = t.add_rule(by_block.accept());
            // By way of a service a pod may meet itself.
            let between_pods = self.rule(&chain).match_iif(&self.bridge).match_oif(&self.bridge);
            let own = load_address(only_family(between_pods, ipv4), Side::Source, ipv4, 0);
            let own = load_address(own, Side::Destination, ipv4, address_words(ipv4));
            t = t.add_rule(look_up(own, SetKind::Own(ipv4)).accept());
        }
        Ok(t.add_rule(self.rule(&chain).drop()))
    }

    fn add_decisions(&self, t: Transaction, id: u32) -> NlResult<Transaction> {
        let (set, chain) = (SetKind::Decisions(id), decisions_chain(id));
        Ok(t.add_set(self.set(set))
            .add_chain(self.chain(&chain)?)
            .add_rule(verdict_of(load_ports(self.rule(&chain), 0), set))
            .add_rule(verdict_of(load_no_port(self.rule(&chain), 0), set)))
    }

    fn add_class(&self, mut t: Transaction, direction: Direction, id: u32) -> NlResult<Transaction> {
        for set in maps_of(direction, id) {
            t = t.add_set(self.set(set));
        }
        let chain = class_chain(direction, id);
        t = t.add_chain(self.chain(&chain)?);
        let other = Side::of_pod(direction).other();
        for ipv4 in FAMILIES {
            let of_family = || load_address(only_family(self.rule(&chain), ipv4), other, ipv4, 0);
            let (peers, ranges) = (
                SetKind::PeerVerdict(direction, id, ipv4),
                SetKind::RangeVerdict(direction, id, ipv4),
            );
            t = t
                .add_rule(verdict_of(of_family(), peers))
                .add_rule(verdict_of(load_ports(of_family(), address_words(ipv4)), ranges))
                .add_rule(verdict_of(load_no_port(of_family(), address_words(ipv4)), ranges));
        }
        Ok(t)
    }

    fn chain(&self, name: &str) -> NlResult<Chain> {
        Ok(Chain::new(self.name.as_str(), name)?.family(FAMILY))
    }

    fn rule(&self, chain: &str) -> Rule {
        Rule::new(&self.name, chain).family(FAMILY)
    }

    fn set(&self, kind: SetKind) -> Set {
        use SetKeyType::{Concat, InetProto, InetService};
        let set = Set::new(&self.name, &kind.name()).family(FAMILY);
        match kind {
            SetKind::Ports(_) => set.key_type(Concat(vec![InetProto, InetService])).interval(),
            SetKind::Decisions(_) => set
                .key_type(Concat(vec![InetProto, InetService]))
                .interval()
                .vmap(),
            SetKind::Allowed(_, _, ipv4)
            | SetKind::PeerVerdict(_, _, ipv4)
            | SetKind::Admin(_, ipv4)
            | SetKind::Isolated(_, ipv4) => set.key_type(address_type(ipv4)).vmap(),
            SetKind::RangeVerdict(_, _, ipv4) => set
                .key_type(Concat(vec![address_type(ipv4), InetProto, InetService]))
                .interval()
                .vmap(),
            SetKind::AllowedBlock(_, _, ipv4) => set
                .key_type(Concat(vec![address_type(ipv4), InetProto, InetService]))
                .interval(),
            SetKind::Own(ipv4) => set.key_type(Concat(vec![address_type(ipv4), address_type(ipv4)])),
        }
    }
}

fn is_chain(element: &Element) -> bool {
    matches!(
        element,
        Element::Ports(_) | Element::Decisions(_) | Element::Isolation(..) | Element::Class(..)
    )
}

/// The sets and maps. The flag is true for IPv4.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SetKind {
    Ports(u32),
    Decisions(u32),
    Allowed(Direction, u32, bool),
    AllowedBlock(Direction, u32, bool),
    PeerVerdict(Direction, u32, bool),
    RangeVerdict(Direction, u32, bool),
    Admin(Direction, bool),
    Isolated(Direction, bool),
    Own(bool),
}

impl SetKind {
    pub(super) fn name(self) -> String {
        let family = |ipv4| if ipv4 { "ipv4" } else { "ipv6" };
        match self {
            SetKind::Ports(id) => ports_chain(id),
            SetKind::Decisions(id) => decisions_chain(id),
            SetKind::Allowed(direction, id, ipv4) => {
                format!("{}-pods-{}", isolation_chain(direction, id), family(ipv4))
            }
            SetKind::AllowedBlock(direction, id, ipv4) => {
                format!("{}-blocks-{}", isolation_chain(direction, id), family(ipv4))
            }
            SetKind::PeerVerdict(direction, id, ipv4) => {
                format!("{}-pods-{}", class_chain(direction, id), family(ipv4))
            }
            SetKind::RangeVerdict(direction, id, ipv4) => {
                format!("{}-ranges-{}", class_chain(direction, id), family(ipv4))
            }
            SetKind::Admin(direction, ipv4) => format!("admin-{}-{}", direction.name(), family(ipv4)),
            SetKind::Isolated(direction, ipv4) => format!("{}-{}", direction.name(), family(ipv4)),
            SetKind::Own(ipv4) => format!("own-{}", family(ipv4)),
        }
    }
}

/// The sets that an isolation has to itself.
fn sets_of(direction: Direction, id: u32) -> Vec<SetKind> {
    FAMILIES
        .into_iter()
        .flat_map(|ipv4| {
            [
                SetKind::Allowed(direction, id, ipv4),
                SetKind::AllowedBlock(direction, id, ipv4),
            ]
        })
        .collect()
}

/// The maps that a class has to itself.
fn maps_of(direction: Direction, id: u32) -> Vec<SetKind> {
    FAMILIES
        .into_iter()
        .flat_map(|ipv4| {
            [
                SetKind::PeerVerdict(direction, id, ipv4),
                SetKind::RangeVerdict(direction, id, ipv4),
            ]
        })
        .collect()
}

fn ports_chain(id: u32) -> String {
    format!("ports-{id}")
}

fn isolation_chain(direction: Direction, id: u32) -> String {
    format!("{}-{id}", direction.name())
}

fn decisions_chain(id: u32) -> String {
    format!("decisions-{id}")
}

fn class_chain(direction: Direction, id: u32) -> String {
    format!("{}-class-{id}", direction.name())
}

/// Whether a chain is a class's.
pub(super) fn is_class(chain: &str) -> bool {
    chain.contains("-class-")
}

fn address_type(ipv4: bool) -> SetKeyType {
    if ipv4 {
        SetKeyType::Ipv4Addr
    } else {
        SetKeyType::Ipv6Addr
    }
}

/// The element and its set; chains are none.
pub(super) fn nft_element(element: Element, value: u32) -> NlResult<Option<(SetKind, SetElement)>> {
    Ok(Some(match element {
        Element::Ports(_) | Element::Decisions(_) | Element::Isolation(..) | Element::Class(..) => {
            return Ok(None);
        }
        Element::Port(id, ports) => (SetKind::Ports(id), SetElement::concat(port_fields(ports))),
        Element::Allowed(direction, id, address) => {
            let verdict = match value {
                ALL_PORTS => Verdict::Accept,
                // Who is not let pass there may be by a block.
                ports => Verdict::JumpTo(ChainName::new(ports_chain(ports))?),
            };
            let kind = SetKind::Allowed(direction, id, address.is_ipv4());
            (kind, one_address(address).verdict(verdict))
        }
        Element::AllowedBlock(direction, id, first, last, ports) => {
            let [protocols, ports] = port_fields(ports);
            let addresses = SetElement::range(octets(first), octets(last));
            let kind = SetKind::AllowedBlock(direction, id, first.is_ipv4());
            (kind, SetElement::concat([addresses, protocols, ports]))
        }
        Element::Decision(id, ports) => {
            let element = SetElement::concat(port_fields(ports));
            (SetKind::Decisions(id), element.verdict(verdict_for(value)?))
        }
        Element::PeerVerdict(direction, id, address) => {
            let kind = SetKind::PeerVerdict(direction, id, address.is_ipv4());
            (kind, one_address(address).verdict(verdict_for(value)?))
        }
        Element::RangeVerdict(direction, id, first, last, ports) => {
            let [protocols, ports] = port_fields(ports);
            let addresses = SetElement::range(octets(first), octets(last));
            let kind = SetKind::RangeVerdict(direction, id, first.is_ipv4());
            let element = SetElement::concat([addresses, protocols, ports]);
            (kind, element.verdict(verdict_for(value)?))
        }
        Element::Admin(direction, address) => {
            // Who is not decided about comes back.
            let verdict = Verdict::JumpTo(ChainName::new(class_chain(direction, value))?);
            let kind = SetKind::Admin(direction, address.is_ipv4());
            (kind, one_address(address).verdict(verdict))
        }
        Element::Baseline(direction, address) => {
            let verdict = Verdict::GotoTo(ChainName::new(class_chain(direction, value))?);
            let kind = SetKind::Isolated(direction, address.is_ipv4());
            (kind, one_address(address).verdict(verdict))
        }
        Element::Isolated(direction, address) => {
            let verdict = match value {
                OPEN => Verdict::Accept,
                id => Verdict::GotoTo(ChainName::new(isolation_chain(direction, id))?),
            };
            let kind = SetKind::Isolated(direction, address.is_ipv4());
            (kind, one_address(address).verdict(verdict))
        }
        Element::Own(address) => (
            SetKind::Own(address.is_ipv4()),
            SetElement::concat([one_address(address), one_address(address)]),
        ),
    }))
}

/// What a class does. `return` leads to where its chain was jumped to from, as the end of the chain does.
fn verdict_for(value: u32) -> NlResult<Verdict> {
    Ok(match value {
        UNDECIDED => Verdict::Return,
        ACCEPTS => Verdict::Accept,
        DENIES => Verdict::Drop,
        decisions => Verdict::GotoTo(ChainName::new(decisions_chain(decisions))?),
    })
}

pub(super) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn one_address(address: IpAddr) -> SetElement {
    SetElement::new(octets(address))
}

fn port_fields(ports: PortBox) -> [SetElement; 2] {
    [
        SetElement::range(vec![ports.protocols.0], vec![ports.protocols.1]),
        SetElement::port_range(ports.ports.0, ports.ports.1),
    ]
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Source,
    Destination,
}

impl Side {
    /// Where the address of this node's pod is.
    fn of_pod(direction: Direction) -> Side {
        match direction {
            Direction::Ingress => Side::Destination,
            Direction::Egress => Side::Source,
        }
    }

    fn other(self) -> Side {
        match self {
            Side::Source => Side::Destination,
            Side::Destination => Side::Source,
        }
    }
}

/// The n-th word of the kernel's registers: the fields of a key lie in words of four bytes, one after the other.
fn word(n: usize) -> Register {
    const WORDS: [Register; 6] = [
        Register::Reg32_00,
        Register::Reg32_01,
        Register::Reg32_02,
        Register::Reg32_03,
        Register::Reg32_04,
        Register::Reg32_05,
    ];
    WORDS[n]
}

fn address_words(ipv4: bool) -> usize {
    if ipv4 { 1 } else { 4 }
}

fn only_family(rule: Rule, ipv4: bool) -> Rule {
    const NFPROTO_IPV4: u8 = 2;
    const NFPROTO_IPV6: u8 = 10;
    rule.expr(Expr::Meta {
        dreg: word(0),
        key: MetaKey::NfProto,
    })
    .expr(Expr::Cmp {
        sreg: word(0),
        op: CmpOp::Eq,
        data: vec![if ipv4 { NFPROTO_IPV4 } else { NFPROTO_IPV6 }],
    })
}

fn load_address(rule: Rule, side: Side, ipv4: bool, at: usize) -> Rule {
    let (offset, len) = match (ipv4, side) {
        (true, Side::Source) => (12, 4),
        (true, Side::Destination) => (16, 4),
        (false, Side::Source) => (8, 16),
        (false, Side::Destination) => (24, 16),
    };
    rule.expr(Expr::Payload {
        dreg: word(at),
        base: PayloadBase::Network,
        offset,
        len,
    })
}

/// Loads protocol and destination port. What has no ports has other bytes there, which is fine for rules without ports.
fn load_ports(rule: Rule, at: usize) -> Rule {
    rule.expr(Expr::Meta {
        dreg: word(at),
        key: MetaKey::L4Proto,
    })
    .expr(Expr::Payload {
        dreg: word(at + 1),
        base: PayloadBase::Transport,
        offset: 2,
        len: 2,
    })
}

/// Loads protocol and no port, for a second look-up of what is too short to have ports: the first one ends where it cannot
/// load them, and what is denied must not pass by that. No rule is about port 0 alone, so that who has ports is not taken
/// for somebody else.
fn load_no_port(rule: Rule, at: usize) -> Rule {
    rule.expr(Expr::Meta {
        dreg: word(at),
        key: MetaKey::L4Proto,
    })
    .expr(Expr::Immediate {
        dreg: word(at + 1),
        data: vec![0, 0],
    })
}

fn look_up(rule: Rule, set: SetKind) -> Rule {
    rule.expr(Expr::Lookup(LookupExpr::new(set.name(), word(0))))
}

/// Does what the map has for the address.
fn verdict_of(rule: Rule, map: SetKind) -> Rule {
    rule.expr(Expr::Lookup(
        LookupExpr::new(map.name(), word(0)).dreg(Register::Verdict),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nft::Touched;

    /// The kernel takes the table, and changes in which ranges take the place of others that they overlap.
    #[test]
    fn the_kernel_takes_it() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let tried = std::thread::spawn(|| {
            // SAFETY: only the network namespace changes, and the thread ends with the test.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(in_a_kernel());
        });
        tried.join().unwrap();
    }

    async fn in_a_kernel() {
        let config = PolicyConfig {
            node_name: "here".into(),
            bridge: "skiff0".into(),
            table: "skiff-test-policy".into(),
            socket: "/nowhere".into(),
        };
        let mut table = Table::open(&config).unwrap();
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let (v4, v6) = (address("10.0.0.1"), address("fd00::1"));
        let egress = Direction::Egress;
        let ports = |first, last| PortBox {
            protocols: (6, 6),
            ports: (first, last),
        };
        let mut there: BTreeMap<Element, u32> = [
            (Element::Ports(3), 0),
            (Element::Port(3, ports(80, 90)), 0),
            (Element::Port(3, ports(100, 100)), 0),
            (Element::Isolation(egress, 7), 0),
            (Element::Allowed(egress, 7, v4), 3),
            (Element::Allowed(egress, 7, v6), ALL_PORTS),
            (
                Element::AllowedBlock(egress, 7, v4, address("10.0.0.9"), ports(1, 5)),
                0,
            ),
            (
                Element::AllowedBlock(egress, 7, v6, address("fd00::ff"), PortBox::ALL),
                0,
            ),
            (Element::Decisions(5), 0),
            (Element::Decision(5, ports(80, 90)), DENIES),
            (Element::Decision(5, ports(91, 91)), UNDECIDED),
            (Element::Class(egress, 9), 0),
            (Element::PeerVerdict(egress, 9, v4), 5),
            (Element::PeerVerdict(egress, 9, v6), UNDECIDED),
            (
                Element::RangeVerdict(egress, 9, v4, address("10.0.0.9"), ports(1, 5)),
                DENIES,
            ),
            (
                Element::RangeVerdict(egress, 9, v6, address("fd00::ff"), PortBox::ALL),
                ACCEPTS,
            ),
            (Element::Admin(egress, v4), 9),
            (Element::Admin(egress, v6), 9),
            (Element::Baseline(egress, v4), 9),
            (Element::Isolated(Direction::Ingress, v4), OPEN),
            (Element::Isolated(egress, v6), 7),
            (Element::Own(v4), 0),
            (Element::Own(v6), 0),
        ]
        .into();
        table
            .apply(&Delta::default(), there.clone().into_iter())
            .await
            .unwrap();
        for (gone, come) in [
            (
                vec![Element::Allowed(egress, 7, v4), Element::Isolated(egress, v6)],
                vec![
                    (Element::Allowed(egress, 7, v4), ALL_PORTS),
                    (Element::Isolated(egress, v6), OPEN),
                ],
            ),
            // What comes overlaps what goes.
            (
                vec![
                    Element::Port(3, ports(80, 90)),
                    Element::AllowedBlock(egress, 7, v4, address("10.0.0.9"), ports(1, 5)),
                ],
                vec![
                    (Element::Port(3, ports(85, 95)), 0),
                    (
                        Element::AllowedBlock(egress, 7, address("10.0.0.0"), v4, PortBox::ALL),
                        0,
                    ),
                ],
            ),
            // A NetworkPolicy comes, and the Baseline tier has nothing to say any more.
            (
                vec![
                    Element::Baseline(egress, v4),
                    Element::Decision(5, ports(80, 90)),
                    Element::RangeVerdict(egress, 9, v4, address("10.0.0.9"), ports(1, 5)),
                ],
                vec![
                    (Element::Isolated(egress, v4), 7),
                    (Element::Decision(5, ports(80, 90)), ACCEPTS),
                    (
                        Element::RangeVerdict(egress, 9, v4, address("10.0.0.2"), ports(3, 9)),
                        ACCEPTS,
                    ),
                ],
            ),
            // Chains take the place of others.
            (
                there
                    .keys()
                    .copied()
                    .chain([
                        Element::Port(3, ports(85, 95)),
                        Element::AllowedBlock(egress, 7, address("10.0.0.0"), v4, PortBox::ALL),
                        Element::Isolated(egress, v4),
                        Element::RangeVerdict(egress, 9, v4, address("10.0.0.2"), ports(3, 9)),
                    ])
                    .filter(|element| {
                        ![
                            Element::Port(3, ports(80, 90)),
                            Element::AllowedBlock(egress, 7, v4, address("10.0.0.9"), ports(1, 5)),
                            Element::RangeVerdict(egress, 9, v4, address("10.0.0.9"), ports(1, 5)),
                            Element::Baseline(egress, v4),
                            Element::Own(v4),
                        ]
                        .contains(element)
                    })
                    .collect(),
                vec![
                    (Element::Ports(4), 0),
                    (Element::Port(4, ports(1, 2)), 0),
                    (Element::Isolation(egress, 8), 0),
                    (Element::Allowed(egress, 8, v4), 4),
                    (Element::Isolated(egress, v6), 8),
                    (Element::Decisions(6), 0),
                    (Element::Decision(6, ports(1, 2)), DENIES),
                    (Element::Class(egress, 10), 0),
                    (Element::PeerVerdict(egress, 10, v6), 6),
                    (Element::Baseline(egress, v4), 10),
                ],
            ),
        ] {
            for element in &gone {
                there.remove(element);
            }
            there.extend(come.iter().copied());
            let mut delta = Delta {
                removed: gone,
                added: come,
            };
            // As the compiler has them.
            delta.removed.sort();
            delta.added.sort();
            table.apply(&delta, std::iter::empty()).await.unwrap();
        }
        // Each set has what it was given, and what is there already is replaced as a whole.
        for _ in 0..2 {
            let mut sets: BTreeMap<SetKind, usize> = BTreeMap::new();
            for (element, value) in &there {
                if let Some((kind, _)) = nft_element(*element, *value).unwrap() {
                    *sets.entry(kind).or_default() += 1;
                }
            }
            for (kind, expected) in sets {
                let name = kind.name();
                let listed = table.connection.list_set_elements(&config.table, &name, FAMILY);
                let listed = listed.await.unwrap();
                assert_eq!(listed.len(), expected, "{kind:?}: {listed:?}");
            }
            let wanted: Vec<_> = there.iter().map(|(element, value)| (*element, *value)).collect();
            let all = Touched {
                all_sets: true,
                ..Touched::default()
            };
            assert!(table.is_as_wanted(&all, None, || wanted.clone()).await.unwrap());
            let mut less = wanted.clone();
            less.retain(|(element, _)| *element != Element::Own(v4));
            assert!(!table.is_as_wanted(&all, None, || less).await.unwrap());
            assert!(!table.stands());
            table
                .apply(&Delta::default(), there.clone().into_iter())
                .await
                .unwrap();
        }
        // A hundred isolations have four sets each, and those are compared as well.
        let isolations = (100..200).map(|id| (Element::Isolation(egress, id), 0));
        let many: Vec<(Element, u32)> = there.into_iter().chain(isolations).collect();
        table.standing = None;
        table
            .apply(&Delta::default(), many.clone().into_iter())
            .await
            .unwrap();
        let all = Touched {
            all_sets: true,
            ..Touched::default()
        };
        let start = std::time::Instant::now();
        assert!(table.is_as_wanted(&all, None, || many).await.unwrap());
        println!("compared all sets within {:?}", start.elapsed());
        table
            .connection
            .del_table(config.table.as_str(), FAMILY)
            .await
            .unwrap();
        let nothing = Touched::default();
        assert!(!table.is_as_wanted(&nothing, None, Vec::new).await.unwrap());
        assert!(!table.stands());
        table.remove().await.unwrap();
    }
}
