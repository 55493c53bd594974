#!/bin/sh
# Prints the path of the kubectl in Debian's kubernetes-client. Where another kubectl is installed, the package
# is unpacked below target/ instead of installed over it.
set -eu
if dpkg-query -S /usr/bin/kubectl 2>/dev/null | grep -q '^kubernetes-client:'; then
    echo /usr/bin/kubectl
    exit 0
fi
dir=$(pwd)/target/debian-kubectl
if [ ! -x "$dir/usr/bin/kubectl" ]; then
    mkdir -p "$dir"
    (cd "$dir" && { apt-get download kubernetes-client || { apt-get update && apt-get download kubernetes-client; }; }) >&2
    dpkg -x "$dir"/kubernetes-client_*.deb "$dir"
fi
echo "$dir/usr/bin/kubectl"
