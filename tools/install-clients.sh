#!/bin/sh
# install-clients.sh DIR: put the JavaScript SDKs that the tests drive into DIR/node_modules, in these versions.
# Strategy: none of their install scripts is run. The packages are Alibaba's own SDK for MNS and the one of the community.
set -eu

directory=$1
cd "$(dirname "$0")/.."

tools/need.sh npm npm
mkdir -p "$directory"
echo '{"private": true}' > "$directory/package.json"
npm install --silent --no-audit --no-fund --ignore-scripts --save-exact --prefix "$directory" \
    @alicloud/mns@1.2.0 ali-mns@2.6.8
