//! JSON to protobuf by the type tables, byte for byte as upstream's generated code writes it: fields in
//! the order of their numbers, fields that are no pointers always, maps by their keys.

use std::borrow::Cow;

use serde_json::Value;

use super::layout::{FieldLayout, Layout, Layouts};
use super::source::{Node, Tape, View};
use super::wire::Back;
use super::{MAGIC, MAX_DEPTH, ProtobufError, Result, special};
use crate::types::{Field, Scalar, Schema, Shape, Special, Type, TypeId};

/// What a message is wrapped in.
#[derive(Clone, Copy, Debug)]
pub struct Header<'a> {
    pub api_version: &'a str,
    pub kind: &'a str,
    /// Leaves `metadata.resourceVersion` out, as what is stored does.
    pub unversioned: bool,
}

/// An object with its envelope.
pub fn encode(schema: &Schema, id: TypeId, header: Header<'_>, value: &Value) -> Result<Vec<u8>> {
    let mut encoder = Encoder::new(schema, header.unversioned, 1024);
    encoder.root(id, value)?;
    Ok(encoder.out.enveloped(header))
}

/// The same out of JSON bytes.
pub fn encode_json(schema: &Schema, id: TypeId, header: Header<'_>, json: &[u8]) -> Result<Vec<u8>> {
    let tape = Tape::parse(json)?;
    let mut encoder = Encoder::new(schema, header.unversioned, json.len());
    encoder.root(id, tape.root())?;
    Ok(encoder.out.enveloped(header))
}

/// A message without an envelope, out of JSON bytes: an item of a list.
pub fn encode_json_message(schema: &Schema, id: TypeId, json: &[u8]) -> Result<Vec<u8>> {
    let tape = Tape::parse(json)?;
    let mut encoder = Encoder::new(schema, false, json.len());
    encoder.root(id, tape.root())?;
    Ok(encoder.out.into_vec())
}

/// A message without an envelope.
pub fn encode_message(schema: &Schema, id: TypeId, value: &Value) -> Result<Vec<u8>> {
    let mut encoder = Encoder::new(schema, false, 256);
    encoder.root(id, value)?;
    Ok(encoder.out.into_vec())
}

/// The bytes around `length` bytes of a message that others write: what comes before and after them.
pub fn envelope_around(header: Header<'_>, length: usize) -> (Vec<u8>, &'static [u8]) {
    let mut out = Back::with_capacity(64);
    out.varint(length as u64);
    out.varint(2 << 3 | 2);
    out.type_meta(header);
    (out.into_vec(), ENVELOPE_END)
}

/// One event of a watch: its length in four bytes, and a WatchEvent around an enveloped object.
pub fn watch_frame(kind: &str, object: &[u8]) -> Vec<u8> {
    let mut out = Back::with_capacity(object.len() + 48);
    out.field_bytes(1, object);
    out.close(2, 0);
    out.field_bytes(1, kind.as_bytes());
    let length = u32::try_from(out.len()).unwrap_or(u32::MAX);
    out.put(&length.to_be_bytes());
    out.into_vec()
}

/// An item of a list, put behind what is there already.
pub fn put_item(out: &mut Vec<u8>, item: &[u8]) {
    out.push(2 << 3 | 2);
    let mut length = item.len();
    while length >= 0x80 {
        out.push(length as u8 | 0x80);
        length >>= 7;
    }
    out.push(length as u8);
    out.extend_from_slice(item);
}

/// Upstream writes the encoding and the type of the content, which are empty.
const ENVELOPE_END: &[u8] = &[0x1a, 0, 0x22, 0];

impl Back {
    fn enveloped(mut self, header: Header<'_>) -> Vec<u8> {
        let length = self.len();
        self.varint(length as u64);
        self.varint(2 << 3 | 2);
        self.type_meta(header);
        let written = self.written();
        let mut out = Vec::with_capacity(written.len() + ENVELOPE_END.len());
        out.extend_from_slice(written);
        out.extend_from_slice(ENVELOPE_END);
        out
    }

    fn type_meta(&mut self, header: Header<'_>) {
        let mark = self.len();
        self.field_bytes(2, header.kind.as_bytes());
        self.field_bytes(1, header.api_version.as_bytes());
        self.close(1, mark);
        self.put(MAGIC);
    }
}

struct Encoder<'s, N> {
    schema: &'s Schema,
    layouts: &'s Layouts,
    out: Back,
    /// The values of the fields of the messages that are being written, one frame a message.
    slots: Vec<Option<N>>,
    depth: usize,
    unversioned: bool,
}

