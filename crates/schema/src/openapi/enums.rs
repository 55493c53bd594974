//! The values that string properties may have, where upstream publishes them. They are in no type table:
//! a property with a list is still any string to the decoder.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// Lists by type and property; `name[]` is of a list's items, `name{}` of a map's values.
#[derive(Debug, Default)]
pub(super) struct Enums(BTreeMap<String, Vec<(String, Value)>>);

impl Enums {
    /// One list a line: the type's name, the property, and the values as JSON.
    pub fn parse(text: &str) -> Enums {
        let mut enums = Enums::default();
        for line in text.lines() {
            let mut words = line.splitn(3, ' ');
            if let (Some(type_name), Some(property), Some(values)) =
                (words.next(), words.next(), words.next())
                && let Ok(values) = serde_json::from_str(values)
            {
                let list = enums.0.entry(type_name.to_string()).or_default();
                list.push((property.to_string(), values));
            }
        }
        enums
    }

    /// Adds the lists of a type to its published properties.
    pub fn add(&self, type_name: &str, properties: &mut Map<String, Value>) {
        for (path, values) in self.0.get(type_name).into_iter().flatten() {
            let (name, inner) = match (path.strip_suffix("[]"), path.strip_suffix("{}")) {
                (Some(name), _) => (name, Some("items")),
                (_, Some(name)) => (name, Some("additionalProperties")),
                _ => (path.as_str(), None),
            };
            let Some(mut place) = properties.get_mut(name) else {
                continue;
            };
            if let Some(inner) = inner {
                place = &mut place[inner];
            }
            place["enum"] = values.clone();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lists_go_where_they_belong() {
        let enums = Enums::parse("T a [\"x\",\"\"]\nT b[] [\"y\"]\nU a [\"z\"]\nnonsense\n");
        let mut properties = Map::from_iter([
            ("a".to_string(), json!({"type": "string"})),
            ("b".to_string(), json!({"items": {"type": "string"}})),
        ]);
        enums.add("T", &mut properties);
        assert_eq!(properties["a"]["enum"], json!(["x", ""]));
        assert_eq!(properties["b"]["items"]["enum"], json!(["y"]));
    }
}
