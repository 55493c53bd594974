//! `skiff restart`: the server of a cluster once more, by the program that is called and with the flags that it had. Its
//! listening sockets are kept meanwhile (`skiff_sockets`), and its pods run on.

use crate::cli::{self, Cli, ClusterArgs, Command, ServerArgs};
use crate::cluster::Cluster;
use crate::{daemon, preflight};
use anyhow::{Context, Result, bail};
use clap::Parser;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::time::Instant;

pub fn run(args: &ClusterArgs) -> Result<()> {
    preflight::check_root()?;
    let cluster = daemon::existing(args)?;
    let Some(running) = Running::find(&cluster, "restart it there, such as by `systemctl restart skiff`")?
    else {
        bail!(
            "cluster {:?} is not running; start it with `skiff up{}`",
            cluster.name,
            cluster.name_flag()
        );
    };
    // Flags that this version does not know are found before anything is stopped.
    running.parse()?;
    daemon::stop(&cluster, running.pid)?;
    running.start(&cluster, &running.flags)
}

/// A server that runs in the background, and how it was started.
pub struct Running {
    pub pid: u32,
    pub flags: Vec<OsString>,
    called_in: Option<PathBuf>,
}

impl Running {
    /// The server of the cluster, if one runs. One in the foreground is an error that ends with `what_to_do`.
    pub fn find(cluster: &Cluster, what_to_do: &str) -> Result<Option<Running>> {
        let Some(pid) = cluster.running()? else {
            return Ok(None);
        };
        let read = |file: &str| {
            let path = format!("/proc/{pid}/{file}");
            let bytes = fs::read(&path).with_context(|| format!("cannot read {path}"))?;
            let parts = bytes.split(|byte| *byte == 0).map(OsStr::from_bytes);
            Ok::<_, anyhow::Error>(parts.map(OsStr::to_owned).collect::<Vec<OsString>>())
        };
        let environment = read("environ")?;
        let variable = |name: &str| {
            environment.iter().find_map(|entry| {
                let value = entry
                    .as_bytes()
                    .strip_prefix(name.as_bytes())?
                    .strip_prefix(b"=")?;
                Some(OsString::from_vec(value.to_vec()))
            })
        };
        if variable(daemon::BACKGROUND).is_none() {
            bail!(
                "cluster {:?} runs in the foreground (pid {pid}), so that it cannot be started again from here: {what_to_do}",
                cluster.name
            );
        }
        let mut flags = read("cmdline")?;
        // What ends with a zero has nothing after it.
        flags.pop();
        let flags = flags
            .into_iter()
            .skip(2)
            .filter(|flag| flag != "--report-progress")
            .collect();
        Ok(Some(Running {
            pid,
            flags,
            called_in: variable(cli::CALLED_IN).map(PathBuf::from),
        }))
    }

    /// The flags as the server took them.
    pub fn parse(&self) -> Result<Box<ServerArgs>> {
        // Files are named from where the server was started.
        if let Some(folder) = &self.called_in {
            std::env::set_current_dir(folder).with_context(|| {
                format!("cannot enter {}, where the server was started", folder.display())
            })?;
        }
        let line = [OsString::from("skiff"), OsString::from("server")];
        match Cli::try_parse_from(line.into_iter().chain(self.flags.iter().cloned()))?.command {
            Command::Server(args) => Ok(args),
            _ => bail!("the flags of the running server cannot be read"),
        }
    }

    pub fn start(&self, cluster: &Cluster, flags: &[OsString]) -> Result<()> {
        daemon::start(cluster, flags, Instant::now(), |_| {
            say!("Cluster {:?} is running again.", cluster.name);
        })
    }
}
