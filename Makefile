# Two commands do everything on a fresh Debian machine with Rust: `make up` and `make test`.

CARGO   ?= cargo
TRIPLE  := x86_64-unknown-linux-gnu
RELEASE := target/$(TRIPLE)/release/skiff

# What a build needs beside Rust: a C compiler for SQLite and the TLS library.
BUILD_PACKAGES := gcc g++ make cmake libc6-dev
# What the tests need: the real parts they claim to work with.
TEST_PACKAGES  := etcd-server containerd runc containernetworking-plugins docker-registry \
                  skopeo busybox-static criu curl dbus-daemon e2fsprogs iproute2 nftables util-linux procps strace openssl

# What the stand-ins for the conformance suite's images are made of.
IMAGE_PACKAGES := busybox-static bash nginx-light perl-base bind9-dnsutils bind9-host curl netcat-openbsd iproute2 \
                  iperf util-linux procps etcd-server wget conntrack iptables

.PHONY: up down build build-deps test test-deps lint unit e2e conformance gateway-conformance churn faults restarts clients mix bench bench-network bench-scheduler bench-sim bench-sim-servers critest cgroup2 bench-dns bench-ingress bench-node fuzz release install clean

## up: build the release binary and start a cluster with everything embedded
up: build
	$(RELEASE) up

## down: stop that cluster and remove all of it
down:
	$(RELEASE) down --delete

build: build-deps
	$(CARGO) build --release --package skiff

build-deps:
	@sh tools/packages.sh $(BUILD_PACKAGES)

## test: install what the tests need and run them all
test: test-deps lint unit e2e

test-deps: build-deps
	@sh tools/packages.sh $(TEST_PACKAGES)
	@command -v kubectl >/dev/null || sh tools/packages.sh kubernetes-client

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) xtask tidy
	@if command -v cargo-deny >/dev/null; then $(CARGO) deny check licenses bans sources; \
	 else echo "cargo-deny is not installed: licences, bans and sources are not checked"; fi

unit:
	sh tools/cargo-test.sh --workspace --exclude skiff
	sh tools/cargo-test.sh --package skiff --bins

# The example once more with the oldest client that is promised to work, Debian's kubectl 1.20.
e2e:
	sh tools/cargo-test.sh --package skiff --test '*' -- --test-threads=3
	SKIFF_TEST_KUBECTL=$$(sh tools/debian-kubectl.sh) sh tools/cargo-test.sh --package skiff --test example

## conformance: the official end-to-end suite on NODES=1 machines (namespaces); takes FOCUS=regex, SKIP=regex and PARALLEL=n, and needs Go
conformance: build
	@sh tools/packages.sh $(IMAGE_PACKAGES)
	sh tests/conformance/run.sh $(RELEASE)

## gateway-conformance: Gateway API's conformance suite, or one TEST=name of it (needs Go)
gateway-conformance: build
	sh tests/gateway/run.sh $(RELEASE)

## bench-dns: cluster DNS with SERVICES=5000 for SECONDS=10, and the real CoreDNS beside it (needs Go; COREDNS=no leaves it out)
bench-dns:
	SERVICES=$(or $(SERVICES),5000) SECONDS=$(or $(SECONDS),10) COREDNS=$(COREDNS) sh tools/bench-dns.sh

## bench-ingress: the ingress proxy beside nginx, ROUNDS=3 times, each measurement for SECONDS=5; TRAEFIK=path adds that binary
bench-ingress: build test-deps
	@sh tools/packages.sh nginx-light nghttp2-client python3
	SECONDS_EACH=$(or $(SECONDS),5) ROUNDS=$(or $(ROUNDS),3) TRAEFIK=$(TRAEFIK) sh tools/bench-ingress.sh $(RELEASE)

## bench-node: pods of a joined node beside upstream's kubelet with containerd: time, CPU, memory; takes ROUNDS=30 and PODS=100 (needs Go)
bench-node: build test-deps
	@sh tools/packages.sh python3
	ROUNDS=$(ROUNDS) PODS=$(PODS) sh tests/mix/run.sh $(RELEASE) node

