//! `skiff image`: the embedded runtime's images, by way of its store on disk, so that it works whether or not
//! the cluster is running. Also what the demo image is.

use crate::cli::{ImageArgs, ImageCommand};
use crate::daemon::existing;
use crate::preflight;
use anyhow::{Context, Result, bail};
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use skiff_runtime::ImageStore;
use skiff_runtime::image::{BinaryImage, Credentials, EngineSocket, Progress, ProgressFn};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

pub const DEMO: &str = "skiff.local/demo:v1";

/// The demo image: this binary, which then serves HTTP.
pub fn demo() -> BinaryImage {
    BinaryImage {
        path: "/skiff".to_owned(),
        entrypoint: vec!["/skiff".to_owned()],
        cmd: vec!["demo".to_owned()],
        user: "65532".to_owned(),
        ..BinaryImage::default()
    }
}

pub async fn run(args: &ImageArgs) -> Result<()> {
    if let ImageCommand::SaveDemo { archive } = &args.command {
        return save_demo(archive);
    }
    preflight::check_root()?;
    let cluster = existing(&args.cluster)?;
    let store = ImageStore::open(&cluster.runtime_config()?.images())?;
    let store = Arc::new(configured(store, &args.command));
    let (bar, progress) = progress();
    match &args.command {
        ImageCommand::Import { archive, .. } => {
            let (path, importing) = (archive.clone(), Arc::clone(&store));
            let import = tokio::task::spawn_blocking(move || importing.import(&path, &progress)).await?;
            bar.finish_and_clear();
            for image in import.with_context(|| archive.display().to_string())? {
                say!("imported {image}");
            }
        }
        ImageCommand::Load { images, host, .. } => {
            let engine = match host {
                Some(host) => EngineSocket::parse(host)?,
                None => EngineSocket::find().await?,
            };
            for image in images {
                bar.set_message(format!("{image} loading"));
                let loaded = store.load(image, &engine, &progress).await;
                for name in loaded.with_context(|| format!("cannot load {image}"))? {
                    bar.suspend(|| say!("loaded {name}"));
                }
            }
            bar.finish_and_clear();
        }
        ImageCommand::Pull {
            image,
            creds,
            authfile,
            ..
        } => {
            let credentials = match (creds, authfile) {
                (Some(creds), _) => Some(read_credentials(creds)?),
                (None, Some(file)) => read_authfile(file, image)?,
                (None, None) => None,
            };
            let pulled = store.pull(image, credentials.as_ref(), &progress).await;
            bar.finish_and_clear();
            say!("pulled {image} ({})", pulled?);
        }
        ImageCommand::List => list(&store)?,
        ImageCommand::Rm { images } => {
            for image in images {
                if store.find(image)?.is_none() {
                    bail!(
                        "there is no image {image:?}; `skiff image list{}` shows those there are",
                        cluster.name_flag()
                    );
                }
                store.remove(image)?;
                say!("removed {image}");
            }
        }
        ImageCommand::SaveDemo { .. } => {}
    }
    Ok(())
}

fn save_demo(archive: &Path) -> Result<()> {
    skiff_runtime::image::save_binary_image(DEMO, &std::env::current_exe()?, &demo(), archive)?;
    say!("wrote {DEMO} to {}", archive.display());
    Ok(())
}

/// The store, with what the flags say about where images come from.
fn configured(store: ImageStore, command: &ImageCommand) -> ImageStore {
    let (platform, registries) = match command {
        ImageCommand::Pull {
            platform,
            registry_config_path,
            ..
        } => (platform, registry_config_path.as_slice()),
        ImageCommand::Import { platform, .. } | ImageCommand::Load { platform, .. } => (platform, &[][..]),
        _ => return store,
    };
    let store = match platform {
        Some(platform) => store.with_platform(platform.clone()),
        None => store,
    };
    match registries {
        [] => store,
        paths => store.with_registry_configs(paths.to_vec()),
    }
}

fn progress() -> (ProgressBar, ProgressFn) {
    let bar = ProgressBar::new_spinner();
    let shown = bar.clone();
    let download = Mutex::new(Download::default());
    let show = move |progress| {
        let mut download = download.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(message) = download.step(progress) {
            shown.set_message(message);
        }
        if let (true, Ok(style)) = (
            download.bytes > 0 && shown.length().is_none(),
            ProgressStyle::with_template("{spinner} {bytes}/{total_bytes} {bar:30} {msg}"),
        ) {
            shown.set_style(style);
            shown.set_length(download.bytes);
        }
        shown.set_position(download.arrived());
        shown.tick();
    };
    (bar, Arc::new(show))
}

/// How far the layers of an image are, taken together.
#[derive(Default)]
struct Download {
    layers: usize,
    bytes: u64,
    /// Bytes of each layer that have arrived, and of how many.
    done: HashMap<String, (u64, u64)>,
}

impl Download {
    /// What there is to say about it.
    fn step(&mut self, progress: Progress) -> Option<String> {
        match progress {
            Progress::Needed { layers, bytes } => {
                (self.layers, self.bytes) = (layers, bytes);
                None
            }
            Progress::Downloading { digest, done, total } => {
                self.done.insert(digest, (done, total));
                let complete = self.done.values().filter(|(done, total)| done == total).count();
                Some(format!("{complete} of {} layers", self.layers))
            }
            Progress::Unpacking { digest } => Some(format!("{} unpacking", short(&digest))),
            Progress::Done { reference } => Some(reference),
        }
    }

    fn arrived(&self) -> u64 {
        self.done.values().map(|(done, _)| done).sum()
    }
}

fn short(digest: &str) -> &str {
    let digest = digest.strip_prefix("sha256:").unwrap_or(digest);
    digest.get(..12).unwrap_or(digest)
}

fn read_credentials(text: &str) -> Result<Credentials> {
    let Some((user, password)) = text.split_once(':') else {
        bail!("--creds takes USER:PASSWORD")
    };
    Ok(Credentials {
        username: user.to_owned(),
        password: password.to_owned(),
        ..Credentials::default()
    })
}

fn read_authfile(file: &Path, image: &str) -> Result<Option<Credentials>> {
    let body = std::fs::read(file).with_context(|| file.display().to_string())?;
    Credentials::from_docker_config(&body, image).with_context(|| file.display().to_string())
}

fn list(store: &ImageStore) -> Result<()> {
    say!("{:<60} {:<14} {:>10}", "IMAGE", "ID", "SIZE");
    for image in store.list()? {
        let names = if image.repo_tags.is_empty() {
            &image.repo_digests
        } else {
            &image.repo_tags
        };
        let unnamed = [String::from("<none>")];
        let names = if names.is_empty() { &unnamed[..] } else { names };
        for name in names {
            say!(
                "{name:<60} {:<14} {:>10}",
                short(&image.id),
                HumanBytes(image.size).to_string()
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_of_a_pull() {
        let mut download = Download::default();
        assert_eq!(download.step(Progress::Needed { layers: 2, bytes: 30 }), None);
        let mut arrived = |digest: &str, done: u64, total: u64| {
            let message = download.step(Progress::Downloading {
                digest: digest.into(),
                done,
                total,
            });
            (message.unwrap_or_default(), download.arrived())
        };
        assert_eq!(arrived("a", 4, 10), ("0 of 2 layers".into(), 4));
        assert_eq!(arrived("b", 20, 20), ("1 of 2 layers".into(), 24));
        // It began anew.
        assert_eq!(arrived("a", 1, 10), ("1 of 2 layers".into(), 21));
        assert_eq!(arrived("a", 10, 10), ("2 of 2 layers".into(), 30));
    }
}
