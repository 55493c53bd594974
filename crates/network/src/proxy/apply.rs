//! From a table as data to the kernel's: only what has changed, in one transaction, so that every packet
//! sees either the old table or the new one.

use std::collections::BTreeSet;
use std::net::IpAddr;

use nlink::netlink::netfilter::{ConntrackFilter, IpProtocol};
use nlink::netlink::nftables::{
    BaseChain, Chain as NftChain, ChainName, CtState, Expr, Family, FibFlags, FilterHook, LookupExpr,
    MetaKey, NFT_MSG_NEWTABLE, NatHook, NatStatement, NumgenKind, PacketField, PayloadBase, Priority,
    RawMessage, Register, Rule as NftRule, Set as NftSet, SetElement, SetKeyType, Transaction,
    Verdict as NftVerdict,
};
use nlink::netlink::types::route::RouteType;
use nlink::netlink::{Connection, Netfilter, Nftables};

use super::Error;
use super::ruleset::{
    Base, Chain, Hook, Key, KeyKind, Kind, Protocol, Rule, Ruleset, Set, Statement, Verdict,
};

const FAMILY: Family = Family::Ip;

/// A transaction is one datagram, and the kernel takes none that is larger than the send buffer. This
/// is a limit and costs nothing until it is used.
const SEND_BUFFER: usize = 256 << 20;

/// Elements a message; a list of them must stay below 64 KiB.
const ELEMENTS_A_MESSAGE: usize = 200;

const PORT_UNREACHABLE: u8 = 3;

const NLM_F_CREATE: u16 = 0x400;
const NFTA_TABLE_NAME: u16 = 1;

type NlResult<T> = Result<T, nlink::Error>;

/// One nftables table and what we know to be in it.
pub struct Table {
    name: String,
    connection: Connection<Nftables>,
    /// What the kernel has; `None` when that is not known, at the start and after an error.
    applied: Option<Ruleset>,
}

impl Table {
    pub fn open(name: &str) -> Result<Table, Error> {
        let connection = Connection::<Nftables>::new()?;
        if let Err(error) =
            rustix::net::sockopt::set_socket_send_buffer_size_force(connection.socket(), SEND_BUFFER)
        {
            tracing::warn!(%error, "cannot raise the netlink send buffer; large rule sets will not load");
        }
        Ok(Table {
            name: name.to_string(),
            connection,
            applied: None,
        })
    }

    /// Makes the kernel's table equal to `wanted`; false if it was already.
    pub async fn apply(&mut self, wanted: &Ruleset) -> Result<bool, Error> {
        if self.applied.as_ref() == Some(wanted) {
            return Ok(false);
        }
        // Taken out: after an error the next attempt starts from scratch.
        let before = self.applied.take();
        let transaction = self.connection.transaction();
        let transaction = match &before {
            Some(before) => changes(transaction, &self.name, before, wanted)?,
            None => {
                // Deleting needs a table that exists, and creating first makes sure of it.
                let create = RawMessage::new(NFT_MSG_NEWTABLE, FAMILY)
                    .flags(NLM_F_CREATE)
                    .attrs(string_attribute(NFTA_TABLE_NAME, &self.name));
                let fresh = transaction
                    .raw(create)
                    .del_table(&self.name, FAMILY)
                    .add_table(&self.name, FAMILY);
                changes(fresh, &self.name, &Ruleset::default(), wanted)?
            }
        };
        transaction.commit(&self.connection).await?;
        if let Some(before) = &before {
            self.forget_udp(before, wanted).await;
        }
        self.applied = Some(wanted.clone());
        Ok(true)
    }

    /// Looks whether somebody else has emptied or removed the table; the next `apply` then restores it.
    pub async fn verify(&mut self) -> Result<(), Error> {
        let Some(applied) = &self.applied else {
            return Ok(());
        };
        let there: BTreeSet<String> = match self.connection.list_chains_in(self.name.as_str(), FAMILY).await {
            Ok(chains) => chains.into_iter().map(|chain| chain.name).collect(),
            Err(error) if error.is_not_found() => BTreeSet::new(),
            Err(error) => return Err(error.into()),
        };
        if there.len() != applied.chains.len() || !applied.chains.keys().all(|name| there.contains(name)) {
            tracing::warn!(
                table = self.name,
                "somebody changed the service proxy's table; restoring it"
            );
            self.applied = None;
        }
        Ok(())
    }

