#!/bin/sh
# install-service.sh WHEEL: install the server as a service of systemd, laid out as on Debian: the program in /opt/veilmq,
# settings and keys in /etc/veilmq, data in /var/lib/veilmq, the unit and its user from deploy/systemd. As root.
# A second run upgrades: it replaces the program and the unit, and leaves settings, keys and data. PYTHON: what the first
# run makes /opt/veilmq with, python3 if it is not set.
set -eu

wheel=$1
here=$(cd "$(dirname "$0")/.." && pwd)
files=$here/deploy/systemd

# What an earlier run left is used again only if it can run the server. All this is looked at before anything is written.
python=/opt/veilmq/bin/python
"$python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "veilmq: $python is not Python 3.11 or later. Nothing was installed; run it again with PYTHON=python3.11" >&2
    exit 1
fi
# A wheel with the accelerator is for one version of Python, that of .venv.
tag=$(basename "$wheel" | cut -d - -f 3)
case $tag in
    py3 | "$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')") ;;
    *)
        echo "veilmq: the wheel has the accelerator for Python 3.${tag#cp3}, which $python is not. Nothing was installed." >&2
        echo "veilmq: move /opt/veilmq away if it is there, then run it again with PYTHON=python3.${tag#cp3}" >&2
        exit 1
        ;;
esac
[ "$(id -u)" = 0 ] || { echo "veilmq: only root may write to /opt, /etc and /var/lib: run it with sudo" >&2; exit 1; }
if ! command -v systemd-sysusers >/dev/null; then
    echo "veilmq: this machine has no systemd (on Debian: apt-get install systemd). Nothing was installed." >&2
    exit 1
fi

if [ "$python" != /opt/veilmq/bin/python ]; then
    PYTHON=$python "$here/tools/need.sh" python-venv python3-venv
    rm -rf /opt/veilmq
    "$python" -m venv /opt/veilmq
fi
pip="env PYTHONPATH= PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore /opt/veilmq/bin/pip --quiet"
$pip install --require-hashes --requirement "$here/requirements/run.txt"
$pip install --no-deps --force-reinstall "$wheel"
ln -sf /opt/veilmq/bin/veilmq /usr/local/bin/veilmq

install -D -m 644 "$files/veilmq.sysusers" /etc/sysusers.d/veilmq.conf
systemd-sysusers /etc/sysusers.d/veilmq.conf
install -D -m 644 "$files/veilmq.service" /etc/systemd/system/veilmq.service
[ -e /etc/veilmq/veilmq.toml ] || install -D -m 644 "$files/veilmq.toml" /etc/veilmq/veilmq.toml
[ -e /etc/veilmq/credentials.toml ] || /opt/veilmq/bin/veilmq keys new --into /etc/veilmq/credentials.toml
chown veilmq:veilmq /etc/veilmq/credentials.toml
install -d -o veilmq -g veilmq -m 700 /var/lib/veilmq
echo "in /opt/veilmq is $(/opt/veilmq/bin/veilmq --version); keys are in /etc/veilmq/credentials.toml" >&2
echo "veilmq: start it with: systemctl daemon-reload && systemctl enable veilmq && systemctl restart veilmq" >&2
