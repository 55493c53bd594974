//! `KubeSchedulerConfiguration` of `kubescheduler.config.k8s.io/v1`: read, checked, and made into profiles.
//!
//! What is not supported is refused, not ignored; what makes no difference here is named in a warning (`unused.rs`).

mod args;
mod election;
mod extender;
#[cfg(test)]
mod tests;
mod unused;

#[cfg(test)]
pub(crate) use self::args::BINDING_TIMEOUT;
pub(crate) use self::args::{
    BalancedAllocationArgs, DefaultPreemptionArgs, DynamicResourcesArgs, FitArgs, InterPodAffinityArgs,
    NodeAffinityArgs, PodTopologySpreadArgs, VolumeBindingArgs, parse_args,
};
pub(crate) use self::election::Election;
pub(crate) use self::extender::ExtenderFile;

use crate::extender::Extender;
use crate::framework::{Enabled, Points, Profile};
use crate::plugins::{Handle, PLUGINS};
use crate::queue::Backoff;
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;
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
    #[serde(deserialize_with = "or_default")]
    profiles: Vec<ProfileFile>,
    #[serde(deserialize_with = "or_default")]
    extenders: Vec<ExtenderFile>,
    #[serde(deserialize_with = "or_default")]
    leader_election: election::ElectionFile,
    client_connection: Option<unused::ClientConnectionFile>,
    enable_profiling: Option<bool>,
    enable_contention_profiling: Option<bool>,
    delay_cache_until_active: Option<bool>,
    /// COMPAT: of versions before v1, and left in many files.
    healthz_bind_address: Option<String>,
    metrics_bind_address: Option<String>,
}

/// A key without a value is not set.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
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
    pub(crate) election: Election,
    extenders: Vec<ExtenderFile>,
    without_effect: Vec<String>,
}

impl Default for Configuration {
    fn default() -> Self {
        Self {
            profiles: vec![ProfileFile::default()],
            percentage_of_nodes_to_score: 0,
            backoff: Backoff::default(),
            election: Election::default(),
            extenders: Vec::new(),
            without_effect: Vec::new(),
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
        let without_effect = unused::check(&file)?;
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
            election: file.leader_election.check()?,
            extenders: file.extenders,
            without_effect,
        };
        configuration.check()?;
        // What is wrong with an address or a certificate is told now, not with the first pod.
        configuration.extenders()?;
        Ok(configuration)
    }

    /// Fields of the file that make no difference here, for a warning.
    pub fn without_effect(&self) -> &[String] {
        &self.without_effect
    }

    fn check(&self) -> Result<(), ConfigError> {
        extender::check(&self.extenders)?;
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

    /// Clients of the extenders, in the order of the file.
    pub(crate) fn extenders(&self) -> Result<Vec<Arc<Extender>>, ConfigError> {
        let made = self.extenders.iter().enumerate().map(|(index, file)| {
            let extender = Extender::new(file).map_err(|message| ConfigError::Invalid {
                field: format!("extenders[{index}]"),
                message,
            });
            extender.map(Arc::new)
        });
        made.collect()
    }

    /// Resources that an extender looks after, and nobody else.
    fn ignored_resources(&self) -> impl Iterator<Item = &str> {
        let managed = self.extenders.iter().flat_map(|one| &one.managed_resources);
        managed
            .filter(|one| one.ignored_by_scheduler)
            .map(|one| one.name.as_str())
    }

    /// The profiles with their plugins made.
    pub(crate) fn profiles(&self, handle: &Handle) -> Result<Vec<Profile>, ConfigError> {
        let mut profiles = Vec::new();
        for (index, file) in self.profiles.iter().enumerate() {
            let mut plugins = Vec::new();
            for (name, weight, points) in file.enabled(index)? {
                if name == crate::plugins::gang_scheduling::NAME && !handle.pod_groups {
                    continue;
                }
                let Some(known) = PLUGINS.iter().find(|known| known.name == name) else {
                    continue;
                };
                let config = file.plugin_config.iter().find(|config| config.name == name);
                let mut args = config.map(|config| args_of(&config.args)).unwrap_or_default();
                if name == "NodeResourcesFit" {
                    ignore(&mut args, self.ignored_resources());
                }
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

/// Adds resources to those that NodeResourcesFit ignores.
fn ignore<'a>(args: &mut Value, resources: impl Iterator<Item = &'a str>) {
    for name in resources {
        let list = &mut args["ignoredResources"];
        match list.as_array_mut() {
            Some(list) => list.push(name.into()),
            None => *list = vec![name].into(),
        }
    }
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