    pub async fn remove(self) -> Result<(), Error> {
        self.connection
            .del_table_if_exists(self.name.as_str(), FAMILY)
            .await?;
        Ok(())
    }

    /// UDP knows no end of a connection: clients that keep sending would stay with an endpoint that is
    /// gone for as long as the kernel remembers them.
    async fn forget_udp(&self, before: &Ruleset, wanted: &Ruleset) {
        let now = udp_targets(wanted);
        for (address, port) in udp_targets(before).difference(&now) {
            let filter = ConntrackFilter::new()
                .proto(IpProtocol::Udp)
                .reply_src(*address)
                .reply_src_port(*port);
            let removed = match Connection::<Netfilter>::new() {
                Ok(conntrack) => conntrack.del_conntrack_matching(&filter).await,
                Err(error) => Err(error),
            };
            if let Err(error) = removed {
                tracing::warn!(%error, %address, port, "cannot forget the UDP flows of a former endpoint");
            }
        }
    }
}

fn udp_targets(ruleset: &Ruleset) -> BTreeSet<(IpAddr, u16)> {
    ruleset
        .chains
        .values()
        .flat_map(|chain| &chain.rules)
        .filter_map(|rule| match rule.as_slice() {
            [Statement::Protocol(Protocol::Udp), Statement::Dnat(address, port)] => Some((*address, *port)),
            _ => None,
        })
        .collect()
}

pub(crate) fn string_attribute(kind: u16, text: &str) -> Vec<u8> {
    let length = 4 + text.len() + 1;
    let mut bytes = (length as u16).to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(text.as_bytes());
    bytes.resize(length.next_multiple_of(4), 0);
    bytes
}

/// The steps from one table to the other, in an order in which every step finds what it refers to and
/// nothing that still refers to what it removes.
fn changes(mut t: Transaction, table: &str, before: &Ruleset, after: &Ruleset) -> NlResult<Transaction> {
    for (name, set) in after
        .sets
        .iter()
        .filter(|(name, _)| !before.sets.contains_key(*name))
    {
        t = t.add_set(nft_set(table, name, set));
    }
    for (name, map) in after
        .maps
        .iter()
        .filter(|(name, _)| !before.maps.contains_key(*name))
    {
        t = t.add_set(nft_map(table, name, map.kind));
    }
    for (name, chain) in after
        .chains
        .iter()
        .filter(|(name, _)| !before.chains.contains_key(*name))
    {
        t = t.add_chain(nft_chain(table, name, chain)?);
    }
    for (name, chain) in &before.chains {
        if after.chains.get(name).is_none_or(|new| new.rules != chain.rules) {
            t = t.flush_chain(table, name, FAMILY);
        }
    }
    for (name, map) in &before.maps {
        let new = after.maps.get(name);
        let gone: Vec<SetElement> = map
            .elements
            .iter()
            .filter(|(key, verdict)| new.and_then(|new| new.elements.get(key)) != Some(verdict))
            .map(|(key, _)| element(*key))
            .collect();
        let nft = nft_map(table, name, map.kind);
        for elements in gone.chunks(ELEMENTS_A_MESSAGE) {
            t = t.del_set_elements(&nft, elements);
        }
    }
    for (name, map) in &after.maps {
        let old = before.maps.get(name);
        let new: Vec<SetElement> = map
            .elements
            .iter()
            .filter(|(key, verdict)| old.and_then(|old| old.elements.get(key)) != Some(verdict))
            .map(|(key, verdict)| Ok(element(*key).verdict(nft_verdict(verdict)?)))
            .collect::<NlResult<_>>()?;
        let nft = nft_map(table, name, map.kind);
        for elements in new.chunks(ELEMENTS_A_MESSAGE) {
            t = t.add_set_elements(&nft, elements);
        }
    }
    t = listed_sets(t, table, before, after);
    for (name, chain) in &after.chains {
        if before.chains.get(name).is_none_or(|old| old.rules != chain.rules) {
            for rule in &chain.rules {
                t = t.add_rule(nft_rule(table, name, rule)?);
            }
        }
    }
    for name in before.maps.keys().filter(|name| !after.maps.contains_key(*name)) {
        t = t.del_set(table, name, FAMILY);
    }
    for name in before
        .chains
        .keys()
        .filter(|name| !after.chains.contains_key(*name))
    {
        t = t.del_chain(table, name, FAMILY);
    }
    for name in before.sets.keys().filter(|name| !after.sets.contains_key(*name)) {
        t = t.del_set(table, name, FAMILY);
    }
    Ok(t)
}

