//! Runs tests one after another in a binary that is also the shim, the container helper, the CNI plugin and
//! a daemon to be killed. The escape suite uses it as well.

use std::ffi::OsString;
use std::panic::AssertUnwindSafe;

pub type Test = (&'static str, fn() -> std::pin::Pin<Box<dyn Future<Output = ()>>>);

macro_rules! tests {
    ($($module:ident::$name:ident),* $(,)?) => {
        &[$((concat!(stringify!($module), "::", stringify!($name)), || Box::pin($module::$name()))),*]
    };
}
pub(crate) use tests;

pub fn main(tests: &[Test]) {
    if let Some(code) = skiff_cni::plugin_main() {
        std::process::exit(code);
    }
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    if let Some(code) = skiff_runtime::internal_main(&arguments) {
        std::process::exit(code);
    }
    if arguments.first().is_some_and(|first| first == "serve") {
        crate::environment::serve(&arguments[1..]);
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
        tests.iter().for_each(|(name, _)| println!("{name}: test"));
        return;
    }
    let filters: Vec<&String> = words.iter().filter(|word| !word.starts_with('-')).collect();
    let mut failed = Vec::new();
    for (name, test) in tests {
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
