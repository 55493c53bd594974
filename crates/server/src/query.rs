//! The query options of the verbs, read and checked with upstream's messages.

use serde_json::{Value, json};
use skiff_meta::selector::{FieldSelector, LabelSelector};
use skiff_meta::{GroupKind, Status, field};
pub use skiff_registry::body::FieldValidation;

use crate::request_info::query_pairs;

/// The options of any verb, as given.
#[derive(Clone, Debug, Default)]
pub struct Query {
    pairs: Vec<(String, String)>,
}

impl Query {
    pub fn parse(query: &str) -> Query {
        Query {
            pairs: query_pairs(query).collect(),
        }
    }

    pub fn get(&self, key: &str) -> Option<&str> {
        self.pairs
            .iter()
            .find(|(k, _)| k == key)
            .map(|(_, value)| value.as_str())
    }

    pub fn text(&self, key: &str) -> &str {
        self.get(key).unwrap_or("")
    }

    pub fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.pairs
            .iter()
            .filter(move |(k, _)| k == key)
            .map(|(_, value)| value.as_str())
    }

    /// COMPAT: any value but `false` and `0` is true, as upstream's query decoder has it.
    pub fn flag(&self, key: &str) -> Option<bool> {
        self.get(key)
            .map(|value| !matches!(value.to_ascii_lowercase().as_str(), "false" | "0"))
    }

    pub fn number(&self, key: &str) -> Result<Option<i64>, Status> {
        match self.get(key) {
            None => Ok(None),
            Some(text) => text.parse().map(Some).map_err(|_| {
                let why = if !text.is_empty()
                    && text
                        .trim_start_matches(['-', '+'])
                        .bytes()
                        .all(|b| b.is_ascii_digit())
                {
                    "value out of range"
                } else {
                    "invalid syntax"
                };
                Status::bad_request(format!("strconv.ParseInt: parsing {}: {why}", field::quote(text)))
            }),
        }
    }
}

/// How an answer relates to the resourceVersion asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionMatch {
    Unset,
    NotOlderThan,
    Exact,
}

/// The options of list, watch and deletecollection.
#[derive(Clone, Debug)]
pub struct ListOptions {
    pub labels: LabelSelector,
    pub fields: FieldSelector,
    pub limit: usize,
    pub continue_token: String,
    pub resource_version: String,
    pub version_match: VersionMatch,
    pub timeout_seconds: Option<i64>,
    pub watch: bool,
    pub bookmarks: bool,
    pub send_initial_events: Option<bool>,
}

impl ListOptions {
    /// Reads the options. `selectable` are the field names that the kind knows, beside name and namespace.
    pub fn read(
        query: &Query,
        watch: bool,
        name: &str,
        selectable: &[&str],
        converted: impl Fn(&str) -> Option<&'static str>,
        unknown: impl Fn(&str) -> String,
    ) -> Result<ListOptions, Status> {
        let labels = LabelSelector::parse(query.text("labelSelector")).map_err(Status::bad_request)?;
        let mut fields = FieldSelector::parse(query.text("fieldSelector")).map_err(Status::bad_request)?;
        let mut options = ListOptions {
            limit: query.number("limit")?.unwrap_or(0).max(0) as usize,
            continue_token: query.text("continue").to_string(),
            resource_version: query.text("resourceVersion").to_string(),
            version_match: match query.text("resourceVersionMatch") {
                "Exact" => VersionMatch::Exact,
                "NotOlderThan" => VersionMatch::NotOlderThan,
                _ => VersionMatch::Unset,
            },
            timeout_seconds: query.number("timeoutSeconds")?,
            watch,
            bookmarks: query.flag("allowWatchBookmarks").unwrap_or(false),
            send_initial_events: query.flag("sendInitialEvents"),
            labels,
            fields: FieldSelector::everything(),
        };
        let mut given_match = query.text("resourceVersionMatch");
        // COMPAT: a watch from nowhere is one with initial events, though it does not say so.
        if watch
            && options.send_initial_events.is_none()
            && given_match.is_empty()
            && matches!(options.resource_version.as_str(), "" | "0")
        {
            options.send_initial_events = Some(true);
            options.version_match = VersionMatch::NotOlderThan;
            given_match = "NotOlderThan";
        }
        options.check(given_match)?;
        for term in &mut fields.terms {
            if matches!(term.field.as_str(), "metadata.name" | "metadata.namespace")
                || selectable.contains(&term.field.as_str())
            {
                continue;
            }
            if let Some(stored) = converted(&term.field) {
                term.field = stored.to_string();
                continue;
            }
            let label = &term.field;
            return Err(Status::bad_request(unknown(label)));
        }
        if !name.is_empty() {
            match fields.required_value("metadata.name") {
                Some(selected) if selected == name => {}
                None if fields.is_empty() => {
                    fields = FieldSelector::parse(&format!("metadata.name={name}"))
                        .map_err(Status::bad_request)?;
                }
                _ => {
                    return Err(Status::bad_request(
                        "fieldSelector metadata.name doesn't match requested name",
                    ));
                }
            }
        }
        Ok(ListOptions { fields, ..options })
    }

