//! Get and list.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use skiff_meta::Status;
use skiff_registry::{
    CacheError, ListResult, ReadAt, Resource, cache_error, check_continue, encode, list_error,
};

use crate::body::Answer;
use crate::chain::Exchange;
use crate::compress;
use crate::crd::select::Select;
use crate::list_body::{Item, ListBody};
use crate::negotiate::{Format, Transform};
use crate::protobuf;
use crate::query::{ListOptions, VersionMatch};
use crate::respond::{self, Stored};
use crate::server::Inner;
use crate::table::{self, IncludeObject};

pub async fn get(inner: &Arc<Inner>, exchange: &Exchange, resource: &Resource) -> Result<Answer, Status> {
    exchange.output(false)?;
    let info = &exchange.info;
    let at = get_version(exchange.query.text("resourceVersion"))?;
    let found = inner
        .registry
        .get_entry(resource, &info.namespace, &info.name, at)
        .await?;
    let Some(entry) = found else {
        return Err(Status::not_found(&resource.group_resource, &info.name));
    };
    let mut stored = Stored::Bytes(entry.bytes.clone());
    if resource.converts_elsewhere() {
        let mut value = encode::decode(&entry.bytes)?;
        resource.strategy.serve_one(&mut value).await?;
        stored = Stored::Value(value);
    }
    respond::object(exchange, resource, StatusCode::OK, stored)
}

/// How fresh a get must be.
fn get_version(text: &str) -> Result<ReadAt, Status> {
    match text {
        "" => Ok(ReadAt::Latest),
        "0" => Ok(ReadAt::Any),
        text => version_number(text)
            .map(ReadAt::NotOlderThan)
            .map_err(|message| Status::failure(500, "", message)),
    }
}

/// A resourceVersion as a number, or what is wrong with it.
pub fn version_number(text: &str) -> Result<i64, String> {
    use skiff_meta::field;
    if let Ok(number) = text.parse::<u64>()
        && !text.starts_with('+')
    {
        return Ok(i64::try_from(number).unwrap_or(i64::MAX));
    }
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let why = if digits {
        "value out of range"
    } else {
        "invalid syntax"
    };
    let why = format!("strconv.ParseUint: parsing {}: {why}", field::quote(text));
    Err(field::Error::invalid(&field::Path::new("resourceVersion"), text, why).to_string())
}

/// The list options of a request, with the field names that the kind can be selected by.
pub fn list_options(exchange: &Exchange, resource: &Resource, watch: bool) -> Result<ListOptions, Status> {
    let strategy = &resource.strategy;
    let name = if exchange.info.parts.len() >= 2 {
        exchange.info.name.as_str()
    } else {
        ""
    };
    let options = ListOptions::read(
        &exchange.query,
        watch,
        name,
        &strategy.selectable(),
        |field| strategy.stored_field(field),
        |label| strategy.unknown_field(label),
    )?;
    let asked = |name: &str| options.fields.terms.iter().any(|term| term.field == name);
    if asked("metadata.namespace") && !strategy.selects_namespace() {
        return Err(Status::bad_request(strategy.unknown_field("metadata.namespace")));
    }
    Ok(options)
}

/// The read that the options ask of the cache.
pub fn cache_list(exchange: &Exchange, options: &ListOptions) -> Result<skiff_registry::ListOptions, Status> {
    let version = options.resource_version.as_str();
    if !options.continue_token.is_empty() && !matches!(version, "" | "0") {
        check_continue(&options.continue_token).map_err(cache_error)?;
        return Err(Status::bad_request(
            "specifying resource version is not allowed when using continue",
        ));
    }
    let number = || {
        version_number(version)
            .map_err(|message| Status::bad_request(format!("invalid resource version: {message}")))
    };
    let at = match (version, options.version_match) {
        ("", _) => ReadAt::Latest,
        ("0", _) => ReadAt::Any,
        (_, VersionMatch::Exact) => ReadAt::Exact(number()?),
        // COMPAT: a first page at a version is that exact version, unless the match says otherwise.
        (_, VersionMatch::Unset) if options.limit > 0 => ReadAt::Exact(number()?),
        _ => ReadAt::NotOlderThan(number()?),
    };
    let mut namespace = (!exchange.info.namespace.is_empty()).then(|| exchange.info.namespace.clone());
    if namespace.is_none()
        && let Some(selected) = options.fields.required_value("metadata.namespace")
        && !selected.is_empty()
    {
        namespace = Some(selected.to_string());
    }
    Ok(skiff_registry::ListOptions {
        namespace,
        labels: options.labels.clone(),
        fields: options.fields.clone(),
        at,
        // COMPAT: what any version may answer, upstream's cache answers whole.
        limit: if version == "0" { 0 } else { options.limit },
        continue_token: (!options.continue_token.is_empty()).then(|| options.continue_token.clone()),
        skip_unreadable: false,
    })
}

