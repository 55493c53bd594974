//! What a route does to a request on its way, whichever sort of object the route is from.

use std::net::SocketAddr;
use std::sync::Arc;

use http::request::Parts;
use http::{HeaderMap, StatusCode};

use crate::backend::Backend;
use crate::features;
use crate::features::limits::Active;
use crate::gateway;

pub enum Course {
    Gateway(gateway::request::Course),
    Ingress(Box<features::course::Course>),
}

impl Course {
    /// Changes what is sent on. `path` is the one that was matched.
    pub fn edit_request(&self, parts: &mut Parts, path: &str) {
        match self {
            Course::Gateway(course) => course.edit_request(parts, path),
            Course::Ingress(course) => course.edit_request(parts),
        }
    }

    /// Changes what the client gets. `endpoint` answered.
    pub fn edit_response(&self, status: StatusCode, headers: &mut HeaderMap, endpoint: Option<SocketAddr>) {
        match self {
            // The filters are for what is HTTP on both sides.
            Course::Gateway(_) if status == StatusCode::SWITCHING_PROTOCOLS => {}
            Course::Gateway(course) => course.edit_response(headers),
            Course::Ingress(course) => course.edit_response(status, headers, endpoint),
        }
    }

    /// Who gets a copy.
    pub fn mirrors(&self) -> Vec<Arc<Backend>> {
        match self {
            Course::Gateway(course) => course.mirrors(rand::random),
            Course::Ingress(_) => Vec::new(),
        }
    }

    /// The endpoint that the client is to stay with.
    pub fn wanted(&self) -> Option<SocketAddr> {
        match self {
            Course::Gateway(_) => None,
            Course::Ingress(course) => course.wanted,
        }
    }

    /// What counts the request until its response is over.
    pub fn take_active(&mut self) -> Option<Active> {
        match self {
            Course::Gateway(_) => None,
            Course::Ingress(course) => course.take_active(),
        }
    }
}
