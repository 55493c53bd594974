//! Authorization checks: `authorizer.group('apps').resource('deployments').check('create').allowed()`. Who decides is
//! the caller's business.

use std::sync::Arc;

use skiff_meta::names;

use super::Native;
use crate::error::EvalError;
use crate::value::{Eval, Value};

/// What is asked of the authorizer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AccessReview {
    /// Namespace and name of the service account to ask for, instead of the user of the request.
    pub service_account: Option<(String, String)>,
    pub verb: String,
    /// Set for paths that are no resources.
    pub path: Option<String>,
    pub group: String,
    pub resource: String,
    pub subresource: String,
    pub namespace: String,
    pub name: String,
    pub field_selector: String,
    pub label_selector: String,
}

/// The answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decision {
    pub allowed: bool,
    pub reason: String,
    pub error: Option<String>,
}

/// Decides on access; implemented by whoever evaluates expressions that ask.
pub trait Authorizer: Send + Sync {
    fn authorize(&self, review: &AccessReview) -> Decision;
}

/// The authorizer, a check being put together, or a decision.
#[derive(Clone)]
pub struct AuthorizerObject(Arc<State>);

#[derive(Clone)]
struct State {
    stage: Stage,
    authorizer: Arc<dyn Authorizer>,
    review: AccessReview,
    decision: Decision,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Authorizer,
    PathCheck,
    GroupCheck,
    ResourceCheck,
    Decision,
}

impl std::fmt::Debug for AuthorizerObject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {:?}", self.0.stage, self.0.review)
    }
}

impl AuthorizerObject {
    pub fn new(authorizer: Arc<dyn Authorizer>) -> Self {
        Self(Arc::new(State {
            stage: Stage::Authorizer,
            authorizer,
            review: AccessReview::default(),
            decision: Decision::default(),
        }))
    }

    /// The check of the resource of the request itself.
    pub fn resource_check(authorizer: Arc<dyn Authorizer>, review: AccessReview) -> Self {
        Self(Arc::new(State {
            stage: Stage::ResourceCheck,
            authorizer,
            review,
            decision: Decision::default(),
        }))
    }

    pub(crate) fn type_name(&self) -> &'static str {
        match self.0.stage {
            Stage::Authorizer => "kubernetes.authorization.Authorizer",
            Stage::PathCheck => "kubernetes.authorization.PathCheck",
            Stage::GroupCheck => "kubernetes.authorization.GroupCheck",
            Stage::ResourceCheck => "kubernetes.authorization.ResourceCheck",
            Stage::Decision => "kubernetes.authorization.Decision",
        }
    }

    pub(crate) fn same(&self, other: &Self) -> bool {
        self.0.stage == other.0.stage
            && self.0.review == other.0.review
            && self.0.decision == other.0.decision
    }

    fn next(&self, stage: Stage, change: impl FnOnce(&mut State)) -> Self {
        let mut state = (*self.0).clone();
        state.stage = stage;
        change(&mut state);
        Self(Arc::new(state))
    }
}

/// Takes the receiver in the expected stage to the next one.
fn step<'a>(
    args: &[Value<'a>],
    (from, to): (Stage, Stage),
    change: impl FnOnce(&mut State, &str) -> Result<(), &'static str>,
) -> Eval<Value<'a>> {
    let [Value::Authorizer(object), Value::String(text)] = args else {
        return Err(EvalError::no_such_overload());
    };
    if object.0.stage != from {
        return Err(EvalError::no_such_overload());
    }
    let mut outcome = Ok(());
    let next = object.next(to, |state| outcome = change(state, text));
    outcome.map_err(EvalError::new)?;
    Ok(Value::Authorizer(next))
}

fn decided<'a>(args: &[Value<'a>], of: fn(&Decision) -> Value<'static>) -> Eval<Value<'a>> {
    match args {
        [Value::Authorizer(object)] if object.0.stage == Stage::Decision => Ok(of(&object.0.decision)),
        _ => Err(EvalError::no_such_overload()),
    }
}

pub(super) fn native(name: &str) -> Option<Native> {
    const RESOURCE: (Stage, Stage) = (Stage::ResourceCheck, Stage::ResourceCheck);
    Some(match name {
        "path" => |_, args| {
            step(args, (Stage::Authorizer, Stage::PathCheck), |state, path| {
                state.review.path = Some(path.to_owned());
                if path.trim().is_empty() {
                    Err("path must not be empty")
                } else {
                    Ok(())
                }
            })
        },
        "group" => |_, args| {
            step(args, (Stage::Authorizer, Stage::GroupCheck), |state, group| {
                state.review.group = group.to_owned();
                Ok(())
            })
        },
        "serviceAccount" => |_, args| match args {
            [
                Value::Authorizer(object),
                Value::String(namespace),
                Value::String(name),
            ] if object.0.stage == Stage::Authorizer => {
                if !names::dns1123_subdomain(name).is_empty() {
                    return Err(EvalError::new("Invalid service account name"));
                }
                if !names::dns1123_label(namespace).is_empty() {
                    return Err(EvalError::new("Invalid service account namespace"));
                }
                let account = (namespace.to_string(), name.to_string());
                Ok(Value::Authorizer(object.next(Stage::Authorizer, |state| {
                    state.review.service_account = Some(account);
                })))
            }
            _ => Err(EvalError::no_such_overload()),
        },
        "resource" => |_, args| {
            step(
                args,
                (Stage::GroupCheck, Stage::ResourceCheck),
                |state, resource| {
                    state.review.resource = resource.to_owned();
                    if resource.trim().is_empty() {
                        Err("resource must not be empty")
                    } else {
                        Ok(())
                    }
                },
            )
        },
        "subresource" => |_, args| {
            step(args, RESOURCE, |state, subresource| {
                state.review.subresource = subresource.to_owned();
                Ok(())
            })
        },
        "namespace" => |_, args| {
            step(args, RESOURCE, |state, namespace| {
                state.review.namespace = namespace.to_owned();
                Ok(())
            })
        },
        "name" => |_, args| {
            step(args, RESOURCE, |state, name| {
                state.review.name = name.to_owned();
                Ok(())
            })
        },
        "fieldSelector" => |_, args| {
            step(args, RESOURCE, |state, selector| {
                state.review.field_selector = selector.to_owned();
                Ok(())
            })
        },
        "labelSelector" => |_, args| {
            step(args, RESOURCE, |state, selector| {
                state.review.label_selector = selector.to_owned();
                Ok(())
            })
        },
        "check" => |_, args| {
            let from = match args {
                [Value::Authorizer(object), _] if object.0.stage == Stage::PathCheck => Stage::PathCheck,
                _ => Stage::ResourceCheck,
            };
            step(args, (from, Stage::Decision), |state, verb| {
                state.review.verb = verb.to_owned();
                state.decision = state.authorizer.authorize(&state.review);
                Ok(())
            })
        },
        "allowed" => |_, args| decided(args, |decision| Value::Bool(decision.allowed)),
        "reason" => |_, args| decided(args, |decision| Value::string(decision.reason.as_str())),
        "errored" => |_, args| decided(args, |decision| Value::Bool(decision.error.is_some())),
        "error" => |_, args| {
            decided(args, |decision| {
                Value::string(decision.error.as_deref().unwrap_or_default())
            })
        },
        _ => return None,
    })
}
