//! Fields of real configurations that set up what this scheduler does not have: a connection of its own, listeners, profiles
//! of the process, threads of a cycle. They are checked as upstream checks them, and named in one warning.

use super::args::DynamicResourcesArgs;
use super::{ConfigError, File, invalid};
use serde::Deserialize;

/// The scheduler's client is made by the wiring, in the process of an API server.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct ClientConnectionFile {
    kubeconfig: String,
    accept_content_types: String,
    content_type: String,
    qps: f64,
    burst: i64,
}

/// The paths of the fields that are set and have no effect.
pub(super) fn check(file: &File) -> Result<Vec<String>, ConfigError> {
    let connection = file.client_connection.clone().unwrap_or_default();
    if connection.burst < 0 {
        return invalid("clientConnection.burst", "must be non-negative");
    }
    if file.parallelism.is_some_and(|number| number <= 0) {
        return invalid("parallelism", "should be an integer value greater than zero");
    }
    let set = [
        ("clientConnection.kubeconfig", !connection.kubeconfig.is_empty()),
        (
            "clientConnection.acceptContentTypes",
            !connection.accept_content_types.is_empty(),
        ),
        (
            "clientConnection.contentType",
            !connection.content_type.is_empty(),
        ),
        ("clientConnection.qps", connection.qps != 0.0),
        ("clientConnection.burst", connection.burst != 0),
        ("enableProfiling", file.enable_profiling == Some(true)),
        (
            "enableContentionProfiling",
            file.enable_contention_profiling == Some(true),
        ),
        // The caches are filled by the leader only, whatever is asked for.
        (
            "delayCacheUntilActive",
            file.delay_cache_until_active == Some(false),
        ),
        ("healthzBindAddress", file.healthz_bind_address.is_some()),
        ("metricsBindAddress", file.metrics_bind_address.is_some()),
        // Cycles are not split over threads, so any number is as good as another.
        ("parallelism", file.parallelism.is_some()),
    ];
    let set = set.into_iter().filter(|(_, set)| *set);
    let mut fields: Vec<String> = set.map(|(field, _)| field.to_owned()).collect();
    for (index, profile) in file.profiles.iter().enumerate() {
        let limited = profile.plugin_config.iter().any(|config| {
            config.name == "DynamicResources" && DynamicResourcesArgs::limits_filter(&config.args)
        });
        if limited {
            fields.push(format!(
                "profiles[{index}].pluginConfig[DynamicResources].args.filterTimeout"
            ));
        }
    }
    Ok(fields)
}
