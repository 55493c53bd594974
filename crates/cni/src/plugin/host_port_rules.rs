//! The nftables rules of host ports: what they are, and whether the kernel still has them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use nlink::netlink::nftables::{
    BaseChain, Chain, ChainName, CmpOp, CtStatus, Expr, Family, FibFlags, NatHook, NatStatement, PayloadBase,
    Priority, Register, Rule, Transaction, Verdict,
};
use nlink::netlink::types::route::RouteType;
use nlink::netlink::{Connection, Nftables};

use super::host_ports::Forward;

/// After the service proxy, which translates at -100 and 100.
const DESTINATION_PRIORITY: i32 = -99;
const SOURCE_PRIORITY: i32 = 101;

const PORTS: &str = "ports";
const POSTROUTING: &str = "postrouting";
/// The chains that packets come to, their hooks as the kernel numbers them, and their priorities.
const HOOKED: [(&str, NatHook, u32, i32); 3] = [
    ("prerouting", NatHook::Prerouting, 0, DESTINATION_PRIORITY),
    ("output", NatHook::Output, 3, DESTINATION_PRIORITY),
    (POSTROUTING, NatHook::Postrouting, 4, SOURCE_PRIORITY),
];
const NF_ACCEPT: u32 = 1;

fn whole(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

/// Adds all chains and rules to a new table.
pub(super) fn add_to(
    t: Transaction,
    table: &str,
    family: Family,
    forwards: &[Forward],
) -> nlink::Result<Transaction> {
    let mut t = t.add_chain(Chain::new(table, PORTS)?.family(family));
    for (name, hook, _, priority) in HOOKED {
        let base = BaseChain::nat(hook, Priority::Custom(priority));
        t = t.add_chain(Chain::new(table, name)?.family(family).base(base));
    }
    for (_, rule) in rules(table, family, forwards)? {
        t = t.add_rule(rule);
    }
    Ok(t)
}

/// The rules, each with its chain.
fn rules(table: &str, family: Family, forwards: &[Forward]) -> nlink::Result<Vec<(&'static str, Rule)>> {
    let rule = |chain| Rule::new(table, chain).family(family);
    let mut rules = Vec::new();
    for name in ["prerouting", "output"] {
        let local = rule(name)
            .match_fib_type(FibFlags::DADDR, RouteType::Local)
            .expr(Expr::Verdict(Verdict::JumpTo(ChainName::new(PORTS)?)));
        rules.push((name, local));
    }
    let mut targets = BTreeSet::new();
    for forward in forwards {
        let to_port = match forward.host {
            Some(host) => rule(PORTS).match_daddr(host, whole(host)),
            None => rule(PORTS),
        };
        let to_port = to_port
            .match_l4proto(forward.protocol)
            .expr(Expr::Payload {
                dreg: Register::R0,
                base: PayloadBase::Transport,
                offset: 2,
                len: 2,
            })
            .expr(Expr::Cmp {
                sreg: Register::R0,
                op: CmpOp::Eq,
                data: forward.host_port.to_be_bytes().to_vec(),
            })
            .nat(NatStatement::dnat(forward.target).port(forward.target_port));
        rules.push((PORTS, to_port));
        targets.insert(forward.target);
    }
    for target in targets {
        // A sandbox that reaches itself by the node, and whoever asks from the node's loopback, would get answers
        // that the node never sees.
        let loopback: (IpAddr, u8) = match target {
            IpAddr::V4(_) => ([127, 0, 0, 0].into(), 8),
            IpAddr::V6(_) => (std::net::Ipv6Addr::LOCALHOST.into(), 128),
        };
        for (source, prefix) in [(target, whole(target)), loopback] {
            let masquerade = rule(POSTROUTING)
                .match_ct_status(CtStatus::DST_NAT)
                .match_saddr(source, prefix)
                .match_daddr(target, whole(target))
                .nat(NatStatement::masquerade());
            rules.push((POSTROUTING, masquerade));
        }
    }
    Ok(rules)
}

/// Whether the kernel has the table with all chains and rules, and with no others.
pub(super) async fn stand(
    connection: &Connection<Nftables>,
    table: &str,
    family: Family,
    forwards: &[Forward],
) -> nlink::Result<bool> {
    let tables = connection.list_tables_in(family).await?;
    // A table that sleeps (`flags dormant`) does nothing.
    if !tables.iter().any(|one| one.name == table && one.flags == 0) {
        return Ok(false);
    }
    let read = async {
        let chains = connection.list_chains_in(table, family).await?;
        let rules = connection.list_rules(table, family).await?;
        Ok::<_, nlink::Error>((chains, rules))
    };
    let (chains, listed) = match read.await {
        Err(error) if error.is_not_found() => return Ok(false),
        read => read?,
    };
    let hooked: BTreeSet<_> = chains
        .iter()
        .filter_map(|chain| Some((chain.name.as_str(), chain.hook?, chain.priority?, chain.policy?)))
        .collect();
    if hooked
        != HOOKED
            .map(|(name, _, hook, priority)| (name, hook, priority, NF_ACCEPT))
            .into()
    {
        return Ok(false);
    }
    // By their text: the kernel adds to a rule what was left out of it.
    let mut found: BTreeMap<String, Vec<Option<String>>> = BTreeMap::new();
    for rule in listed {
        let text = rule.nft_syntax_stateless();
        found.entry(rule.chain).or_default().push(text);
    }
    let mut wanted: BTreeMap<String, Vec<Option<String>>> = BTreeMap::new();
    for (chain, rule) in rules(table, family, forwards)? {
        wanted
            .entry(chain.to_owned())
            .or_default()
            .push(rule.nft_syntax_stateless());
    }
    Ok(found == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rules without one would all be the same.
    #[test]
    fn every_rule_has_a_text() {
        for (family, host, target) in [
            (Family::Ip, Some("192.0.2.1"), "10.0.0.2"),
            (Family::Ip, None, "10.0.0.2"),
            (Family::Ip6, Some("2001:db8::1"), "fd00::2"),
            (Family::Ip6, None, "fd00::2"),
        ] {
            for protocol in [6, 17, 132] {
                let forward = Forward::new(
                    host.map(|host| host.parse().unwrap()),
                    protocol,
                    target.parse().unwrap(),
                );
                for (chain, rule) in rules("table", family, &[forward]).unwrap() {
                    assert!(rule.nft_syntax_stateless().is_some(), "{chain}: {rule:?}");
                }
            }
        }
    }
}
