#!/bin/sh
# install-django.sh LOCK DIR: make DIR a virtual environment with what LOCK says, of a Python that is 3.12 or later.
# Strategy: .venv may be of 3.11, which Django 6 does not run on. Where no later Python is found, DIR stays empty, and
# the test of Django's tasks is skipped with that reason.
set -eu

lock=$1
directory=$2
cd "$(dirname "$0")/.."

rm -rf "$directory"
mkdir -p "$directory"
for python in .venv/bin/python python3 python3.12 python3.13 python3.14 \
    "${PYENV_ROOT:-${HOME:-/root}/.pyenv}"/versions/3.1[2-9]*/bin/python; do
    "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || continue
    echo "veilmq: making $directory of $lock" >&2
    "$python" -m venv "$directory"
    exec env PYTHONPATH= PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore "$directory/bin/python" -m pip \
        --quiet install --require-hashes --only-binary :all: --requirement "$lock"
done
echo "veilmq: no Python 3.12 or later found: the test of Django's tasks is skipped" >&2
