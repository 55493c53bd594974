//! Decodes a document into a type of the table: drops unknown fields, puts special types into canonical
//! form, and says what upstream's Go decoder says about fields that are unknown, double or wrong.

use serde_json::{Map, Value};

use super::node::{Node, number};
use super::specials::{self, Mismatch};
use super::strict::Strict;
use crate::types::{Field, Scalar, Schema, Shape, Special, TypeId};

pub(super) struct Checker<'a> {
    schema: &'a Schema,
    pub strict: Strict,
    /// The first wrong type; decoding goes on, because an error of a special type would win.
    saved: Option<Failure>,
    /// The struct and the fields on the way, for messages.
    context: Option<&'a str>,
    stack: Vec<&'a str>,
}

/// Why a value does not decode. Go adds the place to type errors only, also to those that a special type
/// found on its own.
enum Failure {
    Text(String),
    Type {
        found: String,
        go_type: String,
        owner: Option<String>,
        path: String,
    },
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Text(text) => f.write_str(text),
            Failure::Type {
                found,
                go_type,
                owner: Some(owner),
                path,
            } => {
                write!(
                    f,
                    "json: cannot unmarshal {found} into Go struct field {owner}.{path} of type {go_type}"
                )
            }
            Failure::Type {
                found,
                go_type,
                owner: None,
                ..
            } => {
                write!(
                    f,
                    "json: cannot unmarshal {found} into Go value of type {go_type}"
                )
            }
        }
    }
}

impl From<Mismatch> for Failure {
    fn from(mismatch: Mismatch) -> Failure {
        let Mismatch { found, go_type } = mismatch;
        Failure::Type {
            found,
            go_type: go_type.to_string(),
            owner: None,
            path: String::new(),
        }
    }
}

