//! The policies' nftables table: a handful of rules that never change, and sets and maps whose elements do. Whatever
//! changes together is one transaction, so that every packet sees either the old table or the new one.
//!
//! A packet that opens a connection is looked up by its pod's address, by the other side's address, and by the pair of
//! numbers that these give, with protocol and port: the same work for one policy and for thousands.

use std::net::{IpAddr, Ipv4Addr};

use nlink::netlink::nftables::{
    BaseChain, Chain, ChainName, CmpOp, CtState, Expr, Family, FilterHook, LookupExpr, MetaKey,
    NFT_MSG_NEWTABLE, PayloadBase, Priority, RawMessage, Register, Rule, Set, SetDataType, SetElement,
    SetKeyType, Transaction, Verdict,
};
use nlink::netlink::{Connection, Nftables};

use super::compile::{Delta, Element, OPEN};
use super::ports::PortBox;
use super::{Direction, Error, PolicyConfig};

const FAMILY: Family = Family::Inet;
const NLM_F_CREATE: u16 = 0x400;
const NFTA_TABLE_NAME: u16 = 1;

/// A transaction is one datagram, and the kernel takes none that is larger than the send buffer. This
/// is a limit and costs nothing until it is used.
const SEND_BUFFER: usize = 256 << 20;

/// Elements a message; a list of them must stay below 64 KiB.
const ELEMENTS_A_MESSAGE: usize = 200;

/// The kernel's place for filters: service addresses are translated by then, and sources are not yet.
const FILTER_PRIORITY: i32 = 0;

const FORWARD: &str = "forward";
const INPUT: &str = "input";
/// Two base chains, and of each direction one chain, and one for each address family.
const CHAINS: usize = 8;

const NFPROTO: [(bool, u8); 2] = [(true, 2), (false, 10)];

/// Isolations and identities, in the kernel's order of bytes: `nft list` turns those of marks around in some sets, and
/// shows number 7 as 0.0.0.7 here, everywhere.
const NUMBER: SetKeyType = SetKeyType::Ipv4Addr;

type NlResult<T> = Result<T, nlink::Error>;

pub(super) struct Table {
    name: String,
    bridge: String,
    connection: Connection<Nftables>,
    /// The kernel has all that was handed to `apply`.
    stands: bool,
}

impl Table {
    pub(super) fn open(config: &PolicyConfig) -> Result<Table, Error> {
        let connection = Connection::<Nftables>::new()?;
        if let Err(error) =
            rustix::net::sockopt::set_socket_send_buffer_size_force(connection.socket(), SEND_BUFFER)
        {
            tracing::warn!(%error, "cannot raise the netlink send buffer; large policies will not load");
        }
        Ok(Table {
            name: config.table.clone(),
            bridge: config.bridge.clone(),
            connection,
            stands: false,
        })
    }

    /// Whether the next `apply` makes the table anew.
    pub(super) fn stands(&self) -> bool {
        self.stands
    }

    /// Brings a change into the kernel; if the table does not stand, `all` of it instead.
    pub(super) async fn apply(
        &mut self,
        delta: &Delta,
        all: impl Iterator<Item = (Element, u32)>,
    ) -> Result<(), Error> {
        let transaction = self.connection.transaction();
        let transaction = if self.stands {
            if delta.is_empty() {
                return Ok(());
            }
            let removed = delta.removed.iter().map(|element| (*element, 0));
            let transaction = self.elements(transaction, removed, false);
            self.elements(transaction, delta.added.iter().copied(), true)
        } else {
            // Deleting needs a table that exists, and creating first makes sure of it.
            let create = RawMessage::new(NFT_MSG_NEWTABLE, FAMILY)
                .flags(NLM_F_CREATE)
                .attrs(crate::proxy::string_attribute(NFTA_TABLE_NAME, &self.name));
            let fresh = transaction
                .raw(create)
                .del_table(&self.name, FAMILY)
                .add_table(&self.name, FAMILY);
            let framed = self.frame(fresh)?;
            self.elements(framed, all, true)
        };
        // After an error the next attempt starts from scratch.
        self.stands = false;
        transaction.commit(&self.connection).await?;
        self.stands = true;
        Ok(())
    }

