//! Allocation of devices: which devices of the ResourceSlices that a node reaches satisfy the requests of some claims.
//!
//! A search with backtracking over pure data, bounded in steps.

use super::device_capacity::{self as capacity, Amounts, Asked};
use crate::node::NodeInfo;
use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::api::resource::v1::{
    AllocationResult, Device, DeviceAllocationConfiguration, DeviceAllocationResult, DeviceClass,
    DeviceConstraint, DeviceRequestAllocationResult, DeviceSelector, DeviceToleration, ResourceClaim,
    ResourceSlice,
};
use skiff_cel::device::{Attribute, Device as SeenDevice, Selector};
use skiff_meta::quantity::Quantity;
use skiff_pods::affinity;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// With more steps than this the search gives up.
const MAX_STEPS: usize = 100_000;
/// Upstream's limit of devices in one claim.
const MAX_DEVICES: usize = 32;

/// Driver, pool and device.
pub(crate) type DeviceId = (String, String, String);

/// Devices that are taken.
#[derive(Debug, Clone, Default)]
pub(crate) struct Taken {
    /// As a whole.
    devices: HashSet<DeviceId>,
    /// In part, and how much of them.
    shared: HashMap<DeviceId, Amounts>,
}

impl Taken {
    /// Administrators' access takes nothing.
    pub(crate) fn add(&mut self, result: &DeviceRequestAllocationResult) {
        if result.admin_access == Some(true) {
            return;
        }
        let id = (result.driver.clone(), result.pool.clone(), result.device.clone());
        if result.share_id.is_some() {
            capacity::add(self.shared.entry(id).or_default(), &capacity::of_result(result));
        } else {
            self.devices.insert(id);
        }
    }

    fn contains(&self, id: &DeviceId) -> bool {
        self.devices.contains(id) || self.shared.contains_key(id)
    }
}

/// A device that the node reaches.
struct Reachable<'a> {
    id: DeviceId,
    device: &'a Device,
    slice: &'a ResourceSlice,
}

/// What one request of a claim wants.
struct Wanted<'a> {
    claim: usize,
    /// `request` or `request/subrequest`.
    name: String,
    parent: &'a str,
    class: &'a DeviceClass,
    selectors: Vec<&'a DeviceSelector>,
    tolerations: &'a [DeviceToleration],
    capacity: Asked<'a>,
    /// `None` is all that match.
    count: Option<usize>,
    admin: bool,
}

/// A device that was chosen for a request.
struct Chosen {
    claim: usize,
    request: String,
    parent: String,
    index: usize,
    admin: bool,
    /// What it takes of a shared device.
    share: Option<Amounts>,
    /// Whether it used up counters: of the shares of one device the first does.
    counts: bool,
}

/// Compiled selectors, by their text.
#[derive(Default)]
pub(crate) struct Selectors(HashMap<String, Option<Arc<Selector>>>);

impl Selectors {
    fn get(&mut self, text: &str) -> Option<Arc<Selector>> {
        if let Some(known) = self.0.get(text) {
            return known.clone();
        }
        if self.0.len() > 1024 {
            self.0.clear();
        }
        let compiled = Selector::compile(text).ok().map(Arc::new);
        self.0.insert(text.to_owned(), compiled.clone());
        compiled
    }
}

fn seen(driver: &str, device: &Device) -> OwnedSeen {
    OwnedSeen {
        driver: driver.to_owned(),
        device: device.clone(),
    }
}

/// Holds what a selector borrows from.
struct OwnedSeen {
    driver: String,
    device: Device,
}

impl OwnedSeen {
    fn view(&self) -> SeenDevice<'_> {
        let attributes = self
            .device
            .attributes
            .iter()
            .flatten()
            .filter_map(|(name, value)| {
                let attribute = if let Some(value) = value.bool {
                    Attribute::Bool(value)
                } else if let Some(value) = value.int {
                    Attribute::Int(value)
                } else if let Some(text) = &value.string {
                    Attribute::Text(text)
                } else {
                    Attribute::Version(value.version.as_deref()?)
                };
                Some((name.as_str(), attribute))
            });
        let capacity = self.device.capacity.iter().flatten();
        SeenDevice {
            driver: &self.driver,
            attributes: attributes.collect(),
            capacity: capacity
                .filter_map(|(name, amount)| Some((name.as_str(), Quantity::parse(&amount.value.0).ok()?)))
                .collect(),
            allow_multiple_allocations: self.device.allow_multiple_allocations == Some(true),
        }
    }
}

