//! Whether the kernel still has what the service proxy gave it. Rules are compared with what the kernel showed before, and
//! elements with what is wanted.

use std::collections::HashMap;

use nlink::netlink::nftables::Family;

use super::Error;
use super::elements::{Element, Value};
use super::sets::{SetKind, nft_element};
use super::table::Table;
use crate::nft::{Elements, Look, Touched, Watch, element_of, elements_of};

impl Table {
    /// The tables, in the order of the families.
    pub(super) fn names(&self) -> Vec<(Family, String)> {
        let families = self.families.iter().map(|ipv4| self.frame(*ipv4).family());
        families
            .map(|family| (family, self.config.table.clone()))
            .collect()
    }

    /// Whether rules are not what they were; the next `apply` then loads everything. It costs one question if nobody has
    /// changed any nftables rules.
    pub async fn look(&mut self) -> Result<bool, Error> {
        self.look_at_rules(false, None).await
    }

    /// Compares the kernel's rules and elements with what is `wanted`; if they differ, the next `apply` loads everything.
    /// Returns whether they do.
    pub async fn check(&mut self, wanted: &HashMap<Element, Value>) -> Result<bool, Error> {
        self.check_beside(wanted, None).await
    }

    /// As `check`, while `watch` reports what others change.
    pub(super) async fn check_beside(
        &mut self,
        wanted: &HashMap<Element, Value>,
        watch: Option<&mut Watch>,
    ) -> Result<bool, Error> {
        if self.look_at_rules(false, watch).await? {
            return Ok(true);
        }
        if self.stands.as_ref().is_none_or(|loaded| !loaded.unsure) {
            return Ok(false);
        }
        if self.look_at_elements(wanted, |_, _| true).await? {
            return Ok(true);
        }
        if let Some(loaded) = &mut self.stands {
            loaded.unsure = false;
        }
        Ok(false)
    }

    /// Compares what somebody else has touched of each family's table. Returns as `check` does.
    pub(super) async fn compare(
        &mut self,
        touched: &[Touched],
        wanted: &HashMap<Element, Value>,
    ) -> Result<bool, Error> {
        let rules = touched.iter().any(|touched| touched.rules);
        if rules && self.look_at_rules(true, None).await? {
            return Ok(true);
        }
        let by_family: Vec<(bool, &Touched)> = self.families.iter().copied().zip(touched).collect();
        let is_touched = |ipv4: bool, name: &str| {
            let mut of_family = by_family.iter().filter(|(family, _)| *family == ipv4);
            of_family.any(|(_, touched)| touched.all_sets || touched.sets.contains(name))
        };
        if !touched
            .iter()
            .any(|touched| touched.all_sets || !touched.sets.is_empty())
        {
            return Ok(false);
        }
        self.look_at_elements(wanted, is_touched).await
    }

    /// Remembers the rules right after all were loaded (`Standing::prime`).
    pub(super) async fn prime(&mut self, watch: &mut Watch) {
        let names = self.names();
        if let Some(loaded) = &mut self.stands {
            let standing = &mut loaded.standing;
            standing.prime(&self.connection, &borrowed(&names), watch).await;
        }
    }

    async fn look_at_rules(&mut self, touched: bool, watch: Option<&mut Watch>) -> Result<bool, Error> {
        let names = self.names();
        let Some(loaded) = &mut self.stands else {
            return Ok(true);
        };
        let look = loaded
            .standing
            .look(&self.connection, &borrowed(&names), touched, watch)
            .await?;
        loaded.unsure |= look == Look::Same;
        let missing = loaded
            .standing
            .rule_count()
            .is_some_and(|count| count != loaded.rule_count);
        if look == Look::Lost || missing {
            self.lost("rules are missing or changed");
            return Ok(true);
        }
        Ok(false)
    }

    /// Compares the elements of those sets that `is_meant` names, by family and name.
    async fn look_at_elements(
        &mut self,
        wanted: &HashMap<Element, Value>,
        is_meant: impl Fn(bool, &str) -> bool,
    ) -> Result<bool, Error> {
        let Some(loaded) = &self.stands else {
            return Ok(true);
        };
        let mut expected: HashMap<(bool, SetKind), Elements> = HashMap::new();
        for ipv4 in self.families.iter().copied() {
            let frame = self.frame(ipv4);
            let meant = frame
                .sets()
                .into_iter()
                .filter(|kind| !kind.is_dynamic() && is_meant(ipv4, &kind.name()));
            expected.extend(meant.map(|kind| ((ipv4, kind), Elements::new())));
            for (kind, elements) in frame.fixed_elements()? {
                if let Some(set) = expected.get_mut(&(ipv4, kind)) {
                    set.extend(elements.iter().map(element_of));
                }
            }
        }
        for (way, code) in &loaded.ways {
            let (kind, entry) = self.frame(way.ipv4).entry(way, *code)?;
            if let Some(set) = expected.get_mut(&(way.ipv4, kind)) {
                set.extend([element_of(&entry)]);
            }
        }
        for (element, value) in wanted {
            let (kind, nft) = nft_element(*element, Some(*value), |way| loaded.code(way));
            if let Some(set) = expected.get_mut(&(element.is_ipv4(), kind)) {
                set.extend([element_of(&nft)]);
            }
        }
        for ((ipv4, kind), expected) in expected {
            let (name, family) = (kind.name(), self.frame(ipv4).family());
            let listed = elements_of(&self.connection, family, &self.config.table, &name).await?;
            if listed != expected {
                self.lost(&format!("elements of {name} are not what they should be"));
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The next `apply` loads everything.
    pub(super) fn doubt(&mut self) {
        self.stands = None;
    }

    fn lost(&mut self, why: &str) {
        tracing::warn!(
            table = self.config.table,
            why,
            "somebody changed the service proxy's rules; restoring them"
        );
        self.doubt();
    }
}

fn borrowed(names: &[(Family, String)]) -> Vec<(Family, &str)> {
    let names = names.iter();
    names.map(|(family, name)| (*family, name.as_str())).collect()
}
