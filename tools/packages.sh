#!/bin/sh
# Installs Debian packages by name, if they are not there yet.
set -eu
missing=""
for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
echo "installing$missing"
if [ "$(id -u)" != 0 ]; then
    echo "this needs root: run it with sudo, or install them yourself:$missing" >&2
    exit 1
fi
# Installed services must not start by themselves: the tests start their own.
if [ ! -e /usr/sbin/policy-rc.d ]; then
    printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086
apt-get install -y --no-install-recommends $missing >/dev/null 2>&1 || {
    apt-get update
    apt-get install -y --no-install-recommends $missing
}