/// Why claims cannot be allocated on any node.
pub(crate) type Problem = String;

/// The search for some claims on one node.
pub(crate) struct Search<'a> {
    claims: &'a [Arc<ResourceClaim>],
    reachable: Vec<Reachable<'a>>,
    taken: &'a Taken,
    selectors: &'a mut Selectors,
    /// By device and selector text.
    matched: HashMap<(usize, String), bool>,
    steps: usize,
    chosen: Vec<Chosen>,
    node: &'a NodeInfo,
    /// Counters that are left: driver, pool, set, counter.
    counters: HashMap<(String, String, String, String), i64>,
}

fn tolerates(tolerations: &[DeviceToleration], device: &Device) -> bool {
    let mut taints = device.taints.iter().flatten();
    taints.all(|taint| {
        if !matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute") {
            return true;
        }
        tolerations.iter().any(|one| {
            let effect = one.effect.as_deref().unwrap_or_default();
            let key = one.key.as_deref().unwrap_or_default();
            (effect.is_empty() || effect == taint.effect)
                && (key.is_empty() || key == taint.key)
                && match one.operator.as_deref().unwrap_or_default() {
                    "Exists" => true,
                    "" | "Equal" => {
                        one.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default()
                    }
                    _ => false,
                }
        })
    })
}

fn reaches(node: &NodeInfo, name: Option<&str>, selector: Option<&NodeSelector>, all: Option<bool>) -> bool {
    all == Some(true)
        || name == Some(&*node.name)
        || selector.is_some_and(|selector| affinity::node_selector_matches(selector, &node.meta.node))
}

/// The slices of complete pools in their newest generation.
pub(crate) fn current_slices(slices: &[Arc<ResourceSlice>]) -> Vec<&ResourceSlice> {
    let mut pools: HashMap<(&str, &str), Vec<&ResourceSlice>> = HashMap::new();
    for slice in slices {
        let key = (slice.spec.driver.as_str(), slice.spec.pool.name.as_str());
        pools.entry(key).or_default().push(slice);
    }
    let mut current = Vec::new();
    for mut of_pool in pools.into_values() {
        let newest = of_pool.iter().map(|slice| slice.spec.pool.generation).max();
        of_pool.retain(|slice| Some(slice.spec.pool.generation) == newest);
        let wanted = of_pool
            .first()
            .map_or(0, |slice| slice.spec.pool.resource_slice_count);
        if i64::try_from(of_pool.len()) == Ok(wanted) {
            current.extend(of_pool);
        }
    }
    current.sort_by(|a, b| {
        (&a.spec.driver, &a.spec.pool.name, &a.metadata.name).cmp(&(
            &b.spec.driver,
            &b.spec.pool.name,
            &b.metadata.name,
        ))
    });
    current
}

