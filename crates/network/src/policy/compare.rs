//! Whether the kernel still has the policies' table as it was made: rules are compared with what the kernel showed before, and
//! the elements of sets that somebody else has touched with what is wanted.

use std::collections::BTreeMap;

use super::compile::Element;
use super::table::{FAMILY, Table, nft_element};
use super::{Error, PolicyConfig};
use crate::nft::{Elements, Look, Touched, Watch, element_of, elements_of};

/// Sets that are compared one by one: the kernel lists all sets for each. For more the table is made anew. That is announced in turn,
/// and another cluster of the machine that loses announcements by it may do the same.
const MAX_COMPARED: usize = 512;

impl Table {
    /// Reports what others change of the table.
    pub(super) fn watch(config: &PolicyConfig) -> Result<Watch, Error> {
        Ok(Watch::open([(FAMILY, config.table.as_str())])?)
    }

    /// Compares what somebody else has `touched`, or at times, beside `watch`, the rules alone, with what there should be. If it
    /// differs, the next `apply` makes the table anew.
    pub(super) async fn is_as_wanted(
        &mut self,
        touched: &Touched,
        watch: Option<&mut Watch>,
        wanted: impl FnOnce() -> Vec<(Element, u32)>,
    ) -> Result<bool, Error> {
        let Some(mut standing) = self.standing.take() else {
            return Ok(false);
        };
        let table = [(FAMILY, self.name.as_str())];
        let look = standing.look(&self.connection, &table, touched.rules, watch);
        let lost = if look.await? == Look::Lost {
            Some("rules are missing or changed".to_owned())
        } else if touched.all_sets || !touched.sets.is_empty() {
            self.differing_set(touched, wanted()).await?
        } else {
            None
        };
        if let Some(why) = lost {
            tracing::warn!(
                table = self.name,
                why,
                "somebody changed the network policies' rules; restoring them"
            );
            return Ok(false);
        }
        self.standing = Some(standing);
        Ok(true)
    }

    /// Remembers the rules right after the whole table was made (`Standing::prime`).
    pub(super) async fn prime(&mut self, watch: &mut Watch) {
        if let Some(standing) = &mut self.standing {
            let table = [(FAMILY, self.name.as_str())];
            standing.prime(&self.connection, &table, watch).await;
        }
    }

    async fn differing_set(
        &self,
        touched: &Touched,
        wanted: Vec<(Element, u32)>,
    ) -> Result<Option<String>, Error> {
        let mut expected: BTreeMap<String, Elements> = touched
            .sets
            .iter()
            .map(|name| (name.clone(), Elements::new()))
            .collect();
        if touched.all_sets {
            let sets = self.connection.list_sets_in(&self.name, FAMILY).await?;
            expected.extend(sets.into_iter().map(|set| (set.name, Elements::new())));
        }
        for (element, value) in wanted {
            let Some((kind, element)) = nft_element(element, value)? else {
                continue;
            };
            let name = kind.name();
            if touched.all_sets || touched.sets.contains(&name) {
                expected.entry(name).or_default().extend([element_of(&element)]);
            }
        }
        if expected.len() > MAX_COMPARED {
            return Ok(Some("announcements of changes were lost".to_owned()));
        }
        for (name, expected) in expected {
            if elements_of(&self.connection, FAMILY, &self.name, &name).await? != expected {
                return Ok(Some(format!("elements of {name} are not what they should be")));
            }
        }
        Ok(None)
    }
}