pub async fn list(inner: &Arc<Inner>, exchange: &Exchange, resource: &Resource) -> Result<Answer, Status> {
    let output = exchange.output(false)?;
    let options = list_options(exchange, resource, false)?;
    let (listed, served) = listed(inner, resource, cache_list(exchange, &options)?).await?;
    match listed {
        Ok(listed) => answer_list(exchange, resource, &output, listed, served).await,
        Err(CacheError::ExpiredContinue { token }) => {
            // The token lets a client go on with what there is now, if it can live with that.
            let status = cache_error(CacheError::ExpiredContinue { token: token.clone() });
            let mut value = status.to_value();
            value["metadata"]["continue"] = json!(token);
            respond::raw(exchange, &output, StatusCode::GONE, &value)
        }
        Err(error) => Err(list_error(&resource.group_resource, error)),
    }
}

/// The objects that the options select; also as they are served, where that had to be found out already.
pub async fn listed(
    inner: &Inner,
    resource: &Resource,
    mut options: skiff_registry::ListOptions,
) -> Result<(Result<ListResult, CacheError>, Option<Vec<Value>>), Status> {
    if let Some(select) = Select::split(resource, &mut options.fields) {
        let (listed, served) = select.list(&inner.registry, resource, options).await?;
        return Ok((listed, Some(served)));
    }
    Ok((inner.registry.cache(resource).list(options).await, None))
}

