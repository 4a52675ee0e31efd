#!/bin/sh
# install-npm.sh FROM DIR: put what FROM/package.json names into DIR/node_modules.
# Strategy: package-lock.json beside it pins everything with hashes; DIR gets copies of both, so that nothing is ever
# installed into the checkout's own folders. No install script runs. Which registry serves the packages is npm's own
# configuration.
set -eu

from=$1
directory=$2
cd "$(dirname "$0")/.."

tools/need.sh npm npm
mkdir -p "$directory"
cp "$from/package.json" "$from/package-lock.json" "$directory"
echo "veilmq: installing what $from/package-lock.json names" >&2
npm ci --loglevel=error --no-audit --no-fund --ignore-scripts --prefix "$directory"
