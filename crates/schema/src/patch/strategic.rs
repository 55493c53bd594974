//! Strategic merge patch: lists merge by the keys of the type table, and directives in the patch say what
//! else to do (`$patch`, `$retainKeys`, `$setElementOrder`, `$deleteFromPrimitiveList`).

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::order::{self, List};
use super::{PatchError, go_print};
use crate::types::{Field, Schema, Shape, TypeId};

const PATCH: &str = "$patch";
const RETAIN_KEYS: &str = "$retainKeys";
const DELETE_FROM_PRIMITIVE_LIST: &str = "$deleteFromPrimitiveList";
const SET_ELEMENT_ORDER: &str = "$setElementOrder";

type Object = Map<String, Value>;
type Result<T> = std::result::Result<T, PatchError>;

/// What is known of the value being merged. Inside a map of the type there is no struct any more.
#[derive(Clone, Copy)]
enum Target<'a> {
    Struct(TypeId),
    Other(&'a Shape),
}

impl<'a> Target<'a> {
    fn of(shape: &'a Shape) -> Target<'a> {
        match shape {
            Shape::Struct(id) => Target::Struct(*id),
            other => Target::Other(other),
        }
    }

    /// The Go kind, as messages name it.
    fn kind(self) -> &'static str {
        match self {
            Target::Struct(_) | Target::Other(Shape::Struct(_) | Shape::Special(_)) => "struct",
            Target::Other(Shape::List(_)) => "slice",
            Target::Other(Shape::Map(_)) => "map",
            Target::Other(Shape::Scalar(..)) => "string",
        }
    }
}

struct Merger<'a> {
    schema: &'a Schema,
}

pub fn strategic_merge(schema: &Schema, id: TypeId, current: &Value, patch: &Value) -> Result<Value> {
    let (Value::Object(current), Value::Object(patch)) = (current, patch) else {
        return Err(PatchError::BadRequest("invalid JSON document".to_string()));
    };
    let merged = Merger { schema }.map(current.clone(), patch.clone(), Target::Struct(id))?;
    Ok(Value::Object(merged))
}

pub(super) fn internal(text: impl Into<String>) -> PatchError {
    PatchError::Internal(text.into())
}

fn bad_order() -> PatchError {
    PatchError::BadRequest("invalid patch format of setElementOrder list".to_string())
}

fn bad_retain_keys() -> PatchError {
    PatchError::BadRequest("invalid patch format of retainKeys".to_string())
}

pub(super) fn go_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "%!s(<nil>)",
        Value::Bool(_) => "bool",
        Value::Number(n) if n.is_f64() => "float64",
        Value::Number(_) => "int64",
        Value::String(_) => "string",
        Value::Array(_) => "[]interface {}",
        Value::Object(_) => "map[string]interface {}",
    }
}

fn expect_list(value: &Value) -> Result<&Vec<Value>> {
    value.as_array().ok_or_else(|| {
        internal(format!(
            "expected a []interface {{}}, but received a {}",
            go_type(value)
        ))
    })
}

