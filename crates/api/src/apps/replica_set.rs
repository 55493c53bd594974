//! ReplicaSets.

use serde_json::json;

use super::rolling::required_selector;
use crate::core::replication_controller::replica_counts;
use crate::core::{pod_defaults, pod_spec, pod_warnings};
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, integer, wide};
use crate::node::{Node, at, number};
use crate::{row, strategy, walk};

pub static REPLICA_SET: Kind = Kind {
    group: "apps",
    kind: "ReplicaSet",
    pod_spec: "spec.template.spec",
    default: |_, object| {
        let Some(spec) = walk::object(object, "spec") else {
            return;
        };
        walk::pointer(spec, "replicas", 1);
        walk::made(spec, "template.spec", &mut pod_defaults::pod_spec);
    },
    prepare_create: strategy::create_with_generation,
    prepare_update: strategy::update_spec,
    validate: |object| {
        let mut errors = Errors::new();
        spec(&Node::root(object).field("spec"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        spec(&root.field("spec"), &mut errors);
        errors.immutable(&root.field("spec.selector"), at(old, "spec.selector"));
        errors.into_vec()
    },
    validate_status_update: |new, _| {
        let mut errors = Errors::new();
        replica_counts(&Node::root(new).field("status"), &mut errors);
        errors.into_vec()
    },
    columns: &[
        NAME,
        integer("Desired"),
        integer("Current"),
        integer("Ready"),
        AGE,
        wide("Containers"),
        wide("Images"),
        wide("Selector"),
    ],
    row: |object, now| {
        let [names, images] = row::containers(object, "spec.template.spec");
        vec![
            row::name(object),
            json!(number(object, "spec.replicas")),
            json!(number(object, "status.replicas")),
            json!(number(object, "status.readyReplicas")),
            row::age(object, now),
            names,
            images,
            row::selector(object, "spec.selector"),
        ]
    },
    has_status: true,
    warnings: |new, old| pod_warnings::template(new, old, "spec.template"),
    update_again: Again::Change,
    never_written: super::no_replicas,
    ..BASE
};

fn spec(spec: &Node, errors: &mut Errors) {
    errors.non_negative(&spec.field("replicas"));
    errors.non_negative(&spec.field("minReadySeconds"));
    let selector = spec.field("selector");
    // COMPAT: upstream says deployment here too.
    required_selector(&selector, "deployment", errors);
    let template = spec.field("template");
    if pod_spec::usable_selector(&selector, "invalid label selector", errors) {
        pod_spec::selected_template(&template, selector.value, errors);
        pod_spec::always_restart(&template, "ReplicaSet", errors);
    }
}
