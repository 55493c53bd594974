#!/usr/bin/env python3
"""Measures two service proxies that follow one API server: see bench-network.sh, which runs it.

For every change (an endpoint of a service is replaced by another) the delay is the time from the API server's answer to the
kernel's notification that nftables rules have changed on the proxy's machine. CPU is that of the machine's cgroup, less what
it takes without changes, so programs that a proxy starts (`nft`) are counted.
"""
import concurrent.futures
import http.client
import json
import os
import re
import signal
import ssl
import statistics
import subprocess
import sys
import threading
import time

FOLDER = os.environ["FOLDER"]
ENDPOINTS = 5
CHANGES = int(os.environ.get("CHANGES", "20"))
# kube-proxy brings changes together that come within a second.
PAUSE = float(os.environ.get("PAUSE", "2.5"))
# Times of the kernel's notifications about nftables, one a line.
LISTENER = """
import socket, sys, time
s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
s.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)
s.bind((0, 0))
s.setsockopt(270, 1, 7)
print("ready", flush=True)
while True:
    try:
        s.recv(1 << 16)
    except OSError:
        pass
    print(time.monotonic(), flush=True)
"""


class Api:
    def __init__(self):
        text = open(f"{FOLDER}/kubeconfig").read()
        self.host, self.port = re.search(r"server: https://([^:]+):(\d+)", text).groups()
        pki = f"{FOLDER}/bench-api/lib/skiff/pki"
        self.context = ssl.create_default_context(cafile=f"{pki}/ca.crt")
        self.context.load_cert_chain(f"{pki}/admin.crt", f"{pki}/admin.key")
        self.local = threading.local()

    def request(self, method, path, body=None, kind="application/json"):
        if not hasattr(self.local, "connection"):
            self.local.connection = http.client.HTTPSConnection(self.host, int(self.port), context=self.context)
        connection = self.local.connection
        connection.request(method, path, json.dumps(body) if body else None, {"content-type": kind})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {text[:300]}")
        return json.loads(text)


def endpoints(number, version):
    def pod(index):
        place = number * 16 + index * 2 + (version if index == 0 else 0)
        return f"10.244.{place >> 8 & 255}.{place & 255}" if place < 65536 else f"10.245.{place >> 8 & 255}.{place & 255}"

    return [{"addresses": [pod(i)], "conditions": {"ready": True}, "nodeName": f"node-{i % 3}"} for i in range(ENDPOINTS)]


def create(api, number):
    name = f"service-{number}"
    api.request("POST", "/api/v1/namespaces/default/services", {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
        "spec": {"ports": [{"name": "http", "port": 80, "targetPort": 8080}]}})
    api.request("POST", "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": name}}, "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}], "endpoints": endpoints(number, 0)})


class Machine:
    """A machine with its proxy, and what its kernel tells of."""

    def __init__(self, name, command):
        self.name, self.command, self.times = name, command, []
        self.pid = open(f"{FOLDER}/{name}.pid").read().strip()

    def listen(self):
        command = ["nsenter", "-t", self.pid, "--net", sys.executable, "-u", "-c", LISTENER]
        self.listener = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.listener.stdout.readline() == "ready\n"
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.listener.stdout:
            self.times.append(float(line))

    def start(self):
        enter = ["nsenter", "-t", self.pid, "--net", "--mount", "--uts", "--cgroup"]
        join = "for d in $0; do echo $$ >$d/cgroup.procs; done; exec \"$@\""
        log = open(f"{FOLDER}/{self.name}.log", "w")
        # Into the machine's cgroups first, by the paths of this machine.
        script = ["sh", "-c", join, " ".join(self.cgroups())]
        self.proxy = subprocess.Popen(script + enter + self.command, stdout=log, stderr=log)

    def cgroups(self):
        found = [f"/sys/fs/cgroup/{d}/machine-{self.name}" for d in os.listdir("/sys/fs/cgroup")]
        return [p for p in found + [f"/sys/fs/cgroup/machine-{self.name}"] if os.path.exists(f"{p}/cgroup.procs")]

    def cpu(self):
        """Seconds."""
        for path in self.cgroups():
            if os.path.exists(f"{path}/cpuacct.usage"):
                return int(open(f"{path}/cpuacct.usage").read()) / 1e9
            if os.path.exists(f"{path}/cpu.stat"):
                return int(re.search(r"usage_usec (\d+)", open(f"{path}/cpu.stat").read()).group(1)) / 1e6
        raise RuntimeError("no cgroup counts CPU time")

    def quiet(self, since, seconds):
        """Whether it has loaded something and changed nothing for so long."""
        if self.proxy.poll() is not None:
            raise RuntimeError(f"the proxy ended; see\n{open(f'{FOLDER}/{self.name}.log').read()[-2000:]}")
        return bool(self.times) and self.times[-1] > since and time.monotonic() - self.times[-1] > seconds

    def stop(self):
        for process in (self.proxy, self.listener):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait(what, condition, seconds=600):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not within {seconds} s")
        time.sleep(0.05)


