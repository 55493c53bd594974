//! How much of a device's capacity a request takes. A device that allows several allocations is shared until its capacity
//! is used up; of any other, a request may say how much it must have.

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, Device, DeviceCapacity, DeviceRequestAllocationResult,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Written;
use skiff_meta::quantity::Quantity;
use std::collections::BTreeMap;

/// Amounts by the name of the capacity.
pub(crate) type Amounts = BTreeMap<String, Quantity>;

/// The capacity that a request asks for.
pub(crate) type Asked<'a> = Option<&'a BTreeMap<String, Written>>;

pub(crate) fn is_shared(device: &Device) -> bool {
    device.allow_multiple_allocations == Some(true)
}

fn parse(written: &Written) -> Option<Quantity> {
    Quantity::parse(&written.0).ok()
}

/// What a request takes of each capacity of the device; `None` if the device does not have it or does not give such an
/// amount.
pub(crate) fn taken_by(asked: Asked<'_>, device: &Device) -> Option<Amounts> {
    let none = BTreeMap::new();
    let capacities = device.capacity.as_ref().unwrap_or(&none);
    let mut names = asked.into_iter().flat_map(BTreeMap::keys);
    if names.any(|name| !capacities.contains_key(name)) {
        return None;
    }
    capacities
        .iter()
        .map(|(name, capacity)| {
            let asked = match asked.and_then(|asked| asked.get(name)) {
                Some(written) => Some(parse(written)?),
                None => None,
            };
            Some((name.clone(), amount(asked, capacity)?))
        })
        .collect()
}

/// The amount that is given for what is asked: the next larger one that the policy allows.
fn amount(asked: Option<Quantity>, capacity: &DeviceCapacity) -> Option<Quantity> {
    let Some(policy) = &capacity.request_policy else {
        return asked.or_else(|| parse(&capacity.value));
    };
    match asked {
        Some(asked) => rounded(asked, policy),
        // The default is always one that the policy allows.
        None => parse(policy.default.as_ref().unwrap_or(&capacity.value)),
    }
}

fn rounded(asked: Quantity, policy: &CapacityRequestPolicy) -> Option<Quantity> {
    if let Some(range) = &policy.valid_range {
        let least = parse(&range.min)?;
        let given = match range.step.as_ref().and_then(parse) {
            _ if asked < least => least,
            Some(step) if step.value() > 0 => {
                let beyond = asked.value().checked_sub(least.value())?;
                let steps = beyond / step.value() + i64::from(beyond % step.value() != 0);
                Quantity::from_bytes(least.value().checked_add(steps.checked_mul(step.value())?)?)
            }
            _ => asked,
        };
        let most = range.max.as_ref().and_then(parse);
        return most.is_none_or(|most| given <= most).then_some(given);
    }
    let Some(values) = policy.valid_values.as_ref().filter(|values| !values.is_empty()) else {
        return Some(asked);
    };
    // In ascending order, as validation wants them.
    values.iter().filter_map(parse).find(|value| *value >= asked)
}

pub(crate) fn add(total: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        let sum = total.get(name).map_or(*amount, |old| old.plus(amount));
        total.insert(name.clone(), sum);
    }
}

/// Whether `more` fits into the device beside what is used already.
pub(crate) fn fits(device: &Device, used: &[&Amounts], more: &Amounts) -> bool {
    device.capacity.iter().flatten().all(|(name, capacity)| {
        let Some(has) = parse(&capacity.value) else {
            return false;
        };
        let used = used.iter().filter_map(|amounts| amounts.get(name));
        let sum = used
            .chain(more.get(name))
            .fold(Quantity::from_units(0), |sum, one| sum.plus(one));
        sum <= has
    })
}

/// What an allocation takes of a device that it shares.
pub(crate) fn of_result(result: &DeviceRequestAllocationResult) -> Amounts {
    let consumed = result.consumed_capacity.iter().flatten();
    consumed
        .filter_map(|(name, amount)| Some((name.clone(), parse(amount)?)))
        .collect()
}

pub(crate) fn written(amounts: &Amounts) -> BTreeMap<String, Written> {
    amounts
        .iter()
        .map(|(name, amount)| (name.clone(), Written(amount.to_string())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn device(capacity: Value) -> Device {
        serde_json::from_value(json!({"name": "d", "capacity": capacity})).unwrap()
    }

    fn taken(asked: Value, capacity: Value) -> Option<Value> {
        let asked: BTreeMap<String, Written> = serde_json::from_value(asked).unwrap();
        let taken = taken_by(Some(&asked).filter(|asked| !asked.is_empty()), &device(capacity))?;
        Some(serde_json::to_value(written(&taken)).unwrap())
    }

    #[test]
    fn amounts_follow_the_policy_of_the_device() {
        let plain = json!({"memory": {"value": "40Gi"}});
        assert_eq!(
            taken(json!({}), plain.clone()),
            Some(json!({"memory": "40Gi"})),
            "all of it"
        );
        assert_eq!(
            taken(json!({"memory": "1Gi"}), plain.clone()),
            Some(json!({"memory": "1Gi"}))
        );
        assert_eq!(taken(json!({"cores": "1"}), plain), None, "it has none");

        let values = json!({"memory": {"value": "40Gi", "requestPolicy": {"default": "5Gi", "validValues": ["5Gi", "10Gi", "20Gi"]}}});
        let check = |asked: &str, expected: Option<&str>| {
            let expected = expected.map(|amount| json!({"memory": amount}));
            assert_eq!(
                taken(json!({"memory": asked}), values.clone()),
                expected,
                "{asked}"
            );
        };
        check("1Gi", Some("5Gi"));
        check("10Gi", Some("10Gi"));
        check("11Gi", Some("20Gi"));
        check("21Gi", None);
        assert_eq!(
            taken(json!({}), values),
            Some(json!({"memory": "5Gi"})),
            "the default"
        );

        let range = json!({"memory": {"value": "40Gi", "requestPolicy": {"default": "2Gi",
            "validRange": {"min": "2Gi", "max": "9Gi", "step": "2Gi"}}}});
        let check = |asked: &str, expected: Option<&str>| {
            let expected = expected.map(|amount| json!({"memory": amount}));
            assert_eq!(
                taken(json!({"memory": asked}), range.clone()),
                expected,
                "{asked}"
            );
        };
        check("1Gi", Some("2Gi"));
        check("3Gi", Some("4Gi"));
        check("8Gi", Some("8Gi"));
        check("9Gi", None);
    }

    #[test]
    fn no_more_is_given_than_there_is() {
        let device = device(json!({"memory": {"value": "10Gi"}, "cores": {"value": "4"}}));
        let amounts = |memory: &str, cores: &str| {
            Amounts::from([
                ("memory".to_owned(), Quantity::parse(memory).unwrap()),
                ("cores".to_owned(), Quantity::parse(cores).unwrap()),
            ])
        };
        let (used, searched) = (amounts("4Gi", "1"), amounts("3Gi", "1"));
        assert!(fits(&device, &[], &amounts("10Gi", "4")));
        assert!(fits(&device, &[&used, &searched], &amounts("3Gi", "2")));
        assert!(!fits(&device, &[&used, &searched], &amounts("4Gi", "2")));
        assert!(!fits(&device, &[&used, &searched], &amounts("3Gi", "3")));
        let mut sum = used;
        add(&mut sum, &searched);
        assert_eq!(sum, amounts("7Gi", "2"));
    }
}
