//! Image volumes: the layers of an image as a read-only tree, made in the container's own mount namespace, so that it
//! ends with the container. Must run after that namespace was cut off from the host's.

use super::spec::ImageTree;
use super::tree::clone_opened;
use super::{Context, InitError};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::mount::MountFlags;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// The tree, detached, and whether it is a directory.
pub(super) fn image_tree(image: &ImageTree) -> Result<(OwnedFd, bool), InitError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = |path: &std::path::Path| {
        rustix::fs::open(path, flags, Mode::empty()).context(|| format!("open {}", path.display()))
    };
    let mut layers = Vec::with_capacity(image.lower.len() + 1);
    for name in &image.lower {
        layers.push(open(&image.layers_dir.join(name))?);
    }
    // An overlay without an upper layer has two lower ones at least.
    layers.push(open(&image.empty)?);
    let numbers: Vec<String> = layers.iter().map(|layer| layer.as_raw_fd().to_string()).collect();
    let data = format!("lowerdir={}", numbers.join(":"));
    if data.len() >= 4096 {
        return Err(InitError::Message(format!(
            "the image of a volume has too many layers ({})",
            image.lower.len()
        )));
    }
    let data = CString::new(data).map_err(|_| InitError::Message("a path holds a zero byte".into()))?;
    std::env::set_current_dir("/proc/self/fd").context(|| "enter /proc/self/fd".into())?;
    rustix::mount::mount(
        "overlay",
        &image.mountpoint,
        "overlay",
        MountFlags::RDONLY,
        data.as_c_str(),
    )
    .context(|| "mount the image of a volume".into())?;
    let root = open(&image.mountpoint)?;
    let part = if image.sub_path.is_empty() {
        root
    } else {
        // Links of the image stay in the image.
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        rustix::fs::openat2(&root, image.sub_path.as_str(), flags, Mode::empty(), resolve)
            .context(|| format!("open {:?} in the image of a volume", image.sub_path))?
    };
    let stat = rustix::fs::fstat(&part).context(|| "stat the image of a volume".into())?;
    let directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    let tree = clone_opened(part.as_fd(), false).context(|| "clone the image of a volume".into())?;
    Ok((tree, directory))
}
