//! The schema machinery: type tables, strict decoding with upstream's messages, the shape of upstream's
//! answers, patches, protobuf, and OpenAPI. It knows no kind by name, does no I/O and reads no clock.

pub mod apply;
mod declared;
pub mod decode;
pub mod jsonpath;
mod normalise;
pub mod openapi;
pub mod patch;
pub mod protobuf;
pub mod structural;
pub mod types;

pub use declared::{declared_order, indented};
pub use normalise::{LeftOut, normalise, normalise_sent, put_back};
pub use types::{Field, ListType, MapType, Scalar, Schema, Shape, Special, Type, TypeId};
