//! ControllerRevisions: the kept versions of DaemonSets and StatefulSets.

use serde_json::{Value, json};

use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, text as column};
use crate::node::{Node, at, list, number, text};
use crate::row;

pub static CONTROLLER_REVISION: Kind = Kind {
    group: "apps",
    kind: "ControllerRevision",
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        errors.non_negative(&root.field("revision"));
        let data = root.field("data");
        match data.value {
            Value::Object(_) => {}
            Value::Null => errors.required(&data, "data is mandatory"),
            _ => errors.required(&data, "data must be a valid JSON object"),
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        errors.non_negative(&root.field("revision"));
        errors.immutable(&root.field("data"), at(old, "data"));
        errors.into_vec()
    },
    columns: &[NAME, column("Controller"), column("Revision"), AGE],
    row: |object, now| {
        let owner = list(object, "metadata.ownerReferences")
            .iter()
            .find(|o| at(o, "controller").as_bool() == Some(true));
        let controller = owner.map_or_else(
            || row::NONE.to_owned(),
            |o| {
                let kind = text(o, "kind").to_lowercase();
                let suffix = match text(o, "apiVersion").split_once('/') {
                    Some((group, _)) => format!("{kind}.{group}"),
                    None => kind,
                };
                format!("{suffix}/{}", text(o, "name"))
            },
        );
        vec![
            row::name(object),
            json!(controller),
            json!(number(object, "revision")),
            row::age(object, now),
        ]
    },
    update_again: Again::ChangeObject,
    ..BASE
};
