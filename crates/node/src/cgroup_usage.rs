//! What the processes of one cgroup use, read from the kernel's files of either version. Reads only.

use std::path::PathBuf;

/// Where the kernel tells of the memory of one cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupMemory {
    pub is_v2: bool,
    pub folder: PathBuf,
}

/// A line `name number`.
fn field(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    let (_, value) = lines.find(|(key, _)| *key == name)?;
    value.trim().parse().ok()
}

impl CgroupMemory {
    /// The bytes in use without those of files that the kernel can drop at once, as upstream counts; `None` where the
    /// cgroup cannot be read.
    pub fn working_set(&self) -> Option<u64> {
        let (current, droppable) = match self.is_v2 {
            true => ("memory.current", "inactive_file"),
            false => ("memory.usage_in_bytes", "total_inactive_file"),
        };
        let read = |name: &str| std::fs::read_to_string(self.folder.join(name)).ok();
        let used: u64 = read(current)?.trim().parse().ok()?;
        let droppable = read("memory.stat").and_then(|stat| field(&stat, droppable));
        Some(used.saturating_sub(droppable.unwrap_or(0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let memory = |is_v2: bool| CgroupMemory {
            is_v2,
            folder: dir.path().to_owned(),
        };
        assert_eq!(memory(true).working_set(), None);
        write("memory.usage_in_bytes", "1000\n");
        assert_eq!(memory(false).working_set(), Some(1000));
        write("memory.stat", "inactive_file 40\ntotal_inactive_file 400\n");
        write("memory.current", "100\n");
        assert_eq!(memory(false).working_set(), Some(600));
        assert_eq!(memory(true).working_set(), Some(60));
        write("memory.current", "max\n");
        assert_eq!(memory(true).working_set(), None);
    }
}
