//! `skiff trace`: the path of an apply, drawn from the marks that all servers keep, after a verdict on the object
//! as it is now.

mod machines;
mod verdict;

use crate::cli::{Output, TraceArgs};
use crate::daemon::{client, existing};
use anyhow::{Result, bail};
use kube::Client;
use kube::api::{Api, DynamicObject};
use kube::core::{ApiResource, GroupVersionKind};
use machines::TracedMachine;
use skiff_trace::{Question, SERVICE_RULES, Style, Waterfall, human, waterfall};
use std::io::IsTerminal;

/// Where the path of an apply ends: the moment traffic can reach it.
const ENDS: [&str; 2] = [SERVICE_RULES, "endpointslices.discovery.k8s.io"];
/// What is drawn for when nobody tells how wide the terminal is.
const DEFAULT_COLUMNS: usize = 120;

/// A resource as discovery tells of it.
struct Resource {
    api: ApiResource,
    namespaced: bool,
}

impl Resource {
    /// As marks and upstream's messages name it: `pods`, `deployments.apps`.
    fn full_name(&self) -> String {
        if self.api.group.is_empty() {
            self.api.plural.clone()
        } else {
            format!("{}.{}", self.api.plural, self.api.group)
        }
    }
}

pub async fn show(args: &TraceArgs) -> Result<()> {
    let cluster = existing(&args.cluster)?;
    let Some((kind, name)) = args.object.split_once('/') else {
        bail!(
            "{:?} is not KIND/NAME; write for example deployment/web",
            args.object
        );
    };
    let client = client(&cluster).await?;
    let machines::Collected { marks, servers } = machines::collect(&cluster, &client).await?;
    let resource = find_resource(&client, kind).await?;
    let namespace = if resource.namespaced {
        args.namespace.as_str()
    } else {
        ""
    };
    let full_name = resource.full_name();
    let question = Question {
        resource: &full_name,
        namespace,
        name,
        ends: &ENDS,
        last: args.last,
    };
    let Some(found) = waterfall(&marks, &question) else {
        let which = args
            .last
            .map_or(String::new(), |last| format!(" number {last} from the last"));
        bail!(
            "no write{which} to {full_name} {name:?} in namespace {:?} is remembered; the server keeps the last few thousand writes since it started",
            args.namespace
        );
    };
    let users = found.steps.iter().map(|step| step.actor.as_str());
    let nodes = machines::nodes(&client, users, &servers).await;
    let machines: Vec<TracedMachine> = servers.into_iter().chain(nodes).collect();
    let objects: Api<DynamicObject> = if resource.namespaced {
        Api::namespaced_with(client.clone(), namespace, &resource.api)
    } else {
        Api::all_with(client.clone(), &resource.api)
    };
    let object = objects.get_opt(name).await?;
    let state = verdict::state(&client, &resource.api.kind, object.as_ref(), &marks).await?;
    match args.output {
        Some(Output::Json) => {
            let mut document = serde_json::to_value(&found)?;
            document["verdict"] = verdict::sentence(&found, &state).into();
            document["machines"] = serde_json::to_value(&machines)?;
            say!("{}", serde_json::to_string_pretty(&document)?);
        }
        None => print(args, &found, &state, &machines),
    }
    Ok(())
}

fn print(args: &TraceArgs, found: &Waterfall, state: &verdict::State, machines: &[TracedMachine]) {
    say!("{}\n", verdict::sentence(found, state));
    say!(
        "{}: {} from {:?} (resourceVersion {}), writes on the way: {}",
        found.object,
        human(found.total_us),
        found.request,
        found.resource_version,
        found.writes
    );
    if args.last.is_none() && found.later > 0 {
        let requests = if found.later == 1 { "request" } else { "requests" };
        say!(
            "{} later {requests} had no effects; --last 1 shows the last one",
            found.later
        );
    }
    if machines.len() > 1 {
        say!("\nMachines, with their clocks beside this one's");
        for machine in machines {
            say!("{}", machine.describe());
        }
    }
    let columns = rustix::termios::tcgetwinsize(rustix::stdio::stdout())
        .map(|size| usize::from(size.ws_col))
        .ok()
        .filter(|columns| *columns > 0)
        .or_else(|| std::env::var("COLUMNS").ok()?.parse().ok())
        .unwrap_or(DEFAULT_COLUMNS);
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    say_raw!("\n{}", found.render(Style { columns, color }));
}

/// The resource that a user means: by plural, singular, kind or short name, with or without its group.
async fn find_resource(client: &Client, word: &str) -> Result<Resource> {
    let lower = word.to_lowercase();
    let (lower, group) = match lower.split_once('.') {
        Some((name, group)) => (name, Some(group)),
        None => (lower.as_str(), None),
    };
    let mut lists = vec![client.list_core_api_resources("v1").await?];
    for listed in client.list_api_groups().await?.groups {
        if group.is_some_and(|group| group != listed.name) {
            continue;
        }
        let Some(preferred) = listed
            .preferred_version
            .or_else(|| listed.versions.into_iter().next())
        else {
            continue;
        };
        // One server behind the aggregator may be away; the others still answer.
        if let Ok(list) = client.list_api_group_resources(&preferred.group_version).await {
            lists.push(list);
        }
    }
    for list in lists {
        let (list_group, version) = list
            .group_version
            .split_once('/')
            .unwrap_or(("", &list.group_version));
        if group.is_some_and(|group| group != list_group) {
            continue;
        }
        let found = list.resources.iter().find(|resource| {
            !resource.name.contains('/')
                && (resource.name == lower
                    || resource.singular_name == lower
                    || resource.kind.to_lowercase() == lower
                    || resource.short_names.iter().flatten().any(|short| short == lower))
        });
        if let Some(found) = found {
            let kind = GroupVersionKind::gvk(list_group, version, &found.kind);
            return Ok(Resource {
                api: ApiResource::from_gvk_with_plural(&kind, &found.name),
                namespaced: found.namespaced,
            });
        }
    }
    bail!("the server doesn't have a resource type {word:?}")
}
