//! How each type of a schema looks to the codec: its fields by JSON name, which is the order of the JSON
//! that is written, and by number, which is the order on the wire. Made once a schema.

use crate::decode::json_schema_props;
use crate::types::{Field, Schema, Shape, Special, Type, TypeId};

#[derive(Debug)]
pub(crate) struct Layouts {
    types: Box<[Layout]>,
    /// The type of a schema inside a schema.
    pub json_schema: Option<TypeId>,
}

impl Layouts {
    pub fn new(schema: &Schema) -> Layouts {
        Layouts {
            types: schema.types().map(|(_, t)| Layout::new(t)).collect(),
            json_schema: json_schema_props(schema),
        }
    }

    pub fn get(&self, id: TypeId) -> &Layout {
        &self.types[id.0 as usize]
    }
}

#[derive(Debug)]
pub(crate) struct Layout {
    /// In the order of their names.
    pub slots: Box<[Slot]>,
    /// In the order of their numbers.
    pub parts: Box<[FieldLayout]>,
    /// A type with fields that protobuf does not know has no protobuf form at all.
    pub encodable: bool,
}

#[derive(Debug)]
pub(crate) struct Slot {
    /// The place in [`Type::fields`].
    pub field: u16,
    /// Whether Go prints the field when nobody set it.
    pub always: bool,
}

#[derive(Debug)]
pub(crate) enum FieldLayout {
    Field {
        number: u32,
        slot: u16,
    },
    /// The message of a struct that Go inlines: its fields belong to the same JSON object.
    Inlined {
        number: u32,
        parts: Box<[FieldLayout]>,
    },
}

impl FieldLayout {
    pub fn number(&self) -> u32 {
        match self {
            FieldLayout::Field { number, .. } | FieldLayout::Inlined { number, .. } => *number,
        }
    }
}

impl Layout {
    fn new(t: &Type) -> Layout {
        let mut order: Vec<u16> = (0..t.fields.len() as u16).collect();
        order.sort_by(|a, b| t.fields[*a as usize].name.cmp(&t.fields[*b as usize].name));
        let slots: Box<[Slot]> = order
            .iter()
            .map(|index| Slot {
                field: *index,
                always: always(&t.fields[*index as usize]),
            })
            .collect();
        let placed: Vec<(&[u32], u32, u16)> = slots
            .iter()
            .enumerate()
            .map(|(slot, found)| (&t.fields[found.field as usize], slot as u16))
            .map(|(field, slot)| {
                let path: &[u32] = field.embed().map_or(&[], |embed| &embed.numbers);
                (path, field.number, slot)
            })
            .collect();
        let encodable = t
            .fields
            .iter()
            .all(|field| field.number != 0 || of_type_meta(field));
        Layout {
            slots,
            parts: parts(&placed),
            encodable,
        }
    }
}

fn of_type_meta(field: &Field) -> bool {
    field.embed().is_some_and(|embed| embed.go_name == "TypeMeta")
}

fn parts(placed: &[(&[u32], u32, u16)]) -> Box<[FieldLayout]> {
    let mut found = Vec::new();
    for (path, number, slot) in placed {
        match path.first() {
            None if *number != 0 => found.push(FieldLayout::Field {
                number: *number,
                slot: *slot,
            }),
            Some(outer) if *outer != 0 && !found.iter().any(|part: &FieldLayout| part.number() == *outer) => {
                let inside: Vec<_> = placed
                    .iter()
                    .filter(|(path, ..)| path.first() == Some(outer))
                    .map(|(path, number, slot)| (&path[1..], *number, *slot))
                    .collect();
                found.push(FieldLayout::Inlined {
                    number: *outer,
                    parts: parts(&inside),
                });
            }
            _ => {}
        }
    }
    found.sort_by_key(FieldLayout::number);
    found.into()
}

fn always(field: &Field) -> bool {
    if field.pointer {
        return !field.omitempty;
    }
    match &field.shape {
        // Structs are never empty in Go's eyes; only omitzero hides them.
        Shape::Struct(_) | Shape::Special(_) if field.omitzero => false,
        Shape::Special(Special::Any) => !field.omitempty,
        Shape::Struct(_) | Shape::Special(_) => true,
        _ => !field.omitempty,
    }
}
