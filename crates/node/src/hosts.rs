//! A pod's host name and its /etc/hosts, written as upstream writes them. Pure.

use k8s_openapi::api::core::v1::{HostAlias, Pod};

const HEADER: &str = "# Kubernetes-managed hosts file.\n";
const HOST_NETWORK_HEADER: &str = "# Kubernetes-managed hosts file (host network).\n";
const MAX_HOSTNAME: usize = 63;

/// The host name of the pod and the domain it lives in (empty without a subdomain).
pub fn hostname_and_domain(pod: &Pod, cluster_domain: &str) -> (String, String) {
    let spec = pod.spec.as_ref();
    if let Some(name) = spec
        .and_then(|s| s.hostname_override.as_deref())
        .filter(|n| !n.is_empty())
    {
        return (name.to_owned(), String::new());
    }
    let hostname = spec
        .and_then(|s| s.hostname.as_deref())
        .filter(|h| !h.is_empty())
        .or(pod.metadata.name.as_deref())
        .unwrap_or_default();
    // A pod name may be longer than a host name; what is cut must not end in a separator.
    let hostname = match hostname.get(..MAX_HOSTNAME) {
        Some(cut) if hostname.len() > MAX_HOSTNAME => cut.trim_end_matches(['-', '.']),
        _ => hostname,
    };
    let domain = match spec
        .and_then(|s| s.subdomain.as_deref())
        .filter(|s| !s.is_empty())
    {
        Some(subdomain) => {
            format!(
                "{subdomain}.{}.svc.{cluster_domain}",
                pod.metadata.namespace.as_deref().unwrap_or("default")
            )
        }
        None => String::new(),
    };
    (hostname.to_owned(), domain)
}

/// What the kernel is told: the short name, or the whole one if the pod asks for it.
pub fn kernel_hostname(pod: &Pod, cluster_domain: &str) -> Result<String, String> {
    let (hostname, domain) = hostname_and_domain(pod, cluster_domain);
    let whole = pod.spec.as_ref().and_then(|s| s.set_hostname_as_fqdn) == Some(true);
    if !whole || domain.is_empty() {
        return Ok(hostname);
    }
    let name = format!("{hostname}.{domain}");
    if name.len() > 64 {
        return Err(format!(
            "Failed to construct FQDN from pod hostname and cluster domain, FQDN {name} is too long (64 characters is the max, {} characters requested)",
            name.len()
        ));
    }
    Ok(name)
}

/// The file of a pod with its own network.
pub fn managed(pod_ips: &[String], hostname: &str, domain: &str, aliases: &[HostAlias]) -> String {
    let mut file = String::from(HEADER);
    file.push_str("127.0.0.1\tlocalhost\n");
    file.push_str("::1\tlocalhost ip6-localhost ip6-loopback\n");
    file.push_str("fe00::0\tip6-localnet\n");
    file.push_str("fe00::0\tip6-mcastprefix\n");
    file.push_str("fe00::1\tip6-allnodes\n");
    file.push_str("fe00::2\tip6-allrouters\n");
    for ip in pod_ips {
        if domain.is_empty() {
            file.push_str(&format!("{ip}\t{hostname}\n"));
        } else {
            file.push_str(&format!("{ip}\t{hostname}.{domain}\t{hostname}\n"));
        }
    }
    push_aliases(&mut file, aliases);
    file
}

/// The file of a pod on the host's network: the host's own, with the aliases.
pub fn host_network(node_file: &str, aliases: &[HostAlias]) -> String {
    let mut file = String::from(HOST_NETWORK_HEADER);
    file.push_str(node_file);
    push_aliases(&mut file, aliases);
    file
}

fn push_aliases(file: &mut String, aliases: &[HostAlias]) {
    if aliases.is_empty() {
        return;
    }
    file.push_str("\n# Entries added by HostAliases.\n");
    for alias in aliases {
        file.push_str(&format!(
            "{}\t{}\n",
            alias.ip,
            alias.hostnames.as_deref().unwrap_or_default().join("\t")
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn names() {
        let check = |spec: serde_json::Value, expected: (&str, &str)| {
            let pod: Pod = serde_json::from_value(
                json!({"metadata": {"name": "web-0", "namespace": "ns"}, "spec": spec}),
            )
            .unwrap();
            let (hostname, domain) = hostname_and_domain(&pod, "cluster.local");
            assert_eq!((hostname.as_str(), domain.as_str()), expected);
        };
        check(json!({"containers": []}), ("web-0", ""));
        check(
            json!({"containers": [], "hostname": "h", "subdomain": "s"}),
            ("h", "s.ns.svc.cluster.local"),
        );
        let long: Pod = serde_json::from_value(
            json!({"metadata": {"name": format!("{}-x", "a".repeat(62))}, "spec": {"containers": []}}),
        )
        .unwrap();
        assert_eq!(hostname_and_domain(&long, "").0, "a".repeat(62));
    }

    #[test]
    fn files() {
        let aliases: Vec<HostAlias> =
            serde_json::from_value(json!([{"ip": "1.2.3.4", "hostnames": ["a", "b"]}])).unwrap();
        let file = managed(&["10.0.0.2".into()], "h", "s.ns.svc.c", &aliases);
        assert!(file.starts_with("# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n"));
        assert!(
            file.ends_with("10.0.0.2\th.s.ns.svc.c\th\n\n# Entries added by HostAliases.\n1.2.3.4\ta\tb\n")
        );
        assert_eq!(
            host_network("127.0.0.1\tme\n", &[]),
            "# Kubernetes-managed hosts file (host network).\n127.0.0.1\tme\n"
        );
    }
}
