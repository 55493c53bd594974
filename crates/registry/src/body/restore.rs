//! A decoding error in the words of the converter that upstream uses after a strategic merge and after an apply.

use skiff_api::facts;
use skiff_schema::{Scalar, Shape};

/// A decoding error in the words of the converter that upstream uses after a strategic merge.
pub fn restore_error(error: &str) -> String {
    // What reads itself keeps its own words.
    if error.contains(" into Go value of type ") {
        return error.to_string();
    }
    if let Some(told) = told_by_itself(error) {
        return told;
    }
    if error.starts_with("illegal base64") {
        return format!("error decoding from json: {error}");
    }
    let Some((found, wanted)) = error
        .strip_prefix("json: cannot unmarshal ")
        .and_then(|rest| Some((rest.split(" into Go ").next()?, rest.rsplit(" of type ").next()?)))
    else {
        return error.to_string();
    };
    let kind = match found {
        "object" => "map",
        "array" => "slice",
        number if number.starts_with("number") && number.contains('.') => "float64",
        number if number.starts_with("number") => "int64",
        other => other,
    };
    match (go_kind(wanted), kind) {
        // COMPAT: Go makes a letter of a number.
        (Some("string"), "int64") | (Some("int" | "int32" | "int64"), "float64") => {
            format!("cannot convert {kind} to {wanted}")
        }
        (Some(scalar), _) => format!("unrecognized type: {scalar}"),
        _ if wanted.starts_with("map[") || wanted == "v1.ResourceList" => {
            format!("cannot restore map from {kind}")
        }
        _ if wanted.starts_with("[]") => format!("cannot restore slice from {kind}"),
        _ => format!("cannot restore struct from: {kind}"),
    }
}

/// The complaint about a field of a type that reads itself, such as a time: it knows no field.
fn told_by_itself(error: &str) -> Option<String> {
    let (found, rest) = error.split_once(" into Go struct field ")?;
    let (place, wanted) = rest.rsplit_once(" of type ")?;
    let (name, path) = place.split_once('.')?;
    let field = path.rsplit('.').next()?;
    let special = facts::schema().types().any(|(_, of)| {
        let mut fields = of.fields.iter();
        of.name.rsplit('.').next() == Some(name)
            && fields.any(|one| one.name == field && matches!(one.shape, Shape::Special(_)))
    });
    special.then(|| format!("{found} into Go value of type {wanted}"))
}

/// Go's kind of a scalar type, also of one that has a name of its own.
fn go_kind(wanted: &str) -> Option<&'static str> {
    let kind_of = |scalar: Scalar| match scalar {
        Scalar::Bool => "bool",
        Scalar::Int32 => "int32",
        Scalar::Int64 => "int64",
        Scalar::Int => "int",
        Scalar::Float64 => "float64",
        Scalar::String => "string",
        Scalar::Bytes => "[]uint8",
    };
    let plain = [
        Scalar::Bool,
        Scalar::Int32,
        Scalar::Int64,
        Scalar::Int,
        Scalar::Float64,
        Scalar::String,
    ];
    if let Some(scalar) = plain.into_iter().find(|scalar| kind_of(*scalar) == wanted) {
        return Some(kind_of(scalar));
    }
    fn named(shape: &Shape, wanted: &str) -> Option<Scalar> {
        match shape {
            Shape::Scalar(scalar, Some(name)) if name == wanted => Some(*scalar),
            Shape::List(list) => named(&list.of, wanted),
            Shape::Map(map) => named(&map.of, wanted),
            _ => None,
        }
    }
    facts::schema()
        .types()
        .flat_map(|(_, of)| of.fields.iter())
        .find_map(|field| named(&field.shape, wanted))
        .filter(|scalar| *scalar != Scalar::Bytes)
        .map(kind_of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_are_refused_as_by_upstream() {
        let check = |found: &str, wanted: &str, expected: &str| {
            let error = format!("json: cannot unmarshal {found} into Go struct field A.b of type {wanted}");
            assert_eq!(restore_error(&error), expected, "{error}");
        };
        check("string", "int32", "unrecognized type: int32");
        check("bool", "string", "unrecognized type: string");
        check("number", "string", "cannot convert int64 to string");
        check("number", "v1.PodPhase", "cannot convert int64 to v1.PodPhase");
        check("number", "bool", "unrecognized type: bool");
        check("number 1.5", "int32", "cannot convert float64 to int32");
        check("object", "v1.PodPhase", "unrecognized type: string");
        check("object", "[]v1.Container", "cannot restore slice from map");
        check("string", "map[string]string", "cannot restore map from string");
        check("array", "v1.PodSpec", "cannot restore struct from: slice");
        check("string", "v1.ResourceList", "cannot restore map from string");
        let itself = "json: cannot unmarshal object into Go value of type string";
        assert_eq!(restore_error(itself), itself);
        let in_field =
            "json: cannot unmarshal object into Go struct field LeaseSpec.spec.renewTime of type string";
        assert_eq!(restore_error(in_field), itself);
        assert_eq!(
            restore_error("illegal base64 data at input byte 0"),
            "error decoding from json: illegal base64 data at input byte 0"
        );
    }
}