impl<'a> Search<'a> {
    pub(crate) fn new(
        claims: &'a [Arc<ResourceClaim>],
        slices: &[&'a ResourceSlice],
        taken: &'a Taken,
        selectors: &'a mut Selectors,
        node: &'a NodeInfo,
    ) -> Self {
        let mut reachable = Vec::new();
        let mut counters: HashMap<(String, String, String, String), i64> = HashMap::new();
        for slice in slices {
            let spec = &slice.spec;
            let (driver, pool) = (spec.driver.clone(), spec.pool.name.clone());
            for set in spec.shared_counters.iter().flatten() {
                for (name, counter) in &set.counters {
                    let key = (driver.clone(), pool.clone(), set.name.clone(), name.clone());
                    let value = Quantity::parse(&counter.value.0).map_or(0, |amount| amount.milli_value());
                    *counters.entry(key).or_default() += value;
                }
            }
        }
        for slice in slices {
            let spec = &slice.spec;
            let of_slice = reaches(
                node,
                spec.node_name.as_deref(),
                spec.node_selector.as_ref(),
                spec.all_nodes,
            );
            for device in spec.devices.iter().flatten() {
                let id = (spec.driver.clone(), spec.pool.name.clone(), device.name.clone());
                if taken.contains(&id) {
                    consume(&mut counters, &id, device, -1);
                }
                let of_device = spec.per_device_node_selection == Some(true)
                    && reaches(
                        node,
                        device.node_name.as_deref(),
                        device.node_selector.as_ref(),
                        device.all_nodes,
                    );
                if of_slice || of_device {
                    reachable.push(Reachable { id, device, slice });
                }
            }
        }
        Self {
            claims,
            reachable,
            taken,
            selectors,
            matched: HashMap::new(),
            steps: 0,
            chosen: Vec::new(),
            node,
            counters,
        }
    }

    /// The allocation of each claim, `None` if there is none on this node.
    pub(crate) fn run(
        mut self,
        classes: &'a HashMap<String, Arc<DeviceClass>>,
    ) -> Result<Option<Vec<AllocationResult>>, Problem> {
        let mut requests: Vec<Vec<Vec<Wanted<'a>>>> = Vec::new();
        for (claim, object) in self.claims.iter().enumerate() {
            let devices = object.spec.devices.as_ref();
            for request in devices
                .into_iter()
                .flat_map(|devices| devices.requests.iter().flatten())
            {
                requests.push(alternatives(claim, request, classes)?);
            }
        }
        let found = self.assign(&requests, 0)?;
        Ok(found.then(|| self.results(classes)))
    }

    /// Satisfies the requests from `at` on.
    fn assign(&mut self, requests: &[Vec<Vec<Wanted<'a>>>], at: usize) -> Result<bool, Problem> {
        let Some(options) = requests.get(at) else {
            return Ok(true);
        };
        for option in options {
            let Some(wanted) = option.first() else { continue };
            let found = match wanted.count {
                Some(count) => self.pick(requests, at, wanted, count, 0)?,
                None => self.pick_all(requests, at, wanted)?,
            };
            if found {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn step(&mut self) -> Result<(), Problem> {
        self.steps += 1;
        if self.steps > MAX_STEPS {
            return Err(format!(
                "node {}: timed out trying to allocate devices",
                self.node.name
            ));
        }
        Ok(())
    }

    fn pick(
        &mut self,
        requests: &[Vec<Vec<Wanted<'a>>>],
        at: usize,
        wanted: &Wanted<'a>,
        left: usize,
        from: usize,
    ) -> Result<bool, Problem> {
        if left == 0 {
            return self.assign(requests, at + 1);
        }
        for index in from..self.reachable.len() {
            self.step()?;
            if !self.fits(wanted, index) {
                continue;
            }
            self.choose(wanted, index);
            // A shared device may be chosen again.
            let next = index + usize::from(!capacity::is_shared(self.reachable[index].device));
            if self.pick(requests, at, wanted, left - 1, next)? {
                return Ok(true);
            }
            self.undo();
        }
        Ok(false)
    }

    fn pick_all(
        &mut self,
        requests: &[Vec<Vec<Wanted<'a>>>],
        at: usize,
        wanted: &Wanted<'a>,
    ) -> Result<bool, Problem> {
        let before = self.chosen.len();
        for index in 0..self.reachable.len() {
            self.step()?;
            if !self.selected(wanted, index) || !self.has_room(wanted, index) {
                continue;
            }
            // All that match must be free.
            if !self.fits(wanted, index) {
                while self.chosen.len() > before {
                    self.undo();
                }
                return Ok(false);
            }
            self.choose(wanted, index);
        }
        if self.chosen.len() > before && self.assign(requests, at + 1)? {
            return Ok(true);
        }
        while self.chosen.len() > before {
            self.undo();
        }
        Ok(false)
    }

    fn choose(&mut self, wanted: &Wanted<'a>, index: usize) {
        let one = &self.reachable[index];
        let counts = !wanted.admin && !self.is_shared_already(index);
        if counts {
            consume(&mut self.counters, &one.id, one.device, -1);
        }
        let shared = capacity::is_shared(one.device);
        let taken = capacity::taken_by(wanted.capacity, one.device).filter(|_| shared);
        self.chosen.push(Chosen {
            claim: wanted.claim,
            request: wanted.name.clone(),
            parent: wanted.parent.to_owned(),
            index,
            admin: wanted.admin,
            share: taken,
            counts,
        });
    }

    fn undo(&mut self) {
        if let Some(last) = self.chosen.pop()
            && last.counts
        {
            let one = &self.reachable[last.index];
            consume(&mut self.counters, &one.id, one.device, 1);
        }
    }

    /// Whether somebody has a share of the device: its counters are used up then.
    fn is_shared_already(&self, index: usize) -> bool {
        let mut chosen = self.chosen.iter();
        self.taken.shared.contains_key(&self.reachable[index].id)
            || chosen.any(|one| one.index == index && one.share.is_some())
    }

    /// Whether the device has the capacity that is asked for, beside what others have of it.
    fn has_room(&self, wanted: &Wanted<'a>, index: usize) -> bool {
        let one = &self.reachable[index];
        let Some(more) = capacity::taken_by(wanted.capacity, one.device) else {
            return false;
        };
        let chosen = self.chosen.iter().filter(|other| other.index == index);
        let used: Vec<&Amounts> = chosen
            .filter_map(|other| other.share.as_ref())
            .chain(self.taken.shared.get(&one.id))
            .collect();
        capacity::fits(one.device, &used, &more)
    }

    fn selected(&mut self, wanted: &Wanted<'a>, index: usize) -> bool {
        let of_class = wanted.class.spec.selectors.iter().flatten();
        for selector in of_class.chain(wanted.selectors.iter().copied()) {
            let Some(text) = selector.cel.as_ref().map(|cel| cel.expression.as_str()) else {
                return false;
            };
            let key = (index, text.to_owned());
            let matches = match self.matched.get(&key) {
                Some(known) => *known,
                None => {
                    let one = &self.reachable[index];
                    let owned = seen(&one.id.0, one.device);
                    let compiled = self.selectors.get(text);
                    // An expression that fails over a device does not select it.
                    let matches = compiled.is_some_and(|one| one.matches(&owned.view()) == Ok(true));
                    self.matched.insert(key, matches);
                    matches
                }
            };
            if !matches {
                return false;
            }
        }
        true
    }

    fn fits(&mut self, wanted: &Wanted<'a>, index: usize) -> bool {
        let (id, device) = (&self.reachable[index].id, self.reachable[index].device);
        let mut whole = self
            .chosen
            .iter()
            .filter(|one| one.index == index && one.share.is_none());
        if wanted.admin {
            // Once in a claim.
            if whole.any(|one| one.claim == wanted.claim) {
                return false;
            }
        } else {
            let in_use = self.taken.devices.contains(id) || whole.any(|one| !one.admin);
            if in_use || !self.is_shared_already(index) && !covers(&self.counters, id, device) {
                return false;
            }
        }
        let of_claim = self.chosen.iter().filter(|one| one.claim == wanted.claim);
        tolerates(wanted.tolerations, device)
            && of_claim.count() < MAX_DEVICES
            && self.has_room(wanted, index)
            && self.keeps_constraints(wanted, index)
            && self.selected(wanted, index)
    }

    fn keeps_constraints(&self, wanted: &Wanted<'a>, index: usize) -> bool {
        let claim = &self.claims[wanted.claim];
        let constraints = claim
            .spec
            .devices
            .iter()
            .flat_map(|devices| devices.constraints.iter().flatten());
        for constraint in constraints {
            let concerns = |name: &str, parent: &str| {
                let requests = constraint.requests.as_deref().unwrap_or_default();
                requests.is_empty() || requests.iter().any(|one| one == name || one == parent)
            };
            if !concerns(&wanted.name, wanted.parent) {
                continue;
            }
            let others = self
                .chosen
                .iter()
                .filter(|one| one.claim == wanted.claim && concerns(&one.request, &one.parent));
            let others = others.map(|one| one.index);
            if !self.agrees(constraint, index, others) {
                return false;
            }
        }
        true
    }

    fn agrees(
        &self,
        constraint: &DeviceConstraint,
        index: usize,
        mut others: impl Iterator<Item = usize>,
    ) -> bool {
        let value = |name: &str, index: usize| {
            let one = &self.reachable[index];
            let attributes = one.device.attributes.as_ref()?;
            let short = name.strip_prefix(&format!("{}/", one.id.0));
            attributes.get(name).or_else(|| attributes.get(short?)).cloned()
        };
        if let Some(name) = &constraint.match_attribute {
            let own = value(name, index);
            return own.is_some() && others.all(|other| value(name, other) == own);
        }
        if let Some(name) = &constraint.distinct_attribute {
            let own = value(name, index);
            return own.is_some() && others.all(|other| value(name, other) != own);
        }
        false
    }

    fn results(&self, classes: &HashMap<String, Arc<DeviceClass>>) -> Vec<AllocationResult> {
        let of_claim = |claim: usize| {
            let object = &self.claims[claim];
            let chosen: Vec<_> = self.chosen.iter().filter(|one| one.claim == claim).collect();
            let results = chosen.iter().map(|one| {
                let (driver, pool, device) = self.reachable[one.index].id.clone();
                let object_of = self.reachable[one.index].device;
                let share = one.share.as_ref();
                DeviceRequestAllocationResult {
                    binding_conditions: object_of.binding_conditions.clone(),
                    binding_failure_conditions: object_of.binding_failure_conditions.clone(),
                    request: one.request.clone(),
                    driver,
                    pool,
                    device,
                    admin_access: one.admin.then_some(true),
                    tolerations: tolerations_of(object, &one.request),
                    share_id: share.map(|_| uuid::Uuid::new_v4().to_string()),
                    consumed_capacity: share.filter(|share| !share.is_empty()).map(capacity::written),
                }
            });
            let results: Vec<DeviceRequestAllocationResult> = results.collect();
            AllocationResult {
                devices: Some(DeviceAllocationResult {
                    config: Some(configs(object, &results, classes)),
                    results: Some(results),
                }),
                node_selector: self.node_selector(chosen.iter().map(|one| one.index)),
                allocation_timestamp: None,
            }
        };
        (0..self.claims.len()).map(of_claim).collect()
    }

    /// The nodes from which all of the devices can be used; `None` is all nodes.
    fn node_selector(&self, devices: impl Iterator<Item = usize>) -> Option<NodeSelector> {
        let mut expressions: Vec<NodeSelectorRequirement> = Vec::new();
        let mut fields: Vec<NodeSelectorRequirement> = Vec::new();
        for index in devices {
            let one = &self.reachable[index];
            let spec = &one.slice.spec;
            let per_device = spec.per_device_node_selection == Some(true);
            let (name, selector) = if per_device {
                (&one.device.node_name, &one.device.node_selector)
            } else {
                (&spec.node_name, &spec.node_selector)
            };
            let ties = one.device.binds_to_node == Some(true);
            if ties || name.as_ref().is_some_and(|name| !name.is_empty()) {
                fields = vec![NodeSelectorRequirement {
                    key: "metadata.name".to_owned(),
                    operator: "In".to_owned(),
                    values: Some(vec![self.node.name.to_string()]),
                }];
            } else if let Some(term) = selector
                .as_ref()
                .and_then(|selector| selector.node_selector_terms.first())
            {
                for one in term.match_expressions.iter().flatten() {
                    if !expressions.contains(one) {
                        expressions.push(one.clone());
                    }
                }
                fields.extend(term.match_fields.iter().flatten().cloned());
            }
        }
        if expressions.is_empty() && fields.is_empty() {
            return None;
        }
        let filled = |list: Vec<NodeSelectorRequirement>| (!list.is_empty()).then_some(list);
        Some(NodeSelector {
            node_selector_terms: vec![NodeSelectorTerm {
                match_expressions: filled(expressions),
                match_fields: filled(fields),
            }],
        })
    }
}

type Counters = HashMap<(String, String, String, String), i64>;

fn amounts<'a>(
    id: &'a DeviceId,
    device: &'a Device,
) -> impl Iterator<Item = ((String, String, String, String), i64)> + 'a {
    device.consumes_counters.iter().flatten().flat_map(move |set| {
        set.counters.iter().map(move |(name, counter)| {
            let key = (id.0.clone(), id.1.clone(), set.counter_set.clone(), name.clone());
            let amount = Quantity::parse(&counter.value.0).map_or(0, |amount| amount.milli_value());
            (key, amount)
        })
    })
}

fn consume(counters: &mut Counters, id: &DeviceId, device: &Device, sign: i64) {
    for (key, amount) in amounts(id, device) {
        *counters.entry(key).or_default() += sign * amount;
    }
}

fn covers(counters: &Counters, id: &DeviceId, device: &Device) -> bool {
    amounts(id, device).all(|(key, amount)| counters.get(&key).copied().unwrap_or(0) >= amount)
}

/// The ways to satisfy a request, best first.
fn alternatives<'a>(
    claim: usize,
    request: &'a k8s_openapi::api::resource::v1::DeviceRequest,
    classes: &'a HashMap<String, Arc<DeviceClass>>,
) -> Result<Vec<Vec<Wanted<'a>>>, Problem> {
    let class_of = |name: &str, request: &str| {
        let class = classes.get(name).map(|class| &**class);
        class.ok_or_else(|| format!("request {request}: device class {name} does not exist"))
    };
    let count = |mode: Option<&str>, count: Option<i64>| match mode.unwrap_or_default() {
        "" | "ExactCount" => Ok(Some(usize::try_from(count.unwrap_or(1)).unwrap_or(1))),
        "All" => Ok(None),
        other => Err(format!(
            "request {}: unsupported allocation mode {other}",
            request.name
        )),
    };
    if let Some(exact) = &request.exactly {
        return Ok(vec![vec![Wanted {
            claim,
            name: request.name.clone(),
            parent: &request.name,
            class: class_of(&exact.device_class_name, &request.name)?,
            selectors: exact.selectors.iter().flatten().collect(),
            tolerations: exact.tolerations.as_deref().unwrap_or_default(),
            capacity: exact.capacity.as_ref().and_then(|asked| asked.requests.as_ref()),
            count: count(exact.allocation_mode.as_deref(), exact.count)?,
            admin: exact.admin_access == Some(true),
        }]]);
    }
    let mut options = Vec::new();
    for sub in request.first_available.iter().flatten() {
        let name = format!("{}/{}", request.name, sub.name);
        options.push(vec![Wanted {
            claim,
            parent: &request.name,
            class: class_of(&sub.device_class_name, &name)?,
            selectors: sub.selectors.iter().flatten().collect(),
            tolerations: sub.tolerations.as_deref().unwrap_or_default(),
            capacity: sub.capacity.as_ref().and_then(|asked| asked.requests.as_ref()),
            count: count(sub.allocation_mode.as_deref(), sub.count)?,
            admin: false,
            name,
        }]);
    }
    if options.is_empty() {
        return Err(format!("request {}: unknown request type", request.name));
    }
    Ok(options)
}

fn tolerations_of(claim: &ResourceClaim, request: &str) -> Option<Vec<DeviceToleration>> {
    let requests = claim.spec.devices.as_ref()?.requests.as_ref()?;
    let (name, sub) = request.split_once('/').unwrap_or((request, ""));
    let request = requests.iter().find(|one| one.name == name)?;
    match &request.exactly {
        Some(exact) => exact.tolerations.clone(),
        None => {
            let subs = request.first_available.as_ref()?;
            subs.iter().find(|one| one.name == sub)?.tolerations.clone()
        }
    }
}

fn class_of_request<'a>(claim: &'a ResourceClaim, request: &str) -> Option<&'a str> {
    let requests = claim.spec.devices.as_ref()?.requests.as_ref()?;
    let (name, sub) = request.split_once('/').unwrap_or((request, ""));
    let request = requests.iter().find(|one| one.name == name)?;
    match &request.exactly {
        Some(exact) => Some(&exact.device_class_name),
        None => {
            let subs = request.first_available.as_ref()?;
            Some(&subs.iter().find(|one| one.name == sub)?.device_class_name)
        }
    }
}

/// Configurations of the classes first, then those of the claim.
fn configs(
    claim: &ResourceClaim,
    results: &[DeviceRequestAllocationResult],
    classes: &HashMap<String, Arc<DeviceClass>>,
) -> Vec<DeviceAllocationConfiguration> {
    let mut requests: BTreeMap<&str, ()> = BTreeMap::new();
    for result in results {
        requests.insert(&result.request, ());
    }
    let mut configs = Vec::new();
    for request in requests.keys() {
        let class = class_of_request(claim, request).and_then(|name| classes.get(name));
        for config in class.iter().flat_map(|class| class.spec.config.iter().flatten()) {
            configs.push(DeviceAllocationConfiguration {
                source: "FromClass".to_owned(),
                requests: Some(vec![(*request).to_owned()]),
                opaque: config.opaque.clone(),
            });
        }
    }
    let own = claim
        .spec
        .devices
        .iter()
        .flat_map(|devices| devices.config.iter().flatten());
    for config in own {
        let named = config.requests.as_deref().unwrap_or_default();
        let used = |one: &String| {
            requests
                .keys()
                .any(|request| request == one || request.split('/').next() == Some(one))
        };
        if named.is_empty() || named.iter().any(used) {
            configs.push(DeviceAllocationConfiguration {
                source: "FromClaim".to_owned(),
                requests: config.requests.clone(),
                opaque: config.opaque.clone(),
            });
        }
    }
    configs
}
