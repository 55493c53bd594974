//! The service proxy's nftables tables, one for each address family. Whatever changes together is one transaction, so
//! that every packet sees either the old tables or the new ones.

use std::collections::{BTreeMap, HashMap};

use nlink::netlink::nftables::{
    Family, NFT_MSG_NEWTABLE, RawMessage, SetElement, SetElementData, Transaction,
};
use nlink::netlink::{Connection, Nftables};

use super::elements::{Element, Value};
use super::frame::Frame;
use super::index::Delta;
use super::sets::{COMPARED, COUNTED, FIXED_ENTRIES, SetKind, Way, nft_element};
use super::{Error, ProxyConfig};

/// A transaction is one datagram, and the kernel takes none that is larger than the send buffer. This
/// is a limit and costs nothing until it is used.
const SEND_BUFFER: usize = 256 << 20;

/// Elements a message; a list of them must stay below 64 KiB.
const ELEMENTS_A_MESSAGE: usize = 200;

/// Chains that steer, beyond twice as many as are in use after a load. They come as services change and stay, because
/// adding one costs more than an element; a new load leaves out what is not used.
const SPARE_WAYS: usize = 1000;

const NLM_F_CREATE: u16 = 0x400;
const NFTA_TABLE_NAME: u16 = 1;

type NlResult<T> = Result<T, nlink::Error>;

/// A rule as the kernel shows it: its chain, its number and what it says.
type SeenRule = (String, u64, Vec<u8>);

pub struct Table {
    config: ProxyConfig,
    families: Vec<bool>,
    connection: Connection<Nftables>,
    /// What the kernel has; `None` when that is not known, at the start and after an error.
    stands: Option<Standing>,
}

/// What is remembered of tables that stand.
struct Standing {
    /// The chains that steer, and their numbers.
    ways: HashMap<Way, u32>,
    ways_at_load: usize,
    /// The kernel's generation after the last look at it.
    generation: Option<u32>,
    /// The rules as the kernel showed them; `None` if chains were added since.
    rules: Option<Vec<SeenRule>>,
    rule_count: usize,
    /// Somebody else has changed something since the last full check.
    foreign: bool,
}

impl Standing {
    /// The number of a way; each has one before an element leads there.
    fn code(&self, way: &Way) -> u32 {
        self.ways.get(way).copied().unwrap_or(0)
    }
}

impl Table {
    /// `families`: true for IPv4.
    pub fn open(config: &ProxyConfig, families: &[bool]) -> Result<Table, Error> {
        let connection = Connection::<Nftables>::new()?;
        if let Err(error) =
            rustix::net::sockopt::set_socket_send_buffer_size_force(connection.socket(), SEND_BUFFER)
        {
            tracing::warn!(%error, "cannot raise the netlink send buffer; large rule sets will not load");
        }
        Ok(Table {
            config: config.clone(),
            families: families.to_vec(),
            connection,
            stands: None,
        })
    }

    /// Whether the next `apply` loads everything.
    pub fn stands(&self) -> bool {
        self.stands.is_some()
    }

