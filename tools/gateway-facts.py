#!/usr/bin/env python3
"""gateway-facts.py DIR >crates/ingress/data/gateway-api.txt: the fact table of Gateway API's definitions.

DIR is config/crd/standard of the Go module sigs.k8s.io/gateway-api. What the table holds is described in
crates/ingress/src/gateway/definitions.rs, which makes the definitions from it. Descriptions stay behind.
"""

import json
import sys

import yaml

KINDS = ["gatewayclasses", "gateways", "httproutes", "grpcroutes", "tlsroutes", "referencegrants"]
HIDDEN = {"description", "type", "properties", "required", "items", "additionalProperties", "x-kubernetes-validations"}
SHORT = {"x-kubernetes-list-type": "list", "x-kubernetes-list-map-keys": "keys", "x-kubernetes-map-type": "map"}


def compact(value):
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def bare(node):
    """The schema without its prose."""
    return {key: bare(value) if isinstance(value, dict) else value for key, value in node.items() if key != "description"} \
        if "properties" not in node else {
            **{key: value for key, value in node.items() if key not in ("description", "properties", "items")},
            "properties": {name: bare(field) for name, field in node["properties"].items()},
        }


def children(node):
    found = [(name, field) for name, field in node.get("properties", {}).items()]
    if "items" in node:
        found.append(("[]", node["items"]))
    if isinstance(node.get("additionalProperties"), dict):
        found.append(("{}", node["additionalProperties"]))
    return found


counts, names = {}, {}


def count(name, node):
    text = compact(node)
    counts[text] = counts.get(text, 0) + 1
    names.setdefault(text, name)
    if counts[text] == 1:
        for child, field in children(node):
            count(name if child in ("[]", "{}") else child, field)


def shared(node):
    text = compact(node)
    return counts[text] > 1 and "properties" in node and len(text) > 150


types = {}


def type_name(node):
    text = compact(node)
    if text not in types:
        base, number = names[text], 2
        name = base
        while name in types.values():
            name, number = f"{base}{number}", number + 1
        types[text] = name
        pending.append((name, node))
    return types[text]


def line(depth, name, required, node, top=False):
    mark = "!" if required else ""
    if not top and shared(node):
        print(f"{' ' * depth}{name}{mark} @{type_name(node)}")
        return
    facts = [f"{SHORT.get(key, key)}={compact(node[key])}" for key in sorted(node) if key not in HIDDEN]
    print(" ".join([f"{' ' * depth}{name}{mark}", node.get("type", "any"), *facts]))
    for rule in node.get("x-kubernetes-validations", []):
        assert set(rule) <= {"rule", "message"}, rule
        print(f"{' ' * (depth + 1)}? {compact(rule['rule'])} {compact(rule.get('message', ''))}")
    for child, field in children(node):
        line(depth + 1, child, child in node.get("required", []), field)


pending, definitions = [], []
for kind in KINDS:
    with open(f"{sys.argv[1]}/gateway.networking.k8s.io_{kind}.yaml") as file:
        definitions.append(next(one for one in yaml.safe_load_all(file) if one))
for definition in definitions:
    definition["spec"]["versions"] = [one for one in definition["spec"]["versions"] if one["served"]]
    for version in definition["spec"]["versions"]:
        version["schema"] = bare(version["schema"]["openAPIV3Schema"])
        count(definition["spec"]["names"]["kind"], version["schema"])

annotations = definitions[0]["metadata"]["annotations"]
print("# Gateway API: facts of its definitions. Made by tools/gateway-facts.py; read by src/gateway/definitions.rs.")
for key in sorted(annotations):
    assert all(one["metadata"]["annotations"][key] == annotations[key] for one in definitions)
    print(f"annotation {key} {annotations[key]}")
for definition in definitions:
    spec = definition["spec"]
    known = spec["names"]
    print(f"definition {known['kind']} {known['plural']} {known['singular']} {spec['scope']} "
          f"categories={compact(known.get('categories', []))} shortNames={compact(known.get('shortNames', []))}")
    for version in spec["versions"]:
        flags = [flag for flag in ("storage",) if version[flag]] + (["status"] if "status" in version["subresources"] else [])
        print(" ".join([f" version {version['name']}", *flags]))
        for column in version.get("additionalPrinterColumns", []):
            print(f"  column {compact(column)}")
        line(2, "schema", False, version["schema"])
while pending:
    name, node = pending.pop(0)
    print(f"type {name}")
    line(1, "schema", False, node, top=True)
