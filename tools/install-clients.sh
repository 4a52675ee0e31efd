#!/bin/sh
# install-clients.sh DIR: put the JavaScript clients of the tests into DIR/node_modules.
# Strategy: tests/clients/js/package.json names them and package-lock.json pins everything with hashes; DIR gets copies of
# both, so that nothing is ever installed into the checkout's own folders. No install script runs but that of node-expat (of
# aliyun-mns), which is compiled for the Node.js of .tools/node with that one's headers. Which registry serves the packages is
# npm's own configuration.
set -eu

directory=$1
cd "$(dirname "$0")/.."

tools/need.sh npm npm
mkdir -p "$directory"
cp tests/clients/js/package.json tests/clients/js/package-lock.json "$directory"
echo "veilmq: installing what tests/clients/js/package-lock.json names" >&2
npm ci --loglevel=error --no-audit --no-fund --ignore-scripts --prefix "$directory"

tools/need.sh g++ g++
directory=$(cd "$directory" && pwd)
node=$(readlink -f .tools/node/bin/node)
# Our own node-gyp: Debian's links what it compiles to Debian's Node.js, and ours crashes on that.
"$node" "$directory/node_modules/node-gyp/bin/node-gyp.js" rebuild --silent --nodedir="$(dirname "$(dirname "$node")")" \
    --directory "$directory/node_modules/node-expat" >/dev/null
