//! Numbers as Go's converter takes them into a struct after a strategic merge: what is too large for 32 bits loses its
//! upper half, and a whole float is an integer. Only numbers are looked at; everything else is checked later.

use serde_json::Value;

use crate::types::{Scalar, Schema, Shape, TypeId};

/// Whether a patch brings a number that may need it. Most do not, and then the object need not be walked.
pub fn brings_odd_numbers(patch: &Value) -> bool {
    match patch {
        Value::Number(number) => number
            .as_i64()
            .is_none_or(|number| i32::try_from(number).is_err()),
        Value::Array(values) => values.iter().any(brings_odd_numbers),
        Value::Object(map) => map.values().any(brings_odd_numbers),
        _ => false,
    }
}

pub fn convert_integers(schema: &Schema, id: TypeId, value: &mut Value) {
    let Value::Object(map) = value else { return };
    let of = schema.get(id);
    for (name, value) in map {
        if let Some(field) = of.field(name) {
            convert(schema, &field.shape, value);
        }
    }
}

fn convert(schema: &Schema, shape: &Shape, value: &mut Value) {
    match (shape, value) {
        (Shape::Scalar(scalar @ (Scalar::Int32 | Scalar::Int64 | Scalar::Int), _), value) => {
            let whole = value.as_f64().filter(|float| float.fract() == 0.0);
            let Some(number) = value.as_i64().or(whole.map(of_float)) else {
                return;
            };
            *value = match scalar {
                Scalar::Int32 => Value::from(number as i32),
                _ => Value::from(number),
            };
        }
        (Shape::Struct(id), value) => convert_integers(schema, *id, value),
        (Shape::List(list), Value::Array(values)) => {
            values
                .iter_mut()
                .for_each(|value| convert(schema, &list.of, value));
        }
        (Shape::Map(map), Value::Object(values)) => {
            values
                .values_mut()
                .for_each(|value| convert(schema, &map.of, value));
        }
        _ => {}
    }
}

/// What is out of range becomes the least number, as the processor has it that upstream mostly runs on.
fn of_float(float: f64) -> i64 {
    if (-9.3e18..9.2e18).contains(&float) {
        float as i64
    } else {
        i64::MIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn odd_numbers_are_noticed() {
        let check =
            |patch: Value, expected: bool| assert_eq!(brings_odd_numbers(&patch), expected, "{patch}");
        check(
            json!({"spec": {"replicas": 3, "a": "4000000000", "b": null}}),
            false,
        );
        check(json!({"spec": {"replicas": 2_147_483_648_i64}}), true);
        check(json!({"spec": {"l": [{"port": 80.0}]}}), true);
    }
}
