//! The small languages of a request: selectors, tokens of pages, quantities.

use base64::Engine;
use skiff_meta::quantity::Quantity;
use skiff_meta::selector::{FieldSelector, LabelSelector};
use skiff_schema::decode::canonical_quantity;

use crate::input;

pub fn label_selector(data: &[u8]) {
    if let Some(value) = input::json(data)
        && let Ok(selector) = LabelSelector::from_value(&value)
    {
        let text = selector.to_string();
        let _ = LabelSelector::parse(&text);
    }
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let Ok(selector) = LabelSelector::parse(text) else {
        return;
    };
    let printed = selector.to_string();
    let again = LabelSelector::parse(&printed).expect("what was printed can be read");
    assert_eq!(again.to_string(), printed);
    let labels = [("app", "web"), ("tier", "10"), ("a", "b"), ("empty", "")];
    let get = |key: &str| {
        labels
            .iter()
            .find(|(name, _)| *name == key)
            .map(|(_, value)| *value)
    };
    assert_eq!(selector.matches(get), again.matches(get));
    assert_eq!(selector.matches(|_| None), again.matches(|_| None));
    for (key, value) in selector.required() {
        assert!(
            !selector.matches(|_| None) || key.is_empty(),
            "{key}={value} is required"
        );
    }
}

pub fn field_selector(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let Ok(selector) = FieldSelector::parse(text) else {
        return;
    };
    let printed = selector.to_string();
    let again = FieldSelector::parse(&printed).expect("what was printed can be read");
    assert_eq!(again.to_string(), printed);
    let fields = [
        ("metadata.name", "a"),
        ("spec.nodeName", ""),
        ("status.phase", "Running"),
    ];
    let get = |key: &str| {
        fields
            .iter()
            .find(|(name, _)| *name == key)
            .map(|(_, value)| *value)
    };
    assert_eq!(selector.matches(get), again.matches(get));
}

/// A token as it is, and what a token may hold.
pub fn continue_token(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = skiff_registry::check_continue(text);
    }
    let _ = skiff_registry::check_continue(&base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(data));
}

pub fn quantity(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if let Ok(canonical) = canonical_quantity(text) {
        assert_eq!(canonical_quantity(&canonical).as_deref(), Ok(&*canonical));
    }
    if let Ok(quantity) = Quantity::parse(text) {
        let printed = quantity.to_string();
        let again = Quantity::parse(&printed).expect("what was printed can be read");
        assert_eq!(again.to_string(), printed);
        let _ = (quantity.value(), quantity.milli_value(), quantity.is_whole());
        let sum = quantity.plus(&again);
        let _ = sum.minus(&quantity).to_string();
    }
    if let Some(time) = skiff_meta::time::parse(text) {
        let printed = skiff_meta::time::format_micros(time);
        assert!(skiff_meta::time::parse(&printed).is_some(), "{printed}");
    }
}
