//! Values at run time. What comes from an object borrows its JSON and reads it through the schema when looked at;
//! nothing is copied before it is needed.

mod equality;
mod json;
mod list;
mod map;
mod print;

use std::net::IpAddr;
use std::ops::Deref;
use std::sync::Arc;

use serde_json::Value as Json;
use skiff_meta::quantity::Quantity;

pub use list::List;
pub(crate) use list::{Identity, ListKind, identity};
pub(crate) use map::Key;
pub use map::Map;

use crate::error::EvalError;
use crate::library::authorizer::AuthorizerObject;
use crate::library::named_format::NamedFormat;
use crate::library::net::Cidr;
use crate::library::semver::Semver;
use crate::library::url::Url;
use crate::time::Timestamp;

pub(crate) type Eval<T> = Result<T, EvalError>;

/// A string that is borrowed from the object or the expression, or shared.
#[derive(Debug, Clone)]
pub enum Str<'a> {
    Borrowed(&'a str),
    Shared(Arc<str>),
}

impl Deref for Str<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        match self {
            Self::Borrowed(text) => text,
            Self::Shared(text) => text,
        }
    }
}

/// A value of an expression.
#[derive(Debug, Clone)]
pub enum Value<'a> {
    Null,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Double(f64),
    String(Str<'a>),
    Bytes(Arc<[u8]>),
    /// Nanoseconds.
    Duration(i64),
    Timestamp(Timestamp),
    List(List<'a>),
    Map(Map<'a>),
    /// A type, by its name.
    Type(&'static str),
    Optional(Option<Arc<Value<'a>>>),
    Quantity(Quantity),
    Url(Arc<Url>),
    Ip(IpAddr),
    Cidr(Cidr),
    Semver(Arc<Semver>),
    Format(&'static NamedFormat),
    Authorizer(AuthorizerObject),
    /// Data that no schema describes; it can only be compared.
    Preserved(&'a Json),
}

impl<'a> Value<'a> {
    pub fn string(text: impl Into<Arc<str>>) -> Self {
        Self::String(Str::Shared(text.into()))
    }

    pub fn list(items: Vec<Value<'a>>) -> Self {
        Self::List(List::owned(items))
    }

    pub fn some(value: Value<'a>) -> Self {
        Self::Optional(Some(Arc::new(value)))
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// The name of the type, as `type()` and messages give it.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Null => "null_type",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Uint(_) => "uint",
            Self::Double(_) => "double",
            Self::String(_) => "string",
            Self::Bytes(_) => "bytes",
            Self::Duration(_) => "google.protobuf.Duration",
            Self::Timestamp(_) => "google.protobuf.Timestamp",
            Self::List(_) => "list",
            Self::Map(_) => "map",
            Self::Type(_) => "type",
            Self::Optional(_) => "optional_type",
            Self::Quantity(_) => "kubernetes.Quantity",
            Self::Url(_) => "kubernetes.URL",
            Self::Ip(_) => "net.IP",
            Self::Cidr(_) => "net.CIDR",
            Self::Semver(_) => "kubernetes.Semver",
            Self::Format(_) => "kubernetes.NamedFormat",
            Self::Authorizer(object) => object.type_name(),
            Self::Preserved(_) => "unknown",
        }
    }

    /// The size as cost counts it: one for what has none.
    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::String(text) => text.chars().count() as u64,
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::List(list) => list.len() as u64,
            Self::Map(map) => map.len() as u64,
            Self::Ip(ip) => address_bytes(ip),
            Self::Cidr(cidr) => u64::from(cidr.prefix).div_ceil(8),
            Self::Optional(Some(value)) => value.size(),
            _ => 1,
        }
    }

    /// True for what `optional.ofNonZeroValue` treats as nothing.
    pub(crate) fn is_zero(&self) -> bool {
        match self {
            Self::Null => true,
            Self::Bool(value) => !value,
            Self::Int(value) => *value == 0,
            Self::Uint(value) => *value == 0,
            Self::Double(value) => *value == 0.0,
            Self::String(text) => text.is_empty(),
            Self::Bytes(bytes) => bytes.is_empty(),
            Self::Duration(nanos) => *nanos == 0,
            Self::Timestamp(at) => at.is_zero(),
            // Only lists and maps made by expressions know that they are empty.
            Self::List(list) => list.is_built() && list.is_empty(),
            Self::Map(map) => map.is_built() && map.is_empty(),
            Self::Optional(value) => value.is_none(),
            _ => false,
        }
    }
}

fn address_bytes(ip: &IpAddr) -> u64 {
    match ip {
        IpAddr::V4(_) => 4,
        IpAddr::V6(_) => 16,
    }
}
