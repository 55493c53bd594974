//! The table of a custom resource: the name, then what the definition's columns find by JSONPath.

use serde_json::{Value, json};
use skiff_registry::object;
use skiff_schema::jsonpath::JsonPath;

const NAME: &str = "Name must be unique within a namespace. Is required when creating resources, although some resources may allow a client to request the generation of an appropriate name automatically. Name is primarily intended for creation idempotence and configuration definition. Cannot be updated. More info: https://kubernetes.io/docs/concepts/overview/working-with-objects/names#names";
const AGE: &str = "CreationTimestamp is a timestamp representing the server time when this object was created. It is not guaranteed to be set in happens-before order across separate operations. Clients may not set this value. It is represented in RFC3339 form and is in UTC.\n\nPopulated by the system. Read-only. Null for lists. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#metadata";

#[derive(Debug)]
pub struct Column {
    name: String,
    kind: String,
    format: String,
    description: String,
    priority: i64,
    /// `None`: the path cannot be read, and the cells are empty.
    path: Option<JsonPath>,
}

impl Column {
    /// The columns of a version; without any there is the age.
    pub fn all(given: Option<&Value>) -> Vec<Column> {
        let given = given.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        if given.is_empty() {
            return vec![Column {
                name: "Age".to_owned(),
                kind: "date".to_owned(),
                format: String::new(),
                description: AGE.to_owned(),
                priority: 0,
                path: JsonPath::parse(".metadata.creationTimestamp").ok(),
            }];
        }
        given
            .iter()
            .map(|column| {
                let text = |key: &str| object::at_str(column, &[key]).to_owned();
                let path = JsonPath::parse(&text("jsonPath")).ok();
                let description = match text("description") {
                    empty if empty.is_empty() => {
                        format!(
                            "Custom resource definition column (in JSONPath format): {}",
                            text("jsonPath")
                        )
                    }
                    given => given,
                };
                Column {
                    name: text("name"),
                    kind: text("type"),
                    format: text("format"),
                    description,
                    priority: column.get("priority").and_then(Value::as_i64).unwrap_or(0),
                    path,
                }
            })
            .collect()
    }

    fn cell(&self, object: &Value, now: i64) -> Value {
        let Some(value) = self
            .path
            .as_ref()
            .and_then(|path| path.find(object).into_iter().next())
        else {
            return Value::Null;
        };
        match (self.kind.as_str(), value) {
            (_, Value::Null) => Value::Null,
            ("string", Value::String(_)) => value.clone(),
            ("string", other) => Value::String(other.to_string()),
            ("integer", Value::Number(n)) => n
                .as_i64()
                .or_else(|| n.as_f64().map(|n| n as i64))
                .map_or(Value::Null, Value::from),
            ("number", Value::Number(_)) | ("boolean", Value::Bool(_)) => value.clone(),
            ("date", Value::String(text)) => match skiff_meta::time::parse(text) {
                Some(_) => json!(skiff_api::row::since(text, now)),
                None => json!("<invalid>"),
            },
            _ => Value::Null,
        }
    }
}

pub fn definitions(columns: &[Column]) -> Value {
    let mut all =
        vec![json!({"name": "Name", "type": "string", "format": "name", "description": NAME, "priority": 0})];
    all.extend(columns.iter().map(|column| {
        json!({"name": column.name, "type": column.kind, "format": column.format,
            "description": column.description, "priority": column.priority})
    }));
    Value::Array(all)
}

pub fn row(columns: &[Column], object: &Value, now: i64) -> Vec<Value> {
    let mut cells = vec![json!(object::name(object))];
    cells.extend(columns.iter().map(|column| column.cell(object, now)));
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_have_the_type_of_their_column() {
        let columns = Column::all(Some(&json!([
            {"name": "A", "type": "string", "jsonPath": ".spec.a"},
            {"name": "B", "type": "integer", "jsonPath": ".spec.b", "priority": 1},
            {"name": "C", "type": "date", "jsonPath": ".metadata.creationTimestamp", "description": "When."},
            {"name": "D", "type": "boolean", "jsonPath": ".spec.d"},
            {"name": "E", "type": "string", "jsonPath": ".spec.list[*].x"},
        ])));
        let object = json!({"metadata": {"name": "n", "creationTimestamp": "1970-01-01T00:00:00Z"},
            "spec": {"a": 5, "b": 7, "d": "no", "list": []}});
        assert_eq!(
            row(&columns, &object, 60),
            [
                json!("n"),
                json!("5"),
                json!(7),
                json!("60s"),
                Value::Null,
                Value::Null
            ]
        );
        assert_eq!(
            definitions(&columns)[2],
            json!({"name": "B", "type": "integer", "format": "", "priority": 1,
                "description": "Custom resource definition column (in JSONPath format): .spec.b"})
        );
    }
}
