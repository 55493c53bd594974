//! The service proxy's nftables tables, one for each address family. Whatever changes together is one transaction, so
//! that every packet sees either the old tables or the new ones.

use std::collections::{BTreeMap, HashMap};

use nlink::netlink::nftables::{Family, NFT_MSG_NEWTABLE, RawMessage, SetElement, Transaction};

use super::elements::{Element, Value};
use super::frame::Frame;
use super::index::Delta;
use super::sets::{SetKind, Way, nft_element};
use super::{Error, ProxyConfig};
use crate::nft::{OwnConnection, Standing};

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

pub struct Table {
    pub(super) config: ProxyConfig,
    pub(super) families: Vec<bool>,
    pub(super) connection: OwnConnection,
    /// What the kernel has; `None` when that is not known, at the start and after an error.
    pub(super) stands: Option<Loaded>,
}

/// What is remembered of tables that stand.
pub(super) struct Loaded {
    /// The chains that steer, and their numbers.
    pub(super) ways: HashMap<Way, u32>,
    ways_at_load: usize,
    pub(super) standing: Standing,
    pub(super) rule_count: usize,
    /// Some nftables rules of the machine have changed since all elements were compared.
    pub(super) unsure: bool,
}

impl Loaded {
    /// The number of a way; each has one before an element leads there.
    pub(super) fn code(&self, way: &Way) -> u32 {
        self.ways.get(way).copied().unwrap_or(0)
    }
}

impl Table {
    /// `families`: true for IPv4.
    pub fn open(config: &ProxyConfig, families: &[bool]) -> Result<Table, Error> {
        let connection = OwnConnection::open()?;
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

    pub(super) fn frame(&self, ipv4: bool) -> Frame<'_> {
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
        let (transaction, loaded) = match self.stands.take() {
            Some(mut loaded) => {
                let t = self.change(
                    transaction,
                    &mut loaded,
                    &delta.removed,
                    delta.added.iter().copied(),
                )?;
                (t, loaded)
            }
            None => {
                let mut loaded = Loaded {
                    ways: HashMap::new(),
                    ways_at_load: 0,
                    standing: Standing::default(),
                    rule_count: 0,
                    unsure: false,
                };
                let fresh = self.create(transaction, &mut loaded)?;
                let all = wanted.iter().map(|(element, value)| (*element, *value));
                let t = self.change(fresh, &mut loaded, &[], all)?;
                loaded.ways_at_load = loaded.ways.len();
                (t, loaded)
            }
        };
        transaction.commit(&self.connection).await?;
        if loaded.ways.len() <= 2 * loaded.ways_at_load + SPARE_WAYS {
            self.stands = Some(loaded);
        }
        Ok(())
    }

    /// Empty tables in the place of those that may be there.
    fn create(&self, mut t: Transaction, loaded: &mut Loaded) -> NlResult<Transaction> {
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
                loaded.rule_count += rules;
                t = filled;
            }
        }
        Ok(t)
    }

    /// The steps of a change, in an order in which every step finds what it refers to.
    fn change(
        &self,
        mut t: Transaction,
        loaded: &mut Loaded,
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
                && !loaded.ways.contains_key(&way)
            {
                let code = Way::code(loaded.ways.len());
                let (added, rules) = self.frame(way.ipv4).add_way(t, &way, code)?;
                t = added;
                loaded.ways.insert(way, code);
                loaded.rule_count += rules;
                loaded.standing.rules_changed();
            }
            let (kind, nft) = nft_element(element, Some(value), |way| loaded.code(way));
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

    /// How many rules the kernel has of this proxy.
    pub fn rule_count(&self) -> usize {
        let loaded = self.stands.as_ref();
        loaded.map_or(0, |loaded| loaded.rule_count)
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
