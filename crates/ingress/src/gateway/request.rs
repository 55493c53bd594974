//! What a rule of Gateway API does to one request and its response.

use http::request::Parts;
use http::uri::Uri;
use http::{HeaderMap, HeaderValue, header};
use std::sync::Arc;

use super::cors::Cors;
use super::filters::{Filters, Mirror};
use super::table::Entry;
use crate::backend::Backend;
use crate::table::RouteOptions;

/// A rule, and the backend that was chosen of it.
pub struct Course {
    pub entry: Arc<Entry>,
    /// Of the rule's backends.
    chosen: usize,
    /// The headers that CORS looks at.
    origin: HeaderMap,
}

impl Course {
    /// `None`: there is no backend that could answer.
    pub fn new(entry: Arc<Entry>, chance: f64, headers: &HeaderMap) -> Option<(Course, Arc<Backend>)> {
        let chosen = entry.rule.choose(chance)?;
        let backend = chosen.backend.clone()?;
        let mut backends = entry.rule.backends.iter();
        let chosen = backends.position(|each| std::ptr::eq(each, chosen))?;
        let mut origin = HeaderMap::new();
        if let (Some(_), Some(value)) = (&entry.rule.filters.cors, headers.get(header::ORIGIN)) {
            origin.insert(header::ORIGIN, value.clone());
        }
        let course = Course {
            entry,
            chosen,
            origin,
        };
        Some((course, backend))
    }

    pub fn options(&self) -> RouteOptions {
        let rule = &self.entry.rule;
        RouteOptions {
            response_timeout: rule.backend_timeout,
            request_timeout: rule.request_timeout,
            retry: rule.retry.clone(),
            ..RouteOptions::default()
        }
    }

    /// The filters of the rule, then those of the backend.
    fn filters(&self) -> impl Iterator<Item = &Filters> {
        let of_backend = self.entry.rule.backends.get(self.chosen);
        std::iter::once(&self.entry.rule.filters).chain(of_backend.map(|each| &each.filters))
    }

    /// Changes what is sent on. `path` is the one that was matched.
    pub fn edit_request(&self, parts: &mut Parts, path: &str) {
        for filters in self.filters() {
            filters.request.apply(&mut parts.headers);
            let Some(rewrite) = &filters.rewrite else { continue };
            if let Some(host) = &rewrite.host {
                parts.headers.insert(header::HOST, host.clone());
            }
            if let Some(address) = rewrite.address(path, self.entry.prefix(), parts.uri.query()) {
                parts.uri = Uri::from(address);
            }
        }
    }

    pub fn edit_response(&self, headers: &mut HeaderMap) {
        for filters in self.filters() {
            filters.response.apply(headers);
        }
        if let Some(cors) = &self.entry.rule.filters.cors {
            Cors::respond(cors, &self.origin, headers);
        }
    }

    /// Who gets a copy; `chance` is asked once for each that might.
    pub fn mirrors(&self, chance: impl Fn() -> f64) -> Vec<Arc<Backend>> {
        let all = self.filters().flat_map(|filters| &filters.mirrors);
        let chosen = all.filter(|mirror: &&Mirror| mirror.share > chance());
        chosen.filter_map(|mirror| mirror.backend.clone()).collect()
    }
}

/// Whether a value can be the host of a request to an endpoint.
pub fn host_of(parts: &Parts) -> HeaderValue {
    let host = parts.headers.get(header::HOST).cloned();
    host.unwrap_or_else(|| HeaderValue::from_static(""))
}
