//! Configurations that are taken, and those that are refused.

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
            ("DynamicResources", 2),
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
        !names(a, Points::FILTER).contains(&"NodePorts") && names(b, Points::FILTER).contains(&"NodePorts")
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
    let extender = |rest: &str, expected: &str| check(&format!("extenders: [{{{rest}}}]"), expected);
    extender("filterVerb: f", "extenders[0].urlPrefix: must be set");
    extender("urlPrefix: 'http://'", "extenders[0]");
    extender(
        "urlPrefix: 'http://a', prioritizeVerb: p",
        "extenders[0].weight: must have a positive weight applied to it",
    );
    extender(
        "urlPrefix: 'http://a', managedResources: [{name: cpu}]",
        "\"cpu\" is an invalid extended resource name",
    );
    extender(
        "urlPrefix: 'http://a', managedResources: [{name: a/b}, {name: a/b}]",
        "duplicate extender managed resource name",
    );
    extender(
        "urlPrefix: 'http://a', bindVerb: b}, {urlPrefix: 'http://b', bindVerb: b",
        "only one extender can implement bind",
    );
    extender(
        "urlPrefix: 'http://a', httpTimeout: soon",
        "time: invalid duration",
    );
    extender(
        "urlPrefix: 'https://a', tlsConfig: {caFile: /does/not/exist}",
        "tlsConfig.caData: /does/not/exist",
    );
    extender(
        "urlPrefix: 'https://a', tlsConfig: {certData: YQ==}",
        "a certificate needs its key",
    );
    check(
        "leaderElection: {leaseDuration: 5s}",
        "LeaseDuration must be greater than RenewDeadline",
    );
    check(
        "leaderElection: {retryPeriod: 20s}",
        "RenewDeadline must be greater than RetryPeriod",
    );
    check("leaderElection: {renewDeadline: -1s}", "must not be negative");
    check(
        "clientConnection: {burst: -1}",
        "clientConnection.burst: must be non-negative",
    );
    check("clientConnection: {colour: red}", "colour");
    check("parallelism: 0", "should be an integer value greater than zero");
    check(
        "profiles: [{pluginConfig: [{name: DynamicResources, args: {bindingTimeout: 10ms}}]}]",
        "bindingTimeout: must be at least 1 second",
    );
    check(
        "profiles: [{pluginConfig: [{name: DynamicResources, args: {filterTimeout: -1s}}]}]",
        "filterTimeout: must not be negative",
    );
    check("leaderElection: {resourceLock: endpoints}", "resourceLock");
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

#[tokio::test]
async fn what_extenders_manage_alone_is_not_counted_and_leases_have_names() {
    let text = "extenders: [{urlPrefix: 'http://a/', managedResources: [{name: x.io/a, ignoredByScheduler: true}, {name: x.io/b}]}]\n\
        leaderElection: {leaderElect: false, resourceName: mine, leaseDuration: 30s}\n";
    let text =
        format!("apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n{text}");
    let configuration = Configuration::parse(&text).unwrap();
    assert_eq!(configuration.ignored_resources().collect::<Vec<_>>(), ["x.io/a"]);
    let elector = configuration.election.elector("me");
    assert!(!configuration.election.elects);
    assert_eq!(
        (
            elector.namespace.as_str(),
            elector.name.as_str(),
            elector.lease_duration.as_secs()
        ),
        ("kube-system", "mine", 30)
    );
    let extenders = configuration.extenders().unwrap();
    assert_eq!(extenders[0].name(), "http://a");
    let asks = |resource: &str| {
        let container = serde_json::json!({"name": "c", "resources": {"requests": {resource: "1"}}});
        crate::fixtures::pod("p", serde_json::json!({"containers": [container]}))
    };
    let interested = |resource: &str| extenders[0].is_interested(&asks(resource));
    assert_eq!(
        ["x.io/a", "x.io/b", "x.io/c", "cpu"].map(interested),
        [true, true, false, false]
    );
}

/// As `kube-scheduler --write-config-to` writes it, and with what older files have.
const REAL_FILE: &str = include_str!("real.yaml");

#[tokio::test]
async fn a_real_file_is_taken_and_what_has_no_effect_is_named() {
    let configuration = Configuration::parse(REAL_FILE).unwrap();
    assert_eq!(
        configuration.without_effect(),
        [
            "clientConnection.kubeconfig",
            "clientConnection.contentType",
            "clientConnection.qps",
            "clientConnection.burst",
            "enableProfiling",
            "enableContentionProfiling",
            "delayCacheUntilActive",
            "healthzBindAddress",
            "metricsBindAddress",
            "parallelism",
            "profiles[0].pluginConfig[DynamicResources].args.filterTimeout",
        ]
    );
    let names = |profile: &Profile| -> Vec<(&str, i64)> {
        let scored = profile.at(Points::SCORE).filter(|(_, one)| one.plugin.scores());
        scored.map(|(_, one)| (one.plugin.name(), one.weight)).collect()
    };
    let real = configuration.profiles(&handle(Arc::default())).unwrap();
    assert_eq!(names(&real[0]), names(&parse("").unwrap()[0]));
    let plain = Configuration::parse(
        "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n\
         leaderElection:\nclientConnection:\nprofiles:\nextenders:\n\
         enableProfiling: false\ndelayCacheUntilActive: true\n",
    )
    .unwrap();
    assert_eq!(plain.without_effect(), [""; 0]);
    assert_eq!(plain.election, Election::default());
}

#[test]
fn what_is_empty_in_an_election_is_the_default() {
    let election = |fields: &str| {
        let text = format!(
            "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nleaderElection: {{{fields}}}\n"
        );
        Configuration::parse(&text).unwrap().election
    };
    let empty = "leaderElect: true, leaseDuration: 0s, renewDeadline: 0s, retryPeriod: 0s, resourceLock: '', \
                 resourceName: '', resourceNamespace: ''";
    assert_eq!(election(empty), Election::default());
    let off = election("leaderElect: false, leaseDuration: 5s, resourceLock: endpoints");
    assert!(!off.elects, "its other fields are not looked at");
}
