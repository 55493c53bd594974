//! TokenReview and SelfSubjectReview: who a token, or the caller, is.

use std::sync::Arc;

use http::StatusCode;
use serde_json::{Value, json};
use skiff_auth::UserInfo;
use skiff_meta::Status;
use skiff_registry::{Resource, object};

use super::{gvk_of, read_body};
use crate::body::{Answer, Body};
use crate::chain::Exchange;
use crate::gate::Admission;
use crate::respond;
use crate::server::Inner;

pub async fn review(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    body: Body,
) -> Result<Answer, Status> {
    let (mut review, options) = read_body(exchange, &gvk_of(resource), body).await?;
    super::attribute(inner, exchange, resource, &options, &mut review);
    Admission::new(inner, exchange, resource, Some(&options.value))
        .action(&mut review)
        .await?;
    let token = object::at_str(&review, &["spec", "token"]).to_string();
    if token.is_empty() {
        return Err(Status::bad_request(
            "token is required for TokenReview in authentication",
        ));
    }
    let asked: Vec<String> = object::at(&review, &["spec", "audiences"])
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(|value| value.as_str().map(str::to_string))
        .collect();
    let tokens = &inner.authenticator.tokens;
    let status = if tokens.is_empty() {
        json!({"authenticated": false, "user": {}})
    } else {
        let asked = (!asked.is_empty()).then_some(asked.as_slice());
        let mut notes = Vec::new();
        let found = tokens.authenticate(&token, asked, &mut notes).await;
        inner.tell_of_token(&exchange.context, &notes);
        match found {
            Ok((user, audiences)) => {
                json!({"authenticated": true, "user": user_value(&user), "audiences": audiences})
            }
            Err(error) => {
                tracing::debug!(%error, "a reviewed token is not valid");
                json!({"user": {}, "error": error.told()})
            }
        }
    };
    object::put(&mut review, &["status"], status);
    super::show_metadata(&mut review);
    respond::raw(exchange, &exchange.output(false)?, StatusCode::CREATED, &review)
}

pub async fn self_review(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    body: Body,
) -> Result<Answer, Status> {
    read_body(exchange, &gvk_of(resource), body).await?;
    let mut review = json!({"kind": resource.kind, "apiVersion": resource.api_version});
    let now = skiff_meta::time::format_seconds(inner.registry.now());
    object::set(&mut review, "creationTimestamp", now);
    let user = user_value(&exchange.user);
    object::put(&mut review, &["status"], json!({"userInfo": user}));
    respond::raw(exchange, &exchange.output(false)?, StatusCode::CREATED, &review)
}

fn user_value(user: &UserInfo) -> Value {
    let mut value = json!({"username": user.name, "groups": user.groups});
    if !user.uid.is_empty() {
        value["uid"] = json!(user.uid);
    }
    if !user.extra.is_empty() {
        value["extra"] = json!(user.extra);
    }
    value
}