impl<'a> Merger<'a> {
    fn field(&self, target: Target<'a>, key: &str) -> Result<&'a Field> {
        let Target::Struct(id) = target else {
            let kind = target.kind();
            return Err(internal(format!(
                "merging an object in json but data type is not struct, instead is: {kind}"
            )));
        };
        let t = self.schema.get(id);
        t.field(key).ok_or_else(|| {
            let name = t.short_name();
            internal(format!(
                "unable to find api field in struct {name} for the json field {key:?}"
            ))
        })
    }

    fn list_field(&self, target: Target<'a>, key: &str) -> Result<(&'a Field, Target<'a>)> {
        let field = self.field(target, key)?;
        match &field.shape {
            Shape::List(list) if matches!(list.of, Shape::List(_)) => {
                Err(internal("unexpected slice of slice"))
            }
            Shape::List(list) => Ok((field, Target::of(&list.of))),
            other => Err(internal(format!(
                "expected slice or array type, but got: {}",
                Target::of(other).kind()
            ))),
        }
    }

    fn map(&self, mut original: Object, mut patch: Object, target: Target<'a>) -> Result<Object> {
        if let Some(directive) = patch.get(PATCH) {
            return match directive.as_str() {
                Some("replace") => {
                    patch.remove(PATCH);
                    Ok(patch)
                }
                Some("delete") => Ok(Object::new()),
                _ => Err(unknown_patch_type(directive, &patch)),
            };
        }
        retain_keys(&mut original, &mut patch)?;
        self.ordered_lists(&mut original, &mut patch, target)?;
        for (key, value) in patch {
            self.entry(&mut original, key, value, target)?;
        }
        Ok(original)
    }

    fn entry(&self, original: &mut Object, key: String, value: Value, target: Target<'a>) -> Result<()> {
        let (key, is_delete_list) = match key.strip_prefix(DELETE_FROM_PRIMITIVE_LIST) {
            Some(rest) => match rest.strip_prefix('/') {
                Some(list) => (list.to_string(), true),
                None => {
                    return Err(PatchError::BadRequest(
                        "invalid patch format of primitive list".to_string(),
                    ));
                }
            },
            None => (key, false),
        };
        if value.is_null() {
            original.remove(&key);
            return Ok(());
        }
        let merged = match (original.remove(&key), value) {
            (Some(Value::Object(inner)), Value::Object(value)) => {
                let field = self.field(target, &key)?;
                Some(Value::Object(if field.patch_replace {
                    value
                } else {
                    self.map(inner, value, Target::of(&field.shape))?
                }))
            }
            (Some(Value::Array(inner)), Value::Array(value)) => {
                let (field, of) = self.list_field(target, &key)?;
                Some(Value::Array(self.list_by_strategy(
                    inner,
                    value,
                    field,
                    of,
                    is_delete_list,
                )?))
            }
            // A list of deletions has nothing to do where there is no list.
            (kept, _) if is_delete_list => kept,
            (_, value) => without_directives(without_nulls(value)),
        };
        if let Some(merged) = merged {
            original.insert(key, merged);
        }
        Ok(())
    }

    fn list_by_strategy(
        &self,
        original: Vec<Value>,
        patch: Vec<Value>,
        field: &'a Field,
        of: Target<'a>,
        is_delete_list: bool,
    ) -> Result<Vec<Value>> {
        if field.patch_merge || is_delete_list {
            self.list(
                original,
                patch,
                field.merge_key().unwrap_or(""),
                of,
                is_delete_list,
            )
        } else {
            Ok(patch)
        }
    }

    fn list(
        &self,
        mut original: Vec<Value>,
        mut patch: Vec<Value>,
        merge_key: &str,
        of: Target<'a>,
        is_delete_list: bool,
    ) -> Result<Vec<Value>> {
        if original.is_empty() && patch.is_empty() {
            return Ok(original);
        }
        let maps = order::elements_are_maps(&original, &patch)?;
        let list = List { merge_key, maps };
        let merged = if !maps {
            if is_delete_list {
                let gone: HashSet<String> = patch.iter().map(Value::to_string).collect();
                let left = original.into_iter();
                return Ok(left.filter(|value| !gone.contains(&value.to_string())).collect());
            }
            order::deduplicate(original.iter().chain(&patch).cloned().collect())
        } else {
            if merge_key.is_empty() {
                return Err(internal(format!(
                    "cannot merge lists without merge key for {}",
                    of.kind()
                )));
            }
            (original, patch) = special_elements(original, patch, merge_key)?;
            let mut merged = original.clone();
            let mut index = order::Index::new(merge_key);
            for element in &patch {
                let Value::Object(element) = element else { continue };
                let key = element
                    .get(merge_key)
                    .ok_or_else(|| order::no_merge_key(element, merge_key))?;
                match index.position(&merged, key)? {
                    Some(at) => {
                        if let Value::Object(inner) = std::mem::take(&mut merged[at]) {
                            merged[at] = Value::Object(self.map(inner, element.clone(), of)?);
                        }
                    }
                    None => merged.push(Value::Object(element.clone())),
                }
            }
            merged
        };
        let (in_patch, server_only) = list.partition(merged, &patch)?;
        list.arrange(in_patch, server_only, &patch, &original)
    }

    /// Lists with a `$setElementOrder` beside them: merged here, put into that order, and taken out of
    /// the patch.
    fn ordered_lists(&self, original: &mut Object, patch: &mut Object, target: Target<'a>) -> Result<()> {
        let directives: Vec<String> = patch
            .keys()
            .filter(|key| key.starts_with(SET_ELEMENT_ORDER))
            .cloned()
            .collect();
        for directive in directives {
            let Some(wanted) = patch.remove(&directive) else {
                continue;
            };
            let wanted = expect_list(&wanted)?;
            let key = directive[SET_ELEMENT_ORDER.len()..]
                .strip_prefix('/')
                .ok_or_else(bad_order)?;
            let live = original.get(key).map(expect_list).transpose()?.cloned();
            let changed = patch.get(key).map(expect_list).transpose()?.cloned();
            let (field, of) = self.list_field(target, key)?;
            let merge_key = field.merge_key().unwrap_or("");
            let no_elements = Vec::new();
            order::validate(changed.as_ref().unwrap_or(&no_elements), wanted, merge_key)?;
            let merged = match (&live, &changed) {
                (Some(live), None) => live.clone(),
                (None, Some(changed)) => match without_directives(Value::Array(changed.clone())) {
                    Some(Value::Array(values)) => values,
                    _ => continue,
                },
                (Some(live), Some(changed)) => {
                    self.list_by_strategy(live.clone(), changed.clone(), field, of, false)?
                }
                (None, None) => continue,
            };
            let (live, changed) = (live.unwrap_or_default(), changed.unwrap_or_default());
            let maps = order::elements_are_maps(&live, &changed)?;
            let list = List { merge_key, maps };
            let (in_patch, server_only) = list.partition(merged, wanted)?;
            let live = if maps {
                order::order_after_merge(&live, &changed, merge_key)
            } else {
                live
            };
            let arranged = list.arrange(in_patch, server_only, wanted, &live)?;
            original.insert(key.to_string(), Value::Array(arranged));
            patch.remove(key);
        }
        Ok(())
    }
}

fn unknown_patch_type(directive: &Value, patch: &Object) -> PatchError {
    let map = go_print(&Value::Object(patch.clone()));
    internal(format!(
        "unknown patch type: {} in map: {map}",
        go_print(directive)
    ))
}

fn retain_keys(original: &mut Object, patch: &mut Object) -> Result<()> {
    let Some(directive) = patch.remove(RETAIN_KEYS) else {
        return Ok(());
    };
    let keys = directive.as_array().ok_or_else(bad_retain_keys)?;
    let keys: HashSet<&str> = keys.iter().filter_map(Value::as_str).collect();
    let retained = |key: &str| keys.contains(key);
    for (key, value) in patch.iter() {
        let directive = key.starts_with(DELETE_FROM_PRIMITIVE_LIST) || key.starts_with(SET_ELEMENT_ORDER);
        if !value.is_null() && !directive && !retained(key) {
            return Err(bad_retain_keys());
        }
    }
    original.retain(|key, _| retained(key));
    Ok(())
}

/// Acts on the elements of a patch list that are directives: gives back the list to merge into and the
/// elements to merge.
fn special_elements(
    mut original: Vec<Value>,
    patch: Vec<Value>,
    merge_key: &str,
) -> Result<(Vec<Value>, Vec<Value>)> {
    let mut plain = Vec::with_capacity(patch.len());
    let mut replace = false;
    let mut gone = HashSet::new();
    for element in patch {
        let Value::Object(map) = &element else { continue };
        match map.get(PATCH) {
            None => plain.push(element),
            Some(directive) => match directive.as_str() {
                Some("delete") => {
                    let key = map
                        .get(merge_key)
                        .ok_or_else(|| order::no_merge_key(map, merge_key))?;
                    gone.insert(key.to_string());
                }
                Some("replace") => replace = true,
                Some("merge") => return Err(internal("merging lists cannot yet be specified in the patch")),
                _ => return Err(unknown_patch_type(directive, map)),
            },
        }
    }
    if !gone.is_empty() {
        let key = |element: &Value| element.get(merge_key).map(Value::to_string);
        original.retain(|element| key(element).is_none_or(|key| !gone.contains(&key)));
    }
    Ok(if replace {
        (plain, Vec::new())
    } else {
        (original, plain)
    })
}

/// What is new in the object must not carry nulls into it.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(map) => Value::Object(
            map.into_iter()
                .filter(|(_, v)| !v.is_null())
                .map(|(key, v)| (key, without_nulls(v)))
                .collect(),
        ),
        Value::Array(values) => Value::Array(values.into_iter().map(without_nulls).collect()),
        other => other,
    }
}

/// `None` when the value is itself a directive.
fn without_directives(value: Value) -> Option<Value> {
    Some(match value {
        Value::Object(map) => {
            if map.contains_key(PATCH) {
                return None;
            }
            Value::Object(
                map.into_iter()
                    .filter_map(|(key, v)| Some((key, without_directives(v)?)))
                    .collect(),
            )
        }
        Value::Array(values) => Value::Array(values.into_iter().filter_map(without_directives).collect()),
        other => other,
    })
}
