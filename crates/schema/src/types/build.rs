//! Builds a [`Schema`] type by type. Types are declared first, so that they may name each other.

use super::{Field, Name, Schema, Type, TypeId};

#[derive(Debug, Default)]
pub struct Builder {
    schema: Schema,
}

impl Builder {
    /// The id of a type by its OpenAPI name, defined already or later.
    pub fn declare(&mut self, name: impl Into<Name>) -> TypeId {
        let name = name.into();
        if let Some(id) = self.schema.by_name.get(&name) {
            return *id;
        }
        let id = TypeId(self.schema.types.len() as u32);
        self.schema.types.push(Type {
            name: name.clone(),
            ..Type::default()
        });
        self.schema.by_name.insert(name, id);
        id
    }

    /// Gives a declared type its facts. The name stays.
    pub fn define(&mut self, id: TypeId, definition: Type) {
        let slot = &mut self.schema.types[id.0 as usize];
        let name = std::mem::take(&mut slot.name);
        *slot = Type { name, ..definition };
    }

    pub fn fields(&mut self, id: TypeId, fields: Vec<Field>) {
        self.schema.types[id.0 as usize].fields = fields.into();
    }

    pub fn finish(mut self) -> Schema {
        for index in 0..self.schema.types.len() {
            let t = &self.schema.types[index];
            if t.group_versions.is_empty() {
                continue;
            }
            let short = match &t.name {
                Name::Borrowed(name) => Name::Borrowed(name.rsplit('.').next().unwrap_or(name)),
                Name::Owned(name) => Name::Owned(name.rsplit('.').next().unwrap_or(name).to_string()),
            };
            self.schema
                .by_kind
                .entry(short)
                .or_default()
                .push(TypeId(index as u32));
        }
        self.schema.types.shrink_to_fit();
        self.schema
    }
}
