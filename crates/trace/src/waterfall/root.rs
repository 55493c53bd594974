//! Where a path begins: the write that somebody asked for.

use super::{caused_by, makers};
use crate::Mark;

pub(super) struct Root<'a> {
    pub root: &'a Mark,
    /// The creation of the object that is asked about, where a component made it: the path leads through it.
    pub creation: Option<&'a Mark>,
    /// How many requests about the object came after this one.
    pub later: usize,
}

/// `last` counts the requests about the object from the newest; without it, the newest one that had effects is
/// taken: a label that is set after a rollout does not hide the rollout.
pub(super) fn find<'a>(
    marks: &[&'a Mark],
    is_object: &dyn Fn(&Mark) -> bool,
    last: Option<usize>,
) -> Option<Root<'a>> {
    let mut requests: Vec<&Mark> = marks
        .iter()
        .copied()
        .filter(|m| is_object(m) && is_request(m))
        .collect();
    requests.sort_by_key(|m| std::cmp::Reverse(m.start_us));
    let later = match last {
        Some(last) => last.saturating_sub(1),
        None => requests
            .iter()
            .position(|request| !caused_by(request, marks).is_empty())
            .unwrap_or(0),
    };
    if let Some(root) = requests.get(later) {
        return Some(Root {
            root,
            creation: None,
            later,
        });
    }
    if last.is_some_and(|last| last > 1) {
        return None;
    }
    made_by_a_component(marks, is_object)
}

/// The request that an object goes back to which nobody asked for by name, such as a pod of a Deployment.
fn made_by_a_component<'a>(marks: &[&'a Mark], is_object: &dyn Fn(&Mark) -> bool) -> Option<Root<'a>> {
    let creation = marks
        .iter()
        .copied()
        .filter(|m| is_object(m))
        .min_by_key(|m| m.start_us)?;
    let makers = makers(marks);
    let mut root = creation;
    // Causes are older than their effects, but clients send them: do not go in circles.
    while let Some(maker) = root.cause.as_ref().and_then(|cause| makers.get(cause))
        && maker.start_us < root.start_us
    {
        root = maker;
    }
    Some(Root {
        root,
        creation: (!std::ptr::eq(root, creation)).then_some(creation),
        later: 0,
    })
}

/// Whether somebody asked for this write, as opposed to a component of the cluster that was woken or looked at the
/// clock.
fn is_request(mark: &Mark) -> bool {
    mark.cause.is_none()
        && mark.verb != "delete"
        && !is_component(&mark.user)
        && (mark.subresource.is_empty() || mark.subresource == "scale")
}

fn is_component(user: &str) -> bool {
    [
        "system:serviceaccount:kube-system:",
        "system:node:",
        "system:kube-",
    ]
    .iter()
    .any(|prefix| user.starts_with(prefix))
}
