//! `skiff runtime`: the embedded runtime alone, for another kubelet, crictl or critest. It must know no cluster.

use anyhow::{Context, Result};
use clap::Args;
use skiff_runtime::{Config, Runtime};
use std::path::PathBuf;

#[derive(Debug, Clone, Args)]
pub struct RuntimeArgs {
    /// Directory for images and containers
    #[arg(long, default_value = "/var/lib/skiff-runtime")]
    pub root: PathBuf,
    /// Directory for sockets and namespaces; CRI is served at cri.sock in it
    #[arg(long, default_value = "/run/skiff-runtime")]
    pub run_dir: PathBuf,
    /// cgroup for the runtime's own processes, and for pods that come without a parent
    #[arg(long, default_value = "skiff-runtime")]
    pub cgroup_parent: String,
    /// Directory of the network configuration
    #[arg(long, default_value = "/etc/cni/net.d")]
    pub cni_conf_dir: PathBuf,
    /// Directories of CNI plugins, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "/opt/cni/bin,/usr/lib/cni")]
    pub cni_bin_dir: Vec<PathBuf>,
    /// Folders with the configuration of registries, <host>/hosts.toml
    #[arg(
        long,
        value_name = "DIR:...",
        value_delimiter = ':',
        default_value = "/etc/containerd/certs.d:/etc/docker/certs.d"
    )]
    pub registry_config_path: Vec<PathBuf>,
    /// Import an OCI or docker archive into the images of this directory, and end
    #[arg(long, value_name = "ARCHIVE")]
    pub import: Option<PathBuf>,
    /// Remove all pods, containers and images of a runtime that does not run, and end
    #[arg(long)]
    pub delete: bool,
}

pub fn run(args: &RuntimeArgs) -> Result<()> {
    anyhow::ensure!(
        rustix::process::geteuid().is_root(),
        "the runtime needs root: try sudo skiff runtime"
    );
    let _ = rustix::thread::disable_transparent_huge_pages(true);
    skiff_runtime::raise_open_files();
    let filter = tracing_subscriber::EnvFilter::try_from_env("SKIFF_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    let mut config = Config::new(&args.root, &args.run_dir, &args.cgroup_parent);
    config.cni_conf_dir.clone_from(&args.cni_conf_dir);
    config.cni_bin_dirs.clone_from(&args.cni_bin_dir);
    config
        .registry_config_paths
        .clone_from(&args.registry_config_path);
    config.exe = std::env::current_exe()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        if args.delete {
            return Ok(skiff_runtime::cleanup(config).await?);
        }
        if let Some(archive) = &args.import {
            let store = skiff_runtime::ImageStore::open(&config.images())?;
            let imported = store.import(archive, &skiff_runtime::image::silent());
            for image in imported.with_context(|| archive.display().to_string())? {
                say!("imported {image}");
            }
            return Ok(());
        }
        serve(config).await
    })
}

/// Until it is told to end. Containers run on.
async fn serve(config: Config) -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot wait for signals")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for signals")?;
    let mut runtime = Runtime::start(config).await?;
    tracing::info!(endpoint = runtime.endpoint(), "serving CRI");
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        why = runtime.ended() => anyhow::bail!("the runtime ended: {why}"),
    }
    runtime.stop().await;
    Ok(())
}
