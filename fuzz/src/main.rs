//! libFuzzer's driver. What a target does with an input is in `crates/fuzz-targets`; `SKIFF_FUZZ_TARGET` names it.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use skiff_fuzz_targets::Target;

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("SKIFF_FUZZ_TARGET").unwrap_or_default();
    skiff_fuzz_targets::target(&name).unwrap_or_else(|| {
        let names: Vec<&str> = skiff_fuzz_targets::TARGETS
            .iter()
            .map(|target| target.name)
            .collect();
        eprintln!(
            "SKIFF_FUZZ_TARGET is {name:?} and must be one of {}",
            names.join(", ")
        );
        std::process::exit(2)
    })
});

fuzz_target!(|data: &[u8]| (TARGET.run)(data));