def say(text):
    print(text, file=sys.stderr, flush=True)


def measure(count):
    api = Api()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: create(api, number), range(count)))
    say(f"{count} services are there")
    upstream = [os.environ["KUBE_PROXY"], "--proxy-mode=nftables", f"--kubeconfig={FOLDER}/kubeconfig",
                "--cluster-cidr=10.244.0.0/15", "--conntrack-max-per-core=0", "--hostname-override=node-0"]
    machines = [Machine("bench-skiff", [os.environ["BENCH"], "follow", f"{FOLDER}/kubeconfig"]), Machine("bench-upstream", upstream)]
    try:
        for machine in machines:
            machine.listen()
            machine.load_from = time.monotonic(), machine.cpu()
            machine.start()
            wait(f"{machine.name} loads", lambda: machine.quiet(machine.load_from[0], 4))
            say(f"{machine.name} has loaded them")
            machine.load = (machine.times[-1] - machine.load_from[0], machine.cpu() - machine.load_from[1])
        span = CHANGES * PAUSE
        before = [machine.cpu() for machine in machines]
        time.sleep(span)
        idle = [machine.cpu() - b for machine, b in zip(machines, before)]
        before = [machine.cpu() for machine in machines]
        started = time.monotonic()
        delays = [[] for _ in machines]
        for change in range(CHANGES):
            number = change * 37 % count
            path = f"/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/service-{number}"
            begun = time.monotonic()
            api.request("PATCH", path, {"endpoints": endpoints(number, 1)}, "application/merge-patch+json")
            answered = time.monotonic()
            for machine, found in zip(machines, delays):
                # A proxy may be faster than the answer.
                first = lambda: next((t for t in reversed(machine.times) if t >= begun), None)
                wait(f"{machine.name} follows", lambda: first() is not None, 60)
                first = min(t for t in machine.times if t >= begun)
                found.append(max(first - answered, 0.0))
            time.sleep(max(0.0, started + (change + 1) * PAUSE - time.monotonic()))
        for machine, b, i, found in zip(machines, before, idle, delays):
            # Below what the machine does at rest, this is noise, and may be negative.
            cpu = (machine.cpu() - b - i) / CHANGES
            found.sort()
            print(f"{count:>8} {machine.name:<14} {machine.load[0] * 1000:>9.0f} ms {machine.load[1] * 1000:>9.0f} ms "
                  f"{statistics.median(found) * 1000:>9.2f} ms {found[-1] * 1000:>9.2f} ms {cpu * 1000:>9.2f} ms "
                  f"{i / span * 1000:>9.2f} ms/s", flush=True)
    finally:
        for machine in machines:
            if hasattr(machine, "proxy"):
                machine.stop()


print(f"{'services':>8} {'proxy':<14} {'load':>12} {'load CPU':>12} {'delay p50':>12} {'delay max':>12} {'change CPU':>12} {'idle CPU':>14}")
measure(int(sys.argv[1]))
