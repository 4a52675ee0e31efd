"""`make first-hour`: twelve things that a new user wants (wants.py), each in at most two commands, on a bare Debian 13.

Strategy: debootstrap makes the root file system once; each run works on a copy. It gets what this machine knows of the
package registries (resolver, hosts, pip's settings, certificate authorities) and nothing else, and the commands run in
a clean environment. Everything is downloaded first, and the time from there to the first message is printed. From the
installation on, commands run in a network of their own without a way out, and the service runs under a real systemd
(systemd-nspawn). As root.
"""

import configparser
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.first_hour.wants import FILES, FIRST, INSTALL, SERVE, WANTS, Want

ROOT: Final = Path(__file__).parents[2]
PLACE: Final = ROOT / ".tools" / "first-hour"
PRISTINE: Final = PLACE / "debian-13"
BARE: Final = PLACE / "root"
PATH: Final = "/opt/veilmq/bin:/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
OFFLINE: Final = "--offline"
FIRST_MESSAGE_S: Final = 30.0
AUTHORITIES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
_HEALTH: Final = "http://127.0.0.1:9325/health/ready"
_SERVICE: Final = """
[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/bin/sh -c '(systemctl daemon-reload; {command}; systemctl is-active veilmq; systemctl reload veilmq; \
systemctl is-active veilmq) >/root/service.out 2>&1'
ExecStartPost=/bin/systemctl poweroff --no-block
"""


def pristine() -> None:
    """The bare system, once."""
    if (PRISTINE / "etc" / "debian_version").exists():
        return
    shutil.rmtree(PRISTINE, ignore_errors=True)
    PRISTINE.parent.mkdir(parents=True, exist_ok=True)
    print("making a bare Debian 13 with debootstrap")
    named = [
        path.read_text()
        for path in sorted(Path("/etc/apt").glob("sources.list*/*"))
        if path.suffix in {".sources", ".list"}
    ]
    mirrors = re.findall(r"(?:^URIs:|^deb (?:\[[^]]*\] )?)\s*(\S+)", "\n".join(named), re.MULTILINE)
    command = ["debootstrap", "--variant=minbase", "trixie", str(PRISTINE), *mirrors[:1]]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def prepare() -> None:
    """A copy of it, with the way to the registries, a checkout, and the files of a new user."""
    shutil.rmtree(BARE, ignore_errors=True)
    subprocess.run(["cp", "-a", str(PRISTINE), str(BARE)], check=True)
    for name in ("/etc/resolv.conf", "/etc/hosts"):
        shutil.copyfile(name, f"{BARE}{name}")
    (BARE / "etc" / "pip.conf").write_text(pip_settings())
    if AUTHORITIES.exists():
        shutil.copyfile(AUTHORITIES, BARE / "root" / "authorities.pem")
    checkout = BARE / "root" / "checkout"
    checkout.mkdir()
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    packed = subprocess.run(
        ["tar", "--create", "--null", "--files-from=-"], cwd=ROOT, input=tracked, capture_output=True, check=True
    )
    subprocess.run(["tar", "--extract"], cwd=checkout, input=packed.stdout, check=True)
    for name, text in FILES.items():
        (BARE / "root" / name).write_text(text)


