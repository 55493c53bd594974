//! The passphrase of a backup: from a file, from the environment, or asked for at the terminal.

use crate::cluster::needs_root;
use anyhow::{Context, Result, bail};
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Where it is looked for when no file is named.
pub const VARIABLE: &str = "SKIFF_BACKUP_PASSPHRASE";
const SHORTEST: usize = 8;

pub struct Passphrase {
    pub file: Option<PathBuf>,
}

impl Passphrase {
    /// The one that was given; asks nobody.
    pub fn given(&self) -> Result<Option<Vec<u8>>> {
        let text = match (&self.file, std::env::var_os(VARIABLE)) {
            (Some(path), _) => first_line(path)?,
            (None, Some(value)) => value.into_encoded_bytes(),
            (None, None) => return Ok(None),
        };
        if text.is_empty() {
            bail!("the passphrase is empty");
        }
        Ok(Some(text))
    }

    pub fn is_askable(&self) -> bool {
        std::io::stdin().is_terminal() && std::io::stderr().is_terminal()
    }

    /// For a new file: long enough, and typed twice.
    pub fn choose(&self) -> Result<Vec<u8>> {
        let chosen = match self.given()? {
            Some(given) => given,
            None => {
                let chosen = ask("Passphrase for the backup: ")?;
                if ask("The same again: ")? != chosen {
                    bail!("the two passphrases differ");
                }
                chosen
            }
        };
        if chosen.len() < SHORTEST {
            bail!("the passphrase is too short: use at least {SHORTEST} characters");
        }
        Ok(chosen)
    }

    /// For a file that is there.
    pub fn recall(&self) -> Result<Vec<u8>> {
        match self.given()? {
            Some(given) => Ok(given),
            None if self.is_askable() => ask("Passphrase of the backup: "),
            None => bail!("it is encrypted: give its passphrase by --passphrase-file FILE or {VARIABLE}"),
        }
    }
}

/// Editors end a file with a new line, which is not meant.
fn first_line(path: &Path) -> Result<Vec<u8>> {
    let mut text = std::fs::read(path).with_context(|| needs_root(path))?;
    if let Some(end) = text.iter().position(|byte| *byte == b'\n') {
        text.truncate(end);
    }
    if text.last() == Some(&b'\r') {
        text.pop();
    }
    Ok(text)
}

/// Asks without showing what is typed.
fn ask(question: &str) -> Result<Vec<u8>> {
    let stdin = std::io::stdin();
    let shown = tcgetattr(&stdin).context("there is no terminal to ask at")?;
    let mut hidden = shown.clone();
    hidden.local_modes.remove(LocalModes::ECHO);
    let mut stderr = std::io::stderr();
    write!(stderr, "{question}")?;
    stderr.flush()?;
    tcsetattr(&stdin, OptionalActions::Flush, &hidden)?;
    let mut line = String::new();
    let read = stdin.lock().read_line(&mut line);
    tcsetattr(&stdin, OptionalActions::Flush, &shown)?;
    writeln!(stderr)?;
    read?;
    let typed = line.trim_end_matches(['\r', '\n']);
    if typed.is_empty() {
        bail!("the passphrase is empty");
    }
    Ok(typed.as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_of_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("passphrase");
        let check = |text: &str, expected: Option<&str>| {
            std::fs::write(&file, text).unwrap();
            let passphrase = Passphrase {
                file: Some(file.clone()),
            };
            let found = passphrase.given().ok().flatten();
            assert_eq!(found.as_deref(), expected.map(str::as_bytes), "{text:?}");
        };
        check("open sesame\n", Some("open sesame"));
        check("open sesame", Some("open sesame"));
        check(" a b \r\nmore\n", Some(" a b "));
        check("", None);
        check("\n", None);
        let short = Passphrase { file: Some(file) };
        std::fs::write(short.file.as_ref().unwrap(), "short").unwrap();
        assert!(short.choose().is_err());
    }
}
