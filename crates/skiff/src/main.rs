//! The skiff binary: flags and wiring, nothing else.
//!
//! The same file is also a pod's shim, a container's first process, a CNI plugin and the holder of listening sockets, so `main` looks for those
//! roles before it does anything: they must start fast and single-threaded.

#[macro_use]
mod say;

mod access;
mod addons;
mod agent;
mod api_args;
mod backup;
mod bundle;
mod certificates;
mod certs;
mod cleanup;
mod cli;
mod cluster;
mod components;
mod controller_args;
mod csr;
mod daemon;
mod demo;
mod encryption;
mod etcd_args;
mod gateway_api;
mod image;
mod ingress_args;
mod join;
mod joining;
mod kubelet_root;
mod leave;
mod log;
mod logs;
mod memory;
mod net;
mod networks;
mod node_args;
mod node_health_args;
mod preflight;
mod progress;
mod restart;
mod runtime;
mod secrets;
mod serve;
mod server_state;
mod sim;
mod status;
mod stores;
mod supervise;
mod token;
mod trace;
mod wiring;

use anyhow::Context;
use clap::{CommandFactory, Parser};
use cli::{Cli, Command};
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The version of Kubernetes whose behaviour this is, and that of skiff.
pub const VERSION: &str = concat!("v1.36.4+skiff", env!("CARGO_PKG_VERSION"));

fn main() -> ExitCode {
    let args: Vec<std::ffi::OsString> = std::env::args_os().skip(1).collect();
    let role = skiff_cni::plugin_main()
        .or_else(|| skiff_runtime::internal_main(&args))
        .or_else(|| skiff_sockets::internal_main(&args));
    if let Some(code) = role {
        return ExitCode::from(u8::try_from(code).unwrap_or(1));
    }
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say::complain(format_args!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    match cli.command {
        Command::Up(args) => daemon::up(&args),
        Command::Server(args) => serve::main(&args),
        Command::Down(args) => daemon::down(&args),
        Command::Restart(args) => restart::run(&args),
        Command::Join(args) => join::run(&args),
        Command::Leave(args) => leave::run(&args),
        Command::Token(args) => block_on(token::run(&args))?,
        Command::NodeRoles => joining::print_node_roles(),
        Command::Status(args) => block_on(status::show(&args))?,
        Command::List(args) => status::list(&args),
        Command::Logs(args) => logs::show(&args),
        Command::Kubeconfig(args) => {
            let cluster = daemon::existing(&args)?;
            if cluster.agent {
                anyhow::bail!(
                    "this machine is a node; the administrator's kubeconfig is where the API server runs"
                );
            }
            let path = cluster.kubeconfig();
            let text = std::fs::read_to_string(&path);
            say_raw!("{}", text.with_context(|| cluster::needs_root(&path))?);
            Ok(())
        }
        Command::Trace(args) => block_on(trace::show(&args))?,
        Command::Net(args) => block_on(net::run(&args))?,
        Command::Backup(args) => backup::run(&args),
        Command::Restore(args) => backup::restore(&args),
        Command::Store(args) => stores::run(&args),
        Command::Secrets(args) => block_on(secrets::run(&args))?,
        Command::Sim(args) => sim::run(&args),
        Command::Certs(args) => certs::run(&args),
        Command::Image(args) => block_on(image::run(&args))?,
        Command::Runtime(args) => runtime::run(&args),
        Command::Demo { port } => block_on(demo::serve(port))?,
        Command::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "skiff", &mut script);
            say_raw!("{}", String::from_utf8_lossy(&script));
            Ok(())
        }
        Command::Version => {
            say!("skiff {VERSION}");
            Ok(())
        }
    }
}

/// Commands that only ask something need one thread.
pub fn block_on<T>(future: impl Future<Output = T>) -> anyhow::Result<T> {
    Ok(tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(future))
}
