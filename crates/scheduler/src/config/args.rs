//! The arguments of `pluginConfig`, one struct a plugin, with upstream's defaults and limits.

use super::election::duration;
use crate::plugins::Strategy;
use k8s_openapi::api::core::v1::{NodeAffinity, TopologySpreadConstraint};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::time::Duration;

/// How long PreBind waits for the conditions of devices, unless the arguments say otherwise.
pub(crate) const BINDING_TIMEOUT: Duration = Duration::from_secs(600);

/// Arguments of a plugin; `null` is the defaults.
pub(crate) fn parse_args<T: DeserializeOwned + Default>(args: &Value) -> Result<T, String> {
    if args.is_null() {
        return Ok(T::default());
    }
    serde_json::from_value(args.clone()).map_err(|error| error.to_string())
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct NodeAffinityArgs {
    pub(crate) added_affinity: Option<NodeAffinity>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ResourceWeight {
    name: String,
    weight: Option<i64>,
}

impl ResourceWeight {
    /// COMPAT: zero is not set.
    fn weight(&self) -> i64 {
        self.weight.filter(|weight| *weight != 0).unwrap_or(1)
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ShapePoint {
    utilization: i64,
    score: i64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RatioParam {
    shape: Vec<ShapePoint>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct ScoringStrategy {
    #[serde(rename = "type")]
    type_: String,
    resources: Vec<ResourceWeight>,
    requested_to_capacity_ratio: Option<RatioParam>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct FitArgs {
    pub(crate) ignored_resources: Vec<String>,
    pub(crate) ignored_resource_groups: Vec<String>,
    scoring_strategy: Option<ScoringStrategy>,
}

fn weights(resources: &[ResourceWeight]) -> Result<Vec<(String, i64)>, String> {
    if resources.is_empty() {
        return Ok(vec![("cpu".to_owned(), 1), ("memory".to_owned(), 1)]);
    }
    let read = resources.iter().map(|one| match one.weight() {
        weight @ 1..=100 => Ok((one.name.clone(), weight)),
        _ => Err(format!(
            "resource weight of {} not in valid range [1-100]",
            one.name
        )),
    });
    read.collect()
}

impl FitArgs {
    pub(crate) fn strategy(&self) -> Result<(Strategy, Vec<(String, i64)>), String> {
        let Some(given) = &self.scoring_strategy else {
            return Ok((Strategy::LeastAllocated, weights(&[])?));
        };
        let resources = weights(&given.resources)?;
        let strategy = match given.type_.as_str() {
            "" | "LeastAllocated" => Strategy::LeastAllocated,
            "MostAllocated" => Strategy::MostAllocated,
            "RequestedToCapacityRatio" => {
                let points = given
                    .requested_to_capacity_ratio
                    .iter()
                    .flat_map(|one| &one.shape);
                let shape: Vec<(i64, i64)> = points.map(|point| (point.utilization, point.score)).collect();
                let rising = shape.windows(2).all(|pair| pair[0].0 < pair[1].0);
                let in_range = shape
                    .iter()
                    .all(|(at, score)| (0..=100).contains(at) && (0..=10).contains(score));
                if shape.is_empty() || !rising || !in_range {
                    return Err(
                        "requestedToCapacityRatio.shape: at least one point must be specified, with utilization rising in \
                         [0-100] and score in [0-10]"
                            .to_owned(),
                    );
                }
                Strategy::RequestedToCapacityRatio(
                    shape.into_iter().map(|(at, score)| (at, score * 10)).collect(),
                )
            }
            other => return Err(format!("scoringStrategy.type: unsupported value {other:?}")),
        };
        Ok((strategy, resources))
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct BalancedAllocationArgs {
    resources: Vec<ResourceWeight>,
}

impl BalancedAllocationArgs {
    pub(crate) fn names(&self) -> Result<Option<Vec<String>>, String> {
        if self.resources.is_empty() {
            return Ok(None);
        }
        if self.resources.iter().any(|one| one.weight() != 1) {
            return Err("resources: weights must be 1".to_owned());
        }
        Ok(Some(self.resources.iter().map(|one| one.name.clone()).collect()))
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct VolumeBindingArgs {
    bind_timeout_seconds: Option<i64>,
    shape: Option<Value>,
}

impl VolumeBindingArgs {
    pub(crate) fn seconds(&self) -> Result<u64, String> {
        if self.shape.is_some() {
            return Err("shape: needs the feature gate StorageCapacityScoring, which is off".to_owned());
        }
        u64::try_from(self.bind_timeout_seconds.unwrap_or(600)).map_err(|_| {
            "bindTimeoutSeconds: invalid BindTimeoutSeconds, should not be a negative value".to_owned()
        })
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct DynamicResourcesArgs {
    /// The search for devices ends after a number of steps instead.
    filter_timeout: Option<String>,
    binding_timeout: Option<String>,
}

impl DynamicResourcesArgs {
    pub(super) fn limits_filter(args: &Value) -> bool {
        !args["filterTimeout"].is_null()
    }

    /// How long PreBind waits for the conditions of devices.
    pub(crate) fn binding_timeout(&self) -> Result<Duration, String> {
        duration("filterTimeout", self.filter_timeout.as_ref(), Duration::ZERO)
            .map_err(|error| error.to_string())?;
        let timeout = duration("bindingTimeout", self.binding_timeout.as_ref(), BINDING_TIMEOUT)
            .map_err(|error| error.to_string())?;
        if timeout < Duration::from_secs(1) {
            return Err("bindingTimeout: must be at least 1 second".to_owned());
        }
        Ok(timeout)
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct PodTopologySpreadArgs {
    default_constraints: Vec<TopologySpreadConstraint>,
    defaulting_type: Option<String>,
}

impl PodTopologySpreadArgs {
    /// `None` is the system's defaults.
    pub(crate) fn constraints(&self) -> Result<Option<Vec<TopologySpreadConstraint>>, String> {
        match self.defaulting_type.as_deref() {
            None | Some("System") if self.default_constraints.is_empty() => Ok(None),
            None | Some("List") => {
                for one in &self.default_constraints {
                    if one.label_selector.is_some() {
                        return Err("defaultConstraints: constraint must not define a selector".to_owned());
                    }
                    if one.max_skew <= 0 || one.topology_key.is_empty() {
                        return Err(
                            "defaultConstraints: maxSkew must be greater than zero and topologyKey be set"
                                .to_owned(),
                        );
                    }
                    if !matches!(
                        one.when_unsatisfiable.as_str(),
                        "DoNotSchedule" | "ScheduleAnyway"
                    ) {
                        return Err("defaultConstraints: unsupported whenUnsatisfiable".to_owned());
                    }
                }
                Ok(Some(self.default_constraints.clone()))
            }
            Some("System") => {
                Err("when .defaultingType is System, .defaultConstraints must be empty".to_owned())
            }
            Some(other) => Err(format!("defaultingType: unsupported value {other:?}")),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct InterPodAffinityArgs {
    hard_pod_affinity_weight: Option<i64>,
    pub(crate) ignore_preferred_terms_of_existing_pods: bool,
}

impl InterPodAffinityArgs {
    pub(crate) fn weight(&self) -> Result<i64, String> {
        match self.hard_pod_affinity_weight.unwrap_or(1) {
            weight @ 0..=100 => Ok(weight),
            _ => Err("hardPodAffinityWeight: not in valid range [0-100]".to_owned()),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct DefaultPreemptionArgs {
    min_candidate_nodes_percentage: Option<i64>,
    min_candidate_nodes_absolute: Option<i64>,
}

impl DefaultPreemptionArgs {
    pub(crate) fn candidates(&self) -> Result<(usize, usize), String> {
        let percentage = usize::try_from(self.min_candidate_nodes_percentage.unwrap_or(10));
        let absolute = usize::try_from(self.min_candidate_nodes_absolute.unwrap_or(100));
        match (percentage, absolute) {
            (Ok(percentage @ 0..=100), Ok(absolute)) if percentage + absolute > 0 => Ok((percentage, absolute)),
            _ => Err("minCandidateNodesPercentage must be in [0-100] and minCandidateNodesAbsolute not negative, and not both zero".to_owned()),
        }
    }
}
