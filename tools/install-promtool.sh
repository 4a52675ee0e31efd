#!/bin/sh
# install-promtool.sh DIRECTORY: promtool, which checks rules for Prometheus. It is taken out of Debian's package, which is not
# installed: that would start a server on all addresses.
set -eu

directory=$1
mkdir -p "$directory"
if found=$(command -v promtool); then
    ln -sf "$found" "$directory/promtool"
    exit 0
fi
command -v apt-get >/dev/null 2>&1 || {
    echo "veilmq: promtool is missing, and this machine has no apt-get: put Prometheus' promtool on the PATH" >&2
    exit 1
}
directory=$(cd "$directory" && pwd)
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
cd "$unpacked"
if ! { apt-get -qq download prometheus || { apt-get -qq update && apt-get -qq download prometheus; }; } >log 2>&1; then
    cat log >&2
    echo "veilmq: promtool is missing, and apt-get could not download prometheus: put promtool on the PATH" >&2
    exit 1
fi
dpkg-deb -x prometheus_*.deb .
cp usr/bin/promtool "$directory/promtool"
