//! What operations and their parameters say of themselves. The sentences of operations follow one pattern
//! each, as upstream's do; those of parameters are taken from the options' types where they are published,
//! and are our own where they are not.

use super::Describe;
use super::definitions::meta;
use super::operations::{Operation, Parameter};

pub(super) fn operation(operation: &Operation, path: &str) -> String {
    let kind = &operation.object;
    // `status of ` and the like.
    let of = match operation.subresource.as_str() {
        "" => String::new(),
        name => format!("{name} of "),
    };
    match operation.action {
        "list" if operation.watchable => format!("list or watch objects of kind {kind}"),
        "list" => format!("list objects of kind {kind}"),
        "post" if of.is_empty() => format!("create {}", with_article(kind)),
        "post" => format!("create {of}{}", with_article(kind)),
        "delete" => format!("delete {}", with_article(kind)),
        "deletecollection" => format!("delete collection of {kind}"),
        "get" => format!("read {of}the specified {kind}"),
        "put" => format!("replace {of}the specified {kind}"),
        "patch" => format!("partially update {of}the specified {kind}"),
        "connect" => format!(
            "connect {} requests to {of}{kind}",
            operation.method.to_uppercase()
        ),
        "watch" => format!(
            "watch changes to an object of kind {kind}. deprecated: use the 'watch' parameter with a list \
             operation instead, filtered to a single item with the 'fieldSelector' parameter."
        ),
        "watchlist" => format!(
            "watch individual changes to a list of {kind}. deprecated: use the 'watch' parameter with a list \
             operation instead."
        ),
        _ => match path {
            "/api/" | "/apis/" => "get available API versions",
            "/version/" => "get the version information for this server",
            "/openid/v1/jwks/" => {
                "get service account issuer OpenID JSON Web Key Set (contains public token verification keys)"
            }
            "/.well-known/openid-configuration/" => {
                "get service account issuer OpenID configuration, also known as the 'OIDC discovery doc'"
            }
            path if path.matches('/').count() == 3 && path.starts_with("/apis/") => {
                "get information of a group"
            }
            _ => "get available resources",
        }
        .to_string(),
    }
}

fn with_article(kind: &str) -> String {
    match kind.as_bytes().first() {
        // A kind that is a plural.
        _ if kind == "Endpoints" => kind.to_string(),
        Some(b'A' | b'E' | b'I' | b'O' | b'U') => format!("an {kind}"),
        _ => format!("a {kind}"),
    }
}

pub(super) fn parameter(
    parameter: &Parameter,
    operation: &Operation,
    describe: &dyn Describe,
) -> Option<String> {
    let name = parameter.name.as_str();
    if parameter.location == "path" {
        return Some(match name {
            "name" => {
                let kind = operation.gvk.as_ref().map_or("", |(_, _, kind)| kind);
                format!("name of the {kind}")
            }
            "namespace" => "object name and auth scope, such as for teams and projects".to_string(),
            _ => "path to the resource".to_string(),
        });
    }
    if let Some(text) = describe.of_field(&meta("DeleteOptions"), name) {
        return Some(text.to_string());
    }
    let text = match name {
        "allowWatchBookmarks" => {
            "Asks for BOOKMARK events in a watch: they carry a resourceVersion to resume from."
        }
        "command" => "The command to run, with its arguments; it is not run in a shell.",
        "container" => "The container that is meant; a pod with one container needs no name.",
        "continue" => {
            "The token that the previous page of a list carried; the other parameters must stay as they were. \
             A token that has expired is answered with 410."
        }
        "fieldManager" => {
            "Names who makes the change, in at most 128 printable characters. Apply requires it; otherwise it is \
             taken from the user agent."
        }
        "fieldSelector" => "Restricts the answer to objects with these field values.",
        "fieldValidation" => {
            "What unknown and duplicate fields of the body lead to: Ignore drops them, Warn drops them with a \
             warning header, Strict refuses the request."
        }
        "follow" => "Keeps the stream open and sends lines as they are written.",
        "force" => "Takes conflicting fields over from their managers. For apply only.",
        "insecureSkipTLSVerifyBackend" => {
            "Does not verify the serving certificate of the kubelet that has the log."
        }
        "labelSelector" => "Restricts the answer to objects with these labels.",
        "limit" => {
            "The largest number of objects in one page; the answer carries a continue token if there are more."
        }
        "limitBytes" => "Ends the log after so many bytes.",
        "path" => "The path of the request to pass on.",
        "ports" => "The ports to forward.",
        "pretty" => "Indents the answer if true.",
        "previous" => "The log of the container that ran before this one.",
        "resourceVersion" => {
            "Which version of the data the answer must come from; resourceVersionMatch says how."
        }
        "resourceVersionMatch" => "How resourceVersion applies to a list: Exact or NotOlderThan.",
        "sendInitialEvents" => {
            "Starts a watch with an ADDED event for each object and a bookmark that ends them, in place of a list \
             before the watch."
        }
        "shardSelector" => "Restricts the answer to a part of the objects by a hash of a field.",
        "sinceSeconds" => "Only lines of the last so many seconds.",
        "stderr" => "Whether to stream the standard error.",
        "stdin" => "Whether to stream the standard input.",
        "stdout" => "Whether to stream the standard output.",
        "stream" => "Which stream of the container's log: All, Stdout or Stderr.",
        "tailLines" => "Only the last so many lines.",
        "timeoutSeconds" => "Ends the call after so many seconds, whatever it does.",
        "timestamps" => "Puts the time in front of each line.",
        "tty" => "Whether the streams are those of a terminal.",
        "watch" => "Streams changes, each with its type, in place of a list.",
        _ => return None,
    };
    Some(text.to_string())
}