fn listed_sets(mut t: Transaction, table: &str, before: &Ruleset, after: &Ruleset) -> Transaction {
    let empty = BTreeSet::new();
    for (name, set) in &after.sets {
        let Set::Listed(new) = set else { continue };
        let old = match before.sets.get(name) {
            Some(Set::Listed(old)) => old,
            _ => &empty,
        };
        let nft = nft_set(table, name, set);
        let (gone, come): (Vec<SetElement>, Vec<SetElement>) = (
            old.difference(new)
                .map(|address| address_element(*address))
                .collect(),
            new.difference(old)
                .map(|address| address_element(*address))
                .collect(),
        );
        for elements in gone.chunks(ELEMENTS_A_MESSAGE) {
            t = t.del_set_elements(&nft, elements);
        }
        for elements in come.chunks(ELEMENTS_A_MESSAGE) {
            t = t.add_set_elements(&nft, elements);
        }
    }
    t
}

fn nft_set(table: &str, name: &str, set: &Set) -> NftSet {
    let nft = NftSet::new(table, name)
        .family(FAMILY)
        .key_type(SetKeyType::Ipv4Addr);
    match set {
        Set::Listed(_) => nft,
        // Bounded: one address a client, and clients can be many.
        Set::Remembered(timeout) => nft.dynamic().timeout(*timeout).size(65535),
    }
}

fn nft_map(table: &str, name: &str, kind: KeyKind) -> NftSet {
    let key = match kind {
        KeyKind::Service => SetKeyType::Concat(vec![
            SetKeyType::Ipv4Addr,
            SetKeyType::InetProto,
            SetKeyType::InetService,
        ]),
        KeyKind::Port => SetKeyType::Concat(vec![SetKeyType::InetProto, SetKeyType::InetService]),
        KeyKind::Index => SetKeyType::Mark,
    };
    NftSet::new(table, name).family(FAMILY).key_type(key).vmap()
}

fn address_element(address: IpAddr) -> SetElement {
    match address {
        IpAddr::V4(address) => SetElement::ipv4(address),
        IpAddr::V6(address) => SetElement::ipv6(address),
    }
}

fn element(key: Key) -> SetElement {
    match key {
        Key::Service(address, protocol, port) => SetElement::concat([
            address_element(address),
            SetElement::inet_proto(protocol.number()),
            SetElement::port(port),
        ]),
        Key::Port(protocol, port) => {
            SetElement::concat([SetElement::inet_proto(protocol.number()), SetElement::port(port)])
        }
        Key::Index(index) => SetElement::mark(index),
    }
}

fn nft_verdict(verdict: &Verdict) -> NlResult<NftVerdict> {
    Ok(match verdict {
        Verdict::Drop => NftVerdict::Drop,
        Verdict::Return => NftVerdict::Return,
        Verdict::Jump(chain) => NftVerdict::JumpTo(ChainName::new(chain)?),
        Verdict::Goto(chain) => NftVerdict::GotoTo(ChainName::new(chain)?),
        Verdict::Reject => {
            return Err(nlink::Error::not_supported(
                "reject is a statement and cannot be in a map",
            ));
        }
    })
}

fn nft_chain(table: &str, name: &str, chain: &Chain) -> NlResult<NftChain> {
    let nft = NftChain::new(table, name)?.family(FAMILY);
    let Some(Base { kind, hook, priority }) = chain.base else {
        return Ok(nft);
    };
    let priority = Priority::Custom(priority);
    let base = match (kind, hook) {
        (Kind::Filter, Hook::Prerouting) => BaseChain::filter(FilterHook::Prerouting, priority),
        (Kind::Filter, Hook::Input) => BaseChain::filter(FilterHook::Input, priority),
        (Kind::Filter, Hook::Forward) => BaseChain::filter(FilterHook::Forward, priority),
        (Kind::Filter, Hook::Output) => BaseChain::filter(FilterHook::Output, priority),
        (Kind::Filter, Hook::Postrouting) => BaseChain::filter(FilterHook::Postrouting, priority),
        (Kind::Nat, Hook::Prerouting) => BaseChain::nat(NatHook::Prerouting, priority),
        (Kind::Nat, Hook::Input) => BaseChain::nat(NatHook::Input, priority),
        (Kind::Nat, Hook::Output) => BaseChain::nat(NatHook::Output, priority),
        (Kind::Nat, Hook::Postrouting) => BaseChain::nat(NatHook::Postrouting, priority),
        (Kind::Nat, Hook::Forward) => return Err(nlink::Error::not_supported("there is no forward NAT")),
    };
    Ok(nft.base(base))
}

