//! A whole nftables table as plain data: what `plan` makes, what `apply` compares and sends. It prints
//! itself in nft's syntax, which is what tests look at.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use skiff_meta::net::Cidr;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

impl Protocol {
    pub fn parse(name: &str) -> Option<Protocol> {
        match name {
            "TCP" => Some(Protocol::Tcp),
            "UDP" => Some(Protocol::Udp),
            "SCTP" => Some(Protocol::Sctp),
            _ => None,
        }
    }

    pub fn number(self) -> u8 {
        match self {
            Protocol::Tcp => 6,
            Protocol::Udp => 17,
            Protocol::Sctp => 132,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
            Protocol::Sctp => "sctp",
        }
    }
}

/// A match or statement of a rule, in the order in which the kernel evaluates it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Statement {
    Source(Cidr),
    SourceNot(Cidr),
    Destination(Cidr),
    DestinationNot(Cidr),
    /// The destination is an address of this machine.
    DestinationLocal,
    SourceLocal,
    InputInterface(String),
    InputInterfaceNot(String),
    OutputInterfaceNot(String),
    NewConnection,
    Protocol(Protocol),
    /// Source address in a set.
    SourceIn(String),
    DestinationIn(String),
    /// Destination address, protocol and port, looked up in a verdict map.
    ServiceMap(String),
    /// Protocol and port, looked up in a verdict map.
    PortMap(String),
    /// A random number below the count, looked up in a verdict map.
    RandomMap {
        map: String,
        count: u32,
    },
    /// Remember the source address in a set.
    Remember(String),
    Marked(u32),
    Mark(u32),
    Unmark(u32),
    Dnat(IpAddr, u16),
    Masquerade,
    Verdict(Verdict),
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    Drop,
    Reject,
    Return,
    Jump(String),
    Goto(String),
}

pub type Rule = Vec<Statement>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Nat,
    Filter,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    Prerouting,
    Input,
    Forward,
    Output,
    Postrouting,
}

/// Where the kernel enters the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Base {
    pub kind: Kind,
    pub hook: Hook,
    pub priority: i32,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chain {
    pub base: Option<Base>,
    pub rules: Vec<Rule>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    Service(IpAddr, Protocol, u16),
    Port(Protocol, u16),
    Index(u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyKind {
    Service,
    Port,
    Index,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Map {
    pub kind: KeyKind,
    pub elements: BTreeMap<Key, Verdict>,
}

/// A set of addresses: listed here, or remembered by rules for a while.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Set {
    Listed(BTreeSet<IpAddr>),
    Remembered(Duration),
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ruleset {
    pub chains: BTreeMap<String, Chain>,
    pub maps: BTreeMap<String, Map>,
    pub sets: BTreeMap<String, Set>,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Drop => f.write_str("drop"),
            Verdict::Reject => f.write_str("reject"),
            Verdict::Return => f.write_str("return"),
            Verdict::Jump(chain) => write!(f, "jump {chain}"),
            Verdict::Goto(chain) => write!(f, "goto {chain}"),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Service(address, protocol, port) => write!(f, "{address} . {} . {port}", protocol.name()),
            Key::Port(protocol, port) => write!(f, "{} . {port}", protocol.name()),
            Key::Index(index) => write!(f, "{index}"),
        }
    }
}

impl fmt::Display for Statement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Statement::Source(cidr) => write!(f, "ip saddr {cidr}"),
            Statement::SourceNot(cidr) => write!(f, "ip saddr != {cidr}"),
            Statement::Destination(cidr) => write!(f, "ip daddr {cidr}"),
            Statement::DestinationNot(cidr) => write!(f, "ip daddr != {cidr}"),
            Statement::DestinationLocal => f.write_str("fib daddr type local"),
            Statement::SourceLocal => f.write_str("fib saddr type local"),
            Statement::InputInterface(name) => write!(f, "iifname {name}"),
            Statement::InputInterfaceNot(name) => write!(f, "iifname != {name}"),
            Statement::OutputInterfaceNot(name) => write!(f, "oifname != {name}"),
            Statement::NewConnection => f.write_str("ct state new"),
            Statement::Protocol(protocol) => write!(f, "meta l4proto {}", protocol.name()),
            Statement::SourceIn(set) => write!(f, "ip saddr @{set}"),
            Statement::DestinationIn(set) => write!(f, "ip daddr @{set}"),
            Statement::ServiceMap(map) => write!(f, "ip daddr . meta l4proto . th dport vmap @{map}"),
            Statement::PortMap(map) => write!(f, "meta l4proto . th dport vmap @{map}"),
            Statement::RandomMap { map, count } => write!(f, "numgen random mod {count} vmap @{map}"),
            Statement::Remember(set) => write!(f, "update @{set} {{ ip saddr }}"),
            Statement::Marked(bit) => write!(f, "meta mark & {bit:#x} == {bit:#x}"),
            Statement::Mark(bit) => write!(f, "meta mark set mark or {bit:#x}"),
            Statement::Unmark(bit) => write!(f, "meta mark set mark and not {bit:#x}"),
            Statement::Dnat(address, port) => write!(f, "dnat to {address}:{port}"),
            Statement::Masquerade => f.write_str("masquerade fully-random"),
            Statement::Verdict(verdict) => verdict.fmt(f),
        }
    }
}

impl fmt::Display for Ruleset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, set) in &self.sets {
            match set {
                Set::Listed(addresses) => {
                    let addresses: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
                    writeln!(f, "set {name} {{ {} }}", addresses.join(", "))?;
                }
                Set::Remembered(timeout) => writeln!(f, "set {name} timeout {}s", timeout.as_secs())?,
            }
        }
        for (name, map) in &self.maps {
            writeln!(f, "map {name}")?;
            for (key, verdict) in &map.elements {
                writeln!(f, "  {key} : {verdict}")?;
            }
        }
        for (name, chain) in &self.chains {
            match chain.base {
                Some(base) => {
                    let (kind, hook) = (format!("{:?}", base.kind), format!("{:?}", base.hook));
                    writeln!(
                        f,
                        "chain {name} {} {} {}",
                        kind.to_lowercase(),
                        hook.to_lowercase(),
                        base.priority
                    )?
                }
                None => writeln!(f, "chain {name}")?,
            }
            for rule in &chain.rules {
                let parts: Vec<String> = rule.iter().map(Statement::to_string).collect();
                writeln!(f, "  {}", parts.join(" "))?;
            }
        }
        Ok(())
    }
}
