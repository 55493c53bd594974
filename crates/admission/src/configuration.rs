//! Which plugins run, and how they are set up: the flags `--enable-admission-plugins` and `--disable-admission-plugins`,
//! and the file of an AdmissionConfiguration. What is not built is refused by its name.

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::plugins::{self, PodSecurity};
use crate::pod_security::{Configuration, Defaults, Exemptions};
use crate::{Chain, Plugin};

/// All plugins of upstream, so that a name that is none is told from one that is not built.
const KNOWN: [&str; 41] = [
    "AlwaysAdmit",
    "NamespaceAutoProvision",
    "NamespaceLifecycle",
    "NamespaceExists",
    "LimitPodHardAntiAffinityTopology",
    "LimitRanger",
    "ServiceAccount",
    "NodeRestriction",
    "TaintNodesByCondition",
    "AlwaysPullImages",
    "ImagePolicyWebhook",
    "PodSecurity",
    "PodNodeSelector",
    "Priority",
    "DefaultTolerationSeconds",
    "PodTolerationRestriction",
    "EventRateLimit",
    "ExtendedResourceToleration",
    "DefaultStorageClass",
    "StorageObjectInUseProtection",
    "PodGroupProtection",
    "OwnerReferencesPermissionEnforcement",
    "PersistentVolumeClaimResize",
    "RuntimeClass",
    "CertificateApproval",
    "CertificateSigning",
    "ClusterTrustBundleAttest",
    "CertificateSubjectRestriction",
    "DefaultIngressClass",
    "DenyServiceExternalIPs",
    "PodTopologyLabels",
    "PodGroupWorkloadExists",
    "NodeDeclaredFeatureValidator",
    "JobValidation",
    "PodResizeValidator",
    "MutatingAdmissionPolicy",
    "MutatingAdmissionWebhook",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionWebhook",
    "ResourceQuota",
    "AlwaysDeny",
];

/// Those that the server adds itself, and those of features that are off, which do nothing.
const ELSEWHERE: [&str; 6] = [
    "MutatingAdmissionPolicy",
    "MutatingAdmissionWebhook",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionWebhook",
    "AlwaysAdmit",
    "JobValidation",
];

/// What the flags say.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    pub enabled: Vec<String>,
    pub disabled: Vec<String>,
    pub pod_security: Option<Configuration>,
}

