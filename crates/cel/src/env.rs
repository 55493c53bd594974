//! What an expression is compiled against: its variables and the fields of their types. The functions are always
//! those of Kubernetes v1.36.

use std::collections::HashMap;
use std::sync::Arc;

use crate::decl::DeclType;
use crate::types::Type;

/// Variables, and the object types that can be reached from them.
#[derive(Debug, Clone, Default)]
pub struct Env {
    variables: HashMap<Arc<str>, Type>,
    structs: HashMap<Arc<str>, Arc<DeclType>>,
    /// The type from which sizes are read when cost is estimated.
    root: Option<Arc<DeclType>>,
}

impl Env {
    pub fn new() -> Self {
        Self::default()
    }

    /// Declares a variable of a type that has no fields of its own.
    #[must_use]
    pub fn variable(mut self, name: &str, kind: Type) -> Self {
        self.variables.insert(name.into(), kind);
        self
    }

    /// Declares a variable of a type made from a schema.
    #[must_use]
    pub fn declared(mut self, name: &str, decl: &Arc<DeclType>) -> Self {
        self.register(decl);
        self.variables.insert(name.into(), decl.cel.clone());
        self
    }

    /// Takes sizes for cost estimates from this type, whatever the variable is called.
    #[must_use]
    pub fn sized_by(mut self, root: &Arc<DeclType>) -> Self {
        self.root = Some(root.clone());
        self
    }

    fn register(&mut self, decl: &Arc<DeclType>) {
        if let Type::Struct(name) = &decl.cel {
            self.structs.insert(name.clone(), decl.clone());
        }
        for field in decl.fields.iter().flat_map(|fields| fields.values()) {
            self.register(field);
        }
        if let Some(element) = &decl.element {
            self.register(element);
        }
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Type> {
        self.variables.get(name)
    }

    pub(crate) fn object(&self, name: &str) -> Option<&Arc<DeclType>> {
        self.structs.get(name)
    }

    pub(crate) fn root(&self) -> Option<&Arc<DeclType>> {
        self.root.as_ref()
    }
}
