//! Which devices a container gets. Pure.

use std::collections::{BTreeMap, BTreeSet};

/// A device as its plugin last told of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    pub healthy: bool,
    pub numa: Vec<i64>,
}

/// The devices of a resource, by id.
pub type Devices = BTreeMap<String, Device>;

/// What is to be found for one container.
pub struct Wanted<'a> {
    pub uid: &'a str,
    pub container: &'a str,
    pub resource: &'a str,
    pub amount: usize,
    /// What the container has already.
    pub has: Option<&'a BTreeSet<String>>,
    /// Of containers of the pod that end before this one starts.
    pub reusable: &'a BTreeSet<String>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Choice {
    /// The container has its devices.
    Nothing,
    /// All of these.
    Exactly(BTreeSet<String>),
    /// `chosen`, and so many more of `available`; the plugin may have a preference.
    Among {
        chosen: BTreeSet<String>,
        available: BTreeSet<String>,
        more: usize,
    },
}

/// COMPAT: upstream's words; they become the message of a pod that is not admitted.
pub fn choose(
    wanted: &Wanted<'_>,
    devices: Option<&Devices>,
    in_use: &BTreeSet<String>,
) -> Result<Choice, String> {
    let Wanted { resource, amount, .. } = *wanted;
    if let Some(has) = wanted.has
        && has.len() != amount
    {
        return Err(format!(
            "pod {:?} container {:?} changed request for resource {resource:?} from {} to {amount}",
            wanted.uid,
            wanted.container,
            has.len()
        ));
    }
    let Some(devices) = devices else {
        return Err(format!("cannot allocate unregistered device {resource}"));
    };
    let healthy = |id: &String| devices.get(id).is_some_and(|device| device.healthy);
    if !devices.values().any(|device| device.healthy) {
        return Err(format!(
            "no healthy devices present; cannot allocate unhealthy devices {resource}"
        ));
    }
    if let Some(has) = wanted.has {
        if !has.iter().all(healthy) {
            return Err(format!(
                "previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
            ));
        }
        return Ok(Choice::Nothing);
    }
    if amount == 0 {
        return Ok(Choice::Nothing);
    }
    let chosen: BTreeSet<String> = wanted.reusable.iter().take(amount).cloned().collect();
    let more = amount - chosen.len();
    if more == 0 {
        return Ok(Choice::Exactly(chosen));
    }
    let free = devices.keys().filter(|id| healthy(id) && !in_use.contains(*id));
    let available: BTreeSet<String> = free.cloned().collect();
    if available.len() < more {
        return Err(format!(
            "requested number of devices unavailable for {resource}. Requested: {more}, Available: {}",
            available.len()
        ));
    }
    Ok(Choice::Among {
        chosen,
        available,
        more,
    })
}

/// Devices near the rest of what the container has come first: the plugin chooses among them if they are more than enough;
/// else all of them are chosen, and the plugin chooses the rest. Returns what [`complete`] needs.
pub fn prefer_near(
    mut chosen: BTreeSet<String>,
    available: BTreeSet<String>,
    more: usize,
    near: BTreeSet<String>,
) -> (BTreeSet<String>, BTreeSet<String>, usize) {
    if near.len() > more {
        return (chosen, near, more);
    }
    let rest = &available - &near;
    let left = more - near.len();
    chosen.extend(near);
    (chosen, rest, left)
}

/// The preferred ones first, then any.
pub fn complete(
    mut chosen: BTreeSet<String>,
    available: &BTreeSet<String>,
    more: usize,
    preferred: &[String],
) -> BTreeSet<String> {
    let wanted = chosen.len() + more;
    let preferred = preferred.iter().filter(|id| available.contains(*id));
    for id in preferred.chain(available) {
        if chosen.len() == wanted {
            break;
        }
        chosen.insert(id.clone());
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ids: &[&str]) -> BTreeSet<String> {
        ids.iter().map(|id| (*id).to_owned()).collect()
    }

    #[test]
    fn devices_are_chosen() {
        let devices: Devices = [("a", true), ("b", true), ("c", true), ("d", false)]
            .into_iter()
            .map(|(id, healthy)| {
                (
                    id.to_owned(),
                    Device {
                        healthy,
                        numa: Vec::new(),
                    },
                )
            })
            .collect();
        let check = |has: Option<&[&str]>,
                     reusable: &[&str],
                     amount: usize,
                     in_use: &[&str],
                     expected: Result<&[&str], &str>| {
            let (has, reusable, in_use) = (has.map(set), set(reusable), set(in_use));
            let wanted = Wanted {
                uid: "u",
                container: "c",
                resource: "example.com/x",
                amount,
                has: has.as_ref(),
                reusable: &reusable,
            };
            let got = choose(&wanted, Some(&devices), &in_use).map(|choice| match choice {
                Choice::Nothing => BTreeSet::new(),
                Choice::Exactly(all) => all,
                Choice::Among {
                    chosen,
                    available,
                    more,
                } => complete(chosen, &available, more, &["c".to_owned(), "d".to_owned()]),
            });
            assert_eq!(got, expected.map(set).map_err(str::to_owned));
        };
        check(None, &[], 1, &[], Ok(&["c"]));
        check(None, &[], 2, &[], Ok(&["a", "c"]));
        check(None, &["b"], 1, &["b"], Ok(&["b"]));
        check(None, &["b"], 2, &["b", "c"], Ok(&["a", "b"]));
        check(Some(&["a"]), &[], 1, &["a"], Ok(&[]));
        check(
            None,
            &[],
            3,
            &["a"],
            Err("requested number of devices unavailable for example.com/x. Requested: 3, Available: 2"),
        );
        check(
            Some(&["d"]),
            &[],
            1,
            &["d"],
            Err(
                "previously allocated devices are no longer healthy; cannot allocate unhealthy devices example.com/x",
            ),
        );
        check(
            Some(&["a"]),
            &[],
            2,
            &["a"],
            Err("pod \"u\" container \"c\" changed request for resource \"example.com/x\" from 1 to 2"),
        );
        let near =
            |near: &[&str], more: usize| prefer_near(set(&["z"]), set(&["a", "b", "c"]), more, set(near));
        assert_eq!(near(&[], 1), (set(&["z"]), set(&["a", "b", "c"]), 1));
        assert_eq!(near(&["b", "c"], 1), (set(&["z"]), set(&["b", "c"]), 1));
        assert_eq!(near(&["b"], 2), (set(&["z", "b"]), set(&["a", "c"]), 1));
        assert_eq!(near(&["b"], 1), (set(&["z", "b"]), set(&["a", "c"]), 0));
        let nothing = BTreeSet::new();
        let wanted = Wanted {
            uid: "u",
            container: "c",
            resource: "example.com/x",
            amount: 1,
            has: None,
            reusable: &nothing,
        };
        let unregistered = choose(&wanted, None, &nothing).unwrap_err();
        assert_eq!(unregistered, "cannot allocate unregistered device example.com/x");
        let none = choose(&wanted, Some(&Devices::new()), &nothing).unwrap_err();
        assert_eq!(
            none,
            "no healthy devices present; cannot allocate unhealthy devices example.com/x"
        );
    }
}