    fn check(&self, given_match: &str) -> Result<(), Status> {
        let path = field::Path::new("resourceVersionMatch");
        let initial = field::Path::new("sendInitialEvents");
        let mut found = Vec::new();
        if self.watch {
            if self.send_initial_events.is_some() && given_match != "NotOlderThan" {
                found.push(field::Error::forbidden(
                    &path,
                    "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
                ));
            }
            if !given_match.is_empty() {
                if self.send_initial_events.is_none() {
                    found.push(field::Error::forbidden(
                        &path,
                        "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
                    ));
                }
                if given_match != "NotOlderThan" {
                    found.push(field::Error::not_supported(&path, given_match, &["NotOlderThan"]));
                }
                if !self.continue_token.is_empty() {
                    found.push(field::Error::forbidden(
                        &path,
                        "resourceVersionMatch is forbidden when continue is provided",
                    ));
                }
            }
        } else {
            if !given_match.is_empty() {
                if self.resource_version.is_empty() {
                    found.push(field::Error::forbidden(
                        &path,
                        "resourceVersionMatch is forbidden unless resourceVersion is provided",
                    ));
                }
                if !self.continue_token.is_empty() {
                    found.push(field::Error::forbidden(
                        &path,
                        "resourceVersionMatch is forbidden when continue is provided",
                    ));
                }
                if self.version_match == VersionMatch::Unset {
                    found.push(field::Error::not_supported(
                        &path,
                        given_match,
                        &["Exact", "NotOlderThan", ""],
                    ));
                }
                if self.version_match == VersionMatch::Exact && self.resource_version == "0" {
                    found.push(field::Error::forbidden(
                        &path,
                        "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"",
                    ));
                }
            }
            if self.send_initial_events.is_some() {
                found.push(field::Error::forbidden(
                    &initial,
                    "sendInitialEvents is forbidden for list",
                ));
            }
        }
        refuse("ListOptions", found)
    }
}

fn refuse(kind: &str, found: Vec<field::Error>) -> Result<(), Status> {
    if found.is_empty() {
        Ok(())
    } else {
        Err(Status::invalid(&GroupKind::new("meta.k8s.io", kind), "", &found))
    }
}

/// The options of create, update and patch.
#[derive(Clone, Debug)]
pub struct WriteOptions {
    pub dry_run: bool,
    pub field_validation: FieldValidation,
    /// Empty when the client did not say.
    pub field_manager: String,
    /// Whether an apply takes fields from others.
    pub force: bool,
    /// As admission sees it.
    pub value: Value,
}

impl WriteOptions {
    pub fn read(query: &Query, kind: &'static str) -> Result<WriteOptions, Status> {
        WriteOptions::checked(query, kind, false)
    }

    /// The options of an apply, which must say who applies.
    pub fn of_apply(query: &Query) -> Result<WriteOptions, Status> {
        WriteOptions::checked(query, "PatchOptions", true)
    }

    fn checked(query: &Query, kind: &'static str, apply: bool) -> Result<WriteOptions, Status> {
        let mut found = Vec::new();
        let manager = query.text("fieldManager");
        let path = field::Path::new("fieldManager");
        if apply && manager.is_empty() {
            found.push(field::Error::required(&path, "is required for apply patch"));
        }
        if !apply && kind == "PatchOptions" && query.get("force").is_some() {
            found.push(field::Error::forbidden(
                &field::Path::new("force"),
                "may not be specified for non-apply patch",
            ));
        }
        if manager.len() > 128 {
            found.push(field::Error::too_long(&path, 128));
        }
        for (at, char) in manager.char_indices() {
            if char.is_control() || (char.is_whitespace() && char != ' ') {
                let detail = format!("invalid character U+{:04X} (at position {at})", char as u32);
                found.push(field::Error::invalid(&path, manager, detail));
            }
        }
        let dry_run: Vec<&str> = query.all("dryRun").collect();
        if dry_run.iter().any(|value| *value != "All") {
            found.push(field::Error::not_supported(
                &field::Path::new("dryRun"),
                json!(dry_run),
                &["All"],
            ));
        }
        let field_validation = match query.text("fieldValidation") {
            "" | "Warn" => FieldValidation::Warn,
            "Ignore" => FieldValidation::Ignore,
            "Strict" => FieldValidation::Strict,
            other => {
                let path = field::Path::new("fieldValidation");
                found.push(field::Error::not_supported(
                    &path,
                    other,
                    &["", "Ignore", "Strict", "Warn"],
                ));
                FieldValidation::Strict
            }
        };
        refuse(kind, found)?;
        let mut value = json!({"kind": kind, "apiVersion": "meta.k8s.io/v1"});
        if !dry_run.is_empty() {
            value["dryRun"] = json!(["All"]);
        }
        if !manager.is_empty() {
            value["fieldManager"] = json!(manager);
        }
        if let Some(validation) = query.get("fieldValidation") {
            value["fieldValidation"] = json!(validation);
        }
        Ok(WriteOptions {
            dry_run: !dry_run.is_empty(),
            field_validation,
            field_manager: manager.to_string(),
            force: query.flag("force").unwrap_or(false),
            value,
        })
    }
}

