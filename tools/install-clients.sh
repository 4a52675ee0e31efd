#!/bin/sh
# install-clients.sh DIR: put the JavaScript clients of the tests into DIR/node_modules.
# Strategy: install-npm.sh, and then the one install script that is needed: node-expat (of aliyun-mns) is compiled for the
# Node.js of .tools/node with that one's headers.
set -eu

directory=$1
cd "$(dirname "$0")/.."

tools/install-npm.sh tests/clients/js "$directory"
tools/need.sh g++ g++
directory=$(cd "$directory" && pwd)
node=$(readlink -f .tools/node/bin/node)
# Our own node-gyp: Debian's links what it compiles to Debian's Node.js, and ours crashes on that.
"$node" "$directory/node_modules/node-gyp/bin/node-gyp.js" rebuild --silent --nodedir="$(dirname "$(dirname "$node")")" \
    --directory "$directory/node_modules/node-expat" >/dev/null