/// Answers with a list in the form asked for.
pub async fn answer_list(
    exchange: &Exchange,
    resource: &Resource,
    output: &crate::negotiate::Output,
    listed: ListResult,
    served: Option<Vec<Value>>,
) -> Result<Answer, Status> {
    let mut metadata = list_metadata(&listed);
    let wire = resource.strategy.wire();
    if wire.typed_items && output.transform == Transform::None && metadata.get("continue").is_none() {
        // COMPAT: such lists say that there is no more.
        metadata["continue"] = json!("");
    }
    let list_kind = resource.strategy.list_kind();
    let mut values = served.unwrap_or_default();
    if resource.converts_elsewhere() && values.len() != listed.items.len() {
        let stored: Result<Vec<Value>, Status> = listed
            .items
            .iter()
            .map(|entry| encode::decode(&entry.bytes))
            .collect();
        values = resource.strategy.serve(stored?).await?;
    }
    // What another server converted is at hand already; the rest is decoded one by one.
    let mut values = values.into_iter();
    let mut value_of = |entry: &skiff_registry::Entry| match values.next() {
        Some(value) => Ok(value),
        None => encode::decode(&entry.bytes),
    };
    match &output.transform {
        Transform::None if output.format == Format::Json && !output.pretty => {
            let mut items = Vec::with_capacity(listed.items.len());
            for entry in listed.items {
                let item = match resource
                    .served_as_stored()
                    .then(|| match wire.typed_items {
                        true => Some(Item::whole(entry.clone())),
                        false => Item::cached(entry.clone(), &resource.opening),
                    })
                    .flatten()
                {
                    Some(item) => item,
                    None => Item::Made(made_item(resource, value_of(&entry)?).to_string().into()),
                };
                items.push(item);
            }
            let head = format!(
                "{{\"kind\":\"{list_kind}\",\"apiVersion\":\"{}\",\"metadata\":{metadata},\"items\":[",
                resource.api_version
            );
            Ok(stream(exchange, ListBody::new(Bytes::from(head), items)))
        }
        Transform::None if output.format == Format::Protobuf => {
            let bytes = protobuf::list(resource, &metadata, &listed)?;
            Ok(protobuf::answer(exchange, StatusCode::OK, bytes))
        }
        Transform::None => {
            let items: Result<Vec<Value>, Status> = listed
                .items
                .iter()
                .map(|entry| value_of(entry).map(|value| made_item(resource, value)))
                .collect();
            let value = json!({"kind": list_kind, "apiVersion": resource.api_version,
                "metadata": metadata, "items": items?});
            respond::raw(exchange, output, StatusCode::OK, &value)
        }
        Transform::Table(version) => {
            let include = IncludeObject::read(&exchange.query)?;
            let now = jiff::Timestamp::now().as_second();
            let mut rows = Vec::with_capacity(listed.items.len());
            for entry in &listed.items {
                rows.push(table::row(resource, &value_of(entry)?, version, include, now));
            }
            respond::raw(
                exchange,
                output,
                StatusCode::OK,
                &table::of_list(resource, version, metadata, rows),
            )
        }
        Transform::PartialObjectMetadataList(version) | Transform::PartialObjectMetadata(version) => {
            if let Transform::PartialObjectMetadata(_) = output.transform {
                return Err(Status::not_acceptable(format!(
                    "you requested PartialObjectMetadata, but the requested object is a list ({}List)",
                    resource.strategy.go_type()
                )));
            }
            let hidden = resource.served_annotation;
            if output.format == Format::Json
                && !output.pretty
                && !listed.items.is_empty()
                && !resource.converts_elsewhere()
                && hidden.is_none()
            {
                let items = listed.items.iter();
                let items =
                    items.map(|entry| Item::Made(table::partial_bytes("", entry.metadata(), version, "")));
                let head = format!(
                    "{{\"kind\":\"PartialObjectMetadataList\",\"apiVersion\":\"meta.k8s.io/{version}\",\"metadata\":{metadata},\"items\":["
                );
                return Ok(stream(
                    exchange,
                    ListBody::new(Bytes::from(head), items.collect()),
                ));
            }
            let mut items = Vec::with_capacity(listed.items.len());
            for entry in &listed.items {
                let api_version = format!("meta.k8s.io/{version}");
                items.push(table::partial(&value_of(entry)?, &api_version, hidden));
            }
            // COMPAT: no items are no list.
            let items = match items.is_empty() {
                true => Value::Null,
                false => Value::Array(items),
            };
            let value = json!({"kind": "PartialObjectMetadataList", "apiVersion": format!("meta.k8s.io/{version}"),
                "metadata": metadata, "items": items});
            respond::raw(exchange, output, StatusCode::OK, &value)
        }
    }
}

/// An object as an item of a list: converted, mostly without kind and apiVersion.
fn made_item(resource: &Resource, mut value: Value) -> Value {
    resource.from_stored(&mut value);
    if !resource.strategy.wire().typed_items
        && let Some(map) = value.as_object_mut()
    {
        map.remove("kind");
        map.remove("apiVersion");
    }
    value
}

fn list_metadata(listed: &ListResult) -> Value {
    let mut metadata = json!({"resourceVersion": listed.revision.to_string()});
    if let Some(token) = &listed.continue_token {
        metadata["continue"] = json!(token);
    }
    if let Some(remaining) = listed.remaining.filter(|_| listed.continue_token.is_some()) {
        metadata["remainingItemCount"] = json!(remaining);
    }
    metadata
}

fn stream(exchange: &Exchange, list: ListBody) -> Answer {
    let gzip = list.len() >= compress::THRESHOLD as u64 && compress::accepted(exchange);
    let body = if gzip { list.gzip() } else { list };
    let mut response = Response::new(body.boxed_unsync());
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if gzip { compress::mark(response) } else { response }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_numbers() {
        let check = |text: &str, expected: Result<i64, &str>| {
            let expected = expected.map_err(|why| {
                format!(
                    "resourceVersion: Invalid value: \"{text}\": strconv.ParseUint: parsing \"{text}\": {why}"
                )
            });
            assert_eq!(version_number(text), expected);
        };
        check("7", Ok(7));
        check("18446744073709551615", Ok(i64::MAX));
        for bad in ["abc", "-1", "+1", "1.5", " 1"] {
            check(bad, Err("invalid syntax"));
        }
        check("99999999999999999999", Err("value out of range"));
    }
}
