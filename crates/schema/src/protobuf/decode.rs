//! Protobuf to JSON by the type tables, in the shape and order in which objects are kept: keys by name,
//! zero values left out where Go leaves them out. Unknown fields are skipped, as every reader does.

use serde_json::Value;

use super::layout::{FieldLayout, Layouts};
use super::sink::{Sink, Text, Tree};
use super::wire::{Wire, next_field, varint};
use super::{MAX_DEPTH, ProtobufError, Result, special};
use crate::types::{Field, List, Map, Scalar, Schema, Shape, Special, TypeId};

/// A message as a value. It has no kind or apiVersion: those are in the envelope.
pub fn decode(schema: &Schema, id: TypeId, message: &[u8]) -> Result<Value> {
    let mut decoder = Decoder::new(schema, Tree::default());
    decoder.sink.open_object();
    decoder.root(id, message)?;
    Ok(decoder.sink.done)
}

/// A message as JSON bytes that begin with `opening`: an open object with fields, and a comma.
pub fn decode_json(schema: &Schema, id: TypeId, opening: &str, message: &[u8]) -> Result<Vec<u8>> {
    let mut out = Vec::with_capacity(opening.len() + message.len() * 2 + 64);
    out.extend_from_slice(opening.trim_end_matches(',').as_bytes());
    let mut decoder = Decoder::new(schema, Text { out });
    decoder.root(id, message)?;
    Ok(decoder.sink.out)
}

struct Decoder<'s, 'a, S> {
    schema: &'s Schema,
    layouts: &'s Layouts,
    sink: S,
    /// The fields of the messages that are being read by slot, one frame a message.
    found: Vec<(u16, Wire<'a>)>,
    depth: usize,
}

impl<'s, 'a, S: Sink> Decoder<'s, 'a, S> {
    fn new(schema: &'s Schema, sink: S) -> Decoder<'s, 'a, S> {
        Decoder {
            schema,
            layouts: schema.layouts(),
            sink,
            found: Vec::with_capacity(64),
            depth: 0,
        }
    }

    /// Reads the outermost message into an object that is open already.
    fn root(&mut self, id: TypeId, message: &'a [u8]) -> Result<()> {
        if !self.layouts.get(id).encodable {
            return Err(ProtobufError::NotEncodable(self.schema.get(id).go_type()));
        }
        self.collect(&self.layouts.get(id).parts, message)
            .map_err(|error| error.of(&self.schema.get(id).go_type()))?;
        self.fields(id, 0)
    }

