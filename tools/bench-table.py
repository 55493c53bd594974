#!/usr/bin/env python3
"""bench-table.py UPSTREAM.json SKIFF.json: the table of docs/performance.md, out of two results of kubebench."""
import json
import sys

ROWS = [
    ("creates, 16 clients", "write", ["create_16_clients_per_s"], "{:,.0f}/s"),
    ("creates, one client, median", "write", ["create_1_client_p50_ms"], "{:.2g} ms"),
    ("gets, 16 clients", "write", ["get_16_clients_per_s"], "{:,.0f}/s"),
    ("server CPU of the whole write scenario", "write", "cpu", "{:.1f} s"),
    ("list of 10,000 pods", "list", ["list_all_ms"], "{:.3g} ms"),
    ("the same in pages of 500", "list", ["list_paged_500_ms"], "{:.3g} ms"),
    ("list by label, 1 %", "list", ["list_label_1pct_ms"], "{:.2g} ms"),
    ("list by field, 1 %", "list", ["list_field_1pct_ms"], "{:.2g} ms"),
    ("deletion of 10,000 pods", "list", ["deletecollection_s"], "{:.2g} s"),
    ("server CPU of the whole list scenario", "list", "cpu", "{:.1f} s"),
    ("an event at 1,000 watchers, median", "watch", ["event_p50_ms"], "{:.2g} ms"),
    ("an event at 1,000 watchers, 99th percentile", "watch", ["event_p99_ms"], "{:.2g} ms"),
    ("server CPU of the whole watch scenario", "watch", "cpu", "{:.1f} s"),
    ("memory after 10,000 pods", "list", "rss", "{:,.0f} MiB"),
]
# Of upstream's processes only those that answer requests; skiff is one process with all its parts.
SERVERS = ("etcd", "apiserver", "skiff")


def value(figures, names):
    if names in ("cpu", "rss"):
        unit = {"cpu": "s", "rss": "mib"}[names]
        found = [figures.get(f"{names}_{server}_{unit}") for server in SERVERS]
        found = [each for each in found if each is not None]
        return sum(found) if found else None
    return next((figures[name] for name in names if name in figures), None)


def main():
    results = [json.load(open(path))["scenarios"] for path in sys.argv[1:3]]
    print("| scenario | upstream | skiff | ratio |")
    print("|---|---|---|---|")
    for title, scenario, names, form in ROWS:
        pair = [value(result.get(scenario, {}).get("figures", {}), names) for result in results]
        if None in pair or not pair[0]:
            continue
        ratio = pair[1] / pair[0]
        shown = f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2g}"
        print(f"| {title} | {form.format(pair[0])} | {form.format(pair[1])} | {shown} |")
    for who, result in zip(("upstream", "skiff"), results):
        for name, scenario in result.items():
            if not scenario.get("ok", False):
                print(f"\n{who}: a check of `{name}` did not hold")


main()
