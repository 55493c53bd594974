//! Images made of one static binary, without a registry and without other tools: the demo image.

use super::{
    Error, Image, ImageStore, Platform, chain_ids, digest_of, io_error, layer_name, normalize,
    parse_reference,
};
use serde_json::json;
use std::path::Path;

/// How the binary is run.
#[derive(Debug, Clone, Default)]
pub struct BinaryImage {
    /// Where the binary lies in the image, e.g. `/skiff`.
    pub path: String,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    pub env: Vec<String>,
    /// `65532` for one that needs no root.
    pub user: String,
    pub working_dir: String,
}

impl ImageStore {
    /// Makes or refreshes an image out of `executable`; returns its id. The same binary is not packed
    /// again. Blocking.
    pub fn add_binary_image(
        &self,
        reference: &str,
        executable: &Path,
        image: &BinaryImage,
    ) -> Result<String, Error> {
        let reference = normalize(reference)?;
        let open = io_error(format!("open {}", executable.display()));
        let metadata = std::fs::metadata(executable).map_err(open)?;
        let source = {
            use std::os::unix::fs::MetadataExt;
            let stamp = (
                metadata.dev(),
                metadata.ino(),
                metadata.size(),
                metadata.mtime(),
                metadata.mtime_nsec(),
            );
            digest_of(format!("{stamp:?} {image:?}").as_bytes())
        };
        if let Some(existing) = self.find(&reference)?
            && existing.source.as_deref() == Some(&source)
            && existing
                .layers
                .iter()
                .all(|layer| self.layers_directory().join(layer).exists())
        {
            return Ok(existing.id);
        }
        let _busy = self.busy()?;
        let temporary = self.temporary("binary");
        let result = self.pack(&reference, executable, image, &temporary, source);
        let _ = std::fs::remove_file(&temporary);
        result
    }

    fn pack(
        &self,
        reference: &str,
        executable: &Path,
        image: &BinaryImage,
        temporary: &Path,
        source: String,
    ) -> Result<String, Error> {
        let (diff_id, size) = write_layer(executable, image, temporary)?;
        let body = config_body(image, &diff_id);
        let id = digest_of(&body);
        let chain = chain_ids(std::slice::from_ref(&diff_id), 1)?;
        self.unpack_layer(temporary, None, &diff_id, &chain[0], &mut self.budget()?)?;
        self.write_blob(&id, &body)?;
        // There is no registry manifest; the image's own digest stands for it in status fields.
        let parsed = parse_reference(reference)?;
        let digest = format!("{}/{}@{id}", parsed.registry(), parsed.repository());
        let file: super::config::ConfigFile =
            serde_json::from_slice(&body).map_err(|error| Error::Archive(error.to_string()))?;
        self.add(Image {
            id: id.clone(),
            repo_tags: vec![reference.to_owned()],
            repo_digests: vec![digest],
            size: size + body.len() as u64,
            layers: vec![layer_name(&chain[0])],
            config: file.config,
            pinned: true,
            source: Some(source),
        })?;
        Ok(id)
    }
}

/// Writes such an image as a docker archive, for other runtimes. Blocking.
pub fn save_binary_image(
    reference: &str,
    executable: &Path,
    image: &BinaryImage,
    archive: &Path,
) -> Result<(), Error> {
    let reference = normalize(reference)?;
    let write = || io_error(format!("write {}", archive.display()));
    let layer = archive.with_extension("layer");
    let packed = write_layer(executable, image, &layer).and_then(|(diff_id, _)| {
        let config = config_body(image, &diff_id);
        let name = format!("{}.json", digest_of(&config).trim_start_matches("sha256:"));
        let manifest =
            json!([{"Config": name, "RepoTags": [reference], "Layers": ["layer.tar"]}]).to_string();
        let mut builder = tar::Builder::new(std::fs::File::create(archive).map_err(write())?);
        for (path, content) in [
            (name.as_str(), config.as_slice()),
            ("manifest.json", manifest.as_bytes()),
        ] {
            let size = content.len() as u64;
            append(
                &mut builder,
                path,
                tar::EntryType::Regular,
                0o644,
                size,
                &mut &*content,
            )
            .map_err(write())?;
        }
        let mut file = std::fs::File::open(&layer).map_err(write())?;
        let size = file.metadata().map_err(write())?.len();
        append(
            &mut builder,
            "layer.tar",
            tar::EntryType::Regular,
            0o644,
            size,
            &mut file,
        )
        .map_err(write())?;
        builder
            .into_inner()
            .and_then(|file| file.sync_all())
            .map_err(write())
    });
    let _ = std::fs::remove_file(&layer);
    packed
}

/// The one layer of such an image as a tar file: its digest, and the size of the binary.
fn write_layer(executable: &Path, image: &BinaryImage, target: &Path) -> Result<(String, u64), Error> {
    let write = || io_error("pack the image");
    let file = std::fs::File::create(target).map_err(write())?;
    let mut builder = tar::Builder::new(file);
    let passwd =
        "root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin\n";
    let group = "root:x:0:\nnonroot:x:65532:\n";
    for directory in ["etc/", "tmp/", "root/", "home/nonroot/"] {
        let mode = if directory == "tmp/" { 0o1777 } else { 0o755 };
        append(
            &mut builder,
            directory,
            tar::EntryType::Directory,
            mode,
            0,
            &mut std::io::empty(),
        )
        .map_err(write())?;
    }
    for (path, content) in [("etc/passwd", passwd), ("etc/group", group)] {
        let size = content.len() as u64;
        append(
            &mut builder,
            path,
            tar::EntryType::Regular,
            0o644,
            size,
            &mut content.as_bytes(),
        )
        .map_err(write())?;
    }
    let mut binary = std::fs::File::open(executable).map_err(write())?;
    let size = binary.metadata().map_err(write())?.len();
    let path = image.path.trim_start_matches('/');
    append(
        &mut builder,
        path,
        tar::EntryType::Regular,
        0o755,
        size,
        &mut binary,
    )
    .map_err(write())?;
    builder.into_inner().map_err(write())?;

    let mut file = std::fs::File::open(target).map_err(write())?;
    let mut hash: sha2::Sha256 = sha2::Digest::new();
    std::io::copy(&mut file, &mut HashWriter(&mut hash)).map_err(write())?;
    Ok((
        format!("sha256:{}", super::hex(&sha2::Digest::finalize(hash))),
        size,
    ))
}

fn config_body(image: &BinaryImage, diff_id: &str) -> Vec<u8> {
    let config = json!({
        "architecture": Platform::of_this_machine().architecture(),
        "os": "linux",
        "config": {
            "Entrypoint": image.entrypoint,
            "Cmd": image.cmd,
            "Env": image.env,
            "User": image.user,
            "WorkingDir": image.working_dir,
        },
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
    });
    config.to_string().into_bytes()
}

struct HashWriter<'a>(&'a mut sha2::Sha256);

impl std::io::Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        sha2::Digest::update(self.0, bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn append(
    builder: &mut tar::Builder<std::fs::File>,
    path: &str,
    kind: tar::EntryType,
    mode: u32,
    size: u64,
    content: &mut dyn std::io::Read,
) -> std::io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(size);
    builder.append_data(&mut header, path, content)
}
