#!/bin/sh
# The ingress proxy beside nginx as a reverse proxy (Debian's nginx-light, configured as ingress-nginx does), and beside
# traefik if TRAEFIK names its binary: same backends, in turns, on machines of their own (namespaces). Prints for HTTP/1.1,
# HTTP/1.1 over TLS and HTTP/2 over TLS, with 1 KB and 100 KB, requests a second of the proxy's CPU, requests a second, the
# 99th percentile, and the proxy's memory. SECONDS_EACH is how long each measurement takes, ROUNDS how often it is repeated.
set -eu
skiff=$(realpath "${1:?usage: bench-ingress.sh SKIFF-BINARY}")
cd "$(dirname "$0")/.."
. tools/machines.sh
seconds=${SECONDS_EACH:-5}
rounds=${ROUNDS:-3}
traefik=${TRAEFIK:-}
clients=${CLIENTS:-32}
work=$(mktemp -d)
clean_up() {
    machine front "$skiff" down --delete >/dev/null 2>&1 || true
    machines_end
    rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

machines_start "$work/machines" front back
front=$(machine_address front)
back=$(machine_address back)
host=web.example

# The backends: two servers of files.
mkdir -p "$work/files" "$work/tmp"
chmod 755 "$work"
head -c 1024 /dev/zero | tr '\0' x >"$work/files/1k"
head -c 102400 /dev/zero | tr '\0' x >"$work/files/100k"
cat >"$work/back.conf" <<END
worker_processes 1;
pid $work/back.pid;
error_log $work/back.log;
events { worker_connections 8192; }
http {
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_requests 1000000;
    open_file_cache max=16;
    root $work/files;
    client_body_temp_path $work/tmp/a; proxy_temp_path $work/tmp/b; fastcgi_temp_path $work/tmp/c;
    uwsgi_temp_path $work/tmp/d; scgi_temp_path $work/tmp/e;
    server { listen $back:8001; listen $back:8002; }
}
END
machine back nginx -c "$work/back.conf"

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj "/CN=$host" \
    -addext "subjectAltName=DNS:$host" -keyout "$work/tls.key" -out "$work/tls.crt" 2>/dev/null

# nginx, as ingress-nginx configures it: connections to backends are kept, nothing is buffered on disk.
cat >"$work/nginx.conf" <<END
worker_processes 2;
pid $work/nginx.pid;
error_log $work/nginx.log;
worker_rlimit_nofile 65535;
events { multi_accept on; worker_connections 16384; use epoll; }
http {
    access_log off;
    aio threads;
    tcp_nopush on;
    tcp_nodelay on;
    keepalive_timeout 75s;
    keepalive_requests 1000000;
    server_tokens off;
    client_body_temp_path $work/tmp/f; proxy_temp_path $work/tmp/g; fastcgi_temp_path $work/tmp/h;
    uwsgi_temp_path $work/tmp/i; scgi_temp_path $work/tmp/j;
    upstream web {
        server $back:8001;
        server $back:8002;
        keepalive 320;
        keepalive_timeout 60s;
        keepalive_requests 1000000;
    }
    ssl_protocols TLSv1.2 TLSv1.3;
    ssl_session_cache shared:SSL:10m;
    ssl_session_tickets off;
    ssl_buffer_size 4k;
    ssl_certificate $work/tls.crt;
    ssl_certificate_key $work/tls.key;
    server {
        server_name $host;
        listen 8080 backlog=4096;
        listen 8443 ssl http2 backlog=4096;
        location / {
            proxy_set_header Host \$http_host;
            proxy_set_header X-Request-ID \$request_id;
            proxy_set_header X-Real-IP \$remote_addr;
            proxy_set_header X-Forwarded-For \$remote_addr;
            proxy_set_header X-Forwarded-Host \$http_host;
            proxy_set_header X-Forwarded-Port \$server_port;
            proxy_set_header X-Forwarded-Proto \$scheme;
            proxy_set_header X-Forwarded-Scheme \$scheme;
            proxy_set_header X-Scheme \$scheme;
            proxy_set_header X-Original-Forwarded-For \$http_x_forwarded_for;
            proxy_set_header Proxy "";
            proxy_connect_timeout 5s;
            proxy_send_timeout 60s;
            proxy_read_timeout 60s;
            proxy_buffering off;
            proxy_buffer_size 4k;
            proxy_buffers 4 4k;
            proxy_request_buffering on;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_next_upstream error timeout;
            proxy_next_upstream_tries 3;
            proxy_pass http://web;
            proxy_redirect off;
        }
    }
}
END
machine front nginx -c "$work/nginx.conf"
nginx_pids=$(cat "$work/nginx.pid")
nginx_pids="$nginx_pids $(cat "/proc/$nginx_pids/task/$nginx_pids/children")"

# skiff: the API server and the proxy alone. A Service without a selector names the backends.
machine front "$skiff" up --no-kubeconfig-merge --components api,ingress >"$work/up.log" || { cat "$work/up.log" >&2; exit 1; }
kubectl() { machine front kubectl --kubeconfig /var/lib/skiff/skiff/admin.kubeconfig "$@"; }
kubectl create secret tls tls --cert "$work/tls.crt" --key "$work/tls.key" >/dev/null
kubectl apply -f - >/dev/null <<END
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {ports: [{name: a, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: a, port: 8001}]
endpoints: [{addresses: ["$back"], conditions: {ready: true}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-2, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: a, port: 8002}]
endpoints: [{addresses: ["$back"], conditions: {ready: true}}]
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: web, annotations: {ingress.skiff.io/ssl-redirect: "false"}}
spec:
  tls: [{hosts: [$host], secretName: tls}]
  rules: [{host: $host, http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: web, port: {name: a}}}}]}}]
