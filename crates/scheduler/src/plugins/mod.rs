//! The plugins, one file each. Their order here is the order in which they run.

mod claim_writer;
mod default_binder;
pub(crate) mod default_preemption;
mod device_capacity;
mod device_conditions;
mod devices;
mod domains;
mod dynamic_resources;
pub(crate) mod extended_resources;
pub(crate) mod gang_scheduling;
mod image_locality;
mod inter_pod_affinity;
pub(crate) mod node_affinity;
pub(crate) mod node_declared_features;
mod node_name;
mod node_ports;
mod node_resources;
mod node_unschedulable;
mod node_volume_limits;
mod pod_topology_spread;
mod priority_sort;
mod scheduling_gates;
mod spread;
mod taint_toleration;
mod volume_binding;
mod volume_restrictions;
mod volume_zone;

#[cfg(test)]
mod topology_tests;

use crate::config::{
    BalancedAllocationArgs, DefaultPreemptionArgs, DynamicResourcesArgs, FitArgs, InterPodAffinityArgs,
    NodeAffinityArgs, PodTopologySpreadArgs, VolumeBindingArgs, parse_args,
};
use crate::framework::Plugin;
use crate::listers::Listers;
use crate::metrics::VolumeMetrics;
use crate::preempt::Preempting;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// What plugins are made from.
#[derive(Clone)]
pub(crate) struct Handle {
    pub(crate) client: kube::Client,
    pub(crate) listers: Arc<Listers>,
    pub(crate) preempting: Arc<Preempting>,
    pub(crate) volume_metrics: VolumeMetrics,
    /// PodGroups are served.
    pub(crate) pod_groups: bool,
}

type Made = Result<Arc<dyn Plugin>, String>;

pub(crate) struct Known {
    pub(crate) name: &'static str,
    /// Of its score, where the profile does not say.
    pub(crate) weight: i64,
    pub(crate) make: fn(&Handle, &Value) -> Made,
}

const fn known(name: &'static str, weight: i64, make: fn(&Handle, &Value) -> Made) -> Known {
    Known { name, weight, make }
}

/// All plugins, in the order of the default profile. Adding one is its file and one line here.
pub(crate) const PLUGINS: &[Known] = &[
    known("SchedulingGates", 0, |_, args| {
        no_args(args, scheduling_gates::SchedulingGates)
    }),
    known("PrioritySort", 0, |_, args| {
        no_args(args, priority_sort::PrioritySort)
    }),
    known("NodeUnschedulable", 0, |_, args| {
        no_args(args, node_unschedulable::NodeUnschedulable)
    }),
    known("NodeName", 0, |_, args| no_args(args, node_name::NodeName)),
    known("TaintToleration", 3, |_, args| {
        no_args(args, taint_toleration::TaintToleration)
    }),
    known("NodeAffinity", 2, |_, args| node_affinity(args)),
    known("NodePorts", 0, |_, args| no_args(args, node_ports::NodePorts)),
    known("NodeResourcesFit", 1, fit),
    known("VolumeRestrictions", 0, |handle, args| {
        let listers = Arc::clone(&handle.listers);
        no_args(args, volume_restrictions::VolumeRestrictions { listers })
    }),
    known("NodeVolumeLimits", 0, |handle, args| {
        let listers = Arc::clone(&handle.listers);
        no_args(args, node_volume_limits::NodeVolumeLimits { listers })
    }),
    known("VolumeBinding", 0, volume_binding),
    known("VolumeZone", 0, |handle, args| {
        let listers = Arc::clone(&handle.listers);
        no_args(args, volume_zone::VolumeZone { listers })
    }),
    known("PodTopologySpread", 2, spread),
    known("InterPodAffinity", 2, inter_pod_affinity),
    known("DynamicResources", 2, dynamic_resources),
    known("DefaultPreemption", 0, preemption),
    known("NodeResourcesBalancedAllocation", 1, |_, args| balanced(args)),
    known("ImageLocality", 1, |_, args| {
        no_args(args, image_locality::ImageLocality)
    }),
    known("DefaultBinder", 0, |handle, args| {
        let client = handle.client.clone();
        no_args(args, default_binder::DefaultBinder { client })
    }),
    known("NodeDeclaredFeatures", 0, |_, args| {
        no_args(args, node_declared_features::NodeDeclaredFeatures)
    }),
    known(gang_scheduling::NAME, 0, |handle, args| {
        let listers = Arc::clone(&handle.listers);
        no_args(args, gang_scheduling::GangScheduling { listers })
    }),
];

fn no_args(args: &Value, plugin: impl Plugin + 'static) -> Made {
    if args.is_null() {
        Ok(Arc::new(plugin))
    } else {
        Err("takes no arguments".to_owned())
    }
}

