//! The rules of a definition's conversion: by nobody, or by a webhook at a URL or a service.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skiff_meta::field::{Error, Path};
use skiff_meta::names;

use super::spec::one_of;
use crate::admissionregistration::webhook;
use crate::certificates;
use crate::core::config::decode;
use crate::errors::Errors;
use crate::node::{Node, at, list, text};

/// `served` is the definition as it is served now: there, certificates that can be read are not replaced by others.
pub fn conversion(spec: &Value, served: Option<&Value>, path: &Path, errors: &mut Vec<Error>) {
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
    } else if url.is_string() {
        webhook_url(url, &of_client.child("url"), errors);
    } else {
        webhook_service(service, &of_client.child("service"), errors);
    }
    let bundle = text(client, "caBundle");
    if let Some(served) = served
        && !has_pem(bundle)
        && has_pem(text(served, "spec.conversion.webhook.clientConfig.caBundle"))
    {
        let message = "unable to load root certificates: unable to parse bytes as PEM block";
        errors.push(Error::invalid(&of_client.child("caBundle"), bundle, message));
    }
    review_versions(list(webhook, "conversionReviewVersions"), &of_versions, errors);
}

/// Whether there is something of certificates, or nothing at all, behind a base64 text.
fn has_pem(bundle: &str) -> bool {
    bundle.is_empty() || certificates::pem_type(&decode(bundle)).is_some()
}

fn webhook_url(url: &Value, path: &Path, errors: &mut Vec<Error>) {
    let (root, path) = (Node::root(&Value::Null), path.to_string());
    let mut found = Errors::new();
    webhook::webhook_url(&root.field(&path).with(url), &mut found);
    errors.extend(found.into_vec());
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
    let mut seen = BTreeSet::new();
    for (index, version) in versions.iter().enumerate() {
        let version = version.as_str().unwrap_or("");
        if !seen.insert(version) {
            errors.push(Error::invalid(&path.index(index), version, "duplicate version"));
            continue;
        }
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
