//! Puts a filesystem on a disk that has none, and mounts it, by the rules of upstream's SafeFormatAndMount: what has anything on it is
//! never formatted, and what is to be read only neither.

use std::path::Path;

use super::host::{DISK_TIMEOUT, Host, Output};

const DEFAULT_TYPE: &str = "ext4";
/// What `blkid` ends with if it has found nothing.
const NOTHING_FOUND: i32 = 2;
/// Of `fsck`: errors that it cannot correct.
const UNCORRECTED: i32 = 4;
const PARTITIONS: &str = "unknown data, probably partitions";

/// The type of a filesystem is part of a tool's name.
pub fn check_type(fs_type: &str) -> Result<(), String> {
    let good = fs_type.len() <= 32
        && fs_type.starts_with(|c: char| c.is_ascii_alphanumeric())
        && fs_type
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'));
    match fs_type.is_empty() || good {
        true => Ok(()),
        false => Err(format!("invalid fsType {fs_type:?}")),
    }
}

pub async fn format_and_mount(
    host: &Host,
    device: &Path,
    target: &Path,
    fs_type: &str,
    options: &[String],
) -> Result<(), String> {
    let fs_type = if fs_type.is_empty() { DEFAULT_TYPE } else { fs_type };
    check_type(fs_type)?;
    let (Some(device), Some(target)) = (device.to_str(), target.to_str()) else {
        return Err("the path of the disk is no text".to_owned());
    };
    let read_only = options
        .iter()
        .any(|option| option.split(',').any(|one| one == "ro"));
    let present = present_format(host, device)
        .await
        .map_err(|error| format!("failed to get disk format of disk {device}: {error}"))?;
    match present {
        None if read_only => {
            return Err(format!(
                "cannot mount unformatted disk {device} as we are manipulating it in read-only mode"
            ));
        }
        None => format(host, device, fs_type).await?,
        Some(present) => {
            if present != fs_type {
                tracing::warn!(
                    device,
                    present,
                    wanted = fs_type,
                    "a disk has another format than its volume says"
                );
            }
            if !read_only {
                check(host, device).await?;
            }
        }
    }
    let mut all: Vec<&str> = options.iter().map(String::as_str).collect();
    all.push("defaults");
    let all = all.join(",");
    let arguments = ["-t", fs_type, "-o", &all, device, target];
    let mounted = host.run_for(DISK_TIMEOUT, "mount", &arguments).await;
    let mounted = mounted.map_err(|error| format!("mount failed: {error}"))?;
    if mounted.succeeded() {
        return Ok(());
    }
    Err(format!(
        "mount failed: {}\nMounting arguments: {}",
        mounted.failure(),
        arguments.join(" ")
    ))
}

/// What is on the disk; `None` is nothing.
async fn present_format(host: &Host, device: &str) -> Result<Option<String>, String> {
    let arguments = ["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", device];
    let output = host.run("blkid", &arguments).await.map_err(|e| e.to_string())?;
    parse_blkid(&output)
}

fn parse_blkid(output: &Output) -> Result<Option<String>, String> {
    let silent = output.stdout.trim().is_empty() && output.stderr.trim().is_empty();
    match output.code {
        Some(0) => {}
        // It ends like that as well if it cannot read the disk, which may have everything on it.
        Some(NOTHING_FOUND) if silent => return Ok(None),
        _ => return Err(output.failure()),
    }
    let mut present = None;
    for line in output.stdout.lines().filter(|line| !line.is_empty()) {
        match line.split_once('=') {
            Some((_, value)) if value.contains('=') => {
                return Err(format!("blkid returns invalid output: {}", output.stdout));
            }
            Some(("PTTYPE", _)) => return Ok(Some(PARTITIONS.to_owned())),
            Some(("TYPE", value)) => present = Some(value.to_owned()),
            Some(_) => {}
            None => return Err(format!("blkid returns invalid output: {}", output.stdout)),
        }
    }
    match present {
        // It found something that it has no name for.
        None => Err(format!("blkid returns invalid output: {}", output.stdout)),
        present => Ok(present),
    }
}

async fn format(host: &Host, device: &str, fs_type: &str) -> Result<(), String> {
    let tool = format!("mkfs.{fs_type}");
    let arguments = format_arguments(fs_type, device);
    tracing::info!(device, fs_type, "formatting a disk that has nothing on it");
    let failed =
        |error: String| format!("format of disk {device:?} failed: type:({fs_type:?}) errcode:({error})");
    let output = host.run_for(DISK_TIMEOUT, &tool, &arguments).await;
    let output = output.map_err(|error| failed(error.to_string()))?;
    match output.succeeded() {
        true => Ok(()),
        false => Err(failed(output.failure())),
    }
}

fn format_arguments<'a>(fs_type: &str, device: &'a str) -> Vec<&'a str> {
    match fs_type {
        "ext3" | "ext4" => vec!["-F", "-m0", device],
        "xfs" => vec!["-f", device],
        _ => vec![device],
    }
}

/// Has errors repaired. Only those that are left keep the disk from being mounted.
async fn check(host: &Host, device: &str) -> Result<(), String> {
    let output = match host.run_for(DISK_TIMEOUT, "fsck", &["-a", device]).await {
        Ok(output) => output,
        Err(error) => {
            tracing::warn!(device, %error, "cannot check a disk; mounting it unchecked");
            return Ok(());
        }
    };
    match output.code {
        Some(UNCORRECTED) => Err(format!(
            "'fsck' found errors on device {device} but could not correct them: {}",
            output.failure()
        )),
        Some(0) => Ok(()),
        _ => {
            tracing::warn!(device, said = output.failure(), "fsck ended with an error");
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_blkid_says() {
        let check = |code: i32, stdout: &str, stderr: &str, expected: Result<Option<&str>, ()>| {
            let output = Output {
                code: Some(code),
                stdout: stdout.to_owned(),
                stderr: stderr.to_owned(),
            };
            let found = parse_blkid(&output).map_err(|_| ());
            assert_eq!(found, expected.map(|f| f.map(str::to_owned)), "{output:?}");
        };
        check(2, "", "", Ok(None));
        // An unreadable disk is no empty disk.
        check(2, "", "blkid: error: /dev/x: Input/output error", Err(()));
        check(8, "", "", Err(()));
        check(0, "DEVNAME=/dev/x\nTYPE=ext4\n", "", Ok(Some("ext4")));
        check(0, "TYPE=xfs\nPTTYPE=dos\n", "", Ok(Some(PARTITIONS)));
        check(0, "garbage\n", "", Err(()));
        check(0, "DEVNAME=/dev/x\n", "", Err(()));
        check(0, "", "", Err(()));
    }

    #[test]
    fn types_are_names() {
        for good in ["", "ext4", "xfs", "btrfs"] {
            check_type(good).unwrap();
        }
        for bad in [
            "../x",
            "-t",
            "ext4 ",
            "a/b",
            "ext4\n",
            ".",
            "x".repeat(33).as_str(),
        ] {
            assert!(check_type(bad).is_err(), "{bad:?}");
        }
        assert_eq!(format_arguments("ext4", "/dev/x"), ["-F", "-m0", "/dev/x"]);
        assert_eq!(format_arguments("xfs", "/dev/x"), ["-f", "/dev/x"]);
        assert_eq!(format_arguments("btrfs", "/dev/x"), ["/dev/x"]);
    }
}
