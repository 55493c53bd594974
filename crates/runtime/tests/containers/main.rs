//! Real pods through the CRI socket, as root: this test's own binary is executed again as shim, as
//! container helper and as CNI plugin. Without root every test says that it was skipped.

mod basics;
mod cdi;
mod checkpoint;
mod edges;
mod environment;
mod fake;
mod harness;
mod images;
mod lifecycle;
mod mirrors;
mod propagation;
mod resized;
mod teardown;
mod transfers;
mod websocket;

use harness::{Test, tests};

const TESTS: &[Test] = tests![
    basics::runs_a_container,
    basics::confinement,
    basics::resources,
    basics::users_and_mounts,
    basics::terminal,
    basics::streaming,
    checkpoint::archives,
    checkpoint::refusals,
    cdi::devices,
    edges::failures,
    edges::namespaces,
    edges::figures,
    lifecycle::survives_a_killed_daemon,
    lifecycle::a_lost_shim_ends_the_pod,
    lifecycle::events,
    lifecycle::side_by_side,
    teardown::a_stop_waits_for_a_start,
    teardown::a_tear_down_is_finished_by_the_next_daemon,
    teardown::a_shim_without_a_sandbox_ends,
    teardown::a_lost_pause_process_ends_the_pod,
    teardown::a_successor_is_left_alone,
    propagation::scopes,
    resized::a_limit_below_what_is_used_is_refused,
    resized::images_are_mounted,
    images::archives,
    images::pulls,
    images::real_registry,
    images::binary,
    mirrors::order,
    mirrors::tls,
    mirrors::credentials,
    mirrors::identity_tokens,
    transfers::resumed,
    transfers::resumed_from_a_real_registry,
    transfers::loaded,
    transfers::platforms,
    transfers::names_of_archives,
];

fn main() {
    harness::main(TESTS);
}
