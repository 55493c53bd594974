//! The three patches. The type of the outcome is checked by whoever applies them, so here it may be anything, but it
//! may not be larger than what was sent allows.

use skiff_schema::decode;
use skiff_schema::patch::{self, PatchType, decode_patch};

use crate::input::{self, schema};

/// What copies may add to a document, and escapes on top of it.
const MOST_COPIED: usize = 64 << 20;

pub fn json_patch(data: &[u8]) {
    let Some([object, body]) = input::documents::<2>(data) else {
        return;
    };
    let Some(current) = input::json(object) else {
        return;
    };
    let strict = decode_patch(PatchType::Json, body, true);
    let Ok(decoded) = decode_patch(PatchType::Json, body, false) else {
        assert!(strict.is_err(), "what cannot be read cannot be read strictly");
        return;
    };
    if let Ok(outcome) = patch::json_patch(&current, &decoded.value) {
        assert!(input::size(&outcome) <= MOST_COPIED + 8 * data.len());
        let again = patch::json_patch(&current, &decoded.value);
        assert_eq!(again.as_ref(), Ok(&outcome), "the same patch of the same object");
    }
}

pub fn merge_patch(data: &[u8]) {
    let Some([object, body]) = input::documents::<2>(data) else {
        return;
    };
    let (Some(current), Ok(decoded)) = (input::json(object), decode_patch(PatchType::Merge, body, true))
    else {
        return;
    };
    if let Ok(outcome) = patch::merge_patch(&current, &decoded.value) {
        assert!(input::size(&outcome) <= 8 * data.len());
        let again = patch::merge_patch(&outcome, &decoded.value);
        assert_eq!(again.as_ref(), Ok(&outcome), "patching twice changes nothing");
    }
}

pub fn strategic_merge_patch(data: &[u8]) {
    let (line, rest) = input::line(data);
    let kind = input::kind(line);
    let Some([object, body]) = input::documents::<2>(rest) else {
        return;
    };
    let Some(current) = input::object(kind.id, object) else {
        return;
    };
    let Ok(decoded) = decode_patch(PatchType::StrategicMerge, body, true) else {
        return;
    };
    if let Ok(outcome) = patch::strategic_merge(schema(), kind.id, &current, &decoded.value) {
        assert!(input::size(&outcome) <= input::size(&current) + 8 * data.len());
        let _ = decode::check(schema(), kind.id, outcome);
    }
}
