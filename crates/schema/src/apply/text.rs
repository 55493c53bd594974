//! `FieldsV1` as text. A JSON value keeps its keys in the order of their text; upstream writes the fields of a set in
//! the order of what they say: the number 80 before 443. Only the order differs: every reader takes either.

use serde_json::Value;

use super::element::PathElement;

/// Writes what an entry of `managedFields` owns.
pub fn write_fields(out: &mut Vec<u8>, value: &Value) -> serde_json::Result<()> {
    let Value::Object(map) = value else {
        return serde_json::to_writer(out, value);
    };
    out.push(b'{');
    let mut first = true;
    let mut put = |out: &mut Vec<u8>, key: &str, below: &Value| {
        if !std::mem::replace(&mut first, false) {
            out.push(b',');
        }
        serde_json::to_writer(&mut *out, key)?;
        out.push(b':');
        write_fields(out, below)
    };
    if map.len() > 1 && map.keys().any(|key| says_a_number(key)) {
        let mut sorted: Vec<(Option<PathElement>, &String, &Value)> = map
            .iter()
            .map(|(key, below)| (PathElement::parse(key).ok().flatten(), key, below))
            .collect();
        // What is no element, the place itself, comes first; the rest stays in the order of its text.
        sorted.sort_by(|a, b| a.0.cmp(&b.0));
        for (_, key, below) in sorted {
            put(out, key, below)?;
        }
    } else {
        for (key, below) in map {
            put(out, key, below)?;
        }
    }
    out.push(b'}');
    Ok(())
}

/// Whether the order of such keys may be another than that of their text: a value in it is no string.
fn says_a_number(key: &str) -> bool {
    match key.as_bytes() {
        [b'v', b':', first, ..] => *first != b'"',
        [b'k', b':', rest @ ..] => rest
            .windows(3)
            .any(|three| three[0] == b'"' && three[1] == b':' && three[2] != b'"'),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_ordered_as_numbers() {
        let check = |text: &str| {
            let value: Value = serde_json::from_str(text).expect("JSON");
            let mut out = Vec::new();
            write_fields(&mut out, &value).expect("writes");
            assert_eq!(String::from_utf8(out).expect("UTF-8"), text);
        };
        check(r#"{"f:a":{},"f:b":{".":{},"v:\"x\"":{}}}"#);
        check(
            r#"{"f:ports":{".":{},"k:{\"containerPort\":9,\"protocol\":\"TCP\"}":{".":{},"f:containerPort":{}},"k:{\"containerPort\":80,\"protocol\":\"TCP\"}":{},"k:{\"containerPort\":80,\"protocol\":\"UDP\"}":{},"k:{\"containerPort\":443,\"protocol\":\"TCP\"}":{}}}"#,
        );
        check(r#"{"f:set":{"v:-2":{},"v:3":{},"v:10":{},"v:\"1\"":{}}}"#);
    }
}