END
skiff_pid=$(machine front cat /var/lib/skiff/skiff/skiff.pid)

traefik_pid=""
if [ -n "$traefik" ]; then
    cat >"$work/traefik.yml" <<END
entryPoints: {web: {address: ":9080"}, websecure: {address: ":9443"}}
providers: {file: {filename: $work/routes.yml}}
log: {level: ERROR}
END
    cat >"$work/routes.yml" <<END
http:
  routers:
    plain: {rule: "Host(\`$host\`)", service: web, entryPoints: [web]}
    secure: {rule: "Host(\`$host\`)", service: web, entryPoints: [websecure], tls: {}}
  services:
    web: {loadBalancer: {servers: [{url: "http://$back:8001"}, {url: "http://$back:8002"}]}}
tls:
  certificates: [{certFile: $work/tls.crt, keyFile: $work/tls.key}]
END
    machine front "$traefik" --configfile="$work/traefik.yml" >"$work/traefik.log" 2>&1 &
    until traefik_pid=$(pgrep -f "configfile=$work/traefik.yml" | tail -1) && [ -n "$traefik_pid" ]; do sleep 0.1; done
fi

# Sums over processes.
cpu() { for pid; do sed 's/.*) //' "/proc/$pid/stat"; done | awk '{sum += $12 + $13} END {print sum}'; }
memory() { for pid; do grep '^Pss:' "/proc/$pid/smaps_rollup"; done | awk '{sum += $2} END {print int(sum / 1024)}'; }

# ports PROXY: the ports of a proxy, without TLS and with.
ports() {
    case $1 in
    skiff) echo 80 443 ;;
    nginx) echo 8080 8443 ;;
    traefik) echo 9080 9443 ;;
    esac
}
pids() {
    case $1 in
    skiff) echo "$skiff_pid" ;;
    nginx) echo "$nginx_pids" ;;
    traefik) echo "$traefik_pid" ;;
    esac
}

