//! Metadata of custom objects and of the objects within them: it has the type that the metadata of every
//! kind has, whatever the schema says.

use serde_json::{Map, Value};

use super::{Additional, Structural};
use crate::decode;
use crate::types::{Schema, TypeId};

/// What came of it.
#[derive(Debug, Default)]
pub struct Coerced {
    /// Unknown fields, in the order in which they are told.
    pub unknown: Vec<String>,
}

/// Brings the metadata of an object, and of objects within it, into shape. `repair` drops what does not
/// fit, as is done with what was stored; without it that is an error.
pub fn coerce_metadata(
    types: &Schema,
    object: &mut Value,
    schema: &Structural,
    repair: bool,
) -> Result<Coerced, String> {
    let Some(id) = types.by_name("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta") else {
        return Err("no type ObjectMeta".to_owned());
    };
    let mut work = Work {
        types,
        id,
        repair,
        unknown: Vec::new(),
    };
    if let Value::Object(map) = object {
        work.metadata(map, "")?;
    }
    let mut coerced = Coerced {
        unknown: std::mem::take(&mut work.unknown),
    };
    if schema.any(&|node| node.embedded_resource) {
        work.walk(object, schema, "")?;
        work.unknown.sort_unstable();
        coerced.unknown.append(&mut work.unknown);
    }
    Ok(coerced)
}

struct Work<'a> {
    types: &'a Schema,
    id: TypeId,
    repair: bool,
    unknown: Vec<String>,
}

impl Work<'_> {
    fn metadata(&mut self, map: &mut Map<String, Value>, path: &str) -> Result<(), String> {
        let Some(metadata) = map.get_mut("metadata") else {
            return Ok(());
        };
        let prefix = if path.is_empty() {
            "metadata".to_owned()
        } else {
            format!("{path}.metadata")
        };
        match decode::check(self.types, self.id, metadata.clone()) {
            Ok(checked) => {
                for finding in checked.strict_errors {
                    let field = finding.trim_start_matches("unknown field ").trim_matches('"');
                    self.unknown.push(format!("{prefix}.{field}"));
                }
                *metadata = checked.value;
            }
            Err(error) if !self.repair && path.is_empty() => return Err(error.to_string()),
            Err(error) if !self.repair => {
                return Err(format!("{prefix}: Invalid value: {metadata}: {error}"));
            }
            Err(_) => {
                let mut kept = Map::new();
                for (key, value) in metadata.as_object().into_iter().flatten() {
                    let single = Value::Object(Map::from_iter([(key.clone(), value.clone())]));
                    if let Ok(checked) = decode::check(self.types, self.id, single)
                        && let Value::Object(fields) = checked.value
                    {
                        kept.extend(fields);
                    }
                }
                *metadata = Value::Object(kept);
            }
        }
        crate::normalise(self.types, self.id, metadata);
        Ok(())
    }

    fn walk(&mut self, value: &mut Value, schema: &Structural, path: &str) -> Result<(), String> {
        match value {
            Value::Object(map) => {
                if schema.embedded_resource {
                    for key in ["apiVersion", "kind"] {
                        match map.get(key) {
                            None | Some(Value::String(_)) => {}
                            Some(_) if self.repair => drop(map.remove(key)),
                            Some(found) => {
                                let at = if path.is_empty() {
                                    key.to_owned()
                                } else {
                                    format!("{path}.{key}")
                                };
                                return Err(format!("{at}: Invalid value: {found}: must be a string"));
                            }
                        }
                    }
                    self.metadata(map, path)?;
                }
                for (key, value) in map.iter_mut() {
                    if schema.embedded_resource && key == "metadata" {
                        continue;
                    }
                    let below = match (schema.properties.get(key), &schema.additional) {
                        (Some(property), _) => property,
                        (None, Additional::Schema(additional)) => additional,
                        _ => continue,
                    };
                    let at = if path.is_empty() {
                        key.clone()
                    } else {
                        format!("{path}.{key}")
                    };
                    self.walk(value, below, &at)?;
                }
            }
            Value::Array(values) => {
                let Some(items) = &schema.items else { return Ok(()) };
                for (index, value) in values.iter_mut().enumerate() {
                    self.walk(value, items, &format!("{path}[{index}]"))?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}
