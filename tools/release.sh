#!/bin/sh
# release.sh: what a release consists of, in dist/: wheel, source distribution, the lock, a bill of materials (CycloneDX) of what
# the lock installs, with licences, and checksums. It uploads nothing and tags nothing.
# Strategy: hatchling gives every file in an archive one instant (SOURCE_DATE_EPOCH, or its own), and the list holds no
# instant, so the same checkout makes the same bytes again.
set -eu

cd "$(dirname "$0")/.."
rm -rf dist
VEILMQ_ACCELERATOR=off .venv/bin/python -m hatchling build --target wheel --target sdist
version=$(.venv/bin/python -c 'import veilmq; print(veilmq.__version__)')
cp requirements/run.txt "dist/veilmq-$version-run.txt"

installed=.tools/release/installed
tools/install-venv.sh requirements/run.txt "$installed"
env PYTHONPATH= PIP_DISABLE_PIP_VERSION_CHECK=1 "$installed/bin/python" -m pip --quiet install --no-deps dist/veilmq-*.whl
env PYTHONPATH= "$installed/bin/python" -m pip --quiet uninstall --yes pip setuptools
.tools/release/cyclonedx/bin/cyclonedx-py environment "$installed/bin/python" --pyproject pyproject.toml --output-reproducible \
    --output-file "dist/veilmq-$version.cdx.json"
.venv/bin/python tools/bill.py "dist/veilmq-$version.cdx.json" "$version"
(cd dist && sha256sum veilmq-* > SHA256SUMS)
cat dist/SHA256SUMS
