//! The answers that the proxy gives itself.

use http::header;
use http::{HeaderValue, Response, StatusCode};

use crate::body::ResponseBody;
use crate::metrics::Refusal;

/// An answer that no backend gave.
pub struct Refused {
    pub status: StatusCode,
    pub text: &'static str,
    pub why: Option<Refusal>,
}

pub fn refused(status: StatusCode, text: &'static str, why: Refusal) -> Refused {
    Refused {
        status,
        text,
        why: Some(why),
    }
}

pub fn malformed(text: &'static str) -> Refused {
    refused(StatusCode::BAD_REQUEST, text, Refusal::Malformed)
}

pub fn too_late() -> Refused {
    Refused {
        status: StatusCode::GATEWAY_TIMEOUT,
        text: "504 the service does not respond\n",
        why: None,
    }
}

pub fn unavailable() -> Refused {
    refused(
        StatusCode::SERVICE_UNAVAILABLE,
        "503 no endpoint of the service is ready\n",
        Refusal::NoEndpoint,
    )
}

pub fn bad_gateway() -> Refused {
    Refused {
        status: StatusCode::BAD_GATEWAY,
        text: "502 the service gave no response\n",
        why: None,
    }
}

pub fn text_response(status: StatusCode, text: &'static str) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::text(text));
    *response.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}