    /// Looks whether somebody else has emptied or removed the table; the next `apply` then restores it.
    pub(super) async fn verify(&mut self) -> Result<(), Error> {
        if !self.stands {
            return Ok(());
        }
        let chains = match self.connection.list_chains_in(self.name.as_str(), FAMILY).await {
            Ok(chains) => chains.len(),
            Err(error) if error.is_not_found() => 0,
            Err(error) => return Err(error.into()),
        };
        if chains != CHAINS {
            tracing::warn!(
                table = self.name,
                "somebody changed the network policies' table; restoring it"
            );
            self.stands = false;
        }
        Ok(())
    }

    pub(super) async fn remove(self) -> Result<(), Error> {
        let name = self.name.as_str();
        self.connection.del_table_if_exists(name, FAMILY).await?;
        Ok(())
    }

    /// Everything but the elements.
    fn frame(&self, mut t: Transaction) -> NlResult<Transaction> {
        for kind in SetKind::all() {
            t = t.add_set(self.set(kind));
        }
        let table = self.name.as_str();
        for (name, hook) in [(FORWARD, FilterHook::Forward), (INPUT, FilterHook::Input)] {
            let base = BaseChain::filter(hook, Priority::Custom(FILTER_PRIORITY));
            t = t.add_chain(Chain::new(table, name)?.family(FAMILY).base(base));
        }
        for direction in Direction::BOTH {
            let of_family = |ipv4| family_chain(direction, ipv4);
            for name in [direction.name().to_owned(), of_family(true), of_family(false)] {
                t = t.add_chain(Chain::new(table, name.as_str())?.family(FAMILY));
            }
        }
        let rule = |chain: &str| Rule::new(table, chain).family(FAMILY);
        let to = |rule: Rule, verdict: Verdict| rule.expr(Expr::Verdict(verdict));
        let jump = |direction: Direction| ChainName::new(direction.name()).map(Verdict::JumpTo);
        for chain in [FORWARD, INPUT] {
            let known = CtState::ESTABLISHED | CtState::RELATED;
            t = t.add_rule(rule(chain).match_ct_state(known).accept());
        }
        for (ipv4, number) in NFPROTO {
            // By way of a service a pod may meet itself.
            let own = only_family(
                rule(FORWARD).match_iif(&self.bridge).match_oif(&self.bridge),
                number,
            );
            let own = load_address(own, Side::Source, ipv4, word(0));
            let own = load_address(own, Side::Destination, ipv4, word(address_words(ipv4)));
            t = t.add_rule(look_up(own, SetKind::Own(ipv4)).accept());
        }
        // Who comes by the bridge is a pod of this node, and so is who is reached by it.
        let from_pod = |chain: &str| rule(chain).match_iif(&self.bridge);
        t = t.add_rule(to(from_pod(FORWARD), jump(Direction::Egress)?));
        let to_pod = rule(FORWARD).match_oif(&self.bridge);
        t = t.add_rule(to(to_pod, jump(Direction::Ingress)?));
        t = t.add_rule(to(from_pod(INPUT), jump(Direction::Egress)?));
        for direction in Direction::BOTH {
            for (ipv4, number) in NFPROTO {
                let chain = ChainName::new(&family_chain(direction, ipv4))?;
                let of_family = only_family(rule(direction.name()), number);
                t = t.add_rule(to(of_family, Verdict::GotoTo(chain)));
                for verdict in verdict_rules(direction, ipv4, || rule(&family_chain(direction, ipv4))) {
                    t = t.add_rule(verdict);
                }
            }
        }
        Ok(t)
    }

