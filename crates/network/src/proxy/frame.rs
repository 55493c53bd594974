//! The rules of the table, which are the same whatever services exist, and the chains that steer, one for each way and
//! number of endpoints that occurs. Packets are led by maps: `services` and `node-ports` say by address and port how a
//! packet is steered, `…-entries` lead to the chain that does it, which draws a number, and `…-endpoints` have the
//! endpoint of that number. `…-affinity` remember who stays with which number.
//!
//! What one map says goes to the next by the packet's priority, because that is what `nft list` can show: it knows no
//! look-up of what was looked up. A priority is a number of ours only here, for the first packet of a connection, and
//! is cleared afterwards.
//!
//! The kernel's connection tracking does the rest of the connection: of each one only the first packet comes here.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use nlink::netlink::nftables::{
    BaseChain, Chain, ChainName, CmpOp, CtState, DynsetExpr, DynsetOp, Expr, Family, FibFlags, FilterHook,
    LookupExpr, MetaKey, NatHook, NatStatement, NumgenKind, PayloadBase, Priority, RawExpr, Register, Rule,
    Set, SetDataType, SetElement, SetKeyType, Transaction, Verdict,
};
use nlink::netlink::types::route::RouteType;

use super::ProxyConfig;
use super::elements::{Entry, How, SLOTS, Slot};
use super::objects::Protocol;
use super::sets::{DROP_CODE, ORIGINS, OURS, OURS_MASK, Origin, REJECT_CODE, SetKind, Way, octets};

/// The packet mark that asks for masquerading; upstream's bit.
const MASQUERADE_BIT: u32 = 0x4000;

const SERVICES: &str = "services";
const CHECK: &str = "check";
const CLUSTER_IPS_CHECK: &str = "cluster-ips-check";
const POOL_IPS_CHECK: &str = "pool-ips-check";
const MASQUERADING: &str = "masquerading";
const REJECT: &str = "reject";

/// Clients whose endpoint is remembered, of all services together. Those beyond it are served without affinity.
const MAX_AFFINITIES: u32 = 1 << 20;

const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
const PORT_UNREACHABLE: u8 = 3;
const PORT_UNREACHABLE_V6: u8 = 4;

type NlResult<T> = Result<T, nlink::Error>;

/// Words that are free behind the key of a front and a client: what a map says, and an address and port.
const LOOKED_UP: usize = 13;
const TARGET: usize = 8;

/// The table of one family: what its parts look like to the kernel.
pub struct Frame<'a> {
    pub config: &'a ProxyConfig,
    pub ipv4: bool,
}

