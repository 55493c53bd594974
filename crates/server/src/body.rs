//! The bodies of requests and answers: one boxed type each, whatever transport they come by.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body::Body as _;
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use skiff_meta::Status;

use crate::held::BODY_BUDGET;

pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
pub type Body = UnsyncBoxBody<Bytes, BoxError>;
pub type Answer = Response<Body>;

/// Upstream's limit of a request body.
pub const BODY_LIMIT: usize = 3 * 1024 * 1024;

pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into())
        .map_err(|never| match never {})
        .boxed_unsync()
}

pub fn answer(code: StatusCode, content_type: &'static str, bytes: impl Into<Bytes>) -> Answer {
    let mut response = Response::new(full(bytes));
    *response.status_mut() = code;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// An answer without a body, and so without a type.
pub fn empty(code: StatusCode) -> Answer {
    let mut response = Response::new(full(""));
    *response.status_mut() = code;
    response
}

pub fn text(code: StatusCode, body: impl Into<Bytes>) -> Answer {
    let mut response = answer(code, "text/plain; charset=utf-8", body);
    response
        .headers_mut()
        .insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    response
}

/// The answer of a path that nothing serves.
pub fn not_found() -> Answer {
    text(StatusCode::NOT_FOUND, "404 page not found\n")
}

/// A `Status` as an answer, JSON.
pub fn status(status: &Status) -> Answer {
    let code = StatusCode::from_u16(status.http_code()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut bytes = skiff_schema::declared_order(skiff_api::facts::schema(), &status.to_value());
    bytes.push(b'\n');
    let mut response = answer(code, "application/json", bytes);
    let seconds = status
        .details
        .as_ref()
        .map_or(0, |details| details.retry_after_seconds);
    if seconds > 0 {
        response
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

/// Reads a whole body, at most upstream's 3 MiB, and at most what the bodies of other requests leave.
pub async fn read(mut body: Body) -> Result<Bytes, Status> {
    let too_large = || Status::too_large(format_args!("limit is {BODY_LIMIT}"));
    if body.size_hint().lower() > BODY_LIMIT as u64 {
        return Err(too_large());
    }
    let mut share = BODY_BUDGET.share();
    let mut first: Option<Bytes> = None;
    let mut rest: Vec<u8> = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame
            .map_err(|error| Status::bad_request(format!("unable to read the request body: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        match first.take() {
            None if rest.is_empty() => first = Some(data),
            before => {
                if let Some(before) = before {
                    rest.extend_from_slice(&before);
                }
                rest.extend_from_slice(&data);
            }
        }
        let length = first.as_ref().map_or(0, Bytes::len) + rest.len();
        if length > BODY_LIMIT {
            return Err(too_large());
        }
        if !share.grow(length) {
            let why = "too many large requests are being read, please try again later";
            return Err(Status::too_many_requests(why, 1));
        }
    }
    // Most bodies come in one piece and are not copied.
    Ok(share.hold(first.unwrap_or_else(|| Bytes::from(rest))))
}
