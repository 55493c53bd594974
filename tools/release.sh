#!/bin/sh
# release.sh BINARY DIR: puts into DIR what users install without compiling: the static binary, a Debian package with
# its systemd unit, and checksums of both.
set -eu
binary=${1:?usage: release.sh BINARY DIR}
out=${2:?usage: release.sh BINARY DIR}
root=$(cd "$(dirname "$0")/.." && pwd)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -1)

# A binary that needs libraries of this machine would not run on others.
if ldd "$binary" >/dev/null 2>&1; then
    echo "$binary is not static" >&2
    exit 1
fi
rm -rf "$out"
mkdir -p "$out"
install -m 0755 "$binary" "$out/skiff-$version-linux-amd64"

tree=$(mktemp -d)
chmod 0755 "$tree"
trap 'rm -rf "$tree"' EXIT
install -D -m 0755 "$binary" "$tree/usr/bin/skiff"
install -D -m 0644 "$root/packaging/skiff.service" "$tree/lib/systemd/system/skiff.service"
for shell in bash zsh fish; do
    case $shell in
    bash) file=usr/share/bash-completion/completions/skiff ;;
    zsh) file=usr/share/zsh/vendor-completions/_skiff ;;
    fish) file=usr/share/fish/vendor_completions.d/skiff.fish ;;
    esac
    mkdir -p "$tree/$(dirname "$file")"
    "$binary" completion "$shell" >"$tree/$file"
done
mkdir -p "$tree/usr/share/doc/skiff" "$tree/DEBIAN"
install -m 0644 "$root/LICENSE" "$tree/usr/share/doc/skiff/copyright"
install -m 0644 "$root/README.md" "$root/docs/operations.md" "$tree/usr/share/doc/skiff/"
cat >"$tree/DEBIAN/control" <<TXT
Package: skiff
Version: $version
Architecture: amd64
Maintainer: the skiff maintainers
Section: admin
Priority: optional
Recommends: kubernetes-client
Description: Kubernetes in one binary
 API server, store, controllers, scheduler, node, container runtime, pod network, service proxy and DNS in one
 process. The service is installed, but not enabled: start a cluster with "skiff up" or "systemctl enable --now skiff".
TXT
cat >"$tree/DEBIAN/postinst" <<'TXT'
#!/bin/sh
set -e
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    # An upgrade: pods go on running while the server is replaced.
    if [ "$1" = configure ] && [ -n "$2" ]; then systemctl try-restart skiff.service; fi
fi
TXT
cat >"$tree/DEBIAN/prerm" <<'TXT'
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then systemctl disable --now skiff.service || true; fi
TXT
chmod 0755 "$tree/DEBIAN/postinst" "$tree/DEBIAN/prerm"
dpkg-deb --root-owner-group --build "$tree" "$out/skiff_${version}_amd64.deb" >/dev/null
(cd "$out" && sha256sum -- * >SHA256SUMS)
ls -l "$out"
