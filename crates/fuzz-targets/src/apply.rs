//! Server-side apply: managed fields read and written, and configurations applied.

use serde_json::Value;
use skiff_registry::Resource;
use skiff_registry::fields::{self, FieldManager, OneVersion};
use skiff_schema::TypeId;
use skiff_schema::apply::{Managed, Set};

use crate::input;

pub fn managed_fields(data: &[u8]) {
    if let Some(entries) = input::json(data)
        && let Ok(managed) = Managed::decode(Some(&entries))
    {
        let text = managed.encode();
        let again = Managed::decode(Some(&text)).expect("what was written can be read");
        assert_eq!(again, managed);
    }
    let Some([one, other]) = input::documents::<2>(data) else {
        return;
    };
    let set = |document| Set::from_value(&input::json(document)?).ok();
    let (Some(a), Some(b)) = (set(one), set(other)) else {
        return;
    };
    for set in [&a, &b] {
        let again = Set::from_value(&set.to_value()).expect("what was written can be read");
        assert_eq!(&again, set);
        for path in set.paths() {
            assert!(set.has(&path.0), "{path}");
            let _ = path.to_string();
        }
    }
    let (union, common) = (a.union(&b), a.intersection(&b));
    assert_eq!(union, b.union(&a));
    assert_eq!(common, b.intersection(&a));
    assert_eq!(a.union(&a), a);
    assert_eq!(a.intersection(&a), a);
    assert_eq!(a.difference(&b).union(&common), a);
    assert!(a.difference(&b).intersection(&b).is_empty());
    assert!(a.difference(&a).is_empty());
    let mut without = union.clone();
    without.remove_recursively(&b);
    assert!(without.intersection(&b).is_empty());
}

/// An object as the server would have it after a write by an updater.
fn tracked(fields: &FieldManager<'_>, mut object: Value) -> Value {
    let managed = fields.update(None, &object, None, "updater");
    fields::put(&mut object, managed);
    object
}

pub fn apply(data: &[u8]) {
    let (line, rest) = input::line(data);
    let kind = input::kind(line);
    let Some(resource) = &kind.resource else {
        return;
    };
    let Some([live, first, second]) = input::documents::<3>(rest) else {
        return;
    };
    let versions = OneVersion {
        api_version: resource.facts.api_version().leak(),
        id: kind.id,
    };
    let fields = FieldManager {
        versions: &versions,
        api_version: &resource.api_version,
        kind: &resource.kind,
        subresource: "",
        empty: resource.empty(),
        ignored: resource.unowned(""),
        now: "2024-01-01T00:00:00Z".to_owned(),
    };
    let Some(mut live) = input::object(kind.id, live).map(|object| named(resource, object)) else {
        return;
    };
    // What a live object says of its managers is read too, whatever it is.
    if fields::take(&mut live).is_none() {
        live = tracked(&fields, live);
    }
    for (config, force) in [(first, true), (second, false), (first, false)] {
        let Some(config) = input::json(config).map(|config| named(resource, config)) else {
            continue;
        };
        let step =
            |live: &Value, manager: &str, force: bool| step(&fields, kind.id, live, &config, manager, force);
        let Some(applied) = step(&live, "applier", force) else {
            continue;
        };
        let again = step(&applied, "applier", force).expect("what was applied can be applied");
        assert_eq!(again, applied, "applying twice changes nothing");
        // Who says the same as the last applier is in nobody's way, if what was said is what was kept: a null is not, nor
        // is an entry that the shape of its type adds an empty field to.
        if kept(&config, &applied) {
            step(&applied, "another", false).expect("no conflict");
        }
        live = applied;
    }
}

fn kept(said: &Value, now: &Value) -> bool {
    match (said, now) {
        (Value::Array(said), Value::Array(now)) => said.iter().all(|entry| now.contains(entry)),
        (Value::Object(said), Value::Object(now)) => {
            now.iter().all(|(name, now)| match said.get(name) {
                Some(said) => kept(said, now),
                None => !is_empty(now),
            }) && said.keys().all(|name| now.contains_key(name))
        }
        (said, now) => said == now,
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(entries) => entries.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

fn named(resource: &Resource, mut object: Value) -> Value {
    if object.is_object() {
        object["kind"] = resource.kind.as_str().into();
        object["apiVersion"] = resource.api_version.as_str().into();
    }
    object
}

/// One apply, with what the server does around it: the outcome takes the shape of the type.
fn step(
    fields: &FieldManager<'_>,
    id: TypeId,
    live: &Value,
    config: &Value,
    manager: &str,
    force: bool,
) -> Option<Value> {
    let outcome = fields.apply(Some(live), config, manager, force).ok()?;
    let mut object = outcome.object.unwrap_or_else(|| live.clone());
    skiff_schema::normalise(input::schema(), id, &mut object);
    fields::put(&mut object, outcome.managed);
    Some(object)
}
