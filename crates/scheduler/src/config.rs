//! `KubeSchedulerConfiguration` of `kubescheduler.config.k8s.io/v1`: read, checked, and made into profiles.
//!
//! What is not supported is refused, not ignored.

use crate::framework::{Enabled, Points, Profile};
use crate::plugins::{Handle, PLUGINS, Strategy};
use crate::queue::Backoff;
use k8s_openapi::api::core::v1::{NodeAffinity, TopologySpreadConstraint};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::HashMap;
use std::time::Duration;

pub(crate) const DEFAULT_SCHEDULER: &str = "default-scheduler";

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the scheduler configuration: {0}")]
    Syntax(String),
    #[error("{field}: {message}")]
    Invalid { field: String, message: String },
}

fn invalid<T>(field: impl Into<String>, message: impl Into<String>) -> Result<T, ConfigError> {
    Err(ConfigError::Invalid {
        field: field.into(),
        message: message.into(),
    })
}

/// The file as it is written.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct File {
    api_version: String,
    kind: String,
    parallelism: Option<i64>,
    percentage_of_nodes_to_score: Option<i64>,
    pod_initial_backoff_seconds: Option<i64>,
    pod_max_backoff_seconds: Option<i64>,
    profiles: Vec<ProfileFile>,
    extenders: Vec<Value>,
    leader_election: Option<Value>,
    client_connection: Option<Value>,
    enable_profiling: Option<bool>,
    enable_contention_profiling: Option<bool>,
    delay_cache_until_active: Option<bool>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct ProfileFile {
    scheduler_name: Option<String>,
    percentage_of_nodes_to_score: Option<i64>,
    plugins: PluginsFile,
    plugin_config: Vec<PluginConfig>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct PluginConfig {
    name: String,
    args: Value,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct PluginsFile {
    multi_point: PluginSet,
    pre_enqueue: PluginSet,
    queue_sort: PluginSet,
    pre_filter: PluginSet,
    filter: PluginSet,
    post_filter: PluginSet,
    pre_score: PluginSet,
    score: PluginSet,
    reserve: PluginSet,
    permit: PluginSet,
    pre_bind: PluginSet,
    bind: PluginSet,
    post_bind: PluginSet,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct PluginSet {
    enabled: Vec<PluginRef>,
    disabled: Vec<PluginRef>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct PluginRef {
    name: String,
    weight: Option<i64>,
}

impl PluginsFile {
    fn points(&self) -> [(&'static str, Points, &PluginSet); 12] {
        [
            ("preEnqueue", Points::PRE_ENQUEUE, &self.pre_enqueue),
            ("queueSort", Points::QUEUE_SORT, &self.queue_sort),
            ("preFilter", Points::PRE_FILTER, &self.pre_filter),
            ("filter", Points::FILTER, &self.filter),
            ("postFilter", Points::POST_FILTER, &self.post_filter),
            ("preScore", Points::PRE_SCORE, &self.pre_score),
            ("score", Points::SCORE, &self.score),
            ("reserve", Points::RESERVE, &self.reserve),
            ("permit", Points::PERMIT, &self.permit),
            ("preBind", Points::PRE_BIND, &self.pre_bind),
            ("bind", Points::BIND, &self.bind),
            ("postBind", Points::POST_BIND, &self.post_bind),
        ]
    }
}

/// A checked configuration. The default has one profile, `default-scheduler`, with all default plugins.
#[derive(Debug, Clone)]
pub struct Configuration {
    profiles: Vec<ProfileFile>,
    percentage_of_nodes_to_score: usize,
    pub(crate) backoff: Backoff,
}

impl Default for Configuration {
    fn default() -> Self {
        Self {
            profiles: vec![ProfileFile::default()],
            percentage_of_nodes_to_score: 0,
            backoff: Backoff::default(),
        }
    }
}

fn percentage(field: &str, value: Option<i64>) -> Result<Option<usize>, ConfigError> {
    match value {
        None => Ok(None),
        Some(value) => match usize::try_from(value) {
            Ok(value @ 0..=100) => Ok(Some(value)),
            _ => invalid(field, "not in valid range [0-100]"),
        },
    }
}

impl Configuration {
    /// Reads YAML or JSON. Unknown fields, plugins and arguments are errors.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let file: File =
            serde_saphyr::from_str(text).map_err(|error| ConfigError::Syntax(error.to_string()))?;
        if file.api_version != "kubescheduler.config.k8s.io/v1" || file.kind != "KubeSchedulerConfiguration" {
            return invalid(
                "apiVersion",
                "must be kubescheduler.config.k8s.io/v1, with the kind KubeSchedulerConfiguration",
            );
        }
        for (field, set) in [
            ("extenders", !file.extenders.is_empty()),
            ("leaderElection", file.leader_election.is_some()),
            ("clientConnection", file.client_connection.is_some()),
            ("enableProfiling", file.enable_profiling == Some(true)),
            (
                "enableContentionProfiling",
                file.enable_contention_profiling == Some(true),
            ),
            (
                "delayCacheUntilActive",
                file.delay_cache_until_active == Some(true),
            ),
        ] {
            if set {
                return invalid(field, "is not supported");
            }
        }
        // Cycles are not split over threads, so any number is as good as another.
        if file.parallelism.is_some_and(|number| number <= 0) {
            return invalid("parallelism", "should be an integer value greater than zero");
        }
        let seconds = |field: &str, value: Option<i64>, default: Duration| match value {
            None => Ok(default),
            Some(value) => match u64::try_from(value) {
                Ok(value) if value > 0 => Ok(Duration::from_secs(value)),
                _ => invalid(field, "must be greater than 0"),
            },
        };
        let default = Backoff::default();
        let backoff = Backoff {
            initial: seconds(
                "podInitialBackoffSeconds",
                file.pod_initial_backoff_seconds,
                default.initial,
            )?,
            max: seconds("podMaxBackoffSeconds", file.pod_max_backoff_seconds, default.max)?,
        };
        if backoff.max < backoff.initial {
            return invalid(
                "podMaxBackoffSeconds",
                "must be greater than or equal to PodInitialBackoffSeconds",
            );
        }
        let share = percentage("percentageOfNodesToScore", file.percentage_of_nodes_to_score)?;
        let configuration = Self {
            profiles: if file.profiles.is_empty() {
                vec![ProfileFile::default()]
            } else {
                file.profiles
            },
            percentage_of_nodes_to_score: share.unwrap_or(0),
            backoff,
        };
        configuration.check()?;
        Ok(configuration)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let mut names: HashMap<String, usize> = HashMap::new();
        for (index, profile) in self.profiles.iter().enumerate() {
            let name = profile.name();
            if let Some(other) = names.insert(name.clone(), index) {
                return invalid(
                    format!("profiles[{index}].schedulerName"),
                    format!("Duplicate value: {name:?}, as in profiles[{other}]"),
                );
            }
            percentage(
                &format!("profiles[{index}].percentageOfNodesToScore"),
                profile.percentage_of_nodes_to_score,
            )?;
            for (place, config) in profile.plugin_config.iter().enumerate() {
                let field = format!("profiles[{index}].pluginConfig[{place}]");
                if !PLUGINS.iter().any(|known| known.name == config.name) {
                    return invalid(field, format!("no plugin has the name {:?}", config.name));
                }
                let repeated = profile.plugin_config[..place]
                    .iter()
                    .any(|one| one.name == config.name);
                if repeated {
                    return invalid(field, format!("Duplicate value: {:?}", config.name));
                }
            }
            profile.enabled(index)?;
        }
        Ok(())
    }

    /// The profiles with their plugins made.
    pub(crate) fn profiles(&self, handle: &Handle) -> Result<Vec<Profile>, ConfigError> {
        let mut profiles = Vec::new();
        for (index, file) in self.profiles.iter().enumerate() {
            let mut plugins = Vec::new();
            for (name, weight, points) in file.enabled(index)? {
                let Some(known) = PLUGINS.iter().find(|known| known.name == name) else {
                    continue;
                };
                let config = file.plugin_config.iter().find(|config| config.name == name);
                let args = config.map(|config| args_of(&config.args)).unwrap_or_default();
                let plugin = (known.make)(handle, &args).map_err(|message| ConfigError::Invalid {
                    field: format!("profiles[{index}].pluginConfig[{name}].args"),
                    message,
                })?;
                plugins.push(Enabled {
                    plugin,
                    weight,
                    points,
                });
            }
            profiles.push(Profile {
                scheduler_name: file.name(),
                plugins,
                percentage_of_nodes_to_score: percentage(
                    "percentageOfNodesToScore",
                    file.percentage_of_nodes_to_score,
                )?
                .unwrap_or(self.percentage_of_nodes_to_score),
            });
        }
        Ok(profiles)
    }
}

/// Without the type that upstream's arguments may name.
fn args_of(args: &Value) -> Value {
    let mut args = args.clone();
    if let Some(fields) = args.as_object_mut() {
        fields.remove("apiVersion");
        fields.remove("kind");
    }
    args
}

impl ProfileFile {
    fn name(&self) -> String {
        self.scheduler_name
            .clone()
            .filter(|name| !name.is_empty())
            .unwrap_or_else(|| DEFAULT_SCHEDULER.to_owned())
    }

    /// Which plugins are on, in order, with weights and extension points.
    fn enabled(&self, index: usize) -> Result<Vec<(&'static str, i64, Points)>, ConfigError> {
        let find = |field: &str, one: &PluginRef| match PLUGINS.iter().find(|known| known.name == one.name) {
            Some(known) => Ok(known),
            None => invalid(
                format!("profiles[{index}].plugins.{field}"),
                format!("no plugin has the name {:?}", one.name),
            ),
        };
        let weight = |known: i64, given: Option<i64>| match given {
            Some(given) if given > 0 => given,
            _ => known.max(1),
        };
        let multi = &self.plugins.multi_point;
        let off =
            |set: &PluginSet, name: &str| set.disabled.iter().any(|one| one.name == "*" || one.name == name);
        let mut list: Vec<(&'static str, i64, Points)> = Vec::new();
        for known in PLUGINS.iter().filter(|known| !off(multi, known.name)) {
            list.push((known.name, known.weight.max(1), Points::ALL));
        }
        for one in &multi.enabled {
            let known = find("multiPoint", one)?;
            let weight = weight(known.weight, one.weight);
            match list.iter_mut().find(|(name, ..)| *name == known.name) {
                Some(entry) => entry.1 = weight,
                None => list.push((known.name, weight, Points::ALL)),
            }
        }
        for (field, point, set) in self.plugins.points() {
            for entry in list.iter_mut().filter(|(name, ..)| off(set, name)) {
                entry.2 = entry.2.without(point);
            }
            for one in &set.enabled {
                let known = find(field, one)?;
                let weight = weight(known.weight, one.weight);
                match list.iter_mut().find(|(name, ..)| *name == known.name) {
                    Some(entry) => {
                        entry.2 = entry.2.with(point);
                        if one.weight.is_some() {
                            entry.1 = weight;
                        }
                    }
                    None => list.push((known.name, weight, Points::NONE.with(point))),
                }
            }
        }
        list.retain(|(.., points)| *points != Points::NONE);
        let on = |name: &str, point: Points| {
            list.iter()
                .any(|(one, _, points)| *one == name && points.has(point))
        };
        if !on("PrioritySort", Points::QUEUE_SORT) {
            return invalid(
                format!("profiles[{index}].plugins.queueSort"),
                "one queue sort plugin required for profile",
            );
        }
        if !on("DefaultBinder", Points::BIND) {
            return invalid(
                format!("profiles[{index}].plugins.bind"),
                "at least one bind plugin is needed for profile",
            );
        }
        Ok(list)
    }
}

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
    let read = resources.iter().map(|one| match one.weight.unwrap_or(1) {
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
        if self.resources.iter().any(|one| one.weight.unwrap_or(1) != 1) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::handle;
    use std::sync::Arc;

    fn parse(rest: &str) -> Result<Vec<Profile>, String> {
        let text =
            format!("apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n{rest}");
        let configuration = Configuration::parse(&text).map_err(|error| error.to_string())?;
        configuration
            .profiles(&handle(Arc::default()))
            .map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn the_default_profile_has_all_plugins_with_upstreams_weights() {
        let profiles = parse("").unwrap();
        assert_eq!(
            (profiles.len(), profiles[0].scheduler_name.as_str()),
            (1, DEFAULT_SCHEDULER)
        );
        let weights: Vec<(&str, i64)> = profiles[0]
            .plugins
            .iter()
            .filter(|enabled| enabled.plugin.scores())
            .map(|enabled| (enabled.plugin.name(), enabled.weight))
            .collect();
        assert_eq!(
            weights,
            [
                ("TaintToleration", 3),
                ("NodeAffinity", 2),
                ("NodeResourcesFit", 1),
                ("PodTopologySpread", 2),
                ("InterPodAffinity", 2),
                ("NodeResourcesBalancedAllocation", 1),
                ("ImageLocality", 1)
            ]
        );
    }

    #[tokio::test]
    async fn plugins_are_turned_off_and_weighed_anew() {
        let profiles = parse(
            "percentageOfNodesToScore: 30\nprofiles:\n- schedulerName: a\n  plugins:\n    score:\n      disabled: [{name: ImageLocality}]\n      enabled: [{name: NodeAffinity, weight: 9}]\n    multiPoint:\n      disabled: [{name: NodePorts}]\n- schedulerName: b\n  percentageOfNodesToScore: 50\n  pluginConfig:\n  - name: NodeResourcesFit\n    args: {scoringStrategy: {type: MostAllocated}}\n",
        )
        .unwrap();
        let [a, b] = &profiles[..] else { panic!() };
        assert_eq!(
            (a.percentage_of_nodes_to_score, b.percentage_of_nodes_to_score),
            (30, 50)
        );
        let names = |profile: &Profile, point| -> Vec<&str> {
            profile
                .at(point)
                .map(|(_, enabled)| enabled.plugin.name())
                .collect()
        };
        assert!(
            !names(a, Points::SCORE).contains(&"ImageLocality")
                && names(b, Points::SCORE).contains(&"ImageLocality")
        );
        assert!(
            !names(a, Points::FILTER).contains(&"NodePorts")
                && names(b, Points::FILTER).contains(&"NodePorts")
        );
        let affinity = a
            .plugins
            .iter()
            .find(|enabled| enabled.plugin.name() == "NodeAffinity");
        assert_eq!(affinity.unwrap().weight, 9);
    }

    #[tokio::test]
    async fn what_is_wrong_is_refused() {
        let check = |rest: &str, expected: &str| {
            let error = parse(rest).err().unwrap_or_default();
            assert!(error.contains(expected), "{rest}\n{error}");
        };
        check("extenders: [{urlPrefix: x}]", "extenders: is not supported");
        check("colour: red", "colour");
        check("percentageOfNodesToScore: 101", "not in valid range [0-100]");
        check("podInitialBackoffSeconds: 0", "must be greater than 0");
        check("podInitialBackoffSeconds: 20", "podMaxBackoffSeconds");
        check(
            "profiles: [{schedulerName: a}, {schedulerName: a}]",
            "Duplicate value",
        );
        check(
            "profiles: [{plugins: {filter: {enabled: [{name: X}]}}}]",
            "no plugin has the name \"X\"",
        );
        check(
            "profiles: [{plugins: {multiPoint: {disabled: [{name: '*'}]}}}]",
            "queue sort plugin required",
        );
        check(
            "profiles: [{plugins: {bind: {disabled: [{name: '*'}]}}}]",
            "at least one bind plugin",
        );
        check(
            "profiles: [{pluginConfig: [{name: NodePorts, args: {a: 1}}]}]",
            "takes no arguments",
        );
        check(
            "profiles: [{pluginConfig: [{name: InterPodAffinity, args: {hardPodAffinityWeight: 101}}]}]",
            "hardPodAffinityWeight",
        );
        check(
            "profiles: [{pluginConfig: [{name: NodeResourcesFit, args: {scoringStrategy: {type: Best}}}]}]",
            "unsupported value \"Best\"",
        );
        assert!(Configuration::parse("kind: Pod").is_err());
        assert!(Configuration::parse("{").is_err());
    }
}
