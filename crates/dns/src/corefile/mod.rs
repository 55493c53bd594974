//! A Corefile as configuration: which plugins the server blocks have, with their options. It starts nothing and reads no
//! file: files that a Corefile names are keys of the ConfigMap it came from.
//!
//! What is not supported is refused by name, never passed over.

mod lex;
mod options;

pub use options::{CacheConfig, ForwardConfig, Kept, Policy, Upstreams};

use crate::names::zone;
use crate::plugins::hosts::Hosts;
use crate::plugins::log::LogRule;
use crate::plugins::rewrite::Rule;
use crate::plugins::template::Template;
use crate::zone::Kubernetes;
use hickory_proto::rr::Name;
use lex::Directive;
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// Where the pod of CoreDNS would have the keys of its ConfigMap.
const FOLDER: &str = "/etc/coredns/";
/// The form of a Corefile is small; what is larger is a mistake, and would be held in memory by every node.
const MAX_BYTES: usize = 256 * 1024;
const MAX_BLOCKS: usize = 64;
/// Regular expressions of a Corefile, and what one may take when it is compiled.
const MAX_PATTERNS: usize = 256;
const MAX_PATTERN_BYTES: usize = 256 * 1024;
const MAX_PATTERN_TEXT: usize = 10_000;

/// Why a Corefile is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("Corefile:{line}: {message}")]
pub struct Problem {
    pub line: usize,
    pub message: String,
}

impl Problem {
    pub fn new(line: usize, message: impl Into<String>) -> Problem {
        Problem {
            line,
            message: message.into(),
        }
    }
}

/// One server block.
#[derive(Debug, Clone, Default)]
pub struct BlockConfig {
    /// In lower case.
    pub zones: Vec<Name>,
    pub log: Vec<LogRule>,
    pub errors: bool,
    pub loadbalance: bool,
    pub find_loops: bool,
    pub cache: Option<CacheConfig>,
    pub rewrite: Vec<Rule>,
    pub templates: Vec<Template>,
    pub hosts: Option<Hosts>,
    pub kubernetes: Option<Kubernetes>,
    pub forwards: Vec<ForwardConfig>,
}

#[derive(Debug, Clone, Default)]
pub struct Config {
    pub blocks: Vec<BlockConfig>,
    /// What is accepted because kubeadm's Corefile has it, and does nothing here.
    pub notes: Vec<String>,
}

/// kubeadm's Corefile.
pub fn default_corefile(domain: &str) -> String {
    format!(
        ".:53 {{
    errors
    health {{
        lameduck 5s
    }}
    ready
    kubernetes {domain} in-addr.arpa ip6.arpa {{
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 30
    }}
    prometheus :9153
    forward . /etc/resolv.conf {{
        max_concurrent 1000
    }}
    cache 30 {{
        disable success {domain}
        disable denial {domain}
    }}
    loop
    reload
    loadbalance
}}
"
    )
}

/// What plugins read beside their own lines.
pub(crate) struct Context<'c> {
    /// The zones of the server block.
    pub(crate) zones: &'c [Name],
    files: &'c BTreeMap<String, String>,
    patterns: usize,
}

impl Context<'_> {
    /// A file that a Corefile names: a key of the ConfigMap.
    pub(crate) fn file(&self, path: &str) -> Result<&str, String> {
        let key = path.strip_prefix(FOLDER).unwrap_or(path);
        let found = self.files.get(key).filter(|_| key != "Corefile");
        found.map(String::as_str).ok_or_else(|| {
            format!("the ConfigMap has no key for the file {path}: write {FOLDER}KEY; files of the node are not read")
        })
    }

    pub(crate) fn pattern(&mut self, text: &str) -> Result<regex::Regex, String> {
        if text.len() > MAX_PATTERN_TEXT {
            return Err(format!(
                "regex pattern too long: {} > {MAX_PATTERN_TEXT}",
                text.len()
            ));
        }
        self.patterns += 1;
        if self.patterns > MAX_PATTERNS {
            return Err(format!("more than {MAX_PATTERNS} regex patterns"));
        }
        let built = regex::RegexBuilder::new(text)
            .size_limit(MAX_PATTERN_BYTES)
            .build();
        built.map_err(|_| format!("invalid regex matching pattern: {text}"))
    }

    /// Zones that are named, or those of the server block.
    pub(crate) fn zones_or_own(&self, args: &[String]) -> Result<Vec<Name>, String> {
        match args.is_empty() {
            true => Ok(self.zones.to_vec()),
            false => zones(args),
        }
    }
}

pub(crate) fn zones(args: &[String]) -> Result<Vec<Name>, String> {
    let read = |text: &String| zone(text).ok_or_else(|| format!("{text:?} is not a zone"));
    args.iter().map(read).collect()
}

