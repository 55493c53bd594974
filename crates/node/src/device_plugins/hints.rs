//! The NUMA nodes that devices could come from, for the topology manager. Decides nothing.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, Pod};

use super::choose::Devices;
use super::{DevicePlugins, State};
use crate::pods;
use crate::topology::{Hint, Mask, ProviderHints, at_once, containers, each_mask};

/// By resource.
pub type Reusable = BTreeMap<String, BTreeSet<String>>;

/// The NUMA nodes that a device is at; `None` if its plugin does not tell.
pub fn mask_of(devices: &Devices, id: &str) -> Option<Mask> {
    let device = devices.get(id).filter(|device| !device.numa.is_empty())?;
    Some(
        { device.numa.iter() }
            .filter_map(|node| u32::try_from(*node).ok())
            .collect(),
    )
}

/// All sets of NUMA nodes that have so many devices left, all of `reusable` among them. Those are preferred that are as
/// small as they could be if no device were in use.
fn hints(
    devices: &Devices,
    nodes: &[u32],
    available: &BTreeSet<String>,
    reusable: &BTreeSet<String>,
    wanted: usize,
) -> Vec<Hint> {
    let masks = |ids: &BTreeSet<String>| -> Vec<Mask> {
        let ids = ids.iter();
        ids.filter_map(|id| mask_of(devices, id)).collect()
    };
    let all = masks(&devices.keys().cloned().collect());
    let (free, reused) = (masks(&(available - reusable)), masks(reusable));
    let mut smallest = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
    let mut found = Vec::new();
    each_mask(nodes, |mask| {
        let inside = |masks: &[Mask]| masks.iter().filter(|one| mask.intersects(**one)).count();
        if inside(&all) >= wanted {
            smallest = smallest.min(mask.count());
        }
        if inside(&reused) == reused.len() && inside(&free) + reused.len() >= wanted {
            found.push(mask);
        }
    });
    let hint = |mask: Mask| Hint::new(mask, mask.count() == smallest);
    found.into_iter().map(hint).collect()
}

impl State {
    /// `None`: the devices of this resource are at no certain NUMA node.
    fn hints_of(
        &self,
        resource: &str,
        (wanted, has): (usize, BTreeSet<String>),
        reusable: &BTreeSet<String>,
        nodes: &[u32],
    ) -> Option<Vec<Hint>> {
        let devices = &self.resources.get(resource)?.devices;
        if !devices.values().any(|device| !device.numa.is_empty()) {
            return None;
        }
        if !has.is_empty() {
            return Some(match has.len() == wanted {
                true => hints(devices, nodes, &has, &BTreeSet::new(), wanted),
                // It asks for something else than it was given.
                false => Vec::new(),
            });
        }
        let in_use = self.record.in_use(resource);
        let free = devices
            .iter()
            .filter(|(id, device)| device.healthy && !in_use.contains(*id));
        let available: BTreeSet<String> = free.map(|(id, _)| id.clone()).collect();
        if available.union(reusable).count() < wanted {
            return Some(Vec::new());
        }
        Some(hints(devices, nodes, &available, reusable, wanted))
    }
}

impl DevicePlugins {
    /// Where the container's devices could come from.
    pub fn container_hints(
        &self,
        pod: &Pod,
        container: &Container,
        reusable: &Reusable,
        nodes: &[u32],
    ) -> ProviderHints {
        let wanted = self.wanted(pod, container);
        let state = self.state.lock();
        let has = state.record.of_container(pods::uid(pod), &container.name);
        let of_resource = |(resource, amount): (String, usize)| {
            let has = has.and_then(|has| has.get(&resource));
            let has = has.map(|one| one.devices.clone()).unwrap_or_default();
            let none = BTreeSet::new();
            let reusable = reusable.get(&resource).unwrap_or(&none);
            let hints = state.hints_of(&resource, (amount, has), reusable, nodes);
            (resource, hints)
        };
        wanted.into_iter().map(of_resource).collect()
    }

    /// Where the devices of all of the pod's containers could come from.
    pub fn pod_hints(&self, pod: &Pod, nodes: &[u32]) -> ProviderHints {
        let of_containers: BTreeMap<&str, BTreeMap<String, usize>> = containers(pod)
            .map(|(container, _)| {
                let wanted = self.wanted(pod, container).into_iter().collect();
                (container.name.as_str(), wanted)
            })
            .collect();
        let resources: BTreeSet<&String> = of_containers.values().flat_map(BTreeMap::keys).collect();
        let state = self.state.lock();
        let of_pod = state.record.pods.get(pods::uid(pod));
        let of_resource = |resource: &String| {
            let amount = at_once(pod, |container| {
                let wanted = of_containers.get(container.name.as_str());
                wanted
                    .and_then(|wanted| wanted.get(resource))
                    .copied()
                    .unwrap_or(0) as u64
            });
            let amount = usize::try_from(amount).unwrap_or(usize::MAX);
            let allocations = of_pod.into_iter().flat_map(BTreeMap::values);
            let has: BTreeSet<String> = allocations
                .filter_map(|of_container| of_container.get(resource))
                .flat_map(|one| one.devices.iter().cloned())
                .collect();
            let hints = state.hints_of(resource, (amount, has), &BTreeSet::new(), nodes);
            (resource.clone(), hints)
        };
        resources.into_iter().map(of_resource).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::choose::Device;
    use super::*;

    #[test]
    fn devices_are_at_nodes() {
        let devices: Devices = [("a", vec![0]), ("b", vec![1]), ("c", vec![1]), ("d", vec![])]
            .into_iter()
            .map(|(id, numa)| (id.to_owned(), Device { healthy: true, numa }))
            .collect();
        let set = |ids: &[&str]| -> BTreeSet<String> { ids.iter().map(|id| (*id).to_owned()).collect() };
        type Expected<'a> = &'a [(&'a [u32], bool)];
        let check = |available: &[&str], reusable: &[&str], wanted: usize, expected: Expected<'_>| {
            let found = hints(&devices, &[0, 1], &set(available), &set(reusable), wanted);
            let found: Vec<(Vec<u32>, bool)> = found
                .iter()
                .map(|hint| (hint.nodes.map(Mask::nodes).unwrap_or_default(), hint.preferred))
                .collect();
            let expected: Vec<(Vec<u32>, bool)> = expected
                .iter()
                .map(|(nodes, preferred)| (nodes.to_vec(), *preferred))
                .collect();
            assert_eq!(found, expected, "{available:?} {reusable:?} {wanted}");
        };
        check(
            &["a", "b", "c", "d"],
            &[],
            1,
            &[(&[0], true), (&[1], true), (&[0, 1], false)],
        );
        check(&["a", "b", "c", "d"], &[], 2, &[(&[1], true), (&[0, 1], false)]);
        check(&["a", "b", "c", "d"], &[], 3, &[(&[0, 1], true)]);
        // Two on one node would do, but one of them is in use.
        check(&["a", "b"], &[], 2, &[(&[0, 1], false)]);
        check(&["b", "c"], &["a"], 1, &[(&[0], true), (&[0, 1], false)]);
    }
}
