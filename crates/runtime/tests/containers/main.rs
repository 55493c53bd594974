//! Real pods through the CRI socket, as root: this test's own binary is executed again as shim, as
//! container helper and as CNI plugin. Without root every test says that it was skipped.

mod basics;
mod edges;
mod environment;
mod images;
mod lifecycle;
mod websocket;

use std::ffi::OsString;
use std::panic::AssertUnwindSafe;

type Test = (&'static str, fn() -> std::pin::Pin<Box<dyn Future<Output = ()>>>);

macro_rules! tests {
    ($($module:ident::$name:ident),* $(,)?) => {
        &[$((concat!(stringify!($module), "::", stringify!($name)), || Box::pin($module::$name()))),*]
    };
}

const TESTS: &[Test] = tests![
    basics::runs_a_container,
    basics::confinement,
    basics::resources,
    basics::users_and_mounts,
    basics::terminal,
    basics::streaming,
    edges::failures,
    edges::namespaces,
    edges::figures,
    lifecycle::survives_a_killed_daemon,
    lifecycle::a_lost_shim_ends_the_pod,
    lifecycle::events,
    lifecycle::side_by_side,
    images::archives,
    images::pulls,
    images::real_registry,
    images::binary,
];

fn main() {
    if let Some(code) = skiff_cni::plugin_main() {
        std::process::exit(code);
    }
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    if let Some(code) = skiff_runtime::internal_main(&arguments) {
        std::process::exit(code);
    }
    if arguments.first().is_some_and(|first| first == "serve") {
        environment::serve(&arguments[1..]);
        return;
    }
    // What a container makes of this binary that wants it to stay.
    if arguments.first().is_some_and(|first| first == "stay") {
        std::fs::write("/tmp/stays", std::process::id().to_string()).expect("write");
        loop {
            std::thread::park();
        }
    }
    let words: Vec<String> = arguments
        .iter()
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    if words.iter().any(|word| word == "--list") {
        TESTS.iter().for_each(|(name, _)| println!("{name}: test"));
        return;
    }
    let filters: Vec<&String> = words.iter().filter(|word| !word.starts_with('-')).collect();
    let mut failed = Vec::new();
    for (name, test) in TESTS {
        if !filters.is_empty() && !filters.iter().any(|filter| name.contains(filter.as_str())) {
            continue;
        }
        if !rustix::process::geteuid().is_root() {
            println!("test {name} ... skipped (needs root)");
            continue;
        }
        let started = std::time::Instant::now();
        let result = std::panic::catch_unwind(AssertUnwindSafe(|| {
            tokio::runtime::Runtime::new()
                .expect("a runtime")
                .block_on(test());
        }));
        let outcome = if result.is_ok() { "ok" } else { "FAILED" };
        println!("test {name} ... {outcome} ({} ms)", started.elapsed().as_millis());
        if result.is_err() {
            failed.push(*name);
        }
    }
    if !failed.is_empty() {
        eprintln!("failed: {failed:?}");
        std::process::exit(101);
    }
}
