//! The resources that a pod's status shows: those in effect. Pure.

use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use skiff_meta::quantity::Quantity as Amount;
use skiff_pods::requests::{Resources, spec_limits, spec_requests};

use super::record::Amounts;
use crate::cgroups::PodConfig;
use crate::observed::{ContainerState, ObservedContainer};
use crate::resources::{
    MIN_SHARES, ResourceList, milli_value, quota_to_milli_cpu, shares_to_milli_cpu, value,
};

/// A quota is at least this much, so that smaller limits are all alike.
const MIN_MILLI_LIMIT: i64 = 10;

fn cpu(milli: i64) -> Quantity {
    Quantity(Amount::from_millis(milli).to_string())
}

fn memory(bytes: i64) -> Quantity {
    Quantity(Amount::from_bytes(bytes).to_string())
}

/// Puts what is in effect into the list, unless the list says the same already. What the kernel rounds up to its
/// smallest value is no difference.
fn show_cpu(list: &mut Option<ResourceList>, milli: Option<i64>, smallest: i64) {
    let (Some(list), Some(milli)) = (list, milli) else {
        return;
    };
    let allocated = list.get("cpu").map_or(0, milli_value);
    if milli != allocated && (milli > smallest || allocated > smallest) {
        list.insert("cpu".to_owned(), cpu(milli));
    }
}

fn show_memory(list: &mut Option<ResourceList>, bytes: Option<i64>) {
    let (Some(list), Some(bytes)) = (list, bytes) else {
        return;
    };
    if list.get("memory").map_or(0, value) != bytes {
        list.insert("memory".to_owned(), memory(bytes));
    }
}

/// Of a container: what was allocated, and what of it is in effect. `actuated` fills in for a runtime that does not tell.
pub fn container_resources(
    container: &Container,
    observed: &ObservedContainer,
    actuated: Option<Amounts>,
) -> ResourceRequirements {
    let mut shown = container.resources.clone().unwrap_or_default();
    if observed.state != ContainerState::Running {
        return shown;
    }
    let set = |amount: i64| (amount > 0).then_some(amount);
    let known = |pick: fn(Amounts) -> i64| actuated.and_then(|amounts| set(pick(amounts)));
    let (cpu_limit, cpu_request, memory_limit) = match &observed.resources {
        Some(told) => (
            set(told.cpu_quota)
                .zip(set(told.cpu_period))
                .map(|(quota, period)| quota_to_milli_cpu(quota, period)),
            set(told.cpu_shares).map(shares_to_milli_cpu),
            set(told.memory_limit_in_bytes),
        ),
        None => (
            known(|a| a.cpu_limit),
            known(|a| a.cpu_request),
            known(|a| a.memory_limit),
        ),
    };
    show_cpu(&mut shown.limits, cpu_limit, MIN_MILLI_LIMIT);
    show_memory(&mut shown.limits, memory_limit);
    show_cpu(&mut shown.requests, cpu_request, MIN_SHARES);
    show_memory(&mut shown.requests, known(|a| a.memory_request));
    shown
}

fn as_list(resources: &Resources) -> ResourceList {
    let mut list = ResourceList::new();
    let mut put = |name: &str, amount: i64, text: Quantity| {
        if amount != 0 {
            list.insert(name.to_owned(), text);
        }
    };
    put("cpu", resources.milli_cpu, cpu(resources.milli_cpu));
    put("memory", resources.memory, memory(resources.memory));
    let storage = resources.ephemeral_storage;
    put("ephemeral-storage", storage, memory(storage));
    for (name, amount) in &resources.others {
        let text = match name.strip_prefix("hugepages-") {
            Some(_) => memory(*amount),
            None => Quantity(Amount::from_units(*amount).to_string()),
        };
        put(name, *amount, text);
    }
    list
}

/// Of the pod as a whole: what was allocated to it, and the resources in effect.
pub fn pod_resources(pod: &Pod, config: Option<&PodConfig>) -> (ResourceList, ResourceRequirements) {
    let Some(spec) = &pod.spec else {
        return Default::default();
    };
    let allocated = as_list(&spec_requests(spec));
    let limits = as_list(&spec_limits(spec));
    let running = pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running");
    let Some(config) = config.filter(|_| running) else {
        let effective = ResourceRequirements {
            claims: spec.resources.as_ref().and_then(|r| r.claims.clone()),
            requests: Some(allocated.clone()),
            limits: Some(limits),
        };
        return (allocated, effective);
    };
    let mut shown = spec.resources.clone().unwrap_or_default();
    let (current, wanted) = (&config.current, &config.wanted);
    let requests = shown.requests.get_or_insert_default();
    // By the kernel's own count: a weight says less than the request it was made of.
    let milli = if current.cpu_shares == wanted.cpu_shares {
        allocated.get("cpu").map_or(0, milli_value)
    } else {
        shares_to_milli_cpu(current.cpu_shares)
    };
    if milli > MIN_SHARES {
        requests.insert("cpu".to_owned(), cpu(milli));
    }
    if let Some(amount) = allocated.get("memory") {
        requests
            .entry("memory".to_owned())
            .or_insert_with(|| amount.clone());
    }
    let list = shown.limits.get_or_insert_default();
    if let Some(quota) = current.cpu_quota {
        let milli = quota_to_milli_cpu(quota, crate::resources::QUOTA_PERIOD);
        if milli > MIN_MILLI_LIMIT {
            list.insert("cpu".to_owned(), cpu(milli));
        }
    }
    if let Some(bytes) = current.memory_limit {
        // Rounded to pages by the kernel.
        let said = if config.wanted.memory_limit == Some(bytes) {
            limits.get("memory").map_or(bytes, value)
        } else {
            bytes
        };
        list.insert("memory".to_owned(), memory(said));
    }
    (allocated, shown)
}
