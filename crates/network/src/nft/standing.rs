//! A table that stands: whether its rules are still what they were when they were made, and its elements what they should
//! be. Rules are compared with what the kernel showed of them before, because it shows them in words of its own; what it
//! shows is taken as right as long as nobody else has touched the table.

use std::collections::HashMap;

use nlink::netlink::nftables::{Family, SetElement, SetElementData};
use nlink::netlink::{Connection, Nftables};

use super::Watch;

/// The key of an element, and its end if it is a range.
type ElementKey = (Vec<u8>, Option<Vec<u8>>);

/// Elements and what they lead to.
pub(crate) type Elements = HashMap<ElementKey, Option<SetElementData>>;

/// What is remembered of one or more tables that stand.
#[derive(Debug, Default)]
pub(crate) struct Standing {
    /// The rules as the kernel showed them; `None` if they were changed since.
    shown: Option<Vec<Shown>>,
    /// The kernel's generation of all rules after the last look.
    generation: Option<u32>,
}

/// A table without its elements, as the kernel shows it.
#[derive(Debug, PartialEq, Eq)]
struct Shown {
    handle: u64,
    flags: u32,
    chains: Vec<ShownChain>,
    /// Chain, handle and expressions.
    rules: Vec<(String, u64, Vec<u8>)>,
}

#[derive(Debug, PartialEq, Eq)]
struct ShownChain {
    name: String,
    handle: u64,
    hook: Option<u32>,
    priority: Option<i32>,
    policy: Option<u32>,
}

/// What a look found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// No nftables rules of the machine have changed since the last look.
    Nothing,
    /// The rules of the tables are as they were.
    Same,
    Lost,
}

impl Standing {
    /// We have changed rules or chains.
    pub(crate) fn rules_changed(&mut self) {
        self.shown = None;
    }

    /// Remembers what the kernel shows of rules that were all just made, unless somebody else has changed them meanwhile. Where
    /// nothing is remembered, announcements that are lost are a reason to make everything anew; that is announced as well, and two
    /// clusters of one machine would take turns for ever.
    pub(crate) async fn prime(
        &mut self,
        connection: &Connection<Nftables>,
        tables: &[(Family, &str)],
        watch: &mut Watch,
    ) {
        // Tables that are gone already are in the news.
        if let Err(error) = self.look(connection, tables, false, Some(watch)).await {
            tracing::debug!(%error, "cannot look at rules that were just made");
        }
    }

    /// Looks whether the tables' rules are as they were. Nobody can tell if they were `touched` by somebody else before they
    /// were looked at. It costs one question if no nftables rules at all have changed. `watch` is that of the tables.
    pub(crate) async fn look(
        &mut self,
        connection: &Connection<Nftables>,
        tables: &[(Family, &str)],
        touched: bool,
        watch: Option<&mut Watch>,
    ) -> nlink::Result<Look> {
        if touched && self.shown.is_none() {
            return Ok(Look::Lost);
        }
        let generation = connection.generation().await?;
        if self.generation == Some(generation) && self.shown.is_some() {
            return Ok(Look::Nothing);
        }
        let mut shown = Vec::new();
        for (family, table) in tables {
            match Shown::read(connection, *family, table).await? {
                Some(table) => shown.push(table),
                None => return Ok(Look::Lost),
            }
        }
        match &self.shown {
            Some(before) if *before != shown => return Ok(Look::Lost),
            // What was seen for the first time may be what somebody else has just made of it.
            None if watch.is_some_and(|watch| watch.has_news_of(tables)) => return Ok(Look::Same),
            _ => {}
        }
        self.shown = Some(shown);
        self.generation = Some(generation);
        Ok(Look::Same)
    }

    /// How many rules there were at the last look.
    pub(crate) fn rule_count(&self) -> Option<usize> {
        let shown = self.shown.as_ref()?;
        Some(shown.iter().map(|table| table.rules.len()).sum())
    }
}

impl Shown {
    async fn read(
        connection: &Connection<Nftables>,
        family: Family,
        name: &str,
    ) -> nlink::Result<Option<Shown>> {
        let tables = connection.list_tables_in(family).await?;
        let Some(table) = tables.into_iter().find(|table| table.name == name) else {
            return Ok(None);
        };
        let read = async {
            let chains = connection.list_chains_in(name, family).await?;
            let rules = connection.list_rules(name, family).await?;
            Ok::<_, nlink::Error>((chains, rules))
        };
        let (chains, rules) = match read.await {
            Err(error) if error.is_not_found() => return Ok(None),
            read => read?,
        };
        let chains = chains.into_iter().map(|chain| ShownChain {
            name: chain.name,
            handle: chain.handle,
            hook: chain.hook,
            priority: chain.priority,
            policy: chain.policy,
        });
        let rules = rules
            .into_iter()
            .map(|rule| (rule.chain, rule.handle, rule.expression_bytes));
        Ok(Some(Shown {
            handle: table.handle,
            flags: table.flags,
            chains: chains.collect(),
            rules: rules.collect(),
        }))
    }
}

/// An element for comparing.
pub(crate) fn element_of(element: &SetElement) -> (ElementKey, Option<SetElementData>) {
    let end = element.key_end().filter(|end| *end != element.key());
    let key = (element.key().to_vec(), end.map(<[u8]>::to_vec));
    (key, element.data().cloned())
}

/// The elements of a set; none if it is not there.
pub(crate) async fn elements_of(
    connection: &Connection<Nftables>,
    family: Family,
    table: &str,
    set: &str,
) -> nlink::Result<Elements> {
    match connection.list_set_elements(table, set, family).await {
        Ok(listed) => Ok(listed.iter().map(element_of).collect()),
        Err(error) if error.is_not_found() => Ok(Elements::new()),
        Err(error) => Err(error),
    }
}