    fn enter(&mut self) -> Result<()> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(ProtobufError::TooDeep);
        }
        Ok(())
    }

    /// Sorts the fields of a message into slots.
    fn collect(&mut self, parts: &'s [FieldLayout], mut bytes: &'a [u8]) -> Result<()> {
        let mut at = 0;
        while let Some((number, wire)) = next_field(&mut bytes)? {
            // Fields come in the order of their numbers: look on from the last find.
            let found = (at..parts.len())
                .chain(0..at)
                .find(|place| parts[*place].number() == number);
            let Some(place) = found else { continue };
            at = place;
            match (&parts[place], wire) {
                (FieldLayout::Field { slot, .. }, wire) => self.found.push((*slot, wire)),
                (FieldLayout::Inlined { parts, .. }, Wire::Bytes(inner)) => self.collect(parts, inner)?,
                (FieldLayout::Inlined { number, .. }, wire) => {
                    return Err(mismatch(&number.to_string(), wire));
                }
            }
        }
        Ok(())
    }

    /// A message as an object. One that comes in pieces is the sum of them.
    fn message(&mut self, id: TypeId, pieces: std::ops::Range<usize>, name: &str) -> Result<()> {
        self.enter()?;
        let base = self.found.len();
        let parts = &self.layouts.get(id).parts;
        for place in pieces {
            let piece = bytes(name, self.found[place].1)?;
            self.collect(parts, piece)
                .map_err(|error| error.of(&self.schema.get(id).go_type()))?;
        }
        self.sink.open_object();
        self.fields(id, base)?;
        self.depth -= 1;
        Ok(())
    }

    /// A message that stands for itself.
    fn one_message(&mut self, id: TypeId, message: &'a [u8]) -> Result<()> {
        self.inner_message(id, message, false)
    }

    /// Whether a list holds objects of a kind that say in JSON what they are: all but the items of a List do.
    fn whole_objects(&self, name: &str, list: &'s List) -> bool {
        match &list.of {
            Shape::Struct(id) => self.schema.get(*id).group_versions.len() == 1 && name != "items",
            _ => false,
        }
    }

    /// An object within another. Its kind is not on the wire, but of the type.
    fn whole_object(&mut self, id: TypeId, message: &'a [u8]) -> Result<()> {
        self.inner_message(id, message, true)
    }

    fn inner_message(&mut self, id: TypeId, message: &'a [u8], with_kind: bool) -> Result<()> {
        self.enter()?;
        let base = self.found.len();
        self.collect(&self.layouts.get(id).parts, message)?;
        self.sink.open_object();
        let t = self.schema.get(id);
        if with_kind && let [(group, version)] = &t.group_versions[..] {
            self.sink.key("apiVersion");
            if group.is_empty() {
                self.sink.plain(version);
            } else {
                self.sink.plain(&format!("{group}/{version}"));
            }
            self.sink.key("kind");
            self.sink.plain(t.short_name());
        }
        self.fields(id, base)?;
        self.depth -= 1;
        Ok(())
    }

    /// Writes the fields that were found since `base` in the order of their names, and closes the object.
    fn fields(&mut self, id: TypeId, base: usize) -> Result<()> {
        let (t, layout) = (self.schema.get(id), self.layouts.get(id));
        let frame = &mut self.found[base..];
        if !frame.is_sorted_by_key(|(slot, _)| *slot) {
            frame.sort_by_key(|(slot, _)| *slot);
        }
        let end = self.found.len();
        let mut at = base;
        for (place, slot) in layout.slots.iter().enumerate() {
            let start = at;
            while at < end && usize::from(self.found[at].0) == place {
                at += 1;
            }
            if start < at {
                self.field(&t.fields[slot.field as usize], slot.always, start..at)?;
            } else if slot.always {
                self.unset(&t.fields[slot.field as usize])?;
            }
        }
        self.found.truncate(base);
        self.sink.close_object();
        Ok(())
    }

    fn unset(&mut self, field: &'s Field) -> Result<()> {
        self.sink.key(&field.name);
        if field.pointer {
            self.sink.null();
            return Ok(());
        }
        self.zero(&field.shape)
    }

    /// What Go prints for a value that nobody set.
    fn zero(&mut self, shape: &'s Shape) -> Result<()> {
        match shape {
            Shape::Scalar(Scalar::Bool, _) => self.sink.bool(false),
            Shape::Scalar(Scalar::String, _) => self.sink.plain(""),
            Shape::Scalar(Scalar::Bytes, _) | Shape::List(_) | Shape::Map(_) => self.sink.null(),
            Shape::Scalar(..) => self.sink.integer(0),
            Shape::Struct(id) => return self.one_message(*id, &[]),
            Shape::Special(special) => match special {
                Special::Quantity => self.sink.plain("0"),
                Special::IntOrString => self.sink.integer(0),
                Special::Duration => self.sink.plain("0s"),
                Special::JsonSchemaPropsOrBool => self.sink.bool(false),
                _ => self.sink.null(),
            },
        }
        Ok(())
    }

    /// A field that is on the wire, as often as it is there.
    fn field(&mut self, field: &'s Field, always: bool, found: std::ops::Range<usize>) -> Result<()> {
        let name = field.name.as_ref();
        let last = self.found[found.end - 1].1;
        match &field.shape {
            Shape::List(list) => self.list(name, list, found),
            Shape::Map(map) => self.map(name, map, found),
            Shape::Struct(id) => {
                self.sink.key(name);
                self.message(*id, found, name)
            }
            // Go writes every field that is no pointer; the JSON form leaves zero values out.
            shape if !always && is_zero(shape, last, field.pointer) => Ok(()),
            shape => {
                self.sink.key(name);
                self.value(name, shape, last)
            }
        }
    }

    fn list(&mut self, name: &str, list: &'s List, found: std::ops::Range<usize>) -> Result<()> {
        self.sink.key(name);
        if list.wrapped {
            return self.wrapped(name, list, self.found[found.end - 1].1);
        }
        let whole = self.whole_objects(name, list);
        self.sink.open_array();
        for place in found {
            match (&list.of, self.found[place].1) {
                (Shape::Struct(id), Wire::Bytes(message)) if whole => self.whole_object(*id, message)?,
                (
                    Shape::Scalar(Scalar::Bool | Scalar::Int | Scalar::Int32 | Scalar::Int64, _),
                    Wire::Bytes(mut packed),
                ) => {
                    while !packed.is_empty() {
                        let number = varint(&mut packed)?;
                        self.value(name, &list.of, Wire::Varint(number))?;
                    }
                }
                (shape, wire) => self.value(name, shape, wire)?,
            }
        }
        self.sink.close_array();
        Ok(())
    }

    fn wrapped(&mut self, name: &str, list: &'s List, wire: Wire<'a>) -> Result<()> {
        let mut items = bytes(name, wire)?;
        self.sink.open_array();
        while let Some((number, wire)) = next_field(&mut items)? {
            if number == 1 {
                self.value(name, &list.of, wire)?;
            }
        }
        self.sink.close_array();
        Ok(())
    }

    fn map(&mut self, name: &str, map: &'s Map, found: std::ops::Range<usize>) -> Result<()> {
        let mut entries: Vec<(&'a [u8], Option<Wire<'a>>)> = Vec::with_capacity(found.len());
        for place in found {
            let mut entry = bytes(name, self.found[place].1)?;
            let (mut key, mut value) = (&[][..], None);
            while let Some((number, wire)) = next_field(&mut entry)? {
                match (number, wire) {
                    (1, Wire::Bytes(text)) => key = text,
                    (2, wire) => value = Some(wire),
                    _ => {}
                }
            }
            entries.push((key, value));
        }
        if !entries.is_sorted_by(|a, b| a.0 < b.0) {
            // Of entries with the same key the last one counts.
            entries.reverse();
            entries.sort_by_key(|(key, _)| *key);
            entries.dedup_by_key(|(key, _)| *key);
        }
        self.sink.key(name);
        self.sink.open_object();
        for (key, value) in entries {
            self.sink.map_key(&text(key));
            match value {
                Some(wire) => self.value(name, &map.of, wire)?,
                None => self.zero(&map.of)?,
            }
        }
        self.sink.close_object();
        Ok(())
    }

    fn value(&mut self, name: &str, shape: &'s Shape, wire: Wire<'a>) -> Result<()> {
        match (shape, wire) {
            (Shape::Scalar(Scalar::Bool, _), Wire::Varint(number)) => self.sink.bool(number != 0),
            (Shape::Scalar(Scalar::Int32, _), Wire::Varint(number)) => {
                self.sink.integer(i64::from(number as i32));
            }
            (Shape::Scalar(Scalar::Int64 | Scalar::Int, _), Wire::Varint(number)) => {
                self.sink.integer(number as i64);
            }
            (Shape::Scalar(Scalar::Float64, _), Wire::Fixed64(bits)) => {
                self.sink.float(f64::from_bits(bits))?;
            }
            (Shape::Scalar(Scalar::Float64, _), Wire::Fixed32(bits)) => {
                self.sink.float(f64::from(f32::from_bits(bits)))?;
            }
            (Shape::Scalar(Scalar::String, _), Wire::Bytes(found)) => self.sink.string(&text(found)),
            (Shape::Scalar(Scalar::Bytes, _), Wire::Bytes(found)) => {
                use base64::Engine as _;
                self.sink
                    .plain(&base64::engine::general_purpose::STANDARD.encode(found));
            }
            (Shape::Struct(id), Wire::Bytes(message)) => self.one_message(*id, message)?,
            (Shape::Special(special), Wire::Bytes(message)) => {
                if !special::read(&mut self.sink, *special, name, message)? {
                    self.json_schema(name, *special, message)?;
                }
            }
            (Shape::List(list), wire @ Wire::Bytes(_)) if list.wrapped => self.wrapped(name, list, wire)?,
            // A list or map inside a list or map has no protobuf form of its own.
            (Shape::List(_) | Shape::Map(_), _) => return Err(ProtobufError::NotBuilt(name.to_owned())),
            (_, wire) => return Err(mismatch(name, wire)),
        }
        Ok(())
    }

    /// The places of a schema that hold a schema or something simpler.
    fn json_schema(&mut self, name: &str, special: Special, mut message: &'a [u8]) -> Result<()> {
        let id = match self.layouts.json_schema {
            Some(id) if special != Special::Any => id,
            _ => return Err(ProtobufError::NotBuilt(name.to_owned())),
        };
        let (mut allows, mut schema, mut more) = (false, None, Vec::new());
        while let Some(field) = next_field(&mut message)? {
            match (special, field) {
                (Special::JsonSchemaPropsOrBool, (1, Wire::Varint(value))) => allows = value != 0,
                (Special::JsonSchemaPropsOrBool, (2, Wire::Bytes(inner))) => schema = Some(inner),
                (Special::JsonSchemaPropsOrBool, _) => {}
                (_, (1, Wire::Bytes(inner))) => schema = Some(inner),
                (_, (2, Wire::Bytes(inner))) => more.push(inner),
                _ => {}
            }
        }
        match special {
            Special::JsonSchemaPropsOrBool => match schema {
                Some(schema) => self.one_message(id, schema)?,
                None => self.sink.bool(allows),
            },
            _ if more.is_empty() => match schema {
                Some(schema) => self.one_message(id, schema)?,
                None => self.sink.null(),
            },
            _ => {
                self.sink.open_array();
                for inner in more {
                    match special {
                        Special::JsonSchemaPropsOrArray => self.one_message(id, inner)?,
                        _ => self.sink.string(&text(inner)),
                    }
                }
                self.sink.close_array();
            }
        }
        Ok(())
    }
}

