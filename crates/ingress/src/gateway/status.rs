//! What the objects of Gateway API are told: conditions with upstream's types and reasons. Conditions and parents of
//! other controllers stay as they are.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::CONTROLLER;
use crate::compile::Problem;

/// A condition, without its times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    pub type_: &'static str,
    pub status: bool,
    pub reason: &'static str,
    pub message: String,
}

impl Condition {
    pub fn yes(type_: &'static str, reason: &'static str) -> Condition {
        Condition {
            type_,
            status: true,
            reason,
            message: String::new(),
        }
    }

    pub fn no(type_: &'static str, reason: &'static str, message: impl Into<String>) -> Condition {
        Condition {
            type_,
            status: false,
            reason,
            message: message.into(),
        }
    }

    /// True with the reason, or false with the problem's.
    pub fn of(type_: &'static str, reason: &'static str, problem: Option<&Problem>) -> Condition {
        match problem {
            None => Condition::yes(type_, reason),
            Some(problem) => Condition::no(type_, problem.reason, problem.message.clone()),
        }
    }
}

/// The conditions as they shall be: ours, and those of other types that were there and are not ours to remove.
pub fn conditions(
    ours: &[Condition],
    removable: &[&str],
    old: &Value,
    generation: Option<i64>,
    now: Timestamp,
) -> Value {
    let old: &[Value] = old.as_array().map_or(&[], Vec::as_slice);
    let now = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let made = ours.iter().map(|condition| {
        let status = if condition.status { "True" } else { "False" };
        let before = old.iter().find(|each| each["type"] == condition.type_);
        let since = before
            .filter(|before| before["status"] == status)
            .map(|before| &before["lastTransitionTime"]);
        json!({
            "type": condition.type_, "status": status, "reason": condition.reason, "message": condition.message,
            "observedGeneration": generation.unwrap_or_default(),
            "lastTransitionTime": since.cloned().unwrap_or_else(|| now.clone().into()),
        })
    });
    let is_ours = |each: &Value| {
        let type_ = each["type"].as_str().unwrap_or_default();
        ours.iter().any(|condition| condition.type_ == type_) || removable.contains(&type_)
    };
    let others = old.iter().filter(|each| !is_ours(each)).cloned();
    made.chain(others).collect()
}

/// A listener's part of a Gateway's status.
#[derive(Clone, Debug, PartialEq)]
pub struct ListenerStatus {
    pub name: String,
    pub supported_kinds: Value,
    pub attached: usize,
    pub conditions: Vec<Condition>,
}

