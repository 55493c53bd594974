//! Field selectors where a webhook converts. The cache holds objects as they are stored; a selector speaks of them
//! as they are served, so that part of it is answered here, after conversion.

use serde_json::Value;
use skiff_meta::Status;
use skiff_meta::selector::FieldSelector;
use skiff_registry::{
    CacheError, EventKind, ListOptions, ListResult, ReadAt, Registry, Resource, WatchEvent, encode, object,
};

use super::scale;

/// As many objects are looked at a time where only a few are asked for.
const CHUNK: usize = 500;

/// The part of a selector that only converted objects can answer.
#[derive(Clone)]
pub struct Select(FieldSelector);

impl Select {
    /// Takes that part out of a selector, if there is one.
    pub fn split(resource: &Resource, fields: &mut FieldSelector) -> Option<Select> {
        if !resource.converts_elsewhere() {
            return None;
        }
        let known = |field: &str| matches!(field, "metadata.name" | "metadata.namespace");
        let terms = std::mem::take(&mut fields.terms);
        let (kept, split) = terms.into_iter().partition(|term| known(&term.field));
        fields.terms = kept;
        let select = FieldSelector { terms: split };
        (!select.is_empty()).then_some(Select(select))
    }

    fn matches(&self, served: &Value) -> bool {
        self.0.terms.iter().all(|term| {
            let found = match scale::at(served, &term.field) {
                Some(Value::String(text)) => text.clone(),
                Some(value @ (Value::Bool(_) | Value::Number(_))) => value.to_string(),
                _ => String::new(),
            };
            (found == term.value) == term.equal
        })
    }

    /// A page of the objects that are selected, also as they are served.
    pub async fn list(
        &self,
        registry: &Registry,
        resource: &Resource,
        mut options: ListOptions,
    ) -> Result<(Result<ListResult, CacheError>, Vec<Value>), Status> {
        let cache = registry.cache(resource);
        let limit = options.limit;
        let mut values = Vec::new();
        let mut page: Option<ListResult> = None;
        loop {
            let wanted = limit - values.len().min(limit);
            if limit > 0 {
                options.limit = CHUNK.max(wanted);
            }
            let mut listed = match cache.list(options.clone()).await {
                Ok(listed) => listed,
                Err(error) => return Ok((Err(error), values)),
            };
            let stored: Result<Vec<Value>, Status> = listed
                .items
                .iter()
                .map(|entry| encode::decode(&entry.bytes))
                .collect();
            let served = resource.strategy.serve(stored?).await?;
            let matching = served
                .into_iter()
                .enumerate()
                .filter(|(_, value)| self.matches(value));
            let mut found: Vec<(usize, Value)> = matching.collect();
            let full = limit > 0 && found.len() >= wanted;
            let end = found.get(wanted.saturating_sub(1)).map_or(1, |(at, _)| at + 1);
            if full && end < listed.items.len() {
                // The page ends within the chunk: the cache says by which token it goes on there.
                found.truncate(wanted);
                options.limit = end;
                listed = match cache.list(options.clone()).await {
                    Ok(listed) => listed,
                    Err(error) => return Ok((Err(error), values)),
                };
            }
            let items = listed.items;
            let entries = found.iter().filter_map(|(at, _)| items.get(*at).cloned());
            let page = page.get_or_insert(ListResult {
                items: Vec::new(),
                revision: listed.revision,
                continue_token: None,
                remaining: None,
            });
            page.items.extend(entries);
            page.continue_token = listed.continue_token;
            values.extend(found.into_iter().map(|(_, value)| value));
            if full || page.continue_token.is_none() {
                break;
            }
            options.continue_token.clone_from(&page.continue_token);
            options.at = ReadAt::Latest;
        }
        Ok((page.ok_or(CacheError::NotReady), values))
    }

    /// What an event of the cache is to a watcher with this selector: entering the selection is ADDED and leaving it
    /// is DELETED. `None`: nothing.
    pub async fn event(
        &self,
        resource: &Resource,
        event: &WatchEvent,
    ) -> Result<Option<(EventKind, Value)>, Status> {
        let Some(entry) = &event.entry else {
            return Ok(None);
        };
        let mut states = vec![encode::decode(&entry.bytes)?];
        if let Some(before) = &event.before {
            states.push(encode::decode(&before.bytes)?);
        }
        let mut states = resource.strategy.serve(states).await?.into_iter();
        let (now, before) = (states.next().unwrap_or_default(), states.next());
        let selected = self.matches(&now);
        let was = match event.kind {
            EventKind::Deleted => return Ok(selected.then_some((EventKind::Deleted, now))),
            _ => before.as_ref().is_some_and(|before| self.matches(before)),
        };
        Ok(match (was, selected) {
            (false, false) => None,
            (false, true) => Some((EventKind::Added, now)),
            (true, true) => Some((EventKind::Modified, now)),
            (true, false) => {
                let mut gone = before.unwrap_or_default();
                object::set(&mut gone, "resourceVersion", event.revision.to_string());
                Some((EventKind::Deleted, gone))
            }
        })
    }
}
