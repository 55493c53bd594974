//! Nobody may grant what they do not have: whether the rules a user holds cover the rules they hand out.

use crate::Rule;
use crate::rule::url_matches;

/// True if every single permission in `wanted` is in `held`.
pub fn covers(held: &[Rule], wanted: &[Rule]) -> bool {
    missing_rules(held, wanted).is_empty()
}

/// The single permissions of `wanted` that `held` does not include.
pub fn missing_rules(held: &[Rule], wanted: &[Rule]) -> Vec<Rule> {
    wanted
        .iter()
        .flat_map(single_permissions)
        .filter(|one| !held.iter().any(|h| includes(h, one)))
        .collect()
}

/// A rule as the rules with one verb, group, resource, name or URL each.
fn single_permissions(rule: &Rule) -> Vec<Rule> {
    let mut singles = Vec::new();
    for verb in &rule.verbs {
        for url in &rule.non_resource_urls {
            singles.push(Rule {
                verbs: vec![verb.clone()],
                non_resource_urls: vec![url.clone()],
                ..Rule::default()
            });
        }
        for group in &rule.api_groups {
            for resource in &rule.resources {
                let single = Rule {
                    verbs: vec![verb.clone()],
                    api_groups: vec![group.clone()],
                    resources: vec![resource.clone()],
                    ..Rule::default()
                };
                if rule.resource_names.is_empty() {
                    singles.push(single);
                    continue;
                }
                for name in &rule.resource_names {
                    singles.push(Rule {
                        resource_names: vec![name.clone()],
                        ..single.clone()
                    });
                }
            }
        }
    }
    singles
}

fn includes(held: &Rule, single: &Rule) -> bool {
    let every =
        |have: &[String], want: &[String]| want.iter().all(|w| have.iter().any(|h| h == "*" || h == w));
    let resources = single.resources.iter().all(|want| {
        held.resources.iter().any(|have| {
            have == "*" || have == want || matches!((have.strip_prefix("*/"), want.split_once('/')), (Some(h), Some((_, w))) if h == w)
        })
    });
    let names = held.resource_names.is_empty()
        || (!single.resource_names.is_empty()
            && single
                .resource_names
                .iter()
                .all(|n| held.resource_names.contains(n)));
    let urls = single.non_resource_urls.iter().all(|want| {
        held.non_resource_urls
            .iter()
            .any(|have| have == want || url_matches(have, want))
    });
    every(&held.verbs, &single.verbs)
        && every(&held.api_groups, &single.api_groups)
        && resources
        && names
        && urls
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(verbs: &[&str], resources: &[&str], names: &[&str]) -> Rule {
        let own = |l: &[&str]| l.iter().map(|s| (*s).to_owned()).collect();
        Rule {
            verbs: own(verbs),
            api_groups: vec![String::new()],
            resources: own(resources),
            resource_names: own(names),
            non_resource_urls: vec![],
        }
    }

    #[test]
    fn a_grant_must_be_held() {
        let held = [
            rule(&["get", "list"], &["pods"], &[]),
            rule(&["get"], &["secrets"], &["one"]),
        ];
        assert!(covers(&held, &[rule(&["get"], &["pods"], &[])]));
        assert!(covers(&held, &[rule(&["get"], &["pods"], &["x"])]));
        assert!(!covers(&held, &[rule(&["*"], &["pods"], &[])]));
        assert!(!covers(&held, &[rule(&["get"], &["secrets"], &[])]));
        assert!(covers(&held, &[rule(&["get"], &["secrets"], &["one"])]));
        assert!(covers(&[rule(&["*"], &["*"], &[])], &held));
        assert_eq!(
            missing_rules(&held, &[rule(&["get", "delete"], &["pods"], &[])]).len(),
            1
        );
    }
}