/// What one object is told.
#[derive(Clone, Debug, PartialEq)]
pub enum Told {
    Class(Vec<Condition>),
    Gateway {
        conditions: Vec<Condition>,
        listeners: Vec<ListenerStatus>,
        address: GatewayAddresses,
    },
    /// By parent, as the route names it.
    Route(Vec<(Value, Vec<Condition>)>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GatewayAddresses {
    /// Those of the nodes.
    Shared,
    Own(std::net::IpAddr),
    None,
}

/// The status of an object, given the one that it has. `shared` are the addresses of the nodes.
pub fn status(
    told: &Told,
    old: &Value,
    generation: Option<i64>,
    shared: &[std::net::IpAddr],
    now: Timestamp,
) -> Value {
    let mut status = match old {
        Value::Object(_) => old.clone(),
        _ => json!({}),
    };
    match told {
        Told::Class(ours) => {
            status["conditions"] = conditions(ours, &[], &old["conditions"], generation, now);
            status["supportedFeatures"] = FEATURES.iter().map(|name| json!({"name": name})).collect();
        }
        Told::Gateway {
            conditions: ours,
            listeners,
            address,
        } => {
            status["conditions"] = conditions(ours, &[], &old["conditions"], generation, now);
            let addresses = match address {
                GatewayAddresses::Shared => shared.to_vec(),
                GatewayAddresses::Own(address) => vec![*address],
                GatewayAddresses::None => Vec::new(),
            };
            let shown = addresses.iter().take(16);
            status["addresses"] = shown
                .map(|address| json!({"type": "IPAddress", "value": address}))
                .collect();
            let before = |name: &str| {
                let mut all = old["listeners"].as_array().into_iter().flatten();
                all.find(|each| each["name"] == name)
                    .map_or(Value::Null, |each| each["conditions"].clone())
            };
            let listeners = listeners.iter().map(|listener| {
                let ours = &listener.conditions;
                let removable = ["Conflicted", "OverlappingTLSConfig"];
                json!({
                    "name": listener.name, "supportedKinds": listener.supported_kinds, "attachedRoutes": listener.attached,
                    "conditions": conditions(ours, &removable, &before(&listener.name), generation, now),
                })
            });
            status["listeners"] = listeners.collect();
        }
        Told::Route(parents) => {
            let old: &[Value] = old["parents"].as_array().map_or(&[], Vec::as_slice);
            let others = old.iter().filter(|each| each["controllerName"] != CONTROLLER);
            let ours = parents.iter().map(|(parent, ours)| {
                let mut own = old
                    .iter()
                    .filter(|each| each["controllerName"] == CONTROLLER && each["parentRef"] == *parent);
                let before = own.next().map_or(Value::Null, |each| each["conditions"].clone());
                json!({
                    "parentRef": parent, "controllerName": CONTROLLER,
                    "conditions": conditions(ours, &["PartiallyInvalid"], &before, generation, now),
                })
            });
            status["parents"] = others.cloned().chain(ours).collect();
        }
    }
    status
}

/// The features that are supported, by upstream's names, in order. `HTTPRouteRetry` is how v1.6 called the codes.
pub const FEATURES: [&str; 39] = [
    "GRPCRoute",
    "GRPCRouteNamedRouteRule",
    "GRPCRouteRequestHeaderModifier",
    "Gateway",
    "GatewayAddressEmpty",
    "GatewayHTTPListenerIsolation",
    "GatewayHTTPSListenerDetectMisdirectedRequests",
    "GatewayPort8080",
    "HTTPRoute",
    "HTTPRoute303RedirectStatusCode",
    "HTTPRoute307RedirectStatusCode",
    "HTTPRoute308RedirectStatusCode",
    "HTTPRouteBackendProtocolH2C",
    "HTTPRouteBackendProtocolWebSocket",
    "HTTPRouteBackendRequestHeaderModification",
    "HTTPRouteBackendTimeout",
    "HTTPRouteBackendURLRewrite",
    "HTTPRouteCORS",
    "HTTPRouteHostRewrite",
    "HTTPRouteMethodMatching",
    "HTTPRouteNamedRouteRule",
    "HTTPRouteParentRefPort",
    "HTTPRoutePathRedirect",
    "HTTPRoutePathRewrite",
    "HTTPRoutePortRedirect",
    "HTTPRouteQueryParamMatching",
    "HTTPRouteRequestMirror",
    "HTTPRouteRequestMultipleMirrors",
    "HTTPRouteRequestPercentageMirror",
    "HTTPRouteRequestTimeout",
    "HTTPRouteResponseHeaderModification",
    "HTTPRouteRetry",
    "HTTPRouteRetryCodes",
    "HTTPRouteRetryConnectionError",
    "HTTPRouteSchemeRedirect",
    "ReferenceGrant",
    "TLSRoute",
    "TLSRouteModeMixed",
    "TLSRouteModeTerminate",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn now(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    #[test]
    fn conditions_keep_their_time_and_others_stay() {
        let ours = [Condition::yes("Accepted", "Accepted")];
        let first = conditions(&ours, &[], &Value::Null, Some(1), now(0));
        assert_eq!(first[0]["lastTransitionTime"], "1970-01-01T00:00:00Z");
        let mut with_other = first.as_array().expect("a list").clone();
        with_other.push(json!({"type": "Theirs", "status": "True"}));
        with_other.push(json!({"type": "Conflicted", "status": "True"}));
        let second = conditions(&ours, &["Conflicted"], &with_other.into(), Some(2), now(60));
        assert_eq!(second[0]["lastTransitionTime"], "1970-01-01T00:00:00Z");
        assert_eq!(second[0]["observedGeneration"], 2);
        assert_eq!(second[1]["type"], "Theirs");
        assert!(second.get(2).is_none());
        let refused = [Condition::no("Accepted", "Pending", "why")];
        let third = conditions(&refused, &[], &second, Some(2), now(60));
        assert_eq!(third[0]["lastTransitionTime"], "1970-01-01T00:01:00Z");
    }

    #[test]
    fn parents_of_other_controllers_stay() {
        let old = json!({"parents": [
            {"parentRef": {"name": "a"}, "controllerName": "other"},
            {"parentRef": {"name": "gone"}, "controllerName": CONTROLLER},
        ]});
        let told = Told::Route(vec![(
            json!({"name": "b"}),
            vec![Condition::yes("Accepted", "Accepted")],
        )]);
        let made = status(&told, &old, Some(1), &[], now(0));
        let parents = made["parents"].as_array().expect("parents");
        assert_eq!(parents.len(), 2);
        assert_eq!(parents[0]["controllerName"], "other");
        assert_eq!(parents[1]["parentRef"]["name"], "b");
        assert_eq!(status(&told, &made, Some(1), &[], now(60)), made);
    }
}
