#!/bin/sh
# install-venv.sh LOCK DIR: make DIR a virtual environment with what LOCK says, and nothing else.
# Strategy: for clients of the tests whose versions cannot live beside those of .venv. It is made anew each time: a lock
# that changes is rare, and nothing of an older one is left behind. Every package is checked against its hash in LOCK.
set -eu

lock=$1
directory=$2
cd "$(dirname "$0")/.."

echo "veilmq: making $directory of $lock" >&2
rm -rf "$directory"
.venv/bin/python -m venv "$directory"
env PYTHONPATH= PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore "$directory/bin/python" -m pip --quiet \
    install --require-hashes --only-binary :all: --requirement "$lock"
