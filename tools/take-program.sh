#!/bin/sh
# take-program.sh PROGRAM PACKAGE DIRECTORY: a program out of Debian's package, which is not installed: that would start a
# server (prometheus on all addresses, for promtool). The machine's own is taken if it has one.
set -eu

program=$1 package=$2 directory=$3
mkdir -p "$directory"
if found=$(command -v "$program"); then
    ln -sf "$found" "$directory/$program"
    exit 0
fi
command -v apt-get >/dev/null 2>&1 || {
    echo "veilmq: $program is missing, and this machine has no apt-get: put $program on the PATH" >&2
    exit 1
}
directory=$(cd "$directory" && pwd)
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
cd "$unpacked"
if ! { apt-get -qq download "$package" || { apt-get -qq update && apt-get -qq download "$package"; }; } >log 2>&1; then
    cat log >&2
    echo "veilmq: $program is missing, and apt-get could not download $package: put $program on the PATH" >&2
    exit 1
fi
dpkg-deb -x "$package"_*.deb .
cp "usr/bin/$program" "$directory/$program"