impl<'a> Checker<'a> {
    pub fn new(schema: &'a Schema) -> Checker<'a> {
        Checker {
            schema,
            strict: Strict::default(),
            saved: None,
            context: None,
            stack: Vec::new(),
        }
    }

    pub fn run(self, id: TypeId, node: Node) -> Result<(Value, Vec<String>), String> {
        self.run_nested(id, node).map_err(|failure| failure.to_string())
    }

    fn run_nested(mut self, id: TypeId, node: Node) -> Result<(Value, Vec<String>), Failure> {
        let value = match node {
            Node::Null => None,
            Node::Object(entries) => match self.object(entries, id) {
                Ok(value) => Some(value),
                Err(failure) => return Err(self.in_context(failure)),
            },
            other => {
                self.mismatch(specials::go_value(&other), &Shape::Struct(id));
                None
            }
        };
        match self.saved {
            Some(failure) => Err(failure),
            None => Ok((
                value.unwrap_or_else(|| Value::Object(Map::new())),
                self.strict.into_errors(),
            )),
        }
    }

    fn in_context(&self, failure: Failure) -> Failure {
        match (failure, self.context) {
            (
                Failure::Type {
                    found, go_type, path, ..
                },
                Some(owner),
            ) => {
                let mut stack = self.stack.clone();
                if !path.is_empty() {
                    stack.push(&path);
                }
                Failure::Type {
                    found,
                    go_type,
                    owner: Some(owner.to_string()),
                    path: stack.join("."),
                }
            }
            (failure, _) => failure,
        }
    }

    fn mismatch(&mut self, found: &str, shape: &Shape) {
        if self.saved.is_none() {
            let (found, go_type) = (found.to_string(), self.schema.go_type(shape));
            let failure = Failure::Type {
                found,
                go_type,
                owner: None,
                path: String::new(),
            };
            self.saved = Some(self.in_context(failure));
        }
    }

    /// `None` is a null, which leaves the zero value in Go.
    fn decode(&mut self, node: Node, shape: &'a Shape) -> Result<Option<Value>, Failure> {
        match shape {
            Shape::Special(special) => self.special(node, *special),
            Shape::Scalar(scalar, _) => Ok(self.scalar(node, *scalar, shape)),
            Shape::Struct(id) => match node {
                Node::Null => Ok(None),
                Node::Object(entries) => self.object(entries, *id).map(Some),
                other => {
                    self.mismatch(specials::go_value(&other), shape);
                    Ok(None)
                }
            },
            Shape::List(list) => match node {
                Node::Null => Ok(None),
                Node::Array(nodes) => {
                    let mut values = Vec::with_capacity(nodes.len());
                    for (index, node) in nodes.into_iter().enumerate() {
                        let mark = self.strict.push_index(index);
                        let value = self.decode(node, &list.of)?;
                        self.strict.pop(mark);
                        values.push(value.unwrap_or_else(|| zero(&list.of)));
                    }
                    Ok(Some(Value::Array(values)))
                }
                other => {
                    self.mismatch(specials::go_value(&other), shape);
                    Ok(None)
                }
            },
            Shape::Map(map) => match node {
                Node::Null => Ok(None),
                Node::Object(entries) => {
                    let mut values = Map::new();
                    for (key, node) in entries {
                        if values.contains_key(&key) {
                            self.strict.duplicate(&key);
                        }
                        let mark = self.strict.push_key(&key);
                        let value = self.decode(node, &map.of)?;
                        self.strict.pop(mark);
                        values.insert(key, value.unwrap_or_else(|| entry_zero(&map.of)));
                    }
                    Ok(Some(Value::Object(values)))
                }
                other => {
                    self.mismatch(specials::go_value(&other), shape);
                    Ok(None)
                }
            },
        }
    }

    fn object(&mut self, entries: Vec<(String, Node)>, id: TypeId) -> Result<Value, Failure> {
        let schema = self.schema;
        let t = schema.get(id);
        let mut values = Map::new();
        // Fields that were null are seen too, and leave no value.
        let mut nulls: Vec<&str> = Vec::new();
        for (key, node) in entries {
            let Some(field) = t.field(&key) else {
                self.strict.unknown(&key);
                continue;
            };
            let earlier = values.remove(&key);
            if earlier.is_some() || nulls.contains(&&*field.name) {
                self.strict.duplicate(&key);
            }
            match self.field(node, field, t.short_name(), &key)? {
                Some(value) => {
                    let value = match earlier {
                        Some(earlier) => overlay(schema, &field.shape, earlier, value),
                        None => value,
                    };
                    values.insert(key, value);
                }
                None => nulls.push(&field.name),
            }
        }
        Ok(Value::Object(values))
    }

    fn field(
        &mut self,
        node: Node,
        field: &'a Field,
        owner: &'a str,
        key: &str,
    ) -> Result<Option<Value>, Failure> {
        let (context, depth) = (self.context.replace(owner), self.stack.len());
        if let Some(embed) = field.embed() {
            self.stack.push(&embed.go_name);
        }
        self.stack.push(&field.name);
        let mark = self.strict.push_key(key);
        let value = self.decode(node, &field.shape)?;
        self.strict.pop(mark);
        self.stack.truncate(depth);
        self.context = context;
        Ok(value)
    }

    fn scalar(&mut self, node: Node, scalar: Scalar, shape: &Shape) -> Option<Value> {
        match (scalar, node) {
            (_, Node::Null) => None,
            (Scalar::Bool, Node::Bool(b)) => Some(Value::Bool(b)),
            (Scalar::String, Node::String(text)) => Some(Value::String(text)),
            (Scalar::Bytes, Node::String(text)) => match specials::bytes(text) {
                Ok(value) => Some(value),
                Err(message) => {
                    self.saved.get_or_insert(Failure::Text(message));
                    None
                }
            },
            (Scalar::Bytes, Node::Array(nodes)) => {
                let numbers: Option<Vec<u8>> = nodes
                    .iter()
                    .map(|node| {
                        if let Node::Number(text) = node {
                            text.parse().ok()
                        } else {
                            None
                        }
                    })
                    .collect();
                if numbers.is_none() {
                    self.mismatch("number", shape);
                }
                numbers.map(|numbers| specials::bytes_of(&numbers))
            }
            (Scalar::Int32, Node::Number(text)) => match text.parse::<i32>() {
                Ok(n) => Some(n.into()),
                Err(_) => {
                    self.mismatch(&format!("number {text}"), shape);
                    None
                }
            },
            (Scalar::Int64 | Scalar::Int, Node::Number(text)) => match text.parse::<i64>() {
                Ok(n) => Some(n.into()),
                Err(_) => {
                    self.mismatch(&format!("number {text}"), shape);
                    None
                }
            },
            (Scalar::Float64, Node::Number(text)) => match number(&text) {
                Some(n) => Some(Value::Number(n)),
                None => {
                    self.mismatch(&format!("number {text}"), shape);
                    None
                }
            },
            (_, other) => {
                self.mismatch(specials::go_value(&other), shape);
                None
            }
        }
    }

    fn special(&mut self, node: Node, special: Special) -> Result<Option<Value>, Failure> {
        if node == Node::Null {
            return Ok(None);
        }
        match special {
            Special::Time => time(&node, false),
            Special::MicroTime => time(&node, true),
            Special::Duration => Ok(Some(
                specials::duration(specials::text(&node)?).map_err(Failure::Text)?,
            )),
            Special::Quantity => specials::quantity(&node).map(Some).map_err(Failure::Text),
            Special::IntOrString => Ok(Some(specials::int_or_string(node)?)),
            // Kept as they are: whoever knows the inner type looks into them.
            Special::RawExtension | Special::FieldsV1 | Special::Json => Ok(Some(node.into_value())),
            Special::Any => {
                self.strict.untyped(&node);
                Ok(Some(node.into_value()))
            }
            Special::JsonSchemaPropsOrBool => match node {
                Node::Bool(b) => Ok(Some(Value::Bool(b))),
                Node::Object(_) => self.json_schema(node),
                _ => Err(Failure::Text("boolean or JSON schema expected".to_string())),
            },
            Special::JsonSchemaPropsOrArray => match node {
                Node::Object(_) => self.json_schema(node),
                Node::Array(nodes) => {
                    let values = nodes
                        .into_iter()
                        .map(|node| {
                            Ok(self
                                .json_schema(node)?
                                .unwrap_or_else(|| Value::Object(Map::new())))
                        })
                        .collect::<Result<_, Failure>>()?;
                    Ok(Some(Value::Array(values)))
                }
                _ => Ok(None),
            },
            Special::JsonSchemaPropsOrStringArray => match node {
                Node::Object(_) => self.json_schema(node),
                Node::Array(nodes) => {
                    let values = nodes
                        .into_iter()
                        .map(|node| Ok(Value::from(specials::text(&node)?)))
                        .collect::<Result<_, Failure>>()?;
                    Ok(Some(Value::Array(values)))
                }
                _ => Ok(None),
            },
        }
    }

    /// A schema inside a schema. Go decodes it apart, so unknown fields in it are dropped in silence and
    /// errors begin a path of their own.
    fn json_schema(&mut self, node: Node) -> Result<Option<Value>, Failure> {
        match json_schema_props(self.schema) {
            Some(id) => Ok(Some(Checker::new(self.schema).run_nested(id, node)?.0)),
            None => Ok(Some(node.into_value())),
        }
    }
}

/// A field given twice: Go decodes the second value over the first.
fn overlay(schema: &Schema, shape: &Shape, earlier: Value, later: Value) -> Value {
    match (shape, earlier, later) {
        (Shape::Struct(id), Value::Object(mut under), Value::Object(over)) => {
            for (key, value) in over {
                let value = match (schema.get(*id).field(&key), under.remove(&key)) {
                    (Some(field), Some(earlier)) => overlay(schema, &field.shape, earlier, value),
                    _ => value,
                };
                under.insert(key, value);
            }
            Value::Object(under)
        }
        (Shape::Map(_), Value::Object(mut under), Value::Object(over)) => {
            under.extend(over);
            Value::Object(under)
        }
        (_, _, later) => later,
    }
}

fn time(node: &Node, micro: bool) -> Result<Option<Value>, Failure> {
    Ok(
        Some(specials::time(specials::text(node)?, micro).map_err(Failure::Text)?)
            .filter(|value| !value.is_null()),
    )
}

pub(crate) fn json_schema_props(schema: &Schema) -> Option<TypeId> {
    schema.by_name("io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps")
}

/// What null as an entry of a map becomes: bytes that are there and empty, as they are once they were stored.
fn entry_zero(shape: &Shape) -> Value {
    match shape {
        Shape::Scalar(Scalar::Bytes, _) => "".into(),
        other => zero(other),
    }
}

/// What Go prints for a value that nobody set.
pub(crate) fn zero(shape: &Shape) -> Value {
    match shape {
        Shape::Scalar(scalar, _) => match scalar {
            Scalar::Bool => Value::Bool(false),
            Scalar::Int32 | Scalar::Int64 | Scalar::Int | Scalar::Float64 => 0.into(),
            Scalar::String => "".into(),
            Scalar::Bytes => Value::Null,
        },
        Shape::Struct(_) => Value::Object(Map::new()),
        Shape::List(_) | Shape::Map(_) => Value::Null,
        Shape::Special(special) => match special {
            Special::Quantity => "0".into(),
            Special::IntOrString => 0.into(),
            Special::Duration => "0s".into(),
            Special::JsonSchemaPropsOrBool => false.into(),
            _ => Value::Null,
        },
    }
}