def pip_settings() -> str:
    """This machine's settings of pip that lead to an index."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = configparser.ConfigParser(interpolation=None)
    settings["global"] = {"cert": "/root/authorities.pem"} if AUTHORITIES.exists() else {}
    for name, value in re.findall(
        r"^(?:global|:env:)\.(index-url|extra-index-url|trusted-host)='(.*)'$", listed.stdout, re.MULTILINE
    ):
        if "file:" not in value:
            settings["global"][name] = value
    lines = [f"{name} = {value}" for name, value in settings["global"].items()]
    return "\n".join(["[global]", *lines, ""])


def run(command: str, *, timeout_s: float = 600) -> str:
    """What a command says in the bare system. Raises RuntimeError if it fails."""
    inside = ["chroot", str(BARE), "sh", "-c", f"cd /root && {command}"]
    done = subprocess.run(inside, env=_environment(), capture_output=True, text=True, timeout=timeout_s)
    if done.returncode != 0:
        raise RuntimeError(f"{command}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _environment() -> dict[str, str]:
    proxies = {
        name: value for name, value in os.environ.items() if name.lower() in {"http_proxy", "https_proxy", "no_proxy"}
    }
    return {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive", **proxies}


class Servers:
    """What serves in the background: one at a time, for the ports are the usual ones."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None

    def start(self, command: str) -> str:
        """Returns what health says once it is ready."""
        self.stop()
        inside = ["chroot", str(BARE), "sh", "-c", f"cd /root && exec {command.removesuffix('&')}"]
        self._server = subprocess.Popen(inside, env=_environment(), stderr=subprocess.DEVNULL)
        end = time.monotonic() + 30
        while time.monotonic() < end and self._server.poll() is None:
            with suppress(OSError), urllib.request.urlopen(_HEALTH, timeout=5) as answer:
                return str(answer.read().decode())
            time.sleep(0.05)
        raise RuntimeError(f"it does not serve: {command}")

    def stop(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait(30)


def carry_out(want: Want, servers: Servers) -> None:
    """Type its commands, and read what the last one says. Raises RuntimeError."""
    said = ""
    for command in want.commands:
        said = servers.start(command) if command.endswith("&") else run(command)
    if want.read not in said:
        raise RuntimeError(f"{want.what}: no {want.read!r} in {said}")


def served() -> None:
    """The service, in a system that boots."""
    want = WANTS[-1]
    run(f"apt-get install --yes --no-install-recommends systemd make >/dev/null && {want.commands[0]}")
    units = BARE / "etc" / "systemd" / "system"
    (units / "first-hour.service").write_text(_SERVICE.format(command=want.commands[1]))
    (units / "multi-user.target.wants").mkdir(exist_ok=True)
    (units / "multi-user.target.wants" / "first-hour.service").symlink_to("../first-hour.service")
    boot = [
        "systemd-nspawn",
        "--quiet",
        "--register=no",
        "--keep-unit",
        "--private-network",
        f"--directory={BARE}",
        "--boot",
    ]
    subprocess.run(boot, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=180)
    said = (BARE / "root" / "service.out").read_text()
    if re.findall(rf"^{want.read}$", said, re.MULTILINE) != [want.read] * 2:
        raise RuntimeError(f"{want.what}: {said}")


def online() -> None:
    """Everything that needs the registries, before the clock starts."""
    pristine()
    prepare()
    print("downloading what pip and apt need")
    run("apt-get update >/dev/null && apt-get install --yes --no-install-recommends python3-venv >/dev/null")
    built = BARE / "root" / "packages"
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(built)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    packages = '"$(echo packages/veilmq-*.whl)[server,sqs]" pytest'
    run(f"python3 -m venv /tmp/v && /tmp/v/bin/pip download --quiet --dest packages {packages}")


def offline() -> None:
    """All but the first and the last of the list, in a network without a way out."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    (BARE / "etc" / "hosts").write_text("127.0.0.1 localhost elasticmq\n")
    servers, begun, took_s = Servers(), time.perf_counter(), 0.0
    try:
        for number, want in enumerate(WANTS[:-1], 1):
            carry_out(want, servers)
            print(f"{number:>2}  {want.what}", flush=True)
            if want is FIRST:
                took_s = time.perf_counter() - begun
                print(f"    first message {took_s:.1f} s after the download, with the installation")
    finally:
        servers.stop()
    if took_s > FIRST_MESSAGE_S:
        raise RuntimeError(f"the first message took more than {FIRST_MESSAGE_S:g} s")


def main() -> int:
    """Exit code 1 if something on the list does not work as written."""
    assert WANTS[:3] == (INSTALL, SERVE, FIRST)
    assert len(WANTS) == 12
    assert all(1 <= len(want.commands) <= 2 for want in WANTS)
    if os.geteuid() != 0:
        print("first-hour: run it as root: it makes a root file system", file=sys.stderr)
        return 2
    try:
        if OFFLINE in sys.argv:
            offline()
            return 0
        online()
        again = [
            "unshare",
            "--net",
            "--pid",
            "--fork",
            "--kill-child",
            sys.executable,
            "-m",
            "tests.first_hour",
            OFFLINE,
        ]
        if subprocess.run(again, cwd=ROOT).returncode != 0:
            return 1
        served()
        print(f"{len(WANTS):>2}  {WANTS[-1].what}")
    except (RuntimeError, subprocess.SubprocessError) as error:
        print(f"first-hour: {error}", file=sys.stderr)
        return 1
    finally:
        if OFFLINE not in sys.argv:
            shutil.rmtree(BARE, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