impl Frame<'_> {
    pub fn family(&self) -> Family {
        if self.ipv4 { Family::Ip } else { Family::Ip6 }
    }

    fn address_type(&self) -> SetKeyType {
        if self.ipv4 {
            SetKeyType::Ipv4Addr
        } else {
            SetKeyType::Ipv6Addr
        }
    }

    fn address_words(&self) -> usize {
        if self.ipv4 { 1 } else { 4 }
    }

    fn front_type(&self, origin: Origin) -> Vec<SetKeyType> {
        let port = [SetKeyType::InetProto, SetKeyType::InetService];
        match origin {
            Origin::Services => [self.address_type()].into_iter().chain(port).collect(),
            Origin::NodePorts => port.to_vec(),
        }
    }

    fn front_words(&self, origin: Origin) -> usize {
        match origin {
            Origin::Services => self.address_words() + 2,
            Origin::NodePorts => 2,
        }
    }

    pub fn set(&self, kind: SetKind) -> Set {
        use SetKeyType::{ClassId, Concat, InetProto, InetService, Mark};
        let address = || self.address_type();
        let with_front = |origin, more| {
            let fields = self.front_type(origin).into_iter().chain([more]);
            Concat(fields.collect())
        };
        let set = Set::new(&self.config.table, &kind.name()).family(self.family());
        match kind {
            SetKind::ClusterIps | SetKind::PoolIps => set.key_type(address()),
            SetKind::Own => set.key_type(Concat(vec![address(), address()])),
            SetKind::Sources => set.key_type(with_front(Origin::Services, address())).interval(),
            SetKind::HostPorts => set.key_type(Concat(vec![InetProto, InetService])),
            SetKind::NodePortAddresses => set.key_type(address()).interval(),
            SetKind::Fronts(origin) => set
                .key_type(Concat(self.front_type(origin)))
                .map(SetDataType::Value(ClassId)),
            SetKind::Entries(_) | SetKind::Checks => set.key_type(ClassId).vmap(),
            SetKind::Endpoints(origin, _) => set
                .key_type(with_front(origin, Mark))
                .map(SetDataType::Value(Concat(vec![address(), InetService]))),
            SetKind::Affinity(origin, _) => set
                .key_type(with_front(origin, address()))
                .map(SetDataType::Value(ClassId))
                .dynamic()
                .per_element_timeouts()
                .size(MAX_AFFINITIES),
        }
    }

    pub fn sets(&self) -> Vec<SetKind> {
        let mut sets = vec![
            SetKind::ClusterIps,
            SetKind::PoolIps,
            SetKind::Own,
            SetKind::Sources,
            SetKind::HostPorts,
            SetKind::Checks,
        ];
        if !self.config.node_port_addresses.is_empty() {
            sets.push(SetKind::NodePortAddresses);
        }
        for origin in ORIGINS {
            sets.extend([SetKind::Fronts(origin), SetKind::Entries(origin)]);
            for slot in SLOTS {
                sets.extend([SetKind::Endpoints(origin, slot), SetKind::Affinity(origin, slot)]);
            }
        }
        sets
    }

    /// The elements that are there whatever services exist.
    pub fn fixed_elements(&self) -> NlResult<Vec<(SetKind, Vec<SetElement>)>> {
        let ends = |reject: Verdict, drop: Verdict| {
            vec![
                SetElement::mark(REJECT_CODE).verdict(reject),
                SetElement::mark(DROP_CODE).verdict(drop),
            ]
        };
        let mut fixed = vec![
            (SetKind::HostPorts, self.host_ports()),
            (SetKind::Checks, ends(self.verdict(REJECT)?, Verdict::Drop)),
        ];
        if !self.config.node_port_addresses.is_empty() {
            let of_family = self.config.node_port_addresses.iter();
            let ranges = of_family
                .filter(|network| network.is_ipv4() == self.ipv4)
                .map(|network| SetElement::range(octets(network.address()), octets(network.last())))
                .collect();
            fixed.push((SetKind::NodePortAddresses, ranges));
        }
        for origin in ORIGINS {
            fixed.push((SetKind::Entries(origin), ends(Verdict::Return, Verdict::Return)));
        }
        Ok(fixed)
    }

    /// What is there whatever services exist.
    /// Returns the number of rules, too.
    pub fn add_to(&self, mut t: Transaction) -> NlResult<(Transaction, usize)> {
        for kind in self.sets() {
            t = t.add_set(self.set(kind));
        }
        let chains = self.chains()?;
        for (name, base, _) in &chains {
            let chain = Chain::new(self.config.table.as_str(), name.as_str())?.family(self.family());
            t = t.add_chain(match base {
                Some(base) => chain.base(base.clone()),
                None => chain,
            });
        }
        for (kind, elements) in self.fixed_elements()? {
            t = t.add_set_elements(&self.set(kind), &elements);
        }
        let mut count = 0;
        for rule in chains.into_iter().flat_map(|(_, _, rules)| rules) {
            t = t.add_rule(rule);
            count += 1;
        }
        Ok((t, count))
    }

    fn host_ports(&self) -> Vec<SetElement> {
        let ports = self.config.host_ports.iter();
        ports.map(|port| port_key(Protocol::Tcp, *port)).collect()
    }

    fn verdict(&self, chain: &str) -> NlResult<Verdict> {
        Ok(Verdict::GotoTo(ChainName::new(chain)?))
    }

    fn rule(&self, chain: &str) -> Rule {
        Rule::new(&self.config.table, chain).family(self.family())
    }

    /// The chains with their rules, in an order in which no rule refers to what comes later.
    #[expect(clippy::type_complexity, reason = "it is used once")]
    fn chains(&self) -> NlResult<Vec<(String, Option<BaseChain>, Vec<Rule>)>> {
        let mut chains: Vec<(String, Option<BaseChain>, Vec<Rule>)> = Vec::new();
        let of_family = |networks: &[skiff_meta::net::Cidr]| {
            let mut networks = networks.iter().copied();
            networks.find(|network| network.is_ipv4() == self.ipv4)
        };
        let reject = match self.ipv4 {
            true => self.rule(REJECT).reject_icmp(PORT_UNREACHABLE),
            false => self.rule(REJECT).reject_icmpv6(PORT_UNREACHABLE_V6),
        };
        chains.push((REJECT.into(), None, vec![reject]));
        chains.push((SERVICES.into(), None, self.services_rules()));
        chains.push((CHECK.into(), None, self.check_rules()));
        // What still goes to a service's address after translation goes to a port that it has not; the service network
        // is nowhere else, so what goes to no service's address must not leave the machine.
        let mut unknown = vec![
            self.is_cluster_ip(self.rule(CLUSTER_IPS_CHECK))
                .goto(ChainName::new(REJECT)?),
        ];
        if let Some(services) = of_family(&self.config.service_cidrs) {
            let rule = self.rule(CLUSTER_IPS_CHECK);
            unknown.push(rule.match_daddr(services.address(), services.prefix()).drop());
        }
        chains.push((CLUSTER_IPS_CHECK.into(), None, unknown));
        // The same for an address of the load balancer that this node announces: the machine's own services are not there.
        // Echoes are answered.
        let echo = if self.ipv4 { ICMP } else { ICMPV6 };
        let stray = self
            .rule(POOL_IPS_CHECK)
            .expr(Expr::Meta {
                dreg: word(0),
                key: MetaKey::L4Proto,
            })
            .expr(Expr::Cmp {
                sreg: word(0),
                op: CmpOp::Neq,
                data: vec![echo],
            });
        let stray = self.is_pool_ip(stray, true).goto(ChainName::new(REJECT)?);
        chains.push((POOL_IPS_CHECK.into(), None, vec![stray]));
        chains.push((MASQUERADING.into(), None, self.masquerade_rules()));

        let jump = |chain: &str, to: &str| Ok::<_, nlink::Error>(self.rule(chain).jump(ChainName::new(to)?));
        let if_new = |chain: &str, to: &str| {
            let new = self.rule(chain).match_ct_state(CtState::NEW);
            Ok::<_, nlink::Error>(new.jump(ChainName::new(to)?))
        };
        // -100 and 100 are the kernel's places for destination and source translation.
        for (name, hook, priority, to) in [
            ("nat-prerouting", NatHook::Prerouting, -100, SERVICES),
            ("nat-output", NatHook::Output, -100, SERVICES),
            ("nat-postrouting", NatHook::Postrouting, 100, MASQUERADING),
        ] {
            let base = BaseChain::nat(hook, Priority::Custom(priority));
            chains.push((name.into(), Some(base), vec![jump(name, to)?]));
        }
        // After translation, the priority is the packet's own again.
        for (name, hook, priority, translated, to) in [
            (
                "filter-input",
                FilterHook::Input,
                -110,
                true,
                vec![CHECK, POOL_IPS_CHECK],
            ),
            (
                "filter-forward",
                FilterHook::Forward,
                -110,
                true,
                vec![CHECK, CLUSTER_IPS_CHECK],
            ),
            ("filter-output", FilterHook::Output, -110, false, vec![CHECK]),
            (
                "filter-output-post-dnat",
                FilterHook::Output,
                -90,
                true,
                vec![CLUSTER_IPS_CHECK],
            ),
        ] {
            let base = BaseChain::filter(hook, Priority::Custom(priority));
            let mut rules: Vec<Rule> = to
                .into_iter()
                .map(|to| if_new(name, to))
                .collect::<NlResult<_>>()?;
            if translated {
                rules.push(clear_priority(self.rule(name)));
            }
            chains.push((name.into(), Some(base), rules));
        }
        if let Some(bridge) = self.config.bridge.as_ref().filter(|_| self.ipv4) {
            // Node ports on 127.0.0.1 need `route_localnet` on the bridge, which would also open the
            // node's own loopback services to pods. Before translation, nothing from a pod may go there.
            let name = "guard-loopback";
            let base = BaseChain::filter(FilterHook::Prerouting, Priority::Custom(-300));
            let to_loopback = self.rule(name).match_iif(bridge);
            let to_loopback = to_loopback.match_daddr(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), 8);
            chains.push((name.into(), Some(base), vec![to_loopback.drop()]));
        }
        Ok(chains)
    }

    fn services_rules(&self) -> Vec<Rule> {
        let mut rules = Vec::new();
        let pods = self
            .config
            .pod_cidrs
            .iter()
            .find(|pods| pods.is_ipv4() == self.ipv4);
        if let Some(pods) = pods {
            // Who is not a pod may come from an address that endpoints have no way back to.
            let stranger = self.rule(SERVICES).match_saddr_not(pods.address(), pods.prefix());
            let stranger = self.is_cluster_ip(stranger);
            rules.push(stranger.set_mark_masked(MASQUERADE_BIT, MASQUERADE_BIT));
        }
        // On this machine's addresses its own ports come first, then node ports: a service that names such an address
        // as its external one must not take them away.
        rules.push(self.host_port(SERVICES));
        let enter = |rule: Rule, origin: Origin| self.dispatch(rule, origin, SetKind::Entries(origin));
        rules.push(enter(self.to_node_port(SERVICES), Origin::NodePorts));
        rules.push(enter(self.rule(SERVICES), Origin::Services));
        rules
    }

    fn check_rules(&self) -> Vec<Rule> {
        let check = |rule: Rule, origin: Origin| self.dispatch(rule, origin, SetKind::Checks);
        vec![
            self.host_port(CHECK),
            check(self.to_node_port(CHECK), Origin::NodePorts),
            // A node port goes to no service that has this port on an external address, with or without endpoints.
            self.is_front(self.to_node_port(CHECK), Origin::NodePorts)
                .expr(Expr::Verdict(Verdict::Return)),
            check(self.rule(CHECK), Origin::Services),
        ]
    }

    fn masquerade_rules(&self) -> Vec<Rule> {
        // A pod that reaches itself through a service would see its own address as the source.
        let itself = self.load_address(self.rule(MASQUERADING), Side::Source, 0);
        let itself = self.load_address(itself, Side::Destination, self.address_words());
        let itself = itself.expr(LookupExpr::new(SetKind::Own.name(), word(0)));
        let masquerade = || NatStatement::masquerade().fully_random();
        let asked = self
            .rule(MASQUERADING)
            .match_mark_masked(MASQUERADE_BIT, MASQUERADE_BIT);
        vec![
            asked.set_mark_masked(0, MASQUERADE_BIT).nat(masquerade()),
            itself.nat(masquerade()),
        ]
    }

    fn to_this_machine(&self, chain: &str) -> Rule {
        let local = self.rule(chain).match_fib_type(FibFlags::DADDR, RouteType::Local);
        self.is_pool_ip(local, false)
    }

    fn host_port(&self, chain: &str) -> Rule {
        let rule = self.load_key(self.to_this_machine(chain), Origin::NodePorts);
        rule.expr(LookupExpr::new(SetKind::HostPorts.name(), word(0)))
            .expr(Expr::Verdict(Verdict::Return))
    }

    /// The addresses that node ports are served on.
    fn to_node_port(&self, chain: &str) -> Rule {
        let mut rule = self.to_this_machine(chain);
        if !self.ipv4 {
            // There is no `route_localnet` for IPv6: an answer would never come back.
            rule = rule.match_daddr_not(IpAddr::V6(Ipv6Addr::LOCALHOST), 128);
        }
        if !self.config.node_port_addresses.is_empty() {
            rule = self.load_address(rule, Side::Destination, 0);
            rule = rule.expr(LookupExpr::new(SetKind::NodePortAddresses.name(), word(0)));
        }
        rule
    }

    fn is_cluster_ip(&self, rule: Rule) -> Rule {
        let rule = self.load_address(rule, Side::Destination, 0);
        rule.expr(LookupExpr::new(SetKind::ClusterIps.name(), word(0)))
    }

    fn is_pool_ip(&self, rule: Rule, is: bool) -> Rule {
        let rule = self.load_address(rule, Side::Destination, 0);
        let lookup = LookupExpr::new(SetKind::PoolIps.name(), word(0));
        rule.expr(if is { lookup } else { lookup.invert() })
    }

    fn load_address(&self, rule: Rule, side: Side, at: usize) -> Rule {
        let (offset, len) = match (self.ipv4, side) {
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

    /// Loads what the map of `origin` is looked up by. The fields of a key lie in words of four bytes.
    fn load_key(&self, rule: Rule, origin: Origin) -> Rule {
        let (rule, at) = match origin {
            Origin::Services => (
                self.load_address(rule, Side::Destination, 0),
                self.address_words(),
            ),
            Origin::NodePorts => (rule, 0),
        };
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

    fn is_front(&self, rule: Rule, origin: Origin) -> Rule {
        by_priority(self.load_key(rule, origin), SetKind::Fronts(origin), 0)
    }

    /// Does what the map of `origin` says.
    fn dispatch(&self, rule: Rule, origin: Origin, by: SetKind) -> Rule {
        self.is_front(rule, origin)
            .expr(priority_to(0))
            .expr(LookupExpr::new(by.name(), word(0)).dreg(Register::Verdict))
    }

    /// Adds a chain that steers, and the way to it. Returns the number of rules, too.
    pub fn add_way(&self, t: Transaction, way: &Way, code: u32) -> NlResult<(Transaction, usize)> {
        let name = way.name();
        let chain = Chain::new(self.config.table.as_str(), name.as_str())?.family(self.family());
        let mut t = t.add_chain(chain);
        let rules = self.way_rules(way, &name);
        let count = rules.len();
        for rule in rules {
            t = t.add_rule(rule);
        }
        let (map, entry) = self.entry(way, code)?;
        Ok((t.add_set_elements(&self.set(map), &[entry]), count))
    }

    /// The element that leads to the chain of a way.
    pub fn entry(&self, way: &Way, code: u32) -> NlResult<(SetKind, SetElement)> {
        let entry = SetElement::mark(code).verdict(self.verdict(&way.name())?);
        Ok((SetKind::Entries(way.origin), entry))
    }

    fn way_rules(&self, way: &Way, name: &str) -> Vec<Rule> {
        let (origin, steer) = (way.origin, way.steer);
        let rule = || self.rule(name);
        let mut rules = Vec::new();
        if matches!(steer.entry, Entry::LimitedOutside | Entry::LimitedLocal) {
            let source = self.load_key(rule(), origin);
            let source = self.load_address(source, Side::Source, self.front_words(origin));
            let unknown = LookupExpr::new(SetKind::Sources.name(), word(0)).invert();
            rules.push(source.expr(unknown).drop());
        }
        match steer.entry {
            Entry::Inside | Entry::Reject | Entry::Drop => {}
            Entry::Outside | Entry::LimitedOutside => {
                rules.push(rule().set_mark_masked(MASQUERADE_BIT, MASQUERADE_BIT));
            }
            Entry::Local | Entry::LimitedLocal => {
                let pods = self
                    .config
                    .pod_cidrs
                    .iter()
                    .find(|pods| pods.is_ipv4() == self.ipv4);
                if let Some(pods) = pods {
                    let from_pods = || rule().match_saddr(pods.address(), pods.prefix());
                    rules.extend(self.pick_rules(from_pods, origin, Slot::Second, steer.second));
                }
                let from_node = || rule().match_fib_type(FibFlags::SADDR, RouteType::Local);
                rules.push(from_node().set_mark_masked(MASQUERADE_BIT, MASQUERADE_BIT));
                rules.extend(self.pick_rules(from_node, origin, Slot::Second, steer.second));
            }
        }
        rules.extend(self.pick_rules(rule, origin, Slot::First, steer.first));
        // Without an endpoint here, for who comes from outside.
        if matches!(steer.entry, Entry::Local | Entry::LimitedLocal) {
            rules.push(rule().drop());
        }
        rules
    }

    /// Rules that pick an endpoint for what `from` matches, and translate.
    fn pick_rules(&self, from: impl Fn() -> Rule, origin: Origin, slot: Slot, how: How) -> Vec<Rule> {
        if how.count == 0 {
            return Vec::new();
        }
        let words = self.front_words(origin);
        let number_of = |at: usize, count: u32| Expr::Numgen {
            dreg: word(at),
            kind: NumgenKind::Random,
            modulus: count,
            offset: OURS,
        };
        let number = |at: usize| number_of(at, how.count);
        // The number of the endpoint is behind the front.
        let dnat = |rule: Rule| {
            let (address, port) = (word(TARGET), word(TARGET + self.address_words()));
            let endpoint = LookupExpr::new(SetKind::Endpoints(origin, slot).name(), word(0)).dreg(address);
            rule.expr(endpoint).expr(dnat_to(self.family(), address, port))
        };
        // A transaction may come between two look-ups of one packet: the number that it drew may be no more, but the first
        // one always is.
        let one_of = |count: u32| dnat(self.load_key(from(), origin).expr(number_of(words, count)));
        let any = [one_of(how.count), one_of(1)];
        if how.affinity == 0 {
            return any.into_iter().take(how.count.min(2) as usize).collect();
        }
        let affinity = SetKind::Affinity(origin, slot);
        let client = || self.load_address(self.load_key(from(), origin), Side::Source, words);
        let change = |op: DynsetOp| {
            // The kernel wants the register of the value also where an element goes.
            let element = DynsetExpr::new(op, affinity.name(), word(0)).sreg_data(word(LOOKED_UP));
            match op {
                DynsetOp::Update => element.timeout(Duration::from_secs(u64::from(how.affinity))),
                _ => element,
            }
        };
        let known = || by_priority(client(), affinity, LOOKED_UP);
        let remembered = [
            // Who is known stays with the endpoint.
            dnat(
                known()
                    .expr(priority_to(LOOKED_UP))
                    .expr(change(DynsetOp::Update))
                    .expr(priority_to(words)),
            ),
            // Who is not, or has a number that is no more, gets one, also if there is no more room to remember it.
            client().expr(number(LOOKED_UP)).expr(change(DynsetOp::Delete)),
            client().expr(number(LOOKED_UP)).expr(change(DynsetOp::Update)),
            dnat(known().expr(priority_to(words))),
        ];
        remembered.into_iter().chain(any).collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Source,
    Destination,
}

/// The n-th word of the kernel's registers.
fn word(n: usize) -> Register {
    // The words in use are constants of this file, all below 16.
    Register::word(n).unwrap_or(Register::R3)
}

/// Looks the first words up in a map, and makes what it says the packet's priority.
fn by_priority(rule: Rule, map: SetKind, at: usize) -> Rule {
    rule.expr(LookupExpr::new(map.name(), word(0)).dreg(word(at)))
        .expr(Expr::MetaSet {
            key: MetaKey::Priority,
            sreg: word(at),
        })
}

fn priority_to(at: usize) -> Expr {
    Expr::Meta {
        dreg: word(at),
        key: MetaKey::Priority,
    }
}

/// A priority that is a number of ours becomes none.
fn clear_priority(rule: Rule) -> Rule {
    rule.expr(priority_to(0))
        .expr(Expr::Bitwise {
            sreg: word(0),
            dreg: word(0),
            len: 4,
            mask: OURS_MASK.to_ne_bytes().to_vec(),
            xor: vec![0; 4],
        })
        .expr(Expr::Cmp {
            sreg: word(0),
            op: CmpOp::Eq,
            data: OURS.to_ne_bytes().to_vec(),
        })
        .expr(Expr::Immediate {
            dreg: word(0),
            data: vec![0; 4],
        })
        .expr(Expr::MetaSet {
            key: MetaKey::Priority,
            sreg: word(0),
        })
}

/// Translates the destination to what the registers hold.
fn dnat_to(family: Family, address: Register, port: Register) -> Expr {
    const NFTA_NAT_TYPE: u16 = 1;
    const NFTA_NAT_FAMILY: u16 = 2;
    const NFTA_NAT_REG_ADDR_MIN: u16 = 3;
    const NFTA_NAT_REG_ADDR_MAX: u16 = 4;
    const NFTA_NAT_REG_PROTO_MIN: u16 = 5;
    const NFTA_NAT_REG_PROTO_MAX: u16 = 6;
    const NFT_NAT_DNAT: u32 = 1;
    let attributes = [
        (NFTA_NAT_TYPE, NFT_NAT_DNAT),
        (NFTA_NAT_FAMILY, family as u32),
        (NFTA_NAT_REG_ADDR_MIN, address.wire()),
        (NFTA_NAT_REG_ADDR_MAX, address.wire()),
        (NFTA_NAT_REG_PROTO_MIN, port.wire()),
        (NFTA_NAT_REG_PROTO_MAX, port.wire()),
    ];
    let data = attributes.iter().flat_map(|(kind, value)| {
        let header = [8u16.to_ne_bytes(), kind.to_ne_bytes()].concat();
        header.into_iter().chain(value.to_be_bytes())
    });
    RawExpr::new("nat", data.collect()).into()
}

fn port_key(protocol: Protocol, port: u16) -> SetElement {
    SetElement::concat([SetElement::inet_proto(protocol.number()), SetElement::port(port)])
}