fn node_affinity(args: &Value) -> Made {
    let added = parse_args::<NodeAffinityArgs>(args)?
        .added_affinity
        .unwrap_or_default();
    Ok(Arc::new(node_affinity::NodeAffinity {
        added_required: added.required_during_scheduling_ignored_during_execution,
        added_preferred: added
            .preferred_during_scheduling_ignored_during_execution
            .unwrap_or_default(),
    }))
}

fn fit(handle: &Handle, args: &Value) -> Made {
    let args = parse_args::<FitArgs>(args)?;
    let (strategy, resources) = args.strategy()?;
    Ok(Arc::new(node_resources::Fit {
        strategy,
        resources,
        ignored_resources: args.ignored_resources,
        ignored_groups: args.ignored_resource_groups,
        listers: Arc::clone(&handle.listers),
    }))
}

fn balanced(args: &Value) -> Made {
    let args = parse_args::<BalancedAllocationArgs>(args)?;
    let plugin = match args.names()? {
        Some(resources) => node_resources::BalancedAllocation { resources },
        None => node_resources::BalancedAllocation::default(),
    };
    Ok(Arc::new(plugin))
}

fn volume_binding(handle: &Handle, args: &Value) -> Made {
    let seconds = parse_args::<VolumeBindingArgs>(args)?.seconds()?;
    Ok(Arc::new(volume_binding::VolumeBinding::new(
        handle.client.clone(),
        Arc::clone(&handle.listers),
        Duration::from_secs(seconds),
        handle.volume_metrics.clone(),
    )))
}

fn dynamic_resources(handle: &Handle, args: &Value) -> Made {
    let timeout = parse_args::<DynamicResourcesArgs>(args)?.binding_timeout()?;
    Ok(Arc::new(dynamic_resources::DynamicResources::new(
        handle.client.clone(),
        Arc::clone(&handle.listers),
        timeout,
    )))
}

fn spread(handle: &Handle, args: &Value) -> Made {
    let listers = Arc::clone(&handle.listers);
    let defaults = parse_args::<PodTopologySpreadArgs>(args)?.constraints()?;
    Ok(Arc::new(pod_topology_spread::PodTopologySpread {
        listers,
        system_defaulted: defaults.is_none(),
        defaults: defaults.unwrap_or_else(pod_topology_spread::system_defaults),
    }))
}

fn inter_pod_affinity(handle: &Handle, args: &Value) -> Made {
    let args = parse_args::<InterPodAffinityArgs>(args)?;
    Ok(Arc::new(inter_pod_affinity::InterPodAffinity {
        listers: Arc::clone(&handle.listers),
        hard_weight: args.weight()?,
        ignores_existing_preferred: args.ignore_preferred_terms_of_existing_pods,
    }))
}

fn preemption(handle: &Handle, args: &Value) -> Made {
    let args = parse_args::<DefaultPreemptionArgs>(args)?;
    let (min_candidate_percentage, min_candidates) = args.candidates()?;
    Ok(Arc::new(default_preemption::DefaultPreemption {
        listers: Arc::clone(&handle.listers),
        preempting: Arc::clone(&handle.preempting),
        min_candidate_percentage,
        min_candidates,
    }))
}

/// For the configuration.
pub(crate) use node_resources::{Strategy, is_extended};

/// For the listers.
pub(crate) use extended_resources::IMPLICIT_PREFIX;

#[cfg(any(test, feature = "bench"))]
pub(crate) mod testing {
    use super::*;
    #[cfg(test)]
    use crate::config::Configuration;
    #[cfg(test)]
    use crate::framework::Profile;

    /// A client of a server that nobody can reach.
    pub(crate) fn unreachable_client() -> kube::Client {
        let uri: http::Uri = http::Uri::from_static("http://127.0.0.1:1");
        let config = kube::Config::new(uri);
        #[allow(clippy::unwrap_used, reason = "for tests")]
        kube::Client::try_from(config).unwrap()
    }

    pub(crate) fn handle(listers: Arc<Listers>) -> Handle {
        Handle {
            client: unreachable_client(),
            listers,
            preempting: Arc::default(),
            volume_metrics: VolumeMetrics::new(&skiff_prometheus::Registry::default()),
            pod_groups: true,
        }
    }

    /// The default profile.
    #[cfg(test)]
    pub(crate) fn profile() -> Profile {
        profile_with(Arc::default())
    }

    #[cfg(test)]
    pub(crate) fn profile_with(listers: Arc<Listers>) -> Profile {
        #[allow(clippy::unwrap_used, reason = "for tests")]
        let mut profiles = Configuration::default().profiles(&handle(listers)).unwrap();
        profiles.remove(0)
    }
}
