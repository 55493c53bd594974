//! A pod's resolver configuration: its DNS policy over the cluster's and the host's settings. Pure, except
//! that the caller reads the host's resolv.conf.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Pod, PodDNSConfig};
use skiff_cri::v1::DnsConfig;

const MAX_NAMESERVERS: usize = 3;
const MAX_SEARCH_PATHS: usize = 32;
const MAX_SEARCH_CHARS: usize = 2048;

/// The cluster's side of it.
#[derive(Clone, Debug, Default)]
pub struct ClusterDns {
    pub servers: Vec<IpAddr>,
    pub domain: String,
}

/// The configuration, and warnings for `DNSConfigForming` events.
pub fn pod_dns(pod: &Pod, cluster: &ClusterDns, host: &DnsConfig) -> (DnsConfig, Vec<String>) {
    let spec = pod.spec.as_ref();
    let host_network = spec.and_then(|s| s.host_network) == Some(true);
    let mut warnings = Vec::new();
    let mut config = match spec.and_then(|s| s.dns_policy.as_deref()) {
        Some("None") => DnsConfig::default(),
        Some("Default") => host.clone(),
        Some("ClusterFirst") | None if host_network => host.clone(),
        _ if cluster.servers.is_empty() => {
            warnings.push("kubelet does not have ClusterDNS IP configured and cannot create Pod using \"ClusterFirst\" policy. Falling back to \"Default\" policy.".to_owned());
            host.clone()
        }
        _ => cluster_first(pod, cluster, host),
    };
    if let Some(own) = spec.and_then(|s| s.dns_config.as_ref()) {
        append(&mut config, own);
    }
    if config.servers.len() > MAX_NAMESERVERS {
        config.servers.truncate(MAX_NAMESERVERS);
        warnings.push(format!(
            "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: {}",
            config.servers.join(" ")
        ));
    }
    let before = config.searches.len();
    config.searches.truncate(MAX_SEARCH_PATHS);
    config.searches.retain(|search| search.len() <= 253);
    while config.searches.join(" ").len() > MAX_SEARCH_CHARS {
        config.searches.pop();
    }
    if config.searches.len() != before {
        warnings.push(format!(
            "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: {}",
            config.searches.join(" ")
        ));
    }
    (config, warnings)
}

fn cluster_first(pod: &Pod, cluster: &ClusterDns, host: &DnsConfig) -> DnsConfig {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let mut searches = Vec::new();
    if !cluster.domain.is_empty() {
        searches.push(format!("{namespace}.svc.{}", cluster.domain));
        searches.push(format!("svc.{}", cluster.domain));
        searches.push(cluster.domain.clone());
    }
    for search in &host.searches {
        if !searches.contains(search) {
            searches.push(search.clone());
        }
    }
    DnsConfig {
        servers: cluster.servers.iter().map(IpAddr::to_string).collect(),
        searches,
        options: vec!["ndots:5".to_owned()],
    }
}

fn append(config: &mut DnsConfig, own: &PodDNSConfig) {
    for server in own.nameservers.iter().flatten() {
        if !config.servers.contains(server) {
            config.servers.push(server.clone());
        }
    }
    for search in own.searches.iter().flatten() {
        if !config.searches.contains(search) {
            config.searches.push(search.clone());
        }
    }
    for option in own.options.iter().flatten() {
        let name = option.name.clone().unwrap_or_default();
        let written = match option.value.as_deref().filter(|v| !v.is_empty()) {
            Some(value) => format!("{name}:{value}"),
            None => name.clone(),
        };
        match config
            .options
            .iter_mut()
            .find(|o| o.split(':').next() == Some(name.as_str()))
        {
            Some(existing) => *existing = written,
            None => config.options.push(written),
        }
    }
}

/// Reads a resolv.conf. A later `search` replaces an earlier one, as the resolver does it.
pub fn parse_resolv_conf(text: &str) -> DnsConfig {
    let mut config = DnsConfig::default();
    for line in text.lines().map(str::trim).filter(|l| !l.starts_with(['#', ';'])) {
        let mut fields = line.split_whitespace();
        match fields.next() {
            Some("nameserver") => config.servers.extend(fields.next().map(str::to_owned)),
            Some("search") => {
                config.searches = fields
                    .filter(|s| *s != ".")
                    .map(|s| s.trim_end_matches('.').to_owned())
                    .collect();
            }
            Some("options") => {
                for option in fields {
                    let name = option.split(':').next();
                    config.options.retain(|o| o.split(':').next() != name);
                    config.options.push(option.to_owned());
                }
            }
            _ => {}
        }
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(spec: serde_json::Value, expected: (&[&str], &[&str], &[&str])) {
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {"namespace": "ns"}, "spec": spec})).unwrap();
        let cluster = ClusterDns {
            servers: vec!["10.96.0.10".parse().unwrap()],
            domain: "cluster.local".into(),
        };
        let host = parse_resolv_conf(
            "# c\nnameserver 1.1.1.1\nsearch a. corp.example\noptions timeout:1 timeout:2\n",
        );
        let (config, warnings) = pod_dns(&pod, &cluster, &host);
        let owned = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
        assert_eq!(
            (config.servers, config.searches, config.options),
            (owned(expected.0), owned(expected.1), owned(expected.2))
        );
        assert!(warnings.is_empty(), "{warnings:?}");
    }

    #[test]
    fn policies() {
        let cluster_searches = &[
            "ns.svc.cluster.local",
            "svc.cluster.local",
            "cluster.local",
            "a",
            "corp.example",
        ][..];
        check(
            json!({"containers": [], "dnsPolicy": "ClusterFirst"}),
            (&["10.96.0.10"], cluster_searches, &["ndots:5"]),
        );
        check(
            json!({"containers": [], "dnsPolicy": "Default"}),
            (&["1.1.1.1"], &["a", "corp.example"], &["timeout:2"]),
        );
        check(
            json!({"containers": [], "dnsPolicy": "ClusterFirst", "hostNetwork": true}),
            (&["1.1.1.1"], &["a", "corp.example"], &["timeout:2"]),
        );
        check(
            json!({"containers": [], "dnsPolicy": "ClusterFirstWithHostNet", "hostNetwork": true}),
            (&["10.96.0.10"], cluster_searches, &["ndots:5"]),
        );
        check(
            json!({"containers": [], "dnsPolicy": "None", "dnsConfig": {"nameservers": ["9.9.9.9"], "searches": ["x"], "options": [{"name": "ndots", "value": "2"}, {"name": "edns0"}]}}),
            (&["9.9.9.9"], &["x"], &["ndots:2", "edns0"]),
        );
    }

    #[test]
    fn limits_warn() {
        let pod: Pod = serde_json::from_value(json!({"spec": {"containers": [], "dnsPolicy": "None",
            "dnsConfig": {"nameservers": ["1.1.1.1", "1.1.1.2", "1.1.1.3", "1.1.1.4"]}}}))
        .unwrap();
        let (config, warnings) = pod_dns(&pod, &ClusterDns::default(), &DnsConfig::default());
        assert_eq!(config.servers.len(), 3);
        assert!(warnings[0].starts_with("Nameserver limits were exceeded"));
    }
}
