//! How the values of a node's flags are written.

use k8s_openapi::api::core::v1::Taint;
use std::net::IpAddr;

/// A time as Go writes it.
pub(super) fn go_time(text: &str) -> Result<String, String> {
    skiff_node::parse_go_duration(text).map(|_| text.to_owned())
}

/// One that may be negative.
pub(super) fn signed_time(text: &str) -> Result<String, String> {
    let amount = text.strip_prefix('-').unwrap_or(text);
    skiff_node::parse_go_duration(amount).map(|_| text.to_owned())
}

pub(super) fn amount_of_time(text: &str) -> Result<std::time::Duration, String> {
    skiff_node::parse_go_duration(text).map_err(|why| why.to_string())
}

pub(super) fn option(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write OPTION=VALUE")?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

pub(super) fn duration(text: &str) -> Result<std::time::Duration, String> {
    match skiff_node::parse_go_duration(text).map_err(|why| why.to_string())? {
        zero if zero.is_zero() => Err("must be greater than zero".to_owned()),
        duration => Ok(duration),
    }
}

pub(super) fn reserved_memory(text: &str) -> Result<String, String> {
    let parsed = skiff_node::parse_reserved_memory(text);
    parsed.map(|_| text.to_owned()).map_err(|why| why.to_string())
}

pub(super) fn manifest_url(text: &str) -> Result<String, String> {
    match text.starts_with("http://") || text.starts_with("https://") {
        true => Ok(text.to_owned()),
        false => Err("not a URL of http or https".to_owned()),
    }
}

pub(super) fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("write NAME:VALUE")?;
    let (name, value) = (name.trim().to_owned(), value.trim().to_owned());
    skiff_node::add_manifest_header(&mut Default::default(), &name, &value)?;
    Ok((name, value))
}

pub(super) fn reserved(text: &str) -> Result<(String, String), String> {
    let (resource, amount) = text.split_once('=').ok_or("write RESOURCE=AMOUNT")?;
    let mut none = skiff_node::Reserved::default();
    none.add("it", resource, amount)
        .map_err(|error| error.to_string())?;
    Ok((resource.to_owned(), amount.to_owned()))
}

pub(super) fn size(text: &str) -> Result<u64, String> {
    let parsed = skiff_meta::quantity::Quantity::parse(text)?;
    u64::try_from(parsed.value()).map_err(|_| "must not be negative".to_owned())
}

pub(super) fn node_ip(text: &str) -> Result<IpAddr, String> {
    let address: IpAddr = text.parse().map_err(|_| "not an IP address".to_owned())?;
    // As the kubelet: an address of this machine that others can reach it by.
    let unusable = match address {
        IpAddr::V4(ip) => ip.is_loopback() || ip.is_multicast() || ip.is_link_local() || ip.is_unspecified(),
        IpAddr::V6(ip) => ip.is_loopback() || ip.is_multicast() || ip.is_unspecified(),
    };
    if unusable {
        return Err("others cannot reach a machine by this address".to_owned());
    }
    Ok(address)
}

/// Labels below `kubernetes.io` and `k8s.io` that a node may set on itself.
const OWN_LABELS: [&str; 11] = [
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "beta.kubernetes.io/os",
    "failure-domain.beta.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "kubernetes.io/arch",
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
];
const OWN_NAMESPACES: [&str; 2] = ["kubelet.kubernetes.io", "node.kubernetes.io"];

pub(super) fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').unwrap_or((text, ""));
    if let [why, ..] = skiff_meta::names::qualified_name(key).as_slice() {
        return Err(why.clone());
    }
    if let [why, ..] = skiff_meta::names::label_value(value).as_slice() {
        return Err(why.clone());
    }
    let within = |namespace: &str, domain: &str| {
        namespace == domain
            || namespace
                .strip_suffix(domain)
                .is_some_and(|rest| rest.ends_with('.'))
    };
    let namespace = key.split_once('/').map_or("", |(namespace, _)| namespace);
    let reserved = within(namespace, "kubernetes.io") || within(namespace, "k8s.io");
    let own = OWN_LABELS.contains(&key) || OWN_NAMESPACES.iter().any(|own| within(namespace, own));
    if reserved && !own {
        return Err(format!(
            "a node may not set the label {key} on itself; set it with `kubectl label node`"
        ));
    }
    Ok((key.to_owned(), value.to_owned()))
}

pub(super) fn taint(text: &str) -> Result<Taint, String> {
    let wrong = || "write KEY=VALUE:EFFECT, or KEY:EFFECT".to_owned();
    let (what, effect) = text.rsplit_once(':').ok_or_else(wrong)?;
    if !["NoSchedule", "PreferNoSchedule", "NoExecute"].contains(&effect) {
        return Err(format!(
            "{effect:?} is no effect of a taint: NoSchedule, PreferNoSchedule or NoExecute"
        ));
    }
    let (key, value) = match what.split_once('=') {
        Some((key, value)) => (key, Some(value)),
        None => (what, None),
    };
    let problems = skiff_meta::names::qualified_name(key).into_iter();
    let problems = problems.chain(skiff_meta::names::label_value(value.unwrap_or_default()));
    if let Some(why) = problems.into_iter().next() {
        return Err(why);
    }
    Ok(Taint {
        key: key.to_owned(),
        value: value.filter(|value| !value.is_empty()).map(str::to_owned),
        effect: effect.to_owned(),
        ..Taint::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_a_node_may_set() {
        let check = |text: &str, expected: Option<(&str, &str)>| {
            let parsed = label(text).ok();
            let parsed = parsed.as_ref().map(|(key, value)| (key.as_str(), value.as_str()));
            assert_eq!(parsed, expected, "{text}");
        };
        check("disk=ssd", Some(("disk", "ssd")));
        check("example.com/rack=", Some(("example.com/rack", "")));
        check(
            "topology.kubernetes.io/zone=a",
            Some(("topology.kubernetes.io/zone", "a")),
        );
        check(
            "gpu.node.kubernetes.io/x=1",
            Some(("gpu.node.kubernetes.io/x", "1")),
        );
        check("node-role.kubernetes.io/control-plane=", None);
        check("node-restriction.kubernetes.io/x=1", None);
        check("k8s.io/x=1", None);
        check("a b=c", None);
        check("a=b c", None);
    }

    #[test]
    fn taints_are_written_as_upstream_does() {
        let parsed = taint("dedicated=db:NoSchedule").unwrap();
        assert_eq!(
            (
                parsed.key.as_str(),
                parsed.value.as_deref(),
                parsed.effect.as_str()
            ),
            ("dedicated", Some("db"), "NoSchedule")
        );
        assert_eq!(taint("dedicated:NoExecute").unwrap().value, None);
        for bad in [
            "dedicated",
            "dedicated=db",
            "dedicated:Never",
            ":NoSchedule",
            "a b:NoSchedule",
        ] {
            assert!(taint(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn addresses_that_others_can_reach() {
        assert!(node_ip("192.0.2.7").is_ok() && node_ip("fd00::1").is_ok());
        for bad in [
            "127.0.0.1",
            "0.0.0.0",
            "224.0.0.1",
            "169.254.1.1",
            "::1",
            "example",
        ] {
            assert!(node_ip(bad).is_err(), "{bad}");
        }
    }
}
