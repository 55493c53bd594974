//! The group `flowcontrol.apiserver.k8s.io`.

mod rules;

use serde_json::{Value, json};

use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, STATUS_ALONE, text as column};
use crate::node::{Node, at, list, number, text};
use crate::{row, strategy, walk};

const GROUP: &str = "flowcontrol.apiserver.k8s.io";

pub static FLOW_SCHEMA: Kind = Kind {
    group: GROUP,
    kind: "FlowSchema",
    default: |_, object| {
        if let Some(spec) = walk::object(object, "spec") {
            walk::number(spec, "matchingPrecedence", 1000);
        }
    },
    prepare_create: strategy::create_with_generation,
    prepare_update: strategy::update_spec,
    prepare_status_update: strategy::status_only_keep_metadata,
    validate: |object| {
        let mut errors = Errors::new();
        rules::flow_schema(object, &mut errors);
        errors.into_vec()
    },
    validate_update: |new, _| (FLOW_SCHEMA.validate)(new),
    validate_status_update: |new, _| {
        let mut errors = Errors::new();
        rules::conditions(&Node::root(new).field("status.conditions"), &mut errors);
        errors.into_vec()
    },
    status_again: Again::None,
    columns: &[
        NAME,
        column("PriorityLevel"),
        column("MatchingPrecedence"),
        column("DistinguisherMethod"),
        AGE,
        column("MissingPL"),
    ],
    row: |object, now| {
        let dangling = list(object, "status.conditions")
            .iter()
            .find(|c| text(c, "type") == "Dangling");
        vec![
            row::name(object),
            json!(text(object, "spec.priorityLevelConfiguration.name")),
            json!(number(object, "spec.matchingPrecedence")),
            row::or_none(text(object, "spec.distinguisherMethod.type")),
            row::age(object, now),
            json!(dangling.map_or("?", |c| text(c, "status"))),
        ]
    },
    has_status: true,
    update_again: Again::Object,
    reset_fields: STATUS_ALONE,
    ..BASE
};

pub static PRIORITY_LEVEL_CONFIGURATION: Kind = Kind {
    group: GROUP,
    kind: "PriorityLevelConfiguration",
    default: |_, object| {
        walk::each(object, "spec.exempt", &mut |exempt| {
            walk::pointer(exempt, "nominalConcurrencyShares", 0);
            walk::pointer(exempt, "lendablePercent", 0);
        });
        walk::each(object, "spec.limited", &mut |limited| {
            walk::pointer(limited, "nominalConcurrencyShares", 30);
            walk::pointer(limited, "lendablePercent", 0);
            walk::each(limited, "limitResponse.queuing", &mut |queuing| {
                walk::number(queuing, "handSize", 8);
                walk::number(queuing, "queues", 64);
                walk::number(queuing, "queueLengthLimit", 50);
            });
        });
    },
    prepare_create: strategy::create_with_generation,
    prepare_update: strategy::update_spec,
    prepare_status_update: strategy::status_only_keep_metadata,
    validate: |object| {
        let mut errors = Errors::new();
        rules::priority_level(object, &mut errors);
        errors.into_vec()
    },
    validate_update: |new, _| (PRIORITY_LEVEL_CONFIGURATION.validate)(new),
    validate_status_update: |new, _| {
        let mut errors = Errors::new();
        rules::conditions(&Node::root(new).field("status.conditions"), &mut errors);
        errors.into_vec()
    },
    status_again: Again::None,
    columns: &[
        NAME,
        column("Type"),
        column("NominalConcurrencyShares"),
        column("Queues"),
        column("HandSize"),
        column("QueueLengthLimit"),
        AGE,
    ],
    row: |object, now| {
        let show = |path: &str| match at(object, path) {
            Value::Null => json!(row::NONE),
            value => value.clone(),
        };
        vec![
            row::name(object),
            json!(text(object, "spec.type")),
            show("spec.limited.nominalConcurrencyShares"),
            show("spec.limited.limitResponse.queuing.queues"),
            show("spec.limited.limitResponse.queuing.handSize"),
            show("spec.limited.limitResponse.queuing.queueLengthLimit"),
            row::age(object, now),
        ]
    },
    has_status: true,
    update_again: Again::Object,
    reset_fields: STATUS_ALONE,
    ..BASE
};
