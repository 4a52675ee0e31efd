#!/bin/sh
# need.sh COMMAND PACKAGE: make sure that COMMAND is there.
# Strategy: where apt is and we may use it (root, or sudo), install Debian's PACKAGE; otherwise say exactly what to install
# and fail. COMMAND may also be python-venv, which is no command but the two modules that Debian splits from Python.
set -eu

command=$1
package=$2
python=${PYTHON:-python3}

present() {
    case $command in
        python-venv) "$python" -c 'import ensurepip, venv' 2>/dev/null ;;
        *) command -v "$command" >/dev/null 2>&1 ;;
    esac
}

give_up() {
    echo "veilmq: $command is missing and $1." >&2
    echo "veilmq: install it, then run make again. On Debian: apt-get install $package" >&2
    exit 1
}

present && exit 0
command -v apt-get >/dev/null 2>&1 || give_up "this machine has no apt-get"

as_root=
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null 2>&1 || give_up "only root may install it"
    # Without a terminal nobody can type a password: then only a sudo that asks for none will do.
    [ -t 0 ] || sudo -n true 2>/dev/null || give_up "sudo asks for a password"
    as_root=sudo
fi

echo "veilmq: installing $package with apt-get" >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# stdout belongs to the caller, and apt is silent unless it fails.
if ! {
    $as_root apt-get -qq update &&
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$package"
} >"$log" 2>&1; then
    cat "$log" >&2
    give_up "apt-get could not install it"
fi
present || give_up "apt-get installed $package without it"