    fn frame(&self, ipv4: bool) -> Frame<'_> {
        Frame {
            config: &self.config,
            ipv4,
        }
    }

    /// Brings a change into the kernel; if the tables do not stand, all that is `wanted` instead.
    pub async fn apply(&mut self, delta: &Delta, wanted: &HashMap<Element, Value>) -> Result<(), Error> {
        if self.stands.is_some() && delta.removed.is_empty() && delta.added.is_empty() {
            return Ok(());
        }
        let transaction = self.connection.transaction();
        // Taken out: after an error the next attempt starts from scratch.
        let (transaction, mut standing) = match self.stands.take() {
            Some(mut standing) => {
                let t = self.change(
                    transaction,
                    &mut standing,
                    &delta.removed,
                    delta.added.iter().copied(),
                )?;
                (t, standing)
            }
            None => {
                let mut standing = Standing {
                    ways: HashMap::new(),
                    ways_at_load: 0,
                    generation: None,
                    rules: None,
                    rule_count: 0,
                    foreign: false,
                };
                let fresh = self.create(transaction, &mut standing)?;
                let all = wanted.iter().map(|(element, value)| (*element, *value));
                let t = self.change(fresh, &mut standing, &[], all)?;
                standing.ways_at_load = standing.ways.len();
                (t, standing)
            }
        };
        transaction.commit(&self.connection).await?;
        // Each transaction is one step: a greater one was somebody else's, too.
        standing.generation = standing.generation.map(|generation| generation.wrapping_add(1));
        if standing.ways.len() <= 2 * standing.ways_at_load + SPARE_WAYS {
            self.stands = Some(standing);
        }
        Ok(())
    }

    /// Empty tables in the place of those that may be there.
    fn create(&self, mut t: Transaction, standing: &mut Standing) -> NlResult<Transaction> {
        let name = self.config.table.as_str();
        for ipv4 in [true, false] {
            let frame = self.frame(ipv4);
            // Deleting needs a table that exists, and creating first makes sure of it.
            let create = RawMessage::new(NFT_MSG_NEWTABLE, frame.family())
                .flags(NLM_F_CREATE)
                .attrs(string_attribute(NFTA_TABLE_NAME, name));
            t = t.raw(create).del_table(name, frame.family());
            if self.families.contains(&ipv4) {
                let (filled, rules) = frame.add_to(t.add_table(name, frame.family()))?;
                standing.rule_count += rules;
                t = filled;
            }
        }
        Ok(t)
    }

    /// The steps of a change, in an order in which every step finds what it refers to.
    fn change(
        &self,
        mut t: Transaction,
        standing: &mut Standing,
        removed: &[Element],
        added: impl Iterator<Item = (Element, Value)>,
    ) -> NlResult<Transaction> {
        let mut by_set: BTreeMap<(bool, SetKind), (Vec<SetElement>, Vec<SetElement>)> = BTreeMap::new();
        for element in removed {
            let (kind, nft) = nft_element(*element, None, |_| 0);
            by_set.entry((element.is_ipv4(), kind)).or_default().0.push(nft);
        }
        for (element, value) in added {
            if let Some(way) = Way::of(element, value)
                && !standing.ways.contains_key(&way)
            {
                let code = Way::code(standing.ways.len());
                let (added, rules) = self.frame(way.ipv4).add_way(t, &way, code)?;
                t = added;
                standing.ways.insert(way, code);
                standing.rule_count += rules;
                standing.rules = None;
            }
            let (kind, nft) = nft_element(element, Some(value), |way| standing.code(way));
            by_set.entry((element.is_ipv4(), kind)).or_default().1.push(nft);
        }
        for ((ipv4, kind), (removed, added)) in &by_set {
            let set = self.frame(*ipv4).set(*kind);
            for elements in removed.chunks(ELEMENTS_A_MESSAGE) {
                t = t.del_set_elements(&set, elements);
            }
            for elements in added.chunks(ELEMENTS_A_MESSAGE) {
                t = t.add_set_elements(&set, elements);
            }
        }
        Ok(t)
    }

    /// Whether somebody has changed rules since the last look; the next `apply` then loads everything. It costs one
    /// question as long as nobody changes any nftables rules.
    pub async fn look(&mut self) -> Result<bool, Error> {
        let Some(standing) = &self.stands else {
            return Ok(true);
        };
        let generation = self.connection.generation().await?;
        if standing.generation == Some(generation) && standing.rules.is_some() {
            return Ok(false);
        }
        let rules = self.rules().await?;
        let Some(standing) = &mut self.stands else {
            return Ok(true);
        };
        let changed = standing.rules.as_ref().is_some_and(|before| *before != rules);
        if changed || rules.len() != standing.rule_count {
            self.lost("rules are missing or changed");
            return Ok(true);
        }
        // Elements are compared by the full check: they are many.
        standing.foreign = true;
        standing.generation = Some(generation);
        standing.rules = Some(rules);
        Ok(false)
    }

    /// Compares the kernel's rules and elements with what is `wanted`; if they differ, the next `apply` loads everything.
    /// Returns whether they do.
    pub async fn check(&mut self, wanted: &HashMap<Element, Value>) -> Result<bool, Error> {
        if self.look().await? {
            return Ok(true);
        }
        let Some(standing) = self.stands.as_ref().filter(|standing| standing.foreign) else {
            return Ok(false);
        };
        let mut expected: HashMap<(bool, SetKind), SeenElements> = HashMap::new();
        for (element, value) in wanted {
            let (kind, nft) = nft_element(*element, Some(*value), |way| standing.code(way));
            let set = expected.entry((element.is_ipv4(), kind)).or_default();
            set.insert(seen(&nft), data_of(&nft));
        }
        let mut ways: HashMap<(bool, SetKind), usize> = HashMap::new();
        for way in standing.ways.keys() {
            *ways.entry((way.ipv4, SetKind::Entries(way.origin))).or_default() += 1;
        }
        for ipv4 in self.families.clone() {
            for kind in COMPARED {
                let listed = self.listed(ipv4, kind).await?;
                let listed: SeenElements = listed.iter().map(|nft| (seen(nft), data_of(nft))).collect();
                if listed != expected.remove(&(ipv4, kind)).unwrap_or_default() {
                    self.lost(&format!(
                        "elements of {} are not what they should be",
                        kind.name()
                    ));
                    return Ok(true);
                }
            }
            for kind in COUNTED {
                let count = ways.get(&(ipv4, kind)).copied().unwrap_or(0) + FIXED_ENTRIES;
                if self.listed(ipv4, kind).await?.len() != count {
                    self.lost(&format!(
                        "elements of {} are not what they should be",
                        kind.name()
                    ));
                    return Ok(true);
                }
            }
        }
        if let Some(standing) = &mut self.stands {
            standing.foreign = false;
        }
        Ok(false)
    }

    async fn listed(&self, ipv4: bool, kind: SetKind) -> Result<Vec<SetElement>, Error> {
        let (name, family) = (kind.name(), self.frame(ipv4).family());
        let listed = self
            .connection
            .list_set_elements(&self.config.table, &name, family);
        match listed.await {
            Err(error) if error.is_not_found() => Ok(Vec::new()),
            listed => Ok(listed?),
        }
    }

    fn lost(&mut self, why: &str) {
        tracing::warn!(
            table = self.config.table,
            why,
            "somebody changed the service proxy's rules; restoring them"
        );
        self.stands = None;
    }

    /// All rules as the kernel has them.
    async fn rules(&self) -> Result<Vec<SeenRule>, Error> {
        let mut rules = Vec::new();
        for ipv4 in &self.families {
            let family = self.frame(*ipv4).family();
            match self.connection.list_rules(&self.config.table, family).await {
                Ok(listed) => rules.extend(
                    listed
                        .into_iter()
                        .map(|rule| (rule.chain, rule.handle, rule.expression_bytes)),
                ),
                Err(error) if error.is_not_found() => return Ok(Vec::new()),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(rules)
    }

    /// How many rules the kernel has of this proxy.
    pub fn rule_count(&self) -> usize {
        let standing = self.stands.as_ref();
        standing.map_or(0, |standing| standing.rule_count)
    }

    pub async fn remove(self) -> Result<(), Error> {
        for family in [Family::Ip, Family::Ip6] {
            self.connection
                .del_table_if_exists(self.config.table.as_str(), family)
                .await?;
        }
        Ok(())
    }
}

/// The key of an element, and its end if it is a range.
type Seen = (Vec<u8>, Option<Vec<u8>>);

/// Elements and what they lead to.
type SeenElements = HashMap<Seen, Option<Vec<u8>>>;

fn seen(element: &SetElement) -> Seen {
    let end = element.key_end().filter(|end| *end != element.key());
    (element.key().to_vec(), end.map(<[u8]>::to_vec))
}

fn data_of(element: &SetElement) -> Option<Vec<u8>> {
    match element.data() {
        Some(SetElementData::Value(value)) => Some(value.clone()),
        _ => None,
    }
}

pub(crate) fn string_attribute(kind: u16, text: &str) -> Vec<u8> {
    let length = 4 + text.len() + 1;
    let mut bytes = (length as u16).to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(text.as_bytes());
    bytes.resize(length.next_multiple_of(4), 0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded() {
        assert_eq!(string_attribute(1, "abc"), [8, 0, 1, 0, b'a', b'b', b'c', 0]);
        assert_eq!(
            string_attribute(1, "abcd"),
            [9, 0, 1, 0, b'a', b'b', b'c', b'd', 0, 0, 0, 0]
        );
    }
}
