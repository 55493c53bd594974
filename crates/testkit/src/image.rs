//! Images for tests, packed here as docker archives: no registry can be assumed.

use anyhow::{Context, Result};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The reference that [`busybox_archive`] carries.
pub const BUSYBOX: &str = "test.local/busybox:1";
/// The reference that [`pause_archive`] carries.
pub const PAUSE: &str = "test.local/pause:1";

const APPLETS: [&str; 11] = [
    "sh", "cat", "echo", "false", "grep", "ls", "nslookup", "sleep", "true", "wget", "id",
];

/// Writes an archive with a busybox image into `dir`.
pub fn busybox_archive(dir: &Path) -> Result<PathBuf> {
    archive(&dir.join("busybox.tar"), BUSYBOX, &["sh"])
}

/// An image for pod sandboxes, for runtimes that need one: it sleeps.
pub fn pause_archive(dir: &Path) -> Result<PathBuf> {
    archive(&dir.join("pause.tar"), PAUSE, &["sleep", "2147483647"])
}

/// The busybox image with one more layer, which has nothing but the file `/ballast`: an image that takes a while to pull.
pub fn ballast_archive(dir: &Path, ballast: &[u8]) -> Result<PathBuf> {
    let mut layer = tar::Builder::new(Vec::new());
    append(&mut layer, "ballast", tar::EntryType::Regular, 0o644, ballast)?;
    let layers = vec![busybox_layer()?, layer.into_inner()?];
    pack(&dir.join("ballast.tar"), BUSYBOX, &["sh"], &layers)
}

fn archive(path: &Path, reference: &str, command: &[&str]) -> Result<PathBuf> {
    pack(path, reference, command, &[busybox_layer()?])
}

fn busybox_layer() -> Result<Vec<u8>> {
    let busybox = std::fs::read("/bin/busybox").context("/bin/busybox: install Debian's busybox-static")?;
    let mut layer = tar::Builder::new(Vec::new());
    for folder in ["bin/", "etc/", "tmp/", "root/"] {
        append(&mut layer, folder, tar::EntryType::Directory, 0o755, &[])?;
    }
    append(
        &mut layer,
        "bin/busybox",
        tar::EntryType::Regular,
        0o755,
        &busybox,
    )?;
    append(
        &mut layer,
        "etc/passwd",
        tar::EntryType::Regular,
        0o644,
        b"root:x:0:0::/root:/bin/sh\n",
    )?;
    for applet in APPLETS {
        let mut header = header(tar::EntryType::Symlink, 0o777, 0);
        layer.append_link(&mut header, format!("bin/{applet}"), "busybox")?;
    }
    Ok(layer.into_inner()?)
}

fn pack(path: &Path, reference: &str, command: &[&str], layers: &[Vec<u8>]) -> Result<PathBuf> {
    let digests: Vec<String> = layers.iter().map(|layer| digest(layer)).collect();
    let names: Vec<String> = (0..layers.len())
        .map(|number| format!("layer-{number}.tar"))
        .collect();
    let config = json!({
        "architecture": "amd64", "os": "linux",
        "config": {"Env": ["PATH=/bin"], "Cmd": command},
        "rootfs": {"type": "layers", "diff_ids": digests},
    });
    let config = serde_json::to_vec(&config)?;
    let config_name = format!("{}.json", digest(&config).trim_start_matches("sha256:"));
    let manifest = json!([{"Config": config_name, "RepoTags": [reference], "Layers": names}]);
    let mut archive = tar::Builder::new(File::create(path)?);
    append(
        &mut archive,
        &config_name,
        tar::EntryType::Regular,
        0o644,
        &config,
    )?;
    for (name, layer) in names.iter().zip(layers) {
        append(&mut archive, name, tar::EntryType::Regular, 0o644, layer)?;
    }
    append(
        &mut archive,
        "manifest.json",
        tar::EntryType::Regular,
        0o644,
        &serde_json::to_vec(&manifest)?,
    )?;
    archive.into_inner()?.sync_all()?;
    Ok(path.to_owned())
}

fn append<W: Write>(
    archive: &mut tar::Builder<W>,
    path: &str,
    kind: tar::EntryType,
    mode: u32,
    bytes: &[u8],
) -> Result<()> {
    archive.append_data(&mut header(kind, mode, bytes.len() as u64), path, bytes)?;
    Ok(())
}

fn header(kind: tar::EntryType, mode: u32, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256:{hex}")
}
