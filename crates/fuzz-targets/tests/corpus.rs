//! The kept corpus once more: every input that a fuzzer found worth keeping, and every one that was a finding.

use std::path::PathBuf;

use skiff_fuzz_targets::TARGETS;

fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus")
}

#[test]
fn every_kept_input_holds() {
    for target in TARGETS {
        let folder = corpus().join(target.name);
        let entries =
            std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let mut inputs: Vec<PathBuf> = entries.map(|entry| entry.expect("a file").path()).collect();
        inputs.sort();
        assert!(!inputs.is_empty(), "{} has inputs", target.name);
        for input in inputs {
            let data = std::fs::read(&input).expect("an input");
            // Shown only when the test fails: which input it was.
            println!("{}", input.display());
            (target.run)(&data);
        }
    }
}

#[test]
fn every_corpus_has_a_target() {
    for entry in std::fs::read_dir(corpus()).expect("a corpus") {
        let name = entry.expect("a folder").file_name();
        let name = name.to_string_lossy();
        assert!(skiff_fuzz_targets::target(&name).is_some(), "{name}");
    }
}