# measure PROXY SHAPE SIZE: a line with the figures.
measure() {
    # shellcheck disable=SC2046
    set -- "$1" "$2" "$3" $(ports "$1")
    rm -f "$work/latencies"
    log="--log-file=$work/latencies"
    case $2 in
    h1) set -- "$1" "$2" "$3" --h1 "http://$host:$4/$3" ;;
    h1-tls) set -- "$1" "$2" "$3" --h1 "https://$host:$5/$3" ;;
    h2-tls) set -- "$1" "$2" "$3" -m4 "https://$host:$5/$3" ;;
    esac
    proxy=$1 shape=$2 size=$3
    shift 3
    url=$2
    port=${url##*:}
    # What is called warm-up is not counted by h2load, and its CPU not by us.
    # shellcheck disable=SC2086
    machine front h2load -c "$clients" -t1 -D 1 "$@" --connect-to="127.0.0.1:${port%%/*}" >/dev/null
    # shellcheck disable=SC2046
    before=$(cpu $(pids "$proxy"))
    machine front h2load -c "$clients" -t1 -D "$seconds" "$log" "$@" --connect-to="127.0.0.1:${port%%/*}" >"$work/h2load.out"
    # shellcheck disable=SC2046
    used=$(($(cpu $(pids "$proxy")) - before))
    good=$(sed -n 's/^status codes: \([0-9]*\) 2xx.*/\1/p' "$work/h2load.out")
    bad=$(sed -n 's/^status codes: .* 2xx, \([0-9]*\) 3xx, \([0-9]*\) 4xx, \([0-9]*\) 5xx/\1 \2 \3/p' "$work/h2load.out" | awk '{print $1 + $2 + $3}')
    p99=$(cut -f3 "$work/latencies" | sort -n | awk '{v[NR] = $1} END {print v[int(NR * 0.99) + 1] / 1000}')
    p50=$(cut -f3 "$work/latencies" | sort -n | awk '{v[NR] = $1} END {print v[int(NR * 0.5) + 1] / 1000}')
    # shellcheck disable=SC2046
    echo "$shape $size $proxy $(awk -v n="$good" -v c="$used" -v s="$seconds" 'BEGIN {printf "%.0f %.0f", n * 100 / c, n / s}') $p50 $p99 $(memory $(pids "$proxy")) ${bad:-0}"
}

for proxy in skiff nginx ${traefik_pid:+traefik}; do
    # shellcheck disable=SC2046
    set -- $(ports "$proxy")
    tries=0
    for url in "http://$host:$1/1k" "https://$host:$2/1k"; do
        until machine front curl -skf --connect-to "$host::127.0.0.1:" "$url" >/dev/null; do
            tries=$((tries + 1))
            [ "$tries" -lt 100 ] || { echo "$proxy does not answer at $url" >&2; exit 1; }
            sleep 0.1
        done
    done
done

echo "shape size proxy requests/CPU-second requests/s p50-ms p99-ms memory-MiB failed"
for round in $(seq "$rounds"); do
    for shape in ${SHAPES:-h1 h1-tls h2-tls}; do
        for size in 1k 100k; do
            for proxy in skiff nginx ${traefik_pid:+traefik}; do
                measure "$proxy" "$shape" "$size"
            done
        done
    done
done | tee "$work/figures"

echo
echo "medians of $rounds, and skiff against nginx:"
python3 - "$work/figures" <<'END'
import statistics, sys
figures = {}
for line in open(sys.argv[1]):
    shape, size, proxy, *rest = line.split()
    figures.setdefault((shape, size), {}).setdefault(proxy, []).append([float(x) for x in rest])
print("| shape | " + " | ".join(["proxy", "requests a CPU second", "requests a second", "median", "p99", "memory"]) + " |")
print("|---|---|---:|---:|---:|---:|---:|")
for (shape, size), proxies in figures.items():
    for proxy, runs in proxies.items():
        per_cpu, rate, p50, p99, memory, failed = (statistics.median(column) for column in zip(*runs))
        note = f", {failed:.0f} failed" if failed else ""
        print(f"| {shape} {size} | {proxy} | {per_cpu:,.0f} | {rate:,.0f} | {p50:.2f} ms | {p99:.2f} ms | {memory:.0f} MiB{note} |")
    middle = lambda proxy, column: statistics.median(run[column] for run in proxies[proxy])
    print(f"| | ratio | {middle('skiff', 0) / middle('nginx', 0):.2f} | {middle('skiff', 1) / middle('nginx', 1):.2f} | | {middle('skiff', 3) / middle('nginx', 3):.2f} | |")
END
