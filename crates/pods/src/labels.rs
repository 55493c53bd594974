//! Label selectors over typed objects.
//!
//! An operator that is not known matches nothing: the API server refuses such selectors, so one that
//! shows up here must not make a component grab objects.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

pub type Labels = BTreeMap<String, String>;

pub fn matches(selector: &LabelSelector, labels: Option<&Labels>) -> bool {
    let value_of = |key: &str| labels.and_then(|labels| labels.get(key));
    let labels_match = selector
        .match_labels
        .iter()
        .flatten()
        .all(|(key, value)| value_of(key) == Some(value));
    labels_match
        && selector.match_expressions.iter().flatten().all(|requirement| {
            let value = value_of(&requirement.key);
            let listed =
                || value.is_some_and(|value| requirement.values.iter().flatten().any(|one| one == value));
            match requirement.operator.as_str() {
                "In" => listed(),
                "NotIn" => !listed(),
                "Exists" => value.is_some(),
                "DoesNotExist" => value.is_none(),
                _ => false,
            }
        })
}

/// True if `labels` has all pairs of `wanted`.
pub fn matches_map(wanted: &Labels, labels: Option<&Labels>) -> bool {
    wanted
        .iter()
        .all(|(key, value)| labels.and_then(|labels| labels.get(key)) == Some(value))
}

/// True if the selector takes everything.
pub fn is_empty(selector: &LabelSelector) -> bool {
    selector.match_labels.as_ref().is_none_or(BTreeMap::is_empty)
        && selector.match_expressions.as_ref().is_none_or(Vec::is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn operators() {
        let labels = Labels::from([("app".into(), "web".into()), ("tier".into(), "front".into())]);
        let check = |selector: serde_json::Value, expected: bool| {
            let parsed: LabelSelector = serde_json::from_value(selector.clone()).unwrap();
            assert_eq!(matches(&parsed, Some(&labels)), expected, "{selector}");
        };
        let expression = |key: &str, operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
        check(json!({}), true);
        check(json!({"matchLabels": {"app": "web"}}), true);
        check(json!({"matchLabels": {"app": "web", "x": "y"}}), false);
        check(expression("app", "In", &["a", "web"]), true);
        check(expression("app", "NotIn", &["web"]), false);
        check(expression("none", "NotIn", &["web"]), true);
        check(expression("tier", "Exists", &[]), true);
        check(expression("tier", "DoesNotExist", &[]), false);
        check(expression("tier", "Near", &[]), false);
    }
}
