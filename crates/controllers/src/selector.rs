//! Label selectors over typed objects.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
pub(crate) use skiff_pods::labels::*;

/// A selector as upstream's events print one.
pub(crate) fn go_text(selector: Option<&LabelSelector>) -> String {
    let Some(selector) = selector else {
        return "nil".into();
    };
    let labels = selector.match_labels.iter().flatten();
    let labels: String = labels.map(|(key, value)| format!("{key}: {value},")).collect();
    let expressions = selector.match_expressions.iter().flatten();
    let expressions: String = expressions
        .map(|one| {
            let values = one.values.as_deref().unwrap_or_default().join(" ");
            format!(
                "LabelSelectorRequirement{{Key:{},Operator:{},Values:[{values}],}},",
                one.key, one.operator
            )
        })
        .collect();
    format!(
        "&LabelSelector{{MatchLabels:map[string]string{{{labels}}},MatchExpressions:[]LabelSelectorRequirement{{{expressions}}},}}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_selector_in_an_event() {
        let selector = serde_json::from_value(json!({"matchLabels": {"a": "b"}, "matchExpressions": [
            {"key": "k", "operator": "In", "values": ["x", "y"]}]}))
        .unwrap();
        assert_eq!(
            go_text(Some(&selector)),
            "&LabelSelector{MatchLabels:map[string]string{a: b,},MatchExpressions:[]LabelSelectorRequirement{LabelSelectorRequirement{Key:k,Operator:In,Values:[x y],},},}"
        );
    }
}
