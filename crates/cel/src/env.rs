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
    /// Whether patches can be made: `Object{}`, `Object.spec{}` and `JSONPatch{}`.
    patches: bool,
    /// Whether `cel.bind` is there.
    bindings: bool,
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

    /// Allows the types that mutations are made of.
    #[must_use]
    pub fn patch_types(mut self) -> Self {
        self.patches = true;
        self
    }

    /// Allows `cel.bind`.
    #[must_use]
    pub fn with_bindings(mut self) -> Self {
        self.bindings = true;
        self
    }

    pub(crate) fn patches(&self) -> bool {
        self.patches
    }

    pub(crate) fn bindings(&self) -> bool {
        self.bindings
    }

    /// `Object`, what is below it, or `JSONPatch`.
    pub(crate) fn patch_type(&self, name: &str) -> Option<Type> {
        let known = name == "JSONPatch" || name == "Object" || name.starts_with("Object.");
        (self.patches && known).then(|| Type::Struct(name.into()))
    }

    /// The type of a field of these: a part of an object may have any.
    pub(crate) fn patch_field(&self, of: &str, field: &str) -> Option<Type> {
        match (of, field) {
            ("JSONPatch", "op" | "from" | "path") => Some(Type::String),
            ("JSONPatch", "value") => Some(Type::Dyn),
            ("JSONPatch", _) => None,
            _ => Some(Type::Dyn),
        }
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