fn nft_rule(table: &str, chain: &str, rule: &Rule) -> NlResult<NftRule> {
    let l4proto = |dreg| Expr::Meta {
        dreg,
        key: MetaKey::L4Proto,
    };
    let port = |dreg| Expr::Payload {
        dreg,
        base: PayloadBase::Transport,
        offset: 2,
        len: 2,
    };
    let verdict_of = |map: &str| Expr::Lookup(LookupExpr::new(map, Register::R0).dreg(Register::Verdict));
    let mut nft = NftRule::new(table, chain).family(FAMILY);
    for part in rule {
        nft = match part {
            Statement::Source(cidr) => nft.match_saddr(cidr.address(), cidr.prefix()),
            Statement::SourceNot(cidr) => nft.match_saddr_not(cidr.address(), cidr.prefix()),
            Statement::Destination(cidr) => nft.match_daddr(cidr.address(), cidr.prefix()),
            Statement::DestinationNot(cidr) => nft.match_daddr_not(cidr.address(), cidr.prefix()),
            Statement::DestinationLocal => nft.match_fib_type(FibFlags::DADDR, RouteType::Local),
            Statement::SourceLocal => nft.match_fib_type(FibFlags::SADDR, RouteType::Local),
            Statement::InputInterface(name) => nft.match_iif(name),
            Statement::InputInterfaceNot(name) => nft.match_iif_not(name),
            Statement::OutputInterfaceNot(name) => nft.match_oif_not(name),
            Statement::NewConnection => nft.match_ct_state(CtState::NEW),
            Statement::Protocol(protocol) => nft.match_l4proto(protocol.number()),
            Statement::SourceIn(set) => nft.match_saddr_in_set(set),
            Statement::DestinationIn(set) => nft.match_daddr_in_set(set),
            // The fields of a concatenation lie in words of four bytes.
            Statement::ServiceMap(map) => nft
                .expr(Expr::Payload {
                    dreg: Register::R0,
                    base: PayloadBase::Network,
                    offset: 16,
                    len: 4,
                })
                .expr(l4proto(Register::Reg32_01))
                .expr(port(Register::Reg32_02))
                .expr(verdict_of(map)),
            Statement::PortMap(map) => nft
                .expr(l4proto(Register::R0))
                .expr(port(Register::Reg32_01))
                .expr(verdict_of(map)),
            Statement::RandomMap { map, count } => nft
                .expr(Expr::Numgen {
                    dreg: Register::R0,
                    kind: NumgenKind::Random,
                    modulus: *count,
                    offset: 0,
                })
                .expr(verdict_of(map)),
            Statement::Remember(set) => nft.update_in_set(PacketField::Ip4Saddr, set, None),
            Statement::Marked(bit) => nft.match_mark_masked(*bit, *bit),
            Statement::Mark(bit) => nft.set_mark_masked(*bit, *bit),
            Statement::Unmark(bit) => nft.set_mark_masked(0, *bit),
            Statement::Dnat(address, port) => nft.nat(NatStatement::dnat(*address).port(*port)),
            Statement::Masquerade => nft.nat(NatStatement::masquerade().fully_random()),
            Statement::Verdict(Verdict::Drop) => nft.drop(),
            Statement::Verdict(Verdict::Reject) => nft.reject_icmp(PORT_UNREACHABLE),
            Statement::Verdict(verdict) => nft.expr(Expr::Verdict(nft_verdict(verdict)?)),
        };
    }
    Ok(nft)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_fit_their_maps() {
        for (key, length) in [
            (Key::Service(IpAddr::from([127, 0, 0, 1]), Protocol::Tcp, 80), 12),
            (Key::Port(Protocol::Udp, 53), 8),
            (Key::Index(1), 4),
        ] {
            assert_eq!(element(key).key().len(), length, "{key}");
        }
    }

    #[test]
    fn attributes_are_padded() {
        assert_eq!(string_attribute(1, "abc"), [8, 0, 1, 0, b'a', b'b', b'c', 0]);
        assert_eq!(
            string_attribute(1, "abcd"),
            [9, 0, 1, 0, b'a', b'b', b'c', b'd', 0, 0, 0, 0]
        );
    }
}