## bench-network: the service proxy with SERVICES="1000 5000 10000": time to load, cost of a change; then beside kube-proxy
bench-network: build
	$(CARGO) run --release --package skiff-network --features bench --bin bench-network -- $(SERVICES)
	sh tools/bench-network.sh $(RELEASE) target/$(TRIPLE)/release/bench-network $(SERVICES)

## bench-scheduler: pods a second over the shapes of upstream's scheduler_perf, no API server
bench-scheduler:
	$(CARGO) run --release --package skiff-scheduler --features bench --bin bench-scheduler -- $(NODES)

## bench-sim: simulated NODES=1000 and PODS=30000: pods a second, memory, CPU at rest (over REST=60 seconds)
bench-sim: build
	NODES=$(or $(NODES),1000) PODS=$(or $(PODS),30000) REST=$(or $(REST),60) sh tools/bench-sim.sh $(RELEASE)

## bench-sim-servers: the same against three servers over an etcd of three members, with a server killed under the load
bench-sim-servers: build test-deps
	NODES=$(or $(NODES),1000) PODS=$(or $(PODS),10000) REST=$(or $(REST),30) sh tools/bench-sim-servers.sh $(RELEASE)

## bench: the figures of docs/performance.md
bench: build
	sh tools/bench.sh $(RELEASE)

## fuzz: every fuzz target for SECONDS=3600, or one with TARGET=name (see fuzz/README.md)
fuzz: build-deps
	sh fuzz/run.sh $(or $(SECONDS),3600) $(TARGET)

## churn: pods come and go while parts are killed, for MINUTES=5; SEED=n repeats the choices of a run
churn: test-deps
	SKIFF_CHURN_SECONDS=$$(( $(or $(MINUTES),5) * 60 )) SKIFF_CHURN_SEED=$(SEED) \
	$(CARGO) test --package skiff --test churn -- --nocapture

## faults: servers, members of etcd, networks and nodes fail while clients write and read, each for SECONDS=15, ROUNDS=1 times;
## FAULT=text chooses by name, SEED=n repeats the choices of a run
faults: test-deps
	SKIFF_FAULTS_SECONDS=$(or $(SECONDS),15) SKIFF_FAULTS_ROUNDS=$(or $(ROUNDS),1) SKIFF_FAULT="$(FAULT)" SKIFF_SEED=$(SEED) \
	$(CARGO) test --package skiff --test faults -- --nocapture --test-threads=1

## restarts: controller managers, then schedulers, are killed under load KILLS=100 times; SEED=n repeats the choices of a run
restarts:
	SKIFF_RESTARTS=$(or $(KILLS),100) SKIFF_SEED=$(or $(SEED),1) \
	$(CARGO) test --package skiff-controllers --test whole restarts -- --nocapture
	SKIFF_RESTARTS=$(or $(KILLS),100) SKIFF_SEED=$(or $(SEED),1) \
	$(CARGO) test --package skiff-scheduler --test whole restarts -- --nocapture

## clients: other people's client libraries against a fresh cluster (needs Go, Node.js and Python)
clients: build
	sh tests/clients/run.sh $(RELEASE) $(ONLY)

## critest: the validation suite of CRI and crictl against the embedded runtime; takes FOCUS=regex and SKIP=regex (needs Go)
critest: build test-deps
	@sh tools/packages.sh $(IMAGE_PACKAGES)
	sh tests/cri/run.sh $(RELEASE)

## cgroup2: the runtime's tests on the unified hierarchy, with the controllers that this machine has there
cgroup2: test-deps
	sh tools/cgroup2.sh $(CARGO) test --package skiff-runtime --test containers --test escape

## mix: skiff's parts and upstream's in one cluster, or one of ONLY="kubeadm agent proxy runtime flannel devices metrics csi" (needs Go)
mix: build test-deps
	sh tests/mix/run.sh $(RELEASE) $(ONLY)

## release: the static binary, a Debian package and checksums, in dist/
release: build
	@sh tools/packages.sh dpkg
	sh tools/release.sh $(RELEASE) dist

install: build
	install -m 0755 $(RELEASE) /usr/local/bin/skiff

clean:
	$(CARGO) clean
