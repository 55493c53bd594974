//! The settings of the kernel that a kubelet counts on. This node changes none, because they are the whole machine's; with
//! `protectKernelDefaults` it does not start while one of them is different.

use std::path::Path;

const EXPECTED: [(&str, i64); 6] = [
    ("vm/overcommit_memory", 1),
    ("vm/panic_on_oom", 0),
    ("kernel/panic", 10),
    ("kernel/panic_on_oops", 1),
    ("kernel/keys/root_maxkeys", 1_000_000),
    ("kernel/keys/root_maxbytes", 25_000_000),
];

/// What is different, as upstream says it. `sysctls` is `/proc/sys`.
pub fn different(sysctls: &Path) -> Vec<String> {
    let one = |(name, expected): (&str, i64)| {
        let text = match std::fs::read_to_string(sysctls.join(name)) {
            Ok(text) => text,
            Err(error) => return Some(format!("cannot read the kernel flag {name}: {error}")),
        };
        let value = text.trim();
        (value.parse() != Ok(expected)).then(|| {
            format!("invalid kernel flag: {name}, expected value: {expected}, actual value: {value}")
        })
    };
    EXPECTED.into_iter().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_different_is_named() {
        let dir = tempfile::tempdir().unwrap();
        for (name, value) in EXPECTED {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("{value}\n")).unwrap();
        }
        assert_eq!(different(dir.path()), Vec::<String>::new());
        std::fs::write(dir.path().join("kernel/panic"), "0\n").unwrap();
        std::fs::remove_file(dir.path().join("vm/panic_on_oom")).unwrap();
        let found = different(dir.path());
        assert_eq!(
            found[1],
            "invalid kernel flag: kernel/panic, expected value: 10, actual value: 0"
        );
        assert!(found.len() == 2 && found[0].starts_with("cannot read the kernel flag vm/panic_on_oom"));
    }
}
