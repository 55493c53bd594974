//! `fieldPath` of a rule: a JSON path of fields and map keys, such as `.spec.limits['cpu']`.

use skiff_meta::field::Path;

use crate::schema::{AdditionalProperties, Schema};

/// The path in the form that errors use, if every step exists in the schema.
pub(crate) fn valid_field_path(path: &str, schema: &Schema) -> Result<String, String> {
    let mut found = Path::root();
    let mut at = Some(schema);
    let mut rest = path;
    while !rest.is_empty() {
        let (name, tail) = next_step(rest)?;
        rest = tail;
        let Some(schema) = at else {
            return Err("does not refer to a valid field".to_owned());
        };
        match (&schema.properties, &schema.additional_properties) {
            (Some(properties), _) => {
                let Some(property) = properties.get(&name) else {
                    return Err("does not refer to a valid field".to_owned());
                };
                found = found.child(&name);
                at = Some(property);
            }
            (None, Some(additional)) => {
                found = found.key(&name);
                at = match additional {
                    AdditionalProperties::Schema(schema) => Some(schema),
                    AdditionalProperties::Allowed(_) => None,
                };
            }
            (None, None) => return Err("does not refer to a valid field".to_owned()),
        }
    }
    Ok(found.as_str().to_owned())
}

/// The name of the next step, and what follows.
fn next_step(path: &str) -> Result<(String, &str), String> {
    let end = || "unexpected end of JSON path".to_owned();
    if let Some(rest) = path.strip_prefix('.') {
        if rest.is_empty() {
            return Err(end());
        }
        // A delimiter right after the dot is taken for the name.
        let length = match rest.find(['.', '[', ']']) {
            Some(0) => 1,
            Some(length) => length,
            None => rest.len(),
        };
        return Ok((rest[..length].to_owned(), &rest[length..]));
    }
    let Some(rest) = path.strip_prefix('[') else {
        let token = path
            .find(['.', '[', ']'])
            .map_or(path, |length| &path[..length.max(1)]);
        return Err(format!("expected [ or . but got: {token}"));
    };
    if rest.is_empty() {
        return Err(end());
    }
    let Some(quoted) = rest.strip_prefix('\'') else {
        let token = rest
            .find(['.', '[', ']'])
            .map_or(rest, |length| &rest[..length.max(1)]);
        return Err(format!("expected single quoted string but got {token}"));
    };
    let mut name = String::new();
    let mut chars = quoted.char_indices();
    loop {
        match chars.next() {
            None => return Err(format!("expected single quoted string but got {rest}")),
            Some((at, '\'')) => {
                let tail = &quoted[at + 1..];
                return match tail.strip_prefix(']') {
                    Some(tail) => Ok((name, tail)),
                    None if tail.is_empty() => Err(end()),
                    None => Err(format!("expected ] but got {tail}")),
                };
            }
            Some((_, '\\')) => name.push(match chars.next().map(|(_, c)| c) {
                Some('a') => '\u{7}',
                Some('b') => '\u{8}',
                Some('f') => '\u{c}',
                Some('n') => '\n',
                Some('r') => '\r',
                Some('t') => '\t',
                Some('v') => '\u{b}',
                Some(c @ ('\'' | '\\')) => c,
                Some(other) => return Err(format!("invalid string literal: invalid escape char \\{other}")),
                None => return Err(end()),
            }),
            Some((_, c)) => name.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn paths_follow_the_schema() {
        let schema = Schema::parse(&json!({"type": "object", "properties": {
            "spec": {"type": "object", "properties": {"a.b": {"type": "string"}, "c": {"type": "string"}}},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        }}));
        let check = |path: &str, expected: Result<&str, &str>| {
            assert_eq!(
                valid_field_path(path, &schema),
                expected.map(str::to_owned).map_err(str::to_owned),
                "{path}"
            );
        };
        check(".spec.c", Ok("spec.c"));
        check(".spec['a.b']", Ok("spec.a.b"));
        check("['spec'].c", Ok("spec.c"));
        check(".labels.x", Ok("labels[x]"));
        check(".labels['it\\'s']", Ok("labels[it's]"));
        check(".spec.nope", Err("does not refer to a valid field"));
        check(".spec.c.d", Err("does not refer to a valid field"));
        check("spec", Err("expected [ or . but got: spec"));
        check(".", Err("unexpected end of JSON path"));
        check(".spec[", Err("unexpected end of JSON path"));
        check(".spec[0]", Err("expected single quoted string but got 0"));
    }
}