/// Reads a Corefile. `files` are the other keys of its ConfigMap.
pub fn parse(text: &str, files: &BTreeMap<String, String>) -> Result<Config, Problem> {
    if text.len() > MAX_BYTES {
        return Err(Problem::new(1, format!("longer than {MAX_BYTES} bytes")));
    }
    let blocks = lex::blocks(text)?;
    if blocks.is_empty() {
        return Err(Problem::new(1, "no server block"));
    }
    if blocks.len() > MAX_BLOCKS {
        return Err(Problem::new(1, format!("more than {MAX_BLOCKS} server blocks")));
    }
    let mut config = Config::default();
    let mut served = BTreeSet::new();
    let mut patterns = 0;
    for block in blocks {
        let mut own = Vec::new();
        for key in &block.keys {
            let zone = server_zone(key).map_err(|message| Problem::new(block.line, message))?;
            if !served.insert(zone.clone()) {
                let message = format!("cannot serve dns://{zone}:53 - it is already defined");
                return Err(Problem::new(block.line, message));
            }
            own.push(zone);
        }
        let mut read = BlockConfig {
            zones: own.clone(),
            ..BlockConfig::default()
        };
        let mut context = Context {
            zones: &own,
            files,
            patterns,
        };
        let mut seen = BTreeSet::new();
        for directive in &block.directives {
            let at = |message: String| {
                Problem::new(directive.line, format!("plugin/{}: {message}", directive.name))
            };
            let repeated = !seen.insert(directive.name.as_str());
            if repeated
                && !matches!(
                    directive.name.as_str(),
                    "forward" | "rewrite" | "template" | "log"
                )
            {
                return Err(at("this plugin can only be used once per Server Block".to_owned()));
            }
            plugin(&mut read, &mut config.notes, directive, &mut context).map_err(at)?;
        }
        patterns = context.patterns;
        config.blocks.push(read);
    }
    config.notes.sort();
    config.notes.dedup();
    Ok(config)
}

/// `[dns://]ZONE[:PORT]`.
fn server_zone(key: &str) -> Result<Name, String> {
    let rest = key.strip_prefix("dns://").unwrap_or(key);
    if let Some((scheme, _)) = rest.split_once("://") {
        return Err(format!("{key}: cluster DNS does not serve {scheme}"));
    }
    let (name, port) = match rest.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => (name, Some(port)),
        _ => (rest, None),
    };
    if port.is_some_and(|port| port != "53") {
        return Err(format!("{key}: cluster DNS serves port 53 only"));
    }
    let name = if name.is_empty() { "." } else { name };
    zone(name).ok_or_else(|| format!("{key} is not a zone"))
}

fn plugin(
    block: &mut BlockConfig,
    notes: &mut Vec<String>,
    directive: &Directive,
    context: &mut Context<'_>,
) -> Result<(), String> {
    let nothing = |allowed: &[&str], args: usize| -> Result<(), String> {
        let option = directive
            .block
            .iter()
            .find(|line| !allowed.contains(&line.name.as_str()));
        match option {
            Some(line) => Err(format!("unknown property '{}'", line.name)),
            None if directive.args.len() > args => Err("wrong argument count".to_owned()),
            None => Ok(()),
        }
    };
    match directive.name.as_str() {
        "errors" => {
            nothing(&[], 0)?;
            block.errors = true;
        }
        "health" => {
            nothing(&["lameduck"], 1)?;
            notes.push("health: no port is opened; `skiff status` tells".to_owned());
        }
        "ready" => {
            nothing(&[], 1)?;
            notes.push("ready: no port is opened; `skiff status` tells".to_owned());
        }
        "prometheus" => {
            nothing(&[], 1)?;
            notes.push("prometheus: metrics are at the API server's /metrics?component=coredns".to_owned());
        }
        "reload" => nothing(&[], 2)?,
        "loop" => {
            nothing(&[], 0)?;
            block.find_loops = true;
        }
        "loadbalance" => {
            nothing(&[], 1)?;
            if directive
                .args
                .first()
                .is_some_and(|policy| policy != "round_robin")
            {
                return Err(format!("unknown policy: {}", directive.args[0]));
            }
            block.loadbalance = true;
        }
        "log" => block.log.push(LogRule::parse(directive, context)?),
        "cache" => block.cache = Some(CacheConfig::parse(directive, context)?),
        "rewrite" => block.rewrite.push(Rule::parse(directive, context)?),
        "template" => block.templates.push(Template::parse(directive, context)?),
        "hosts" => block.hosts = Some(Hosts::parse(directive, context)?),
        "kubernetes" => block.kubernetes = Some(options::kubernetes(directive, context)?),
        "forward" => block.forwards.push(ForwardConfig::parse(directive, context)?),
        name => return Err(format!("the plugin {name} is not supported")),
    }
    Ok(())
}

pub(crate) use lex::Directive as CorefileLine;

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
