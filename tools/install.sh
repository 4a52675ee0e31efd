#!/bin/sh
# install.sh LOCK: bring .venv to what LOCK says and install this checkout into it, editable.
# Strategy: every package is checked against its hash in LOCK; the checkout itself is then built by the locked hatchling,
# without build isolation, so that nothing unlocked is ever fetched. Which index serves the packages is pip's own
# configuration. Where there is a C compiler, the accelerator is built in place (docs/decisions/0034-accelerator.md).
set -eu

lock=$1
cd "$(dirname "$0")/.."

find_python() {
    for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13 python3.14}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "veilmq: no Python 3.11 or later found${PYTHON:+ as $PYTHON}. On Debian: apt-get install python3" >&2
    exit 1
}

# A virtual environment that was moved, or whose Python went away, does not start: make it anew.
if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    python=$(find_python)
    PYTHON=$python tools/need.sh python-venv python3-venv
    rm -rf .venv
    echo "veilmq: making .venv" >&2
    "$python" -m venv .venv
fi

pip="env PYTHONPATH= PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore .venv/bin/python -m pip --quiet"
echo "veilmq: installing what $lock names" >&2
$pip install --require-hashes --only-binary :all: --requirement requirements/build.txt
# Some packages come as source alone: these are built here, by the locked build tools, without isolation. For a lock without
# them the options are left out, because the pip of Debian 12 warns about it; that of Debian 13 warns without --use-pep517.
sources=$(sed -nE 's/^(pyspark|aliyun-mns-sdk)==.*/--use-pep517 --no-binary \1/p' "$lock")
$pip install --require-hashes --only-binary :all: $sources --no-build-isolation --requirement "$lock"
$pip install --no-deps --no-build-isolation --editable .
.venv/bin/python tools/accelerator.py
