//! CEL types: what the checker infers and what messages print. Types know nothing of values or schemas.

use std::fmt;
use std::sync::Arc;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Type {
    Dyn,
    /// The type of an expression that did not check; it agrees with everything, so that one mistake is one message.
    Error,
    Null,
    Bool,
    Int,
    Uint,
    Double,
    String,
    Bytes,
    Duration,
    Timestamp,
    List(Arc<Type>),
    Map(Arc<Type>, Arc<Type>),
    /// An object with declared fields, by name.
    Struct(Arc<str>),
    /// A named type with parameters: `optional_type(T)`, `net.IP`.
    Opaque(Arc<str>, Arc<[Type]>),
    /// A parameter of an overload, as declared.
    Param(Arc<str>),
    /// A type variable of one check.
    Var(u32),
    Type(Option<Arc<Type>>),
}

pub(crate) const OPTIONAL: &str = "optional_type";

impl Type {
    pub fn list(element: Type) -> Self {
        Self::List(Arc::new(element))
    }

    pub fn map(key: Type, value: Type) -> Self {
        Self::Map(Arc::new(key), Arc::new(value))
    }

    pub fn optional(of: Type) -> Self {
        Self::Opaque(OPTIONAL.into(), Arc::from([of]))
    }

    pub(crate) fn type_of(of: Type) -> Self {
        Self::Type(Some(Arc::new(of)))
    }

    pub fn as_optional(&self) -> Option<&Type> {
        match self {
            Self::Opaque(name, parameters) if &**name == OPTIONAL => parameters.first(),
            _ => None,
        }
    }

    pub(crate) fn is_dyn(&self) -> bool {
        matches!(self, Self::Dyn)
    }

    pub(crate) fn is_dyn_or_error(&self) -> bool {
        matches!(self, Self::Dyn | Self::Error)
    }

    /// The name at run time, without parameters.
    /// The name with that of its parameters.
    pub fn declared_name(&self) -> String {
        match self {
            Self::List(element) => format!("list({})", element.declared_name()),
            Self::Map(key, value) => format!("map({}, {})", key.declared_name(), value.declared_name()),
            other => other.runtime_name().to_owned(),
        }
    }

    pub fn runtime_name(&self) -> &str {
        match self {
            Self::Dyn => "dyn",
            Self::Error => "error",
            Self::Null => "null_type",
            Self::Bool => "bool",
            Self::Int => "int",
            Self::Uint => "uint",
            Self::Double => "double",
            Self::String => "string",
            Self::Bytes => "bytes",
            Self::Duration => "google.protobuf.Duration",
            Self::Timestamp => "google.protobuf.Timestamp",
            Self::List(_) => "list",
            Self::Map(..) => "map",
            Self::Struct(name) | Self::Opaque(name, _) | Self::Param(name) => name,
            Self::Var(_) => "dyn",
            Self::Type(_) => "type",
        }
    }
}

/// As compile errors print types.
impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Error => f.write_str("!error!"),
            Self::Null => f.write_str("null"),
            Self::Duration => f.write_str("duration"),
            Self::Timestamp => f.write_str("timestamp"),
            Self::List(element) => write!(f, "list({element})"),
            Self::Map(key, value) => write!(f, "map({key}, {value})"),
            Self::Opaque(name, parameters) if !parameters.is_empty() => {
                write!(f, "{name}(")?;
                for (position, parameter) in parameters.iter().enumerate() {
                    if position > 0 {
                        f.write_str(", ")?;
                    }
                    write!(f, "{parameter}")?;
                }
                f.write_str(")")
            }
            Self::Var(number) => write!(f, "_var{number}"),
            Self::Type(Some(of)) => write!(f, "type({of})"),
            other => f.write_str(other.runtime_name()),
        }
    }
}
