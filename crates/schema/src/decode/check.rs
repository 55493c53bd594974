//! Decodes a document into a type of the table: drops unknown fields, puts special types into canonical
//! form, and says what upstream's Go decoder says about fields that are unknown, double or wrong.

use serde_json::{Map, Value};

use super::node::{Node, number};
use super::specials;
use super::strict::Strict;
use crate::types::{Field, Scalar, Schema, Shape, Special, TypeId};

pub(super) struct Checker<'a> {
    schema: &'a Schema,
    pub strict: Strict,
    /// The first wrong type; decoding goes on, because an error of a special type would win.
    saved: Option<String>,
    /// The struct and the fields on the way, for messages.
    context: Option<&'a str>,
    stack: Vec<&'a str>,
}

type Fatal = String;

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

    pub fn run(mut self, id: TypeId, node: Node) -> Result<(Value, Vec<String>), String> {
        let value = match node {
            Node::Null => None,
            Node::Object(entries) => Some(self.object(entries, id)?),
            other => {
                self.mismatch(specials::go_value(&other), &Shape::Struct(id));
                None
            }
        };
        match self.saved {
            Some(message) => Err(message),
            None => Ok((
                value.unwrap_or_else(|| Value::Object(Map::new())),
                self.strict.into_errors(),
            )),
        }
    }

    fn mismatch(&mut self, found: &str, shape: &Shape) {
        if self.saved.is_none() {
            let go_type = self.schema.go_type(shape);
            self.saved = Some(match self.context {
                Some(name) => {
                    let path = self.stack.join(".");
                    format!(
                        "json: cannot unmarshal {found} into Go struct field {name}.{path} of type {go_type}"
                    )
                }
                None => format!("json: cannot unmarshal {found} into Go value of type {go_type}"),
            });
        }
    }

    /// `None` is a null, which leaves the zero value in Go.
    fn decode(&mut self, node: Node, shape: &'a Shape) -> Result<Option<Value>, Fatal> {
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
                        values.insert(key, value.unwrap_or_else(|| zero(&map.of)));
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

    fn object(&mut self, entries: Vec<(String, Node)>, id: TypeId) -> Result<Value, Fatal> {
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
            if values.contains_key(&key) || nulls.contains(&&*field.name) {
                self.strict.duplicate(&key);
            }
            let value = self.field(node, field, t.short_name(), &key)?;
            match value {
                Some(value) => drop(values.insert(key, value)),
                None => {
                    values.remove(&key);
                    nulls.push(&field.name);
                }
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
    ) -> Result<Option<Value>, Fatal> {
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
                    self.saved.get_or_insert(message);
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

    fn special(&mut self, node: Node, special: Special) -> Result<Option<Value>, Fatal> {
        if node == Node::Null {
            return Ok(None);
        }
        match special {
            Special::Time => time(&node, false),
            Special::MicroTime => time(&node, true),
            Special::Duration => specials::duration(specials::text(&node)?).map(Some),
            Special::Quantity => specials::quantity(&node).map(Some),
            Special::IntOrString => specials::int_or_string(node).map(Some),
            // Kept as they are: whoever knows the inner type looks into them.
            Special::RawExtension | Special::FieldsV1 | Special::Json => Ok(Some(node.into_value())),
            Special::Any => {
                self.strict.untyped(&node);
                Ok(Some(node.into_value()))
            }
            Special::JsonSchemaPropsOrBool => match node {
                Node::Bool(b) => Ok(Some(Value::Bool(b))),
                Node::Object(_) => self.json_schema(node),
                _ => Err("boolean or JSON schema expected".to_string()),
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
                        .collect::<Result<_, Fatal>>()?;
                    Ok(Some(Value::Array(values)))
                }
                _ => Ok(None),
            },
            Special::JsonSchemaPropsOrStringArray => match node {
                Node::Object(_) => self.json_schema(node),
                Node::Array(nodes) => {
                    let values = nodes
                        .into_iter()
                        .map(|node| specials::text(&node).map(Value::from))
                        .collect::<Result<_, Fatal>>()?;
                    Ok(Some(Value::Array(values)))
                }
                _ => Ok(None),
            },
        }
    }

    /// A schema inside a schema. Go decodes it apart, so unknown fields in it are dropped in silence and
    /// errors begin a path of their own.
    fn json_schema(&mut self, node: Node) -> Result<Option<Value>, Fatal> {
        match json_schema_props(self.schema) {
            Some(id) => Ok(Some(Checker::new(self.schema).run(id, node)?.0)),
            None => Ok(Some(node.into_value())),
        }
    }
}

fn time(node: &Node, micro: bool) -> Result<Option<Value>, Fatal> {
    Ok(Some(specials::time(specials::text(node)?, micro)?).filter(|value| !value.is_null()))
}

pub(crate) fn json_schema_props(schema: &Schema) -> Option<TypeId> {
    schema.by_name("io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps")
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
