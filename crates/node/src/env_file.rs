//! Environment variables from files of a volume (`fileKeyRef`): the file is found without leaving the volume, and read
//! by upstream's strict rules, so that it means the same to a shell.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};

/// COMPAT: upstream reads lines of at most this length; a file of more than some of them holds no variables.
const MAX_FILE: u64 = 1 << 20;

/// The value of `key`; `None` if the file does not have it, or has it empty.
pub fn read(volume: &Path, path: &str, key: &str) -> Result<Option<String>, String> {
    let text = read_inside(volume, path).map_err(|error| {
        // What the host looks like inside is not for the user to learn.
        tracing::warn!(%error, path, "cannot read a file of environment variables");
        "couldn't parse env file".to_owned()
    })?;
    parse(&text, key).map_err(|error| {
        tracing::warn!(error, path, "cannot parse a file of environment variables");
        "couldn't parse env file".to_owned()
    })
}

fn read_inside(volume: &Path, path: &str) -> std::io::Result<String> {
    let root = openat(
        CWD,
        volume,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    // A link of the container's stays in the volume, and a pipe makes nobody wait.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let file = File::from(openat2(&root, path, flags, Mode::empty(), resolve)?);
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() > MAX_FILE {
        return Err(std::io::Error::other("not a small file"));
    }
    let mut text = String::new();
    file.take(MAX_FILE).read_to_string(&mut text)?;
    Ok(text)
}

fn parse(text: &str, key: &str) -> Result<Option<String>, String> {
    let invalid = |line: usize, what: &str| {
        Err(format!(
            "invalid environment variable format at line {line}: {what}"
        ))
    };
    let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
    while let Some((number, line)) = lines.next() {
        let line = line.trim_start_matches([' ', '\t']);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let Some((name, value)) = line.split_once('=') else {
            return invalid(number, "missing '='");
        };
        if name.is_empty() || name.ends_with([' ', '\t']) {
            return invalid(number, "the name must be right before '='");
        }
        // As to a shell, what is not at the '=' is no value.
        if value.starts_with([' ', '\t']) {
            if name == key {
                return Ok(None);
            }
            continue;
        }
        let Some(mut rest) = value.strip_prefix('\'') else {
            return invalid(number, "value must be enclosed in single quotes");
        };
        let mut whole = String::new();
        let after = loop {
            if let Some((end, after)) = rest.split_once('\'') {
                whole.push_str(end);
                break after;
            }
            whole.push_str(rest);
            whole.push('\n');
            match lines.next() {
                Some((_, next)) => rest = next,
                None => return invalid(number, "unclosed single quote"),
            }
        };
        let after = after.trim_start_matches([' ', '\t']);
        if !after.is_empty() && !after.starts_with('#') {
            return invalid(number, "unexpected content after closing quote");
        }
        if name == key {
            return Ok(Some(whole).filter(|value| !value.is_empty()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables() {
        let check = |text: &str, expected: Result<Option<&str>, &str>| {
            let found = parse(text, "A");
            match (found, expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found.as_deref(), expected, "{text:?}"),
                (Err(found), Err(expected)) => assert!(found.contains(expected), "{found}"),
                other => panic!("{text:?}: {other:?}"),
            }
        };
        check("A='b'", Ok(Some("b")));
        check("# c\n\n  B='x'\n\tA='b c' # end\n", Ok(Some("b c")));
        check("A='one\ntwo'\n", Ok(Some("one\ntwo")));
        check("A='$B \\n'", Ok(Some("$B \\n")));
        check("A= 'b'\n", Ok(None));
        check("B='b'\n", Ok(None));
        check("A=''", Ok(None));
        check("A", Err("line 1: missing '='"));
        check("\nA ='b'", Err("line 2"));
        check("A=b", Err("single quotes"));
        check("A='b' c", Err("after closing quote"));
        check("A='b", Err("unclosed"));
    }

    #[test]
    fn files_are_of_the_volume() {
        let dir = tempfile::tempdir().unwrap();
        let volume = dir.path().join("volume");
        std::fs::create_dir(&volume).unwrap();
        std::fs::write(volume.join("env"), "A='in'").unwrap();
        std::fs::write(dir.path().join("secret"), "A='out'").unwrap();
        std::os::unix::fs::symlink("../secret", volume.join("link")).unwrap();
        assert_eq!(read(&volume, "env", "A"), Ok(Some("in".to_owned())));
        assert_eq!(read(&volume, "env", "B"), Ok(None));
        for path in ["link", "none", "."] {
            assert_eq!(
                read(&volume, path, "A"),
                Err("couldn't parse env file".to_owned()),
                "{path}"
            );
        }
    }
}
