"""`make image`: builds deploy/Containerfile with Debian's buildah, and tries what docs/deploy.md says of the image.

Strategy: no container engine is needed. The base is the bare Debian 13 of `make first-hour`. Steps run in a chroot, and
what this machine knows of the package registries is mounted there, so that the image has nothing of it. The image's
root file system then serves as an engine would run it: read-only, by its own user without capabilities, as process 1 of
a network of its own. As root.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tests.first_hour.__main__ import AUTHORITIES, PLACE, PRISTINE, ROOT, pip_settings, pristine

IMAGES: Final = PLACE / "images"
BUILDAH: Final = ["buildah", "--root", str(IMAGES / "root"), "--runroot", str(IMAGES / "run")]
BASE: Final = "docker.io/library/debian:13-slim"
START_SECONDS: Final = 60
STOP_SECONDS: Final = 30
# What an engine does between making the namespaces and starting the process; $0 is the root, $1 the volume.
_ENTER: Final = """
ip link set lo up
printf '127.0.0.1 localhost\n::1 localhost\n' >"$0/etc/hosts"
mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"
mount --bind "$1" "$0/var/lib/veilmq" && mount -t proc proc "$0/proc"
root=$0 user=$2 group=$3; shift 3
exec chroot "$root" setpriv --reuid="$user" --regid="$group" --clear-groups --no-new-privs --bounding-set=-all \
    --inh-caps=-all env --ignore-environment "$@"
"""
_MESSAGE: Final = """
import boto3
sqs = boto3.client("sqs", endpoint_url="http://127.0.0.1:9324", region_name="us-east-1",
    aws_access_key_id="any", aws_secret_access_key="any")
url = sqs.create_queue(QueueName="orders")["QueueUrl"]
sqs.send_message(QueueUrl=url, MessageBody="hello")
print(sqs.receive_message(QueueUrl=url)["Messages"][0]["Body"])
"""


def buildah(*arguments: str, cwd: Path = ROOT) -> str:
    """What it prints. Raises CalledProcessError."""
    command = [*BUILDAH, *arguments]
    return subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def build() -> dict[str, Any]:
    """Image `veilmq`; returns its configuration. The time that it takes is printed, without that for the base."""
    pristine()
    left_out = [f"--exclude=./{each}/*" for each in ("proc", "sys", "var/lib/apt/lists", "var/cache/apt")]
    subprocess.run(["tar", "-C", str(PRISTINE), *left_out, "-cf", str(IMAGES / "base.tar"), "."], check=True)
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(IMAGES / "base.tar"), "/")
    buildah("commit", "--quiet", container, BASE)
    settings = IMAGES / "pip.conf"
    settings.write_text(pip_settings())
    mounted = {settings: "/etc/pip.conf", AUTHORITIES: "/root/authorities.pem"}
    volumes = [f"--volume={source}:{target}:ro" for source, target in mounted.items() if source.exists()]
    begun = time.perf_counter()
    buildah(
        *("bud", "--isolation", "chroot", "--pull-never", "--format", "docker", *volumes),
        *("-f", "deploy/Containerfile", "-t", "veilmq", "."),
    )
    took_s, (busy, *_) = time.perf_counter() - begun, os.getloadavg()
    print(f"built in {took_s:.0f} s at a load of {busy:.0f}: ", end="")
    print(buildah("images", "--format", "{{.Name}} {{.Size}}").replace("\n", ", "))
    found: dict[str, Any] = json.loads(buildah("inspect", "veilmq"))["Docker"]["config"]
    return found


def serve(settings: dict[str, Any]) -> None:
    """Run it, take a message, probe it, end it. Raises AssertionError and CalledProcessError."""
    root = buildah("mount", buildah("from", "--pull-never", "veilmq"))
    volume = IMAGES / "volume"
    volume.mkdir()
    user, group = settings["User"].split(":")
    os.chown(volume, int(user), int(group))
    alone = ["unshare", "--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child"]
    program = [*settings["Env"], *settings["Entrypoint"], *settings["Cmd"]]
    process = subprocess.Popen([*alone, "sh", "-euc", _ENTER, root, str(volume), user, group, *program])
    try:
        server = _child(process.pid)
        probe = ["env", "--ignore-environment", *settings["Env"], *settings["Healthcheck"]["Test"][1:]]
        inside = ["nsenter", f"--target={server}", "--net", "--pid", "--root", "--wd", f"--setuid={user}"]
        _until_it_passes([*inside, f"--setgid={group}", *probe], process)
        print("the health check passes")
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{server}/status").read_text().splitlines())
        assert status["NSpid"].split()[-1] == "1", status
        assert (status["CapEff"], status["CapBnd"], status["Uid"].split()[0]) == ("0" * 16, "0" * 16, user), status
        mounts = [line.split() for line in Path(f"/proc/{server}/mountinfo").read_text().splitlines()]
        assert [fields[5].split(",")[0] for fields in mounts if fields[4] == "/"] == ["ro"], mounts
        said = subprocess.run(
            ["nsenter", f"--target={server}", "--net", sys.executable, "-c", _MESSAGE],
            check=True, stdout=subprocess.PIPE, text=True,
        ).stdout  # fmt: skip
        assert said == "hello\n", said
        print(f"it serves as user {user} without capabilities, from a read-only root")
        os.kill(server, 15)
        assert process.wait(STOP_SECONDS) == 0
        print("SIGTERM ends it with code 0")
    finally:
        process.kill()
        process.wait()


def _child(parent: int) -> int:
    """Pid of the process that `unshare` made, which is the server in the end."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        with suppress(OSError, ValueError):
            return int(Path(f"/proc/{parent}/task/{parent}/children").read_text())
        time.sleep(0.05)
    raise RuntimeError("unshare made no process")


def _until_it_passes(probe: list[str], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while subprocess.run(probe, stderr=subprocess.DEVNULL).returncode != 0:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the health check of the image does not pass: {' '.join(probe)}")
        time.sleep(0.5)


def main() -> int:
    """Exit code 1 if the image does not do what the page says."""
    if os.geteuid() != 0:
        print("image: run it as root: it makes a root file system", file=sys.stderr)
        return 2
    _clean()  # of a run that was killed
    IMAGES.mkdir(parents=True)
    try:
        serve(build())
    except (AssertionError, RuntimeError, subprocess.SubprocessError) as error:
        print(f"image: {error}", file=sys.stderr)
        return 1
    finally:
        _clean()
    return 0


def _clean() -> None:
    if IMAGES.exists():
        for arguments in (("umount", "--all"), ("rm", "--all")):
            subprocess.run([*BUILDAH, *arguments], stdout=subprocess.DEVNULL)
        shutil.rmtree(IMAGES)


if __name__ == "__main__":
    sys.exit(main())
