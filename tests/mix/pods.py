"""Pods of several nodes, in turns: `pods.py API IMAGE ROUNDS PODS NODE…`. The API is asked without TLS (`kubectl proxy`). Prints a
table: create to Running, one pod at a time; all pods of a Deployment Running; CPU of the node's machine meanwhile; what it uses
at rest with these pods; memory of all its processes but the pods' own."""
import http.client
import json
import os
import statistics
import sys
import threading
import time
import urllib.parse

# What the containers run, so that their memory is not counted.
COMMAND = ["sleep", "1000001"]
SETTLE = 5
REST = 10


class Api:
    def __init__(self, url):
        self.host = urllib.parse.urlparse(url).netloc
        self.connection = http.client.HTTPConnection(self.host)

    def call(self, method, path, body=None):
        text = None if body is None else json.dumps(body)
        self.connection.request(method, path, text, {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        answer = json.loads(response.read())
        if response.status >= 400 and response.status != 404:
            sys.exit(f"{method} {path}: {answer}")
        return answer


class Pods:
    """When each pod was seen Running, and which are there."""

    def __init__(self, api):
        self.running = {}
        self.there = set()
        self.changed = threading.Condition()
        path = "/api/v1/namespaces/default/pods?watch=true&allowWatchBookmarks=false"
        connection = http.client.HTTPConnection(api.host)
        connection.request("GET", path)
        self.response = connection.getresponse()
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self):
        for line in self.response:
            now = time.monotonic()
            event = json.loads(line)
            pod = event["object"]
            name = pod["metadata"]["name"]
            with self.changed:
                if event["type"] == "DELETED":
                    self.there.discard(name)
                else:
                    self.there.add(name)
                if pod["status"].get("phase") == "Running":
                    self.running.setdefault(name, now)
                self.changed.notify_all()

    def wait(self, is_done):
        with self.changed:
            if not self.changed.wait_for(is_done, timeout=600):
                sys.exit("gave up waiting for pods")


def spec(image, node):
    return {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "c", "image": image, "command": COMMAND}],
    }


def cgroups(node):
    """The cgroups of a machine made of namespaces: of each hierarchy one."""
    for root in ["/sys/fs/cgroup"] + [f"/sys/fs/cgroup/{one}" for one in os.listdir("/sys/fs/cgroup")]:
        if os.path.isdir(f"{root}/machine-{node}"):
            yield f"{root}/machine-{node}"


def cpu(node):
    """Seconds."""
    for folder in cgroups(node):
        if os.path.exists(f"{folder}/cpuacct.usage"):
            return int(open(f"{folder}/cpuacct.usage").read()) / 1e9
        if os.path.exists(f"{folder}/cpu.stat"):
            text = open(f"{folder}/cpu.stat").read()
            if "usage_usec" in text:
                return int(text.split("usage_usec")[1].split()[0]) / 1e6
    sys.exit(f"no cgroup tells the CPU of {node}")


def memory(node):
    """MiB of its processes, shared pages divided, and how many processes these are."""
    processes = set()
    for folder in cgroups(node):
        for root, _, files in os.walk(folder):
            if "cgroup.procs" in files:
                processes.update(open(f"{root}/cgroup.procs").read().split())
    total = count = 0
    for process in processes:
        try:
            command = open(f"/proc/{process}/cmdline").read().split("\0")
            lines = open(f"/proc/{process}/smaps_rollup").read().splitlines()
        except OSError:
            continue
        if command[: len(COMMAND)] != COMMAND and command[:2] != ["sleep", "infinity"]:
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            count += 1
    return total / 1024, count


def one_by_one(api, pods, image, nodes, rounds):
    took = {node: [] for node in nodes}
    for number in range(rounds + 1):
        for node in nodes:
            name = f"one-{number}-{node}"
            labels = {"round": "last" if number == rounds else "other"}
            body = {"metadata": {"name": name, "labels": labels}, "spec": spec(image, node)}
            began = time.monotonic()
            api.call("POST", "/api/v1/namespaces/default/pods", body)
            pods.wait(lambda: name in pods.running)
            # The first pod finds cold caches.
            if number:
                took[node].append((pods.running[name] - began) * 1000)
            if number < rounds:
                api.call("DELETE", f"/api/v1/namespaces/default/pods/{name}")
                pods.wait(lambda: name not in pods.there)
    return took


def deployment(api, pods, image, node, replicas):
    name = f"all-{node}"
    body = {
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": spec(image, node)},
        },
    }
    path = "/apis/apps/v1/namespaces/default/deployments"
    used, began = cpu(node), time.monotonic()
    api.call("POST", path, body)
    mine = lambda: [when for pod, when in list(pods.running.items()) if pod.startswith(f"{name}-")]
    pods.wait(lambda: len(mine()) >= replicas)
    took = max(mine()) - began
    time.sleep(SETTLE)
    used = cpu(node) - used
    rest = cpu(node)
    time.sleep(REST)
    rest = (cpu(node) - rest) / REST
    held, processes = memory(node)
    api.call("DELETE", f"{path}/{name}?propagationPolicy=Background")
    pods.wait(lambda: not any(pod.startswith(f"{name}-") for pod in pods.there))
    return [took, used * 1000 / replicas, rest * 1000, held, processes]


def main():
    url, image, rounds, replicas = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    nodes = sys.argv[5:]
    api = Api(url)
    pods = Pods(api)
    took = one_by_one(api, pods, image, nodes, rounds)
    all_of = {node: deployment(api, pods, image, node, replicas) for node in nodes}
    print("| node | create to Running, median ms | p99 ms | %d pods Running, s | CPU ms a pod | at rest, CPU ms/s | memory MiB | processes |" % replicas)
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for node in nodes:
        ordered = sorted(took[node])
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        figures = [statistics.median(ordered), p99] + all_of[node]
        print(f"| {node} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |")


main()
