//! `skiff trace`: the path of the last apply, drawn from the marks that the server keeps.

use crate::cli::{Output, TraceArgs};
use crate::daemon::{client, existing};
use anyhow::{Context, Result, bail};
use skiff_trace::{Mark, waterfall};

const BAR_WIDTH: usize = 40;
/// Where the path of an apply ends: the moment traffic can reach it.
const ENDS: [&str; 1] = ["endpointslices.discovery.k8s.io"];

/// What the server answers.
#[derive(serde::Deserialize)]
struct Marks {
    marks: Vec<Mark>,
}

pub async fn show(args: &TraceArgs) -> Result<()> {
    let cluster = existing(&args.cluster)?;
    let Some((kind, name)) = args.object.split_once('/') else {
        bail!(
            "{:?} is not KIND/NAME; write for example deployment/web",
            args.object
        );
    };
    let (resource, namespaced) = resource_of(kind)?;
    let namespace = if namespaced { args.namespace.as_str() } else { "" };
    let client = client(&cluster).await?;
    let request = http::Request::get("/debug/skiff/trace").body(Vec::new())?;
    let text = client
        .request_text(request)
        .await
        .context("the server does not answer; is the cluster up?")?;
    let Marks { marks } = serde_json::from_str(&text).context("the server sent no marks")?;
    let Some(found) = waterfall(&marks, &resource, namespace, name, &ENDS) else {
        bail!(
            "no write to {resource} {name:?} in namespace {:?} is remembered; the server keeps the last few thousand writes since it started",
            args.namespace
        );
    };
    match args.output {
        Some(Output::Json) => say!("{}", serde_json::to_string_pretty(&found)?),
        None => say_raw!("{}", found.render(BAR_WIDTH)),
    }
    Ok(())
}

/// The resource that a user means: by plural, singular, kind or short name.
fn resource_of(word: &str) -> Result<(String, bool)> {
    let lower = word.to_lowercase();
    let found = skiff_api::facts::resources().iter().find(|r| {
        r.plural == lower
            || r.singular == lower
            || r.kind.to_lowercase() == lower
            || r.short_names.contains(&lower.as_str())
    });
    let Some(found) = found else {
        bail!("the server doesn't have a resource type {word:?}")
    };
    let name = if found.group.is_empty() {
        found.plural.to_owned()
    } else {
        format!("{}.{}", found.plural, found.group)
    };
    Ok((name, found.namespaced))
}
