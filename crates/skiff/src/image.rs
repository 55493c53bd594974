//! `skiff image`: the embedded runtime's images, by way of its store on disk, so that it works whether or not
//! the cluster is running. Also what the demo image is.

use crate::cli::{ImageArgs, ImageCommand};
use crate::daemon::existing;
use crate::preflight;
use anyhow::{Context, Result, bail};
use indicatif::{HumanBytes, ProgressBar};
use skiff_runtime::ImageStore;
use skiff_runtime::image::{BinaryImage, Credentials, Progress, ProgressFn};
use std::path::Path;
use std::sync::Arc;

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
    let store = Arc::new(ImageStore::open(&cluster.runtime_config()?.images())?);
    let (bar, progress) = progress();
    match &args.command {
        ImageCommand::Import { archive } => {
            let (path, importing) = (archive.clone(), Arc::clone(&store));
            let import = tokio::task::spawn_blocking(move || importing.import(&path, &progress)).await?;
            bar.finish_and_clear();
            for image in import.with_context(|| archive.display().to_string())? {
                say!("imported {image}");
            }
        }
        ImageCommand::Pull { image, creds } => {
            let credentials = creds.as_deref().map(read_credentials).transpose()?;
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

fn progress() -> (ProgressBar, ProgressFn) {
    let bar = ProgressBar::new_spinner();
    let shown = bar.clone();
    let show = move |progress| match progress {
        Progress::Downloading { digest, done, total } => {
            shown.set_message(format!(
                "{} {} of {}",
                short(&digest),
                HumanBytes(done),
                HumanBytes(total)
            ));
            shown.tick();
        }
        Progress::Unpacking { digest } => {
            shown.set_message(format!("{} unpacking", short(&digest)));
            shown.tick();
        }
        Progress::Done { reference } => shown.set_message(reference),
    };
    (bar, Arc::new(show))
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

fn list(store: &ImageStore) -> Result<()> {
    say!("{:<60} {:<14} {:>10}", "IMAGE", "ID", "SIZE");
    for image in store.list()? {
        let names = if image.repo_tags.is_empty() {
            &image.repo_digests
        } else {
            &image.repo_tags
        };
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
