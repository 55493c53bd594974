//! `skiff store`: moves a cluster between the embedded store and etcd, and takes clusters over from others.

mod import;
mod migrate;
pub mod transfer;

use crate::cli::{self, ClusterArgs};
use crate::encryption::EncryptionArgs;
use crate::etcd_args::EtcdArgs;
use anyhow::Result;
use clap::{Args, Subcommand, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct StoreArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    #[command(subcommand)]
    pub command: StoreCommand,
}

#[derive(Debug, Subcommand)]
pub enum StoreCommand {
    /// Move a cluster to another store; its server is stopped meanwhile, its pods go on running
    Migrate(Box<MigrateArgs>),
    /// Make a cluster out of the objects in the etcd of kubeadm or in the database of k3s
    Import(Box<ImportArgs>),
}

#[derive(Debug, Clone, Args)]
pub struct MigrateArgs {
    /// The store to move to
    #[arg(long, value_enum, value_name = "STORE")]
    pub to: Kind,
    // The etcd to move to, or away from if neither the record nor the running server names it.
    #[command(flatten)]
    pub etcd: EtcdArgs,
    #[command(flatten)]
    pub encryption: EncryptionArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    Embedded,
    Etcd,
}

#[derive(Debug, Clone, Args)]
pub struct ImportArgs {
    /// Read the etcd that --etcd-servers names
    #[arg(
        long,
        requires = "etcd_servers",
        required_unless_present = "from_kine",
        conflicts_with = "from_kine"
    )]
    pub from_etcd: bool,
    /// Read this SQLite database of k3s, which is server/db/state.db in its data directory
    #[arg(long, value_name = "FILE", value_parser = cli::file)]
    pub from_kine: Option<PathBuf>,
    #[command(flatten)]
    pub etcd: EtcdArgs,
    /// EncryptionConfiguration that the objects were encrypted with
    #[arg(long, value_name = "FILE", value_parser = cli::file)]
    pub source_encryption_provider_config: Option<PathBuf>,
    /// Folder with keys of the old cluster in kubeadm's layout: ca.crt and ca.key, sa.key, front-proxy-ca.crt and
    /// front-proxy-ca.key; those that are missing are made
    #[arg(long, value_name = "DIR", value_parser = cli::file)]
    pub pki_dir: Option<PathBuf>,
    /// Address of the API server [default: 0.0.0.0:6443]
    #[arg(long, value_name = "IP:PORT")]
    pub bind: Option<SocketAddr>,
    /// Network of the pods, as the old cluster had it [default: 10.244.0.0/16]
    #[arg(long, value_name = "CIDR")]
    pub cluster_cidr: Option<String>,
    /// Network of the services, as the old cluster had it [default: 10.96.0.0/12]
    #[arg(long, value_name = "CIDR")]
    pub service_cluster_ip_range: Option<String>,
}

pub fn run(args: &StoreArgs) -> Result<()> {
    crate::preflight::check_root()?;
    match &args.command {
        StoreCommand::Migrate(command) => migrate::run(&args.cluster, command),
        StoreCommand::Import(command) => import::run(&args.cluster, command),
    }
}

#[cfg(test)]
mod tests {
    use crate::cli::Cli;
    use clap::Parser;

    #[test]
    fn sources_and_targets_are_named() {
        let check = |line: &str, expected: bool| {
            let parsed = Cli::try_parse_from(line.split(' '));
            assert_eq!(parsed.is_ok(), expected, "{line}: {:?}", parsed.err());
        };
        check("skiff store migrate --to embedded --name a", true);
        check(
            "skiff store migrate --to etcd --etcd-servers http://a:1,http://b:1",
            true,
        );
        check("skiff store migrate", false);
        check("skiff store migrate --to paper", false);
        check("skiff store import --from-kine state.db", true);
        check("skiff store import --from-etcd --etcd-servers http://a:1", true);
        check("skiff store import --from-etcd", false);
        check("skiff store import", false);
        check(
            "skiff store import --from-etcd --etcd-servers http://a:1 --from-kine state.db",
            false,
        );
        check("skiff backup", false);
        check("skiff backup a --with-keys --passphrase-file b", true);
        check("skiff backup a --with-keys --secrets-in-plain-text", false);
        check("skiff restore a --name b --bind 127.0.0.1:7443", true);
    }
}