/// Whether JSON leaves this value out, if it may.
fn is_zero(shape: &Shape, wire: Wire<'_>, pointer: bool) -> bool {
    match (shape, wire) {
        (Shape::Special(Special::Time | Special::MicroTime), Wire::Bytes(bytes)) => bytes.is_empty(),
        (Shape::Scalar(..), _) if pointer => false,
        (Shape::Scalar(..), Wire::Bytes(bytes)) => bytes.is_empty(),
        (Shape::Scalar(Scalar::Int32, _), Wire::Varint(value)) => value as i32 == 0,
        (Shape::Scalar(..), Wire::Varint(value)) => value == 0,
        (Shape::Scalar(..), Wire::Fixed64(bits)) => f64::from_bits(bits) == 0.0,
        _ => false,
    }
}

/// COMPAT: upstream's readers do not look at strings; its JSON writer replaces what is not UTF-8.
fn text(bytes: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

fn bytes<'a>(name: &str, wire: Wire<'a>) -> Result<&'a [u8]> {
    match wire {
        Wire::Bytes(bytes) => Ok(bytes),
        other => Err(mismatch(name, other)),
    }
}

/// A field as upstream's types call it, for messages.
fn go_name(name: &str) -> String {
    match name {
        "metadata" => "ObjectMeta".to_owned(),
        "uid" | "ip" | "url" => name.to_uppercase(),
        "apiVersion" => "APIVersion".to_owned(),
        _ => {
            let mut name = name.to_owned();
            if let Some(first) = name.get_mut(..1) {
                first.make_ascii_uppercase();
            }
            name
        }
    }
}

fn mismatch(name: &str, wire: Wire<'_>) -> ProtobufError {
    ProtobufError::Mismatch {
        wire: wire.number(),
        field: go_name(name),
    }
}