impl<'s, 'a, N: Node<'a>> Encoder<'s, N> {
    fn new(schema: &'s Schema, unversioned: bool, capacity: usize) -> Encoder<'s, N> {
        Encoder {
            schema,
            layouts: schema.layouts(),
            out: Back::with_capacity(capacity),
            slots: Vec::with_capacity(128),
            depth: 0,
            unversioned,
        }
    }

    fn root(&mut self, id: TypeId, node: N) -> Result<()> {
        if !self.layouts.get(id).encodable {
            return Err(ProtobufError::NotEncodable(self.schema.get(id).go_type()));
        }
        self.message(id, Some(node), false)
    }

    /// Writes the fields of one message. Without a node, those of the zero value.
    fn message(&mut self, id: TypeId, node: Option<N>, unversioned: bool) -> Result<()> {
        if self.depth > MAX_DEPTH {
            return Err(ProtobufError::TooDeep);
        }
        let (schema, layouts) = (self.schema, self.layouts);
        let (t, layout) = (schema.get(id), layouts.get(id));
        let base = self.slots.len();
        self.slots.resize(base + layout.slots.len(), None);
        match node.map(N::view) {
            None | Some(View::Null) => {}
            Some(View::Object(entries)) => {
                // Both sides are mostly in the order of their names: look on from the last find.
                let mut at = 0;
                for (key, node) in entries {
                    if let Some(slot) = find(t, layout, &key, at) {
                        at = slot;
                        self.slots[base + slot] = Some(node);
                        if unversioned && key == "resourceVersion" {
                            self.slots[base + slot] = None;
                        }
                    }
                }
            }
            Some(_) => return Err(mismatch(t.short_name(), "an object")),
        }
        self.depth += 1;
        self.parts(t, layout, &layout.parts, base)?;
        self.depth -= 1;
        self.slots.truncate(base);
        Ok(())
    }

    fn parts(
        &mut self,
        t: &'s Type,
        layout: &'s Layout,
        parts: &'s [FieldLayout],
        base: usize,
    ) -> Result<()> {
        for part in parts.iter().rev() {
            match part {
                FieldLayout::Inlined { number, parts } => {
                    let mark = self.out.len();
                    self.parts(t, layout, parts, base)?;
                    self.out.close(*number, mark);
                }
                FieldLayout::Field { number, slot } => {
                    let slot = *slot as usize;
                    let field = &t.fields[layout.slots[slot].field as usize];
                    let node = self.slots[base + slot];
                    self.field(field, *number, node)?;
                }
            }
        }
        Ok(())
    }

    fn field(&mut self, field: &'s Field, number: u32, node: Option<N>) -> Result<()> {
        let view = node.map_or(View::Null, N::view);
        match (&field.shape, view) {
            (Shape::List(_) | Shape::Map(_) | Shape::Scalar(Scalar::Bytes, _), View::Null) => Ok(()),
            (_, View::Null) if field.pointer => Ok(()),
            (_, View::Null) => self.zero(&field.shape, number),
            (Shape::List(list), View::Array(items)) if list.wrapped => {
                self.wrapped(&field.name, &list.of, number, items)
            }
            (Shape::List(list), View::Array(mut items)) => {
                items.try_for_each(|item| self.value(&field.name, &list.of, number, item))
            }
            (Shape::Map(map), View::Object(entries)) => self.map(&field.name, &map.of, number, entries),
            (Shape::List(_), _) => Err(mismatch(&field.name, "an array")),
            (Shape::Map(_), _) => Err(mismatch(&field.name, "an object")),
            _ => match node {
                Some(node) => self.value(&field.name, &field.shape, number, node),
                None => Ok(()),
            },
        }
    }

    fn wrapped(&mut self, name: &str, of: &'s Shape, number: u32, items: N::Items) -> Result<()> {
        let mark = self.out.len();
        for item in items {
            self.value(name, of, 1, item)?;
        }
        self.out.close(number, mark);
        Ok(())
    }

    fn map(&mut self, name: &str, of: &'s Shape, number: u32, entries: N::Entries) -> Result<()> {
        let mut sorted: Vec<(Cow<'a, str>, N)> = Vec::new();
        for entry in entries {
            sorted.push(entry);
        }
        if !sorted.is_sorted_by(|a, b| a.0 > b.0) {
            sorted.sort_by(|a, b| b.0.cmp(&a.0));
        }
        for (key, node) in sorted {
            let mark = self.out.len();
            self.value(name, of, 2, node)?;
            self.out.field_bytes(1, key.as_bytes());
            self.out.close(number, mark);
        }
        Ok(())
    }

    /// Writes one value, which is no list or map of its own unless that is wrapped.
    fn value(&mut self, name: &str, shape: &'s Shape, number: u32, node: N) -> Result<()> {
        match (shape, node.view()) {
            (_, View::Null) => self.zero(shape, number)?,
            (Shape::Scalar(Scalar::Bool, _), View::Bool(value)) => {
                self.out.field_varint(number, u64::from(value));
            }
            // Negative numbers of either width are sign-extended to 64 bits.
            (Shape::Scalar(Scalar::Int32 | Scalar::Int64 | Scalar::Int, _), View::Integer(value)) => {
                self.out.field_varint(number, value as u64);
            }
            (Shape::Scalar(Scalar::Float64, _), View::Integer(value)) => {
                self.out.field_double(number, value as f64);
            }
            (Shape::Scalar(Scalar::Float64, _), View::Float(value)) => self.out.field_double(number, value),
            (Shape::Scalar(Scalar::String, _), View::String(text)) => {
                self.out.field_bytes(number, text.as_bytes());
            }
            (Shape::Scalar(Scalar::Bytes, _), View::String(text)) => {
                self.out.field_bytes(number, &special::base64(name, &text)?);
            }
            (Shape::Struct(id), View::Object(_)) => {
                let mark = self.out.len();
                let unversioned = self.unversioned && self.depth == 1 && name == "metadata";
                self.message(*id, Some(node), unversioned)?;
                self.out.close(number, mark);
            }
            (Shape::List(list), View::Array(items)) if list.wrapped => {
                self.wrapped(name, &list.of, number, items)?;
            }
            (Shape::Special(special), view) => self.special(name, *special, number, node, view)?,
            (Shape::Scalar(scalar, _), _) => return Err(mismatch(name, scalar_name(*scalar))),
            (Shape::Struct(_), _) => return Err(mismatch(name, "an object")),
            (Shape::List(_) | Shape::Map(_), _) => return Err(ProtobufError::NotBuilt(name.to_owned())),
        }
        Ok(())
    }

    fn zero(&mut self, shape: &'s Shape, number: u32) -> Result<()> {
        match shape {
            Shape::Scalar(Scalar::Float64, _) => self.out.field_double(number, 0.0),
            Shape::Scalar(Scalar::String, _) => self.out.field_bytes(number, b""),
            // Go tells bytes that are not there from empty ones.
            Shape::Scalar(Scalar::Bytes, _) => {}
            Shape::Scalar(..) => self.out.field_varint(number, 0),
            Shape::Struct(id) => {
                let mark = self.out.len();
                self.message(*id, None, false)?;
                self.out.close(number, mark);
            }
            Shape::Special(special) => {
                let mark = self.out.len();
                special::zero(&mut self.out, *special);
                self.out.close(number, mark);
            }
            Shape::List(_) | Shape::Map(_) => {
                let mark = self.out.len();
                self.out.close(number, mark);
            }
        }
        Ok(())
    }

    fn special(
        &mut self,
        name: &str,
        special: Special,
        number: u32,
        node: N,
        view: View<'a, N>,
    ) -> Result<()> {
        let mark = self.out.len();
        match (special, view) {
            (Special::FieldsV1, _) => self.out.field_bytes(1, &node.fields()),
            (Special::RawExtension | Special::Json, _) => {
                self.out.field_bytes(1, &node.json());
            }
            (Special::JsonSchemaPropsOrBool, View::Bool(allows)) => {
                self.out.field_varint(1, u64::from(allows));
            }
            (Special::JsonSchemaPropsOrBool, View::Object(_)) => {
                self.json_schema(2, node)?;
                self.out.field_varint(1, 1);
            }
            (Special::JsonSchemaPropsOrArray, View::Array(items)) => {
                for item in items {
                    self.json_schema(2, item)?;
                }
            }
            (Special::JsonSchemaPropsOrStringArray, View::Array(items)) => {
                for item in items {
                    let View::String(text) = item.view() else {
                        return Err(mismatch(name, "a string"));
                    };
                    self.out.field_bytes(2, text.as_bytes());
                }
            }
            (Special::JsonSchemaPropsOrArray | Special::JsonSchemaPropsOrStringArray, View::Object(_)) => {
                self.json_schema(1, node)?;
            }
            (Special::IntOrString, View::Integer(value)) => special::int(&mut self.out, value),
            (special, View::String(text)) => special::text(&mut self.out, special, name, &text)?,
            _ => return Err(mismatch(name, "what its type wants")),
        }
        self.out.close(number, mark);
        Ok(())
    }

    /// A schema inside a schema.
    fn json_schema(&mut self, number: u32, node: N) -> Result<()> {
        let id = self
            .layouts
            .json_schema
            .ok_or_else(|| ProtobufError::NotBuilt("JSONSchemaProps".to_owned()))?;
        let mark = self.out.len();
        self.message(id, Some(node), false)?;
        self.out.close(number, mark);
        Ok(())
    }
}

/// The slot of a field, looked for from `from` backwards and around.
fn find(t: &Type, layout: &Layout, key: &str, from: usize) -> Option<usize> {
    let count = layout.slots.len();
    let mut at = from;
    for _ in 0..count {
        at = if at == 0 { count - 1 } else { at - 1 };
        let name = t.fields[layout.slots[at].field as usize].name.as_ref();
        if name.len() == key.len() && name == key {
            return Some(at);
        }
    }
    None
}

fn scalar_name(scalar: Scalar) -> &'static str {
    match scalar {
        Scalar::Bool => "a bool",
        Scalar::String | Scalar::Bytes => "a string",
        _ => "a number",
    }
}

fn mismatch(name: &str, wanted: &str) -> ProtobufError {
    ProtobufError::Value(format!("field {name} is not {wanted}"))
}