impl Chain {
    /// The recommended plugins, with those that are wanted and without those that are not.
    pub fn chosen(choice: Choice) -> Result<Chain, String> {
        let Choice {
            enabled,
            disabled,
            pod_security,
        } = choice;
        for (flag, names) in [("enable", &enabled), ("disable", &disabled)] {
            if let Some(name) = names.iter().find(|name| !KNOWN.contains(&name.as_str())) {
                return Err(format!("{flag}-admission-plugins plugin {name:?} is unknown"));
            }
        }
        let both: Vec<&str> = enabled
            .iter()
            .filter(|name| disabled.contains(name))
            .map(String::as_str)
            .collect();
        if !both.is_empty() {
            return Err(format!(
                "[{}] in enable-admission-plugins and disable-admission-plugins overlapped",
                both.join(" ")
            ));
        }
        let mut list = plugins::recommended();
        if let Some(configuration) = pod_security {
            let configured: Box<dyn Plugin> = Box::new(PodSecurity::new(configuration));
            if let Some(at) = list.iter().position(|plugin| plugin.name() == configured.name()) {
                list[at] = configured;
            }
        }
        for name in &enabled {
            let there = list.iter().any(|plugin| plugin.name() == name);
            if there || ELSEWHERE.contains(&name.as_str()) {
                continue;
            }
            match plugins::optional(name) {
                Some(plugin) => list.push(plugin),
                None => return Err(format!("enable-admission-plugins plugin {name:?} is not built")),
            }
        }
        let place = |plugin: &dyn Plugin| KNOWN.iter().position(|name| *name == plugin.name());
        list.sort_by_key(|plugin| place(plugin.as_ref()));
        list.retain(|plugin| !disabled.iter().any(|name| name == plugin.name()));
        let mut chain = Chain::new(list);
        chain.disabled = disabled;
        Ok(chain)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct AdmissionConfiguration {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    plugins: Vec<PluginConfiguration>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PluginConfiguration {
    #[serde(default)]
    name: String,
    #[serde(default)]
    path: String,
    configuration: Option<PodSecurityConfiguration>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PodSecurityConfiguration {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    defaults: Defaults,
    #[serde(default)]
    exemptions: Exemptions,
}

fn parse<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_saphyr::from_str(text).map_err(|error| error.to_string())
}

/// Reads the file of `--admission-control-config-file`; `read` reads those that it names, which lie beside it.
pub fn pod_security(
    text: &str,
    read: impl Fn(&str) -> Result<String, String>,
) -> Result<Option<Configuration>, String> {
    let file: AdmissionConfiguration = parse(text)?;
    let version = file.api_version.as_str();
    let of_admission = matches!(
        version,
        "apiserver.config.k8s.io/v1" | "apiserver.config.k8s.io/v1alpha1" | "apiserver.k8s.io/v1alpha1"
    );
    if !of_admission || file.kind != "AdmissionConfiguration" {
        return Err(format!(
            "no kind {:?} is registered for version {version:?}",
            file.kind
        ));
    }
    let mut found = None;
    for plugin in file.plugins {
        if !KNOWN.contains(&plugin.name.as_str()) {
            return Err(format!("unknown admission plugin {:?}", plugin.name));
        }
        if plugin.name != "PodSecurity" {
            return Err(format!(
                "the configuration of the plugin {:?} is not built",
                plugin.name
            ));
        }
        let of_plugin: PodSecurityConfiguration = match (plugin.configuration, plugin.path.as_str()) {
            (Some(configuration), _) => configuration,
            (None, "") => continue,
            (None, path) => parse(&read(path)?)?,
        };
        let version = of_plugin.api_version.as_str();
        let known = version.strip_prefix("pod-security.admission.config.k8s.io/");
        if !matches!(known, Some("v1" | "v1beta1" | "v1alpha1"))
            || of_plugin.kind != "PodSecurityConfiguration"
        {
            return Err(format!(
                "no kind {:?} is registered for version {version:?}",
                of_plugin.kind
            ));
        }
        found = Some(Configuration::new(&of_plugin.defaults, of_plugin.exemptions)?);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(enabled: &[&str], disabled: &[&str]) -> Result<Vec<&'static str>, String> {
        let own = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let chain = Chain::chosen(Choice {
            enabled: own(enabled),
            disabled: own(disabled),
            pod_security: None,
        })?;
        Ok(chain.names())
    }

    #[test]
    fn plugins_are_chosen() {
        let all = names(&[], &[]).unwrap();
        let recommended: Vec<&str> = plugins::recommended()
            .iter()
            .map(|plugin| plugin.name())
            .collect();
        assert_eq!(all, recommended);
        assert_eq!(
            names(&["NodeRestriction", "ValidatingAdmissionWebhook"], &[]).unwrap(),
            all
        );
        let without = names(&[], &["PodSecurity", "MutatingAdmissionWebhook"]).unwrap();
        assert_eq!(without.len(), all.len() - 1);
        let with = names(&["AlwaysDeny", "AlwaysPullImages", "DenyServiceExternalIPs"], &[]).unwrap();
        assert_eq!(with.len(), all.len() + 3);
        let at = |name: &str| with.iter().position(|other| *other == name).unwrap();
        assert!(
            at("TaintNodesByCondition") < at("AlwaysPullImages")
                && at("AlwaysPullImages") < at("PodSecurity")
        );
        assert_eq!(with.last(), Some(&"AlwaysDeny"));
        let refused = |enabled: &[&str], disabled: &[&str], why: &str| {
            assert_eq!(names(enabled, disabled).unwrap_err(), why);
        };
        refused(
            &["Foo"],
            &[],
            "enable-admission-plugins plugin \"Foo\" is unknown",
        );
        refused(
            &[],
            &["Foo"],
            "disable-admission-plugins plugin \"Foo\" is unknown",
        );
        refused(
            &["EventRateLimit"],
            &[],
            "enable-admission-plugins plugin \"EventRateLimit\" is not built",
        );
        refused(
            &["PodSecurity"],
            &["PodSecurity"],
            "[PodSecurity] in enable-admission-plugins and disable-admission-plugins overlapped",
        );
    }

    #[test]
    fn what_was_disabled_is_not_put_in_later() {
        let mut chain = Chain::chosen(Choice {
            disabled: vec!["AlwaysDeny".to_owned()],
            ..Choice::default()
        })
        .unwrap();
        let before = chain.names();
        chain.insert_before("ResourceQuota", plugins::optional("AlwaysDeny").unwrap());
        assert_eq!(chain.names(), before);
    }

    #[test]
    fn files_set_up_pod_security() {
        let file = |plugin: &str| {
            format!(
                "apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins: [{plugin}]"
            )
        };
        let none = |_: &str| Err("no other file".to_owned());
        assert_eq!(pod_security(&file(""), none).unwrap(), None);
        let inner = "{apiVersion: pod-security.admission.config.k8s.io/v1, kind: PodSecurityConfiguration, defaults: {enforce: baseline, enforce-version: v1.30}, exemptions: {usernames: [u], namespaces: [n]}}";
        let found = pod_security(
            &file(&format!("{{name: PodSecurity, configuration: {inner}}}")),
            none,
        );
        let found = found.unwrap().unwrap();
        assert!(found.exempts_namespace("n") && !found.exempts_namespace("m") && found.exempts_user("u"));
        let by_path = pod_security(&file("{name: PodSecurity, path: x.yaml}"), |path| {
            assert_eq!(path, "x.yaml");
            Ok(inner.to_owned())
        });
        assert_eq!(by_path.unwrap().unwrap(), found);
        let refused = |plugin: &str, why: &str| {
            let error = pod_security(&file(plugin), none).unwrap_err();
            assert!(error.contains(why), "{error}");
        };
        refused("{name: EventRateLimit}", "not built");
        refused("{name: Foo}", "unknown admission plugin");
        refused(
            "{name: PodSecurity, configuration: {kind: Foo}}",
            "no kind \"Foo\"",
        );
        let bad = inner.replace("baseline", "strict");
        refused(
            &format!("{{name: PodSecurity, configuration: {bad}}}"),
            "must be one of privileged, baseline, restricted",
        );
        assert!(pod_security("kind: Foo", none).is_err());
    }
}
