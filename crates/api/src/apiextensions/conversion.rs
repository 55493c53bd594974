//! The rules of a definition's conversion: by nobody, or by a webhook at a URL or a service.

use serde_json::{Value, json};
use skiff_meta::field::{Error, Path};
use skiff_meta::names;

use super::spec::one_of;
use crate::node::{at, list, text};

pub fn conversion(spec: &Value, path: &Path, errors: &mut Vec<Error>) {
    let conversion = at(spec, "conversion");
    if conversion.is_null() {
        return;
    }
    let strategy = text(conversion, "strategy");
    if strategy != "None" && at(spec, "preserveUnknownFields").as_bool() == Some(true) {
        let message = "must be None if spec.preserveUnknownFields is true";
        errors.push(Error::invalid(&path.child("strategy"), strategy, message));
    }
    one_of(&path.child("strategy"), strategy, &["None", "Webhook"], errors);
    let webhook = at(conversion, "webhook");
    let client = at(webhook, "clientConfig");
    let (of_client, of_versions) = (
        path.child("webhookClientConfig"),
        path.child("conversionReviewVersions"),
    );
    if strategy != "Webhook" {
        let message = "should not be set when strategy is not set to Webhook";
        if !client.is_null() {
            errors.push(Error::forbidden(&of_client, message));
        }
        if !list(webhook, "conversionReviewVersions").is_empty() {
            errors.push(Error::forbidden(&of_versions, message));
        }
        return;
    }
    let (url, service) = (at(client, "url"), at(client, "service"));
    if client.is_null() {
        errors.push(Error::required(
            &of_client,
            "required when strategy is set to Webhook",
        ));
    } else if url.is_null() == service.is_null() {
        errors.push(Error::required(
            &of_client,
            "exactly one of url or service is required",
        ));
    } else if let Some(url) = url.as_str() {
        webhook_url(url, &of_client.child("url"), errors);
    } else {
        webhook_service(service, &of_client.child("service"), errors);
    }
    review_versions(list(webhook, "conversionReviewVersions"), &of_versions, errors);
}

fn webhook_url(url: &str, path: &Path, errors: &mut Vec<Error>) {
    const FORM: &str = "desired format: https://host[/path]";
    let Some((scheme, rest)) = url.split_once("://") else {
        let message = format!(
            "url must be a valid URL: parse {}: invalid URI for request; {FORM}",
            skiff_meta::field::quote(url)
        );
        errors.push(Error::invalid(path, url, message));
        return;
    };
    if scheme != "https" {
        errors.push(Error::invalid(
            path,
            scheme,
            format!("'https' is the only allowed URL scheme; {FORM}"),
        ));
    }
    let host = rest.split(['/', '?', '#']).next().unwrap_or("");
    if host.is_empty() {
        errors.push(Error::invalid(
            path,
            host,
            format!("host must be specified; {FORM}"),
        ));
    }
    if let Some((user, _)) = host.rsplit_once('@') {
        errors.push(Error::invalid(
            path,
            user,
            "user information is not permitted in the URL",
        ));
    }
    if let Some((_, fragment)) = rest.split_once('#') {
        errors.push(Error::invalid(
            path,
            fragment,
            "fragments are not permitted in the URL",
        ));
    }
    if let Some((_, query)) = rest.split('#').next().and_then(|rest| rest.split_once('?')) {
        errors.push(Error::invalid(
            path,
            query,
            "query parameters are not permitted in the URL",
        ));
    }
}

fn webhook_service(service: &Value, path: &Path, errors: &mut Vec<Error>) {
    for key in ["name", "namespace"] {
        if text(service, key).is_empty() {
            errors.push(Error::required(&path.child(key), ""));
        }
    }
    if let Some(port) = at(service, "port").as_i64()
        && !names::port_number(port).is_empty()
    {
        let message = format!("port is not valid: {}", names::port_number(port).join(","));
        errors.push(Error::invalid(&path.child("port"), port, message));
    }
    let Some(given) = at(service, "path").as_str() else {
        return;
    };
    let path = path.child("path");
    if given.is_empty() || given == "/" {
        return;
    }
    if !given.starts_with('/') {
        errors.push(Error::invalid(&path, given, "must start with a '/'"));
    }
    // COMPAT: upstream takes the first character for the slash, whatever it is.
    let rest = given.get(1..).unwrap_or("");
    for (index, segment) in rest.strip_suffix('/').unwrap_or(rest).split('/').enumerate() {
        if segment.is_empty() {
            errors.push(Error::invalid(
                &path,
                given,
                format!("segment[{index}] may not be empty"),
            ));
            continue;
        }
        for message in names::dns1123_subdomain(segment) {
            errors.push(Error::invalid(
                &path,
                given,
                format!("segment[{index}]: {message}"),
            ));
        }
    }
}

fn review_versions(versions: &[Value], path: &Path, errors: &mut Vec<Error>) {
    if versions.is_empty() {
        errors.push(Error::required(path, ""));
        return;
    }
    let mut seen: Vec<&str> = Vec::new();
    for (index, version) in versions.iter().enumerate() {
        let version = version.as_str().unwrap_or("");
        if seen.contains(&version) {
            errors.push(Error::invalid(&path.index(index), version, "duplicate version"));
            continue;
        }
        seen.push(version);
        for message in names::dns1035_label(version) {
            errors.push(Error::invalid(&path.index(index), version, message));
        }
    }
    if !seen.iter().any(|version| matches!(*version, "v1" | "v1beta1")) {
        errors.push(Error::invalid(
            path,
            json!(versions),
            "must include at least one of v1, v1beta1",
        ));
    }
}
