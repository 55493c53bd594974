//! Decodes an object without its managed fields. No component looks at them, and in most pods they are a third of the
//! JSON, of the sort that takes longest: trees of maps without a type.
//!
//! Everything else is passed on to the type's own decoding.

use std::fmt;

use serde::de::value::{BorrowedStrDeserializer, StringDeserializer};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde::forward_to_deserialize_any;

pub(super) fn decode<K: DeserializeOwned>(raw: &[u8]) -> serde_json::Result<K> {
    let mut json = serde_json::Deserializer::from_slice(raw);
    let object = K::deserialize(Within {
        inner: &mut json,
        level: Level::Object,
    })?;
    json.end()?;
    Ok(object)
}

/// Where in the object we are.
#[derive(Clone, Copy, PartialEq)]
enum Level {
    Object,
    Metadata,
}

/// A deserializer, a visitor or a map at some level.
struct Within<T> {
    inner: T,
    level: Level,
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Within<D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let level = self.level;
        self.inner.deserialize_any(Within {
            inner: visitor,
            level,
        })
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let level = self.level;
        self.inner.deserialize_option(Within {
            inner: visitor,
            level,
        })
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let level = self.level;
        self.inner.deserialize_map(Within {
            inner: visitor,
            level,
        })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let level = self.level;
        let visitor = Within {
            inner: visitor,
            level,
        };
        self.inner.deserialize_struct(name, fields, visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let level = self.level;
        let visitor = Within {
            inner: visitor,
            level,
        };
        self.inner.deserialize_newtype_struct(name, visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct enum identifier ignored_any
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Within<V> {
    type Value = V::Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(formatter)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(Map {
            inner: map,
            level: self.level,
            in_metadata: false,
        })
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        let level = self.level;
        self.inner.visit_some(Within {
            inner: deserializer,
            level,
        })
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        let level = self.level;
        self.inner.visit_newtype_struct(Within {
            inner: deserializer,
            level,
        })
    }

    // What is no map goes through as it is, so that mistakes are named as ever.
    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<V::Value, A::Error> {
        self.inner.visit_seq(seq)
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<V::Value, E> {
        self.inner.visit_bool(value)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<V::Value, E> {
        self.inner.visit_i64(value)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<V::Value, E> {
        self.inner.visit_u64(value)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<V::Value, E> {
        self.inner.visit_f64(value)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<V::Value, E> {
        self.inner.visit_str(value)
    }

    fn visit_borrowed_str<E: Error>(self, value: &'de str) -> Result<V::Value, E> {
        self.inner.visit_borrowed_str(value)
    }
}

struct Map<A> {
    inner: A,
    level: Level,
    /// The last key was `metadata`, of an object.
    in_metadata: bool,
}

/// A key, copied only if it has escapes.
enum MapKey<'de> {
    Borrowed(&'de str),
    Owned(String),
}

struct ReadKey;

impl<'de> DeserializeSeed<'de> for ReadKey {
    type Value = MapKey<'de>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<MapKey<'de>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for ReadKey {
    type Value = MapKey<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a key")
    }

    fn visit_borrowed_str<E: Error>(self, key: &'de str) -> Result<MapKey<'de>, E> {
        Ok(MapKey::Borrowed(key))
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<MapKey<'de>, E> {
        Ok(MapKey::Owned(key.to_owned()))
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Map<A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, A::Error> {
        loop {
            let Some(key) = self.inner.next_key_seed(ReadKey)? else {
                return Ok(None);
            };
            let name = match &key {
                MapKey::Borrowed(name) => name,
                MapKey::Owned(name) => name.as_str(),
            };
            if self.level == Level::Metadata && name == "managedFields" {
                self.inner.next_value::<IgnoredAny>()?;
                continue;
            }
            self.in_metadata = self.level == Level::Object && name == "metadata";
            return match key {
                MapKey::Borrowed(name) => seed.deserialize(BorrowedStrDeserializer::new(name)),
                MapKey::Owned(name) => seed.deserialize(StringDeserializer::new(name)),
            }
            .map(Some);
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        if self.in_metadata {
            return self.inner.next_value_seed(Metadata(seed));
        }
        self.inner.next_value_seed(seed)
    }
}

struct Metadata<T>(T);

impl<'de, T: DeserializeSeed<'de>> DeserializeSeed<'de> for Metadata<T> {
    type Value = T::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T::Value, D::Error> {
        self.0.deserialize(Within {
            inner: deserializer,
            level: Level::Metadata,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::{ConfigMap, Pod};
    use kube::core::{DynamicObject, PartialObjectMeta};
    use serde::Serialize;
    use serde_json::{Value, json};

    /// It is what serde makes of it, but for the managed fields of the object itself.
    fn check<K: DeserializeOwned + Serialize>(object: &Value) {
        let text = object.to_string();
        let decoded: K = decode(text.as_bytes()).unwrap();
        let mut bare = object.clone();
        bare["metadata"].as_object_mut().unwrap().remove("managedFields");
        let expected: K = serde_json::from_value(bare).unwrap();
        assert_eq!(json!(decoded), json!(expected), "{text}");
    }

    #[test]
    fn everything_but_managed_fields_is_decoded() {
        let managed = json!([{"manager": "m", "operation": "Update", "fieldsV1": {"f:spec": {"f:a": {}}}}]);
        let meta = json!({"name": "a", "namespace": "b", "managedFields": managed, "labels": {"managedFields": "x"},
            "annotations": {"quote\"d": "\\\"managedFields\\\":["}, "creationTimestamp": null});
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"nodeName": "n",
            "containers": [{"name": "c", "resources": {"limits": {"cpu": "1"}}}], "tolerations": null},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True",
                "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
        check::<Pod>(&pod);
        check::<DynamicObject>(&pod);
        check::<PartialObjectMeta<DynamicObject>>(&pod);
        check::<Value>(
            &json!({"metadata": {"a": [1, -2, 2.5, true, "x"]}, "list": [{"metadata": {"b": 1}}]}),
        );
        check::<ConfigMap>(&json!({"metadata": meta, "data": {"managedFields": "kept", "metadata": "kept"}}));
        check::<Value>(&json!({"metadata": {}, "spec": {"metadata": {"managedFields": "of the template"}}}));
    }

    #[test]
    fn mistakes_are_named_as_ever() {
        for wrong in [
            "[]",
            "5",
            "{\"metadata\": 5}",
            "{\"data\": 5}",
            "{} x",
            "{\"metadata\": {\"name\": 7}}",
            "{",
        ] {
            let ours = decode::<ConfigMap>(wrong.as_bytes()).unwrap_err().to_string();
            let theirs = serde_json::from_str::<ConfigMap>(wrong).unwrap_err().to_string();
            assert_eq!(ours, theirs, "{wrong}");
        }
    }
}
