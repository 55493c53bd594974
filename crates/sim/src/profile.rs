//! The file that says which nodes there are and what becomes of their pods.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Taint;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

/// More than this is a mistake in the file rather than a wish.
const MAX_NODES: usize = 100_000;

#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error("{0}")]
    Syntax(String),
    #[error("nodes: {0} nodes are more than the {MAX_NODES} that can be simulated")]
    TooManyNodes(usize),
    #[error("nodes: two groups have the prefix {0:?}; give each its own")]
    SamePrefix(String),
    #[error("pods[{0}]: a pod cannot both succeed and fail; set one of succeedAfter and failAfter")]
    BothEnds(usize),
    #[error("pods[{0}].failChance: {1} is not between 0 and 1")]
    Chance(usize, f64),
    #[error("nodes[{0}].capacity: {1:?} is not a quantity")]
    Quantity(usize, String),
}

/// Nodes and the stages of pods. Without stages every pod becomes Running and Ready at once.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Profile {
    #[serde(default)]
    pub nodes: Vec<NodeShape>,
    /// The first stage that selects a pod decides.
    #[serde(default)]
    pub pods: Vec<Stage>,
}

/// A group of equal nodes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeShape {
    pub count: usize,
    /// Names are this and a number.
    #[serde(default = "default_prefix")]
    pub prefix: String,
    #[serde(default = "default_capacity")]
    pub capacity: BTreeMap<String, String>,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Values of `topology.kubernetes.io/zone`, in turns.
    #[serde(default)]
    pub zones: Vec<String>,
    #[serde(default)]
    pub taints: Vec<Taint>,
}

/// What becomes of the pods that it selects.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Stage {
    /// Empty: all namespaces.
    #[serde(default)]
    pub namespace: String,
    /// Labels that a pod must have.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// From bound to Running and Ready.
    #[serde(default, deserialize_with = "duration")]
    pub ready_after: Duration,
    /// From Running to Succeeded; absent: never.
    #[serde(default, deserialize_with = "optional_duration")]
    pub succeed_after: Option<Duration>,
    /// From Running to Failed; absent: never.
    #[serde(default, deserialize_with = "optional_duration")]
    pub fail_after: Option<Duration>,
    /// Which part of the pods fails; the others go on running.
    #[serde(default = "certain")]
    pub fail_chance: f64,
    #[serde(default = "one")]
    pub exit_code: i32,
    /// From deletion to gone.
    #[serde(default, deserialize_with = "duration")]
    pub gone_after: Duration,
}

fn default_prefix() -> String {
    "sim-".to_owned()
}

fn default_capacity() -> BTreeMap<String, String> {
    let pairs = [
        ("cpu", "32"),
        ("memory", "256Gi"),
        ("pods", "110"),
        ("ephemeral-storage", "1Ti"),
    ];
    pairs
        .map(|(name, amount)| (name.to_owned(), amount.to_owned()))
        .into()
}

fn certain() -> f64 {
    1.0
}

fn one() -> i32 {
    1
}

fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse(&text).ok_or_else(|| D::Error::custom(format!("{text:?} is not a duration such as 500ms or 1m30s")))
}

fn optional_duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    duration(deserializer).map(Some)
}

fn parse(text: &str) -> Option<Duration> {
    let nanos = skiff_meta::duration::parse(text).ok()?;
    u64::try_from(nanos).ok().map(Duration::from_nanos)
}

impl Profile {
    /// So many nodes of the usual shape, and pods that run at once.
    pub fn of_nodes(count: usize) -> Profile {
        let shape = NodeShape {
            count,
            prefix: default_prefix(),
            capacity: default_capacity(),
            labels: BTreeMap::new(),
            zones: Vec::new(),
            taints: Vec::new(),
        };
        Profile {
            nodes: vec![shape],
            pods: Vec::new(),
        }
    }

    pub fn parse(text: &str) -> Result<Profile, ProfileError> {
        let profile: Profile =
            serde_saphyr::from_str(text).map_err(|error| ProfileError::Syntax(error.to_string()))?;
        profile.validate()?;
        Ok(profile)
    }

    pub fn validate(&self) -> Result<(), ProfileError> {
        let count: usize = self
            .nodes
            .iter()
            .map(|shape| shape.count)
            .fold(0, usize::saturating_add);
        if count > MAX_NODES {
            return Err(ProfileError::TooManyNodes(count));
        }
        let mut prefixes: Vec<&str> = self.nodes.iter().map(|shape| shape.prefix.as_str()).collect();
        prefixes.sort_unstable();
        if let Some(pair) = prefixes.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(ProfileError::SamePrefix(pair[0].to_owned()));
        }
        for (index, shape) in self.nodes.iter().enumerate() {
            let mut amounts = shape.capacity.values();
            if let Some(wrong) = amounts.find(|amount| skiff_meta::quantity::Quantity::parse(amount).is_err())
            {
                return Err(ProfileError::Quantity(index, wrong.clone()));
            }
        }
        for (index, stage) in self.pods.iter().enumerate() {
            if stage.succeed_after.is_some() && stage.fail_after.is_some() {
                return Err(ProfileError::BothEnds(index));
            }
            if !(0.0..=1.0).contains(&stage.fail_chance) {
                return Err(ProfileError::Chance(index, stage.fail_chance));
            }
        }
        Ok(())
    }
}

impl Stage {
    pub(crate) fn selects(&self, namespace: &str, labels: Option<&BTreeMap<String, String>>) -> bool {
        let has = |(key, value): (&String, &String)| labels.and_then(|labels| labels.get(key)) == Some(value);
        (self.namespace.is_empty() || self.namespace == namespace) && self.labels.iter().all(has)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_read_and_checked() {
        let text = "
nodes:
- count: 3
  zones: [a, b]
  taints: [{key: dedicated, value: batch, effect: NoSchedule}]
- count: 2
  prefix: big-
  capacity: {cpu: '128', memory: 1Ti, pods: '250'}
pods:
- labels: {job: batch}
  readyAfter: 500ms
  succeedAfter: 2s
- namespace: flaky
  failAfter: 1m30s
  failChance: 0.25
  exitCode: 137
";
        let profile = Profile::parse(text).unwrap();
        assert_eq!(profile.nodes[0].prefix, "sim-");
        assert_eq!(profile.nodes[0].capacity["cpu"], "32");
        assert_eq!(profile.pods[0].succeed_after, Some(Duration::from_secs(2)));
        assert_eq!(profile.pods[1].fail_after, Some(Duration::from_secs(90)));
        let batch = BTreeMap::from([("job".to_owned(), "batch".to_owned())]);
        assert!(profile.pods[0].selects("any", Some(&batch)) && !profile.pods[0].selects("any", None));
        assert!(profile.pods[1].selects("flaky", None) && !profile.pods[1].selects("other", None));
    }

    #[test]
    fn mistakes_are_named() {
        let check = |text: &str, part: &str| {
            let error = Profile::parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        };
        check("nodes: [{count: 1, colour: red}]", "colour");
        check("nodes: [{count: 200000}]", "200000 nodes");
        check("nodes: [{count: 1}, {count: 2}]", "sim-");
        check("nodes: [{count: 1, capacity: {cpu: many}}]", "many");
        check("pods: [{succeedAfter: 1s, failAfter: 1s}]", "succeedAfter");
        check("pods: [{failAfter: 1s, failChance: 2}]", "failChance");
        check("pods: [{readyAfter: soon}]", "soon");
    }
}