    fn set(&self, kind: SetKind) -> Set {
        use SetKeyType::{Concat, InetProto, InetService};
        let set = Set::new(&self.name, &kind.name()).family(FAMILY);
        match kind {
            SetKind::Isolated(_, ipv4) | SetKind::Identified(ipv4) => {
                set.key_type(address_type(ipv4)).map(SetDataType::Value(NUMBER))
            }
            SetKind::Own(ipv4) => set.key_type(Concat(vec![address_type(ipv4), address_type(ipv4)])),
            SetKind::Allowed(_) => set
                .key_type(Concat(vec![NUMBER, NUMBER, InetProto, InetService]))
                .interval(),
            SetKind::AllowedBlock(_, ipv4) => set
                .key_type(Concat(vec![NUMBER, address_type(ipv4), InetProto, InetService]))
                .interval(),
        }
    }

    /// Adds elements to their sets, or deletes them.
    fn elements(
        &self,
        mut t: Transaction,
        elements: impl Iterator<Item = (Element, u32)>,
        add: bool,
    ) -> Transaction {
        let mut by_set: std::collections::BTreeMap<SetKind, Vec<SetElement>> = Default::default();
        for (element, value) in elements {
            let (kind, element) = nft_element(element, value);
            by_set.entry(kind).or_default().push(element);
        }
        for (kind, elements) in by_set {
            let set = self.set(kind);
            for elements in elements.chunks(ELEMENTS_A_MESSAGE) {
                t = match add {
                    true => t.add_set_elements(&set, elements),
                    false => t.del_set_elements(&set, elements),
                };
            }
        }
        t
    }
}

/// The sets and maps. The flag is true for IPv4.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum SetKind {
    Isolated(Direction, bool),
    Identified(bool),
    Own(bool),
    Allowed(Direction),
    AllowedBlock(Direction, bool),
}

impl SetKind {
    fn all() -> impl Iterator<Item = SetKind> {
        let families = [true, false];
        let of_both = families
            .into_iter()
            .flat_map(|ipv4| [SetKind::Identified(ipv4), SetKind::Own(ipv4)]);
        let of_directions = Direction::BOTH.into_iter().flat_map(move |direction| {
            let of_families = families.into_iter().flat_map(move |ipv4| {
                [
                    SetKind::Isolated(direction, ipv4),
                    SetKind::AllowedBlock(direction, ipv4),
                ]
            });
            of_families.chain([SetKind::Allowed(direction)])
        });
        of_both.chain(of_directions)
    }

    fn name(self) -> String {
        match self {
            SetKind::Isolated(direction, ipv4) => {
                format!("{}-isolation-{}", direction.name(), family_name(ipv4))
            }
            SetKind::Identified(ipv4) => format!("identity-{}", family_name(ipv4)),
            SetKind::Own(ipv4) => format!("own-{}", family_name(ipv4)),
            SetKind::Allowed(direction) => format!("{}-pods", direction.name()),
            SetKind::AllowedBlock(direction, ipv4) => {
                format!("{}-blocks-{}", direction.name(), family_name(ipv4))
            }
        }
    }
}

fn family_name(ipv4: bool) -> &'static str {
    if ipv4 { "ipv4" } else { "ipv6" }
}

fn family_chain(direction: Direction, ipv4: bool) -> String {
    format!("{}-{}", direction.name(), family_name(ipv4))
}

fn address_type(ipv4: bool) -> SetKeyType {
    if ipv4 {
        SetKeyType::Ipv4Addr
    } else {
        SetKeyType::Ipv6Addr
    }
}

