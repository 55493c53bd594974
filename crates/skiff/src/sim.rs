//! `skiff sim`: simulated nodes for skiff's own cluster, or for any other by its kubeconfig.

use std::time::Duration;

use crate::cli::{SimArgs, SimCommand};
use crate::daemon;
use anyhow::{Context, Result};
use skiff_sim::{Profile, SimConfig};
use tokio_util::sync::CancellationToken;

pub fn run(args: &SimArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let client = client(args).await?;
        match &args.command {
            SimCommand::Remove => {
                let count = skiff_sim::remove(&client).await?;
                say!("removed {count} simulated nodes");
                Ok(())
            }
            SimCommand::Nodes {
                count,
                file,
                lease_interval,
            } => {
                let profile = match file {
                    Some(file) => {
                        let text = std::fs::read_to_string(file);
                        let text = text.with_context(|| format!("cannot read {}", file.display()))?;
                        Profile::parse(&text).with_context(|| file.display().to_string())?
                    }
                    None => Profile::of_nodes(count.unwrap_or_default()),
                };
                profile.validate()?;
                let mut config = SimConfig::new(profile);
                config.lease_interval = Duration::from_secs(*lease_interval);
                let stop = CancellationToken::new();
                let interrupted = stop.clone();
                tokio::spawn(async move {
                    let _ = tokio::signal::ctrl_c().await;
                    interrupted.cancel();
                });
                let created = |count| {
                    say!("{count} simulated nodes are ready; they live until you press Ctrl-C.");
                    say!("`skiff sim remove` removes them.");
                };
                Ok(skiff_sim::run(config, client, stop, created).await?)
            }
        }
    })
}

async fn client(args: &SimArgs) -> Result<kube::Client> {
    match &args.kubeconfig {
        Some(path) => skiff_client::remote(path, None)
            .await
            .with_context(|| path.display().to_string()),
        None => daemon::client(&daemon::existing(&args.cluster)?).await,
    }
}
