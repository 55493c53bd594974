//! The project's own chores: `facts` writes the tables of the built-in kinds, `tidy` checks the
//! rules of the house. It is no part of the product and no crate links it.

mod facts;
mod tidy;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

const USAGE: &str = "usage:
  cargo xtask facts --openapi DIR --discovery DIR --go DIR [--out DIR]
      DIR of --openapi holds swagger.json and v3/*.json, of --discovery api__v1.json and its like, of --go the modules
      k8s.io/{api,apimachinery,apiextensions-apiserver,kube-aggregator,kubernetes} as folders (`go mod download`
      makes them), whose types carry the protobuf numbers and the patch strategies
  cargo xtask tidy";

fn main() -> Result<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some("facts") => {
            let mut options = std::collections::BTreeMap::new();
            while let Some(flag) = arguments.next() {
                let value = arguments
                    .next()
                    .with_context(|| format!("{flag} needs a value"))?;
                options.insert(flag, PathBuf::from(value));
            }
            let mut take = |flag: &str| {
                options
                    .remove(flag)
                    .with_context(|| format!("{flag} is missing\n{USAGE}"))
            };
            let paths = facts::Options {
                openapi: take("--openapi")?,
                discovery: take("--discovery")?,
                go: take("--go")?,
                out: take("--out").unwrap_or_else(|_| "crates/api/data".into()),
            };
            if let Some(flag) = options.keys().next() {
                bail!("unknown flag {flag}\n{USAGE}");
            }
            facts::run(&paths)?;
            Ok(ExitCode::SUCCESS)
        }
        Some("tidy") => {
            let findings = tidy::run(&workspace_root())?;
            for finding in &findings {
                println!("{finding}");
            }
            Ok(if findings.is_empty() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            })
        }
        _ => {
            eprintln!("{USAGE}");
            Ok(ExitCode::from(2))
        }
    }
}

/// `cargo xtask` runs anywhere inside the workspace.
fn workspace_root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .map(PathBuf::from)
        .unwrap_or_default()
}