fn nft_element(element: Element, value: u32) -> (SetKind, SetElement) {
    match element {
        Element::Isolated(direction, address) => (
            SetKind::Isolated(direction, address.is_ipv4()),
            one_address(address).value(number(value)),
        ),
        Element::Identified(address) => (
            SetKind::Identified(address.is_ipv4()),
            one_address(address).value(number(value)),
        ),
        Element::Own(address) => (
            SetKind::Own(address.is_ipv4()),
            SetElement::concat([one_address(address), one_address(address)]),
        ),
        Element::Allowed(direction, isolation, identity, ports) => {
            let [protocols, ports] = port_fields(ports);
            let key = [number(isolation), number(identity), protocols, ports];
            (SetKind::Allowed(direction), SetElement::concat(key))
        }
        Element::AllowedBlock(direction, isolation, first, last, ports) => {
            let [protocols, ports] = port_fields(ports);
            let addresses = SetElement::range(octets(first), octets(last));
            let key = [number(isolation), addresses, protocols, ports];
            (
                SetKind::AllowedBlock(direction, first.is_ipv4()),
                SetElement::concat(key),
            )
        }
    }
}

fn number(number: u32) -> SetElement {
    SetElement::ipv4(Ipv4Addr::from_bits(number))
}

fn octets(address: IpAddr) -> Vec<u8> {
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

/// The rules that decide on a pod's packet in one direction.
fn verdict_rules(direction: Direction, ipv4: bool, rule: impl Fn() -> Rule) -> [Rule; 4] {
    let (pod, other) = match direction {
        Direction::Ingress => (Side::Destination, Side::Source),
        Direction::Egress => (Side::Source, Side::Destination),
    };
    let isolation = |rule: Rule| load_number(rule, pod, SetKind::Isolated(direction, ipv4), ipv4, word(0));
    let done = |rule: Rule| rule.expr(Expr::Verdict(Verdict::Return));
    let open = isolation(rule()).expr(Expr::Cmp {
        sreg: word(0),
        op: CmpOp::Eq,
        data: OPEN.to_be_bytes().to_vec(),
    });
    let by_identity = load_number(isolation(rule()), other, SetKind::Identified(ipv4), ipv4, word(1));
    let by_identity = look_up(load_ports(by_identity, 2), SetKind::Allowed(direction));
    let by_block = load_address(isolation(rule()), other, ipv4, word(1));
    let by_block = look_up(
        load_ports(by_block, 1 + address_words(ipv4)),
        SetKind::AllowedBlock(direction, ipv4),
    );
    // Also for an address that no pod is known to have: who has not been looked at gets nothing.
    [done(open), done(by_identity), done(by_block), rule().drop()]
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Source,
    Destination,
}

/// The n-th word of the kernel's registers: the fields of a key lie in words of four bytes, one after the other.
fn word(n: usize) -> Register {
    const WORDS: [Register; 12] = [
        Register::Reg32_00,
        Register::Reg32_01,
        Register::Reg32_02,
        Register::Reg32_03,
        Register::Reg32_04,
        Register::Reg32_05,
        Register::Reg32_06,
        Register::Reg32_07,
        Register::Reg32_08,
        Register::Reg32_09,
        Register::Reg32_10,
        Register::Reg32_11,
    ];
    WORDS[n]
}

/// Where no key has its fields.
const SCRATCH: usize = 8;

fn address_words(ipv4: bool) -> usize {
    if ipv4 { 1 } else { 4 }
}

fn only_family(rule: Rule, number: u8) -> Rule {
    rule.expr(Expr::Meta {
        dreg: word(0),
        key: MetaKey::NfProto,
    })
    .expr(Expr::Cmp {
        sreg: word(0),
        op: CmpOp::Eq,
        data: vec![number],
    })
}

fn load_address(rule: Rule, side: Side, ipv4: bool, dreg: Register) -> Rule {
    let (offset, len) = match (ipv4, side) {
        (true, Side::Source) => (12, 4),
        (true, Side::Destination) => (16, 4),
        (false, Side::Source) => (8, 16),
        (false, Side::Destination) => (24, 16),
    };
    rule.expr(Expr::Payload {
        dreg,
        base: PayloadBase::Network,
        offset,
        len,
    })
}

/// Loads what a map has for an address. The rule ends where the map has nothing.
fn load_number(rule: Rule, side: Side, map: SetKind, ipv4: bool, dreg: Register) -> Rule {
    let scratch = word(SCRATCH);
    load_address(rule, side, ipv4, scratch)
        .expr(Expr::Lookup(LookupExpr::new(map.name(), scratch).dreg(dreg)))
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

fn look_up(rule: Rule, set: SetKind) -> Rule {
    rule.expr(Expr::Lookup(LookupExpr::new(set.name(), word(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_fit_their_sets() {
        let (v4, v6): (IpAddr, IpAddr) = ("10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap());
        let ingress = Direction::Ingress;
        for (element, length) in [
            (Element::Isolated(ingress, v4), 4),
            (Element::Identified(v6), 16),
            (Element::Own(v4), 8),
            (Element::Own(v6), 32),
            (Element::Allowed(ingress, 1, 2, PortBox::ALL), 16),
            (Element::AllowedBlock(ingress, 1, v4, v4, PortBox::ALL), 16),
            (Element::AllowedBlock(ingress, 1, v6, v6, PortBox::ALL), 28),
        ] {
            assert_eq!(nft_element(element, 1).1.key().len(), length, "{element:?}");
        }
    }

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
        let mut there: std::collections::BTreeMap<Element, u32> = [
            (Element::Isolated(Direction::Ingress, v4), OPEN),
            (Element::Isolated(egress, v6), 7),
            (Element::Identified(v4), 9),
            (Element::Own(v4), 0),
            (Element::Own(v6), 0),
            (Element::Allowed(egress, 7, 9, ports(80, 90)), 0),
            (Element::Allowed(egress, 7, 10, PortBox::ALL), 0),
            (
                Element::AllowedBlock(egress, 7, v4, address("10.0.0.9"), ports(1, 5)),
                0,
            ),
            (
                Element::AllowedBlock(egress, 7, v6, address("fd00::ff"), PortBox::ALL),
                0,
            ),
        ]
        .into();
        table
            .apply(&Delta::default(), there.clone().into_iter())
            .await
            .unwrap();
        for (gone, come) in [
            (Element::Identified(v4), (Element::Identified(v4), 10)),
            (
                Element::Allowed(egress, 7, 9, ports(80, 90)),
                (Element::Allowed(egress, 7, 9, ports(85, 100)), 0),
            ),
            (
                Element::AllowedBlock(egress, 7, v4, address("10.0.0.9"), ports(1, 5)),
                (
                    Element::AllowedBlock(egress, 7, address("10.0.0.0"), v4, PortBox::ALL),
                    0,
                ),
            ),
        ] {
            let delta = Delta {
                removed: vec![gone],
                added: vec![come],
            };
            table.apply(&delta, std::iter::empty()).await.unwrap();
            there.remove(&gone);
            there.insert(come.0, come.1);
        }
        // Each set has what it was given, and what is there already is replaced as a whole.
        for _ in 0..2 {
            for kind in SetKind::all() {
                let expected = there
                    .iter()
                    .filter(|(element, value)| nft_element(**element, **value).0 == kind);
                let listed = table
                    .connection
                    .list_set_elements(&config.table, &kind.name(), FAMILY);
                let listed = listed.await.unwrap();
                assert_eq!(listed.len(), expected.count(), "{kind:?}: {listed:?}");
            }
            table.verify().await.unwrap();
            assert!(table.stands());
            table.stands = false;
            table
                .apply(&Delta::default(), there.clone().into_iter())
                .await
                .unwrap();
        }
        table
            .connection
            .del_table(config.table.as_str(), FAMILY)
            .await
            .unwrap();
        table.verify().await.unwrap();
        assert!(!table.stands());
        table.remove().await.unwrap();
    }

    #[test]
    fn sets_have_names_of_their_own() {
        let names: std::collections::BTreeSet<String> = SetKind::all().map(SetKind::name).collect();
        assert_eq!(names.len(), SetKind::all().count());
    }
}
