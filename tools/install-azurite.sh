#!/bin/sh
# install-azurite.sh DIR: put azurite into DIR/node_modules.
# Strategy: as install-clients.sh: tests/clients/azurite pins everything with hashes, DIR gets copies, no install script runs.
set -eu

directory=$1
cd "$(dirname "$0")/.."

tools/need.sh npm npm
mkdir -p "$directory"
cp tests/clients/azurite/package.json tests/clients/azurite/package-lock.json "$directory"
echo "veilmq: installing what tests/clients/azurite/package-lock.json names" >&2
npm ci --loglevel=error --no-audit --no-fund --ignore-scripts --prefix "$directory"