/// DeleteOptions given in the query, where the request has no body.
pub fn delete_options(query: &Query) -> Result<Value, Status> {
    let mut value = json!({"kind": "DeleteOptions", "apiVersion": "meta.k8s.io/v1"});
    if let Some(seconds) = query.number("gracePeriodSeconds")? {
        value["gracePeriodSeconds"] = json!(seconds);
    }
    if let Some(orphan) = query.flag("orphanDependents") {
        value["orphanDependents"] = json!(orphan);
    }
    if let Some(policy) = query.get("propagationPolicy") {
        value["propagationPolicy"] = json!(policy);
    }
    if let Some(ignore) = query.flag("ignoreStoreReadErrorWithClusterBreakingPotential") {
        value["ignoreStoreReadErrorWithClusterBreakingPotential"] = json!(ignore);
    }
    let dry_run: Vec<&str> = query.all("dryRun").collect();
    if !dry_run.is_empty() {
        value["dryRun"] = json!(dry_run);
    }
    for precondition in ["uid", "resourceVersion"] {
        if let Some(wanted) = query.get(precondition).filter(|wanted| !wanted.is_empty()) {
            value["preconditions"][precondition] = json!(wanted);
        }
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(query: &str, watch: bool, expected: &str) {
        let unknown = |label: &str| format!("field label not supported: {label}");
        let query_text = query;
        let query = Query::parse(query);
        let got = match ListOptions::read(&query, watch, "", &["spec.nodeName"], |_| None, unknown) {
            Ok(_) => String::new(),
            Err(status) => format!("{} {}", status.code, status.message),
        };
        assert_eq!(got, expected, "{query_text}");
    }

    #[test]
    fn list_options() {
        check("", false, "");
        check(
            "labelSelector=a%3Db&fieldSelector=spec.nodeName%3Dx&limit=5",
            false,
            "",
        );
        check(
            "limit=x",
            false,
            "400 strconv.ParseInt: parsing \"x\": invalid syntax",
        );
        check(
            "timeoutSeconds=",
            false,
            "400 strconv.ParseInt: parsing \"\": invalid syntax",
        );
        check(
            "fieldSelector=spec.foo%3Dx",
            false,
            "400 field label not supported: spec.foo",
        );
        check(
            "resourceVersionMatch=Exact",
            false,
            "422 ListOptions.meta.k8s.io \"\" is invalid: resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden unless resourceVersion is provided",
        );
        check(
            "sendInitialEvents=true",
            true,
            "422 ListOptions.meta.k8s.io \"\" is invalid: resourceVersionMatch: Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
        );
        check(
            "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true",
            true,
            "",
        );
        check("resourceVersion=7&continue=x", true, "");
        check(
            "resourceVersion=0&continue=x",
            true,
            "422 ListOptions.meta.k8s.io \"\" is invalid: resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden when continue is provided",
        );
    }

    #[test]
    fn write_options() {
        let read =
            |query: &str| WriteOptions::read(&Query::parse(query), "CreateOptions").map_err(|s| s.message);
        assert!(read("dryRun=All").expect("fine").dry_run);
        assert_eq!(
            read("dryRun=x").expect_err("refused"),
            "CreateOptions.meta.k8s.io \"\" is invalid: dryRun: Unsupported value: [\"x\"]: supported values: \"All\""
        );
        assert_eq!(
            read("fieldValidation=x").expect_err("refused"),
            "CreateOptions.meta.k8s.io \"\" is invalid: fieldValidation: Unsupported value: \"x\": supported values: \"\", \"Ignore\", \"Strict\", \"Warn\""
        );
    }
}
