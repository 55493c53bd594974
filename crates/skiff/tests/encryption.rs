//! A real cluster encrypts its Secrets by a key of its own, and does not start without that key once it has.

use anyhow::{Context, Result, ensure};
use skiff_testkit::{Cluster, expect_eq};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
const WORD: &[u8] = b"c3dvcmRmaXNoIGFuZCBtb3Jl";

/// The files below a folder that hold the word, or what it is the base64 of.
fn tell(folder: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let bytes = fs::read(entry?.path())?;
        for part in [WORD, b"swordfish and more"] {
            if bytes.windows(part.len()).any(|window| window == part) {
                found.push(String::from_utf8_lossy(part).into_owned());
            }
        }
    }
    Ok(found)
}

fn key_of(config: &str) -> Result<String> {
    let (_, rest) = config.split_once("secret: ").context("a secret")?;
    Ok(rest.split('}').next().context("its end")?.to_owned())
}

#[test]
fn secrets_are_encrypted_by_default() -> Result<()> {
    let cluster = Cluster::start(SKIFF, &["--components", "api"])?;
    let kubectl = cluster.kubectl();
    kubectl.apply(
        r#"{"apiVersion":"v1","kind":"Secret","metadata":{"name":"one"},"stringData":{"word":"swordfish and more"}}"#,
    )?;
    let folder = Cluster::data_dir(cluster.name());
    expect_eq(&tell(&folder.join("store"))?, &Vec::new())?;
    let key = folder.join("encryption/config.yaml");
    expect_eq(&(fs::metadata(&key)?.permissions().mode() & 0o777), &0o600)?;
    // After a restart they are read again.
    cluster.skiff(&["down"])?;
    cluster.up()?;
    let read = || kubectl.json(&["get", "secret", "one"]);
    expect_eq(&read()?["data"]["word"].as_str().map(str::as_bytes), &Some(WORD))?;
    // To another key: the new one first, then all is written again, then the old one can go.
    let rotated = fs::read_to_string(&key)?;
    let (old, new) = (key_of(&rotated)?, "ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA=");
    let both = format!("[{{name: key2, secret: {new}}}, {{name: key1, secret: {old}}}]");
    fs::write(
        &key,
        rotated.replace(&format!("[{{name: key1, secret: {old}}}]"), &both),
    )?;
    cluster.skiff(&["down"])?;
    cluster.up()?;
    let said = cluster.skiff(&["secrets", "reencrypt"])?;
    expect_eq(
        said.as_str(),
        "1 of 1 Secrets were written again, encrypted by the key that is in use now.\n",
    )?;
    let said = cluster.skiff(&["secrets", "reencrypt"])?;
    ensure!(said.starts_with("0 of 1 "), "{said}");
    cluster.skiff(&["down"])?;
    fs::write(
        &key,
        rotated.replace("name: key1", "name: key2").replace(&old, new),
    )?;
    cluster.up()?;
    expect_eq(read()?["data"]["word"].as_str().map(str::as_bytes), Some(WORD))?;
    // Without the key the cluster does not start, and makes no other.
    cluster.skiff(&["down"])?;
    let kept = fs::read(&key)?;
    fs::remove_file(&key)?;
    let refused = format!("{:#}", cluster.up().err().context("it started without its key")?);
    ensure!(refused.contains("their key is not there"), "{refused}");
    ensure!(!key.exists(), "another key was made");
    fs::write(&key, kept)?;
    cluster.up()?;
    expect_eq(&read()?["data"]["word"].as_str().map(str::as_bytes), &Some(WORD))?;
    // The key goes with the cluster.
    drop(cluster);
    ensure!(!folder.exists(), "{} was left behind", folder.display());
    Ok(())
}
