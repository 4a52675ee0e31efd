"""Installs what the benchmark needs, or says exactly what is missing if it may not install it.

System packages come through tools/need.sh (apt, as root or through sudo); node from npm if the machine has none of at
least NODE_MIN; each peer in its pinned version below bench/.peers, which git ignores. Every step checks first and does
nothing if the thing exists, so a second run installs nothing.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

PEERS = Path(__file__).resolve().parent / ".peers"
TOOLS = Path(__file__).resolve().parent.parent / "tools"
NODE_MIN = 22
"""fauxqs needs `node:sqlite`."""
NODE_VERSION = "22.23.3"
JAVA_MIN = 11
INSTALL_SECONDS_MAX = 900


class Missing(Exception):
    """Something the benchmark needs is missing and cannot be installed from here; the text says how to get it."""


def run(command: list[str], cwd: Path | None = None) -> None:
    """Run one install step; raises Missing with the end of its output if it fails."""
    print(f"install: {' '.join(Path(part).name if part.startswith('/') else part for part in command)}", flush=True)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "NPM_CONFIG_LOGLEVEL": "error"}
    try:
        done = subprocess.run(
            command,
            check=False,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_SECONDS_MAX,
        )
    except subprocess.TimeoutExpired:
        raise Missing(f"`{' '.join(command)}` did not end within {INSTALL_SECONDS_MAX} s") from None
    if done.returncode:
        raise Missing(f"`{' '.join(command)}` failed:\n{done.stdout[-2000:]}")


def output_of(command: list[str]) -> str:
    """What a command prints on either stream, or "" if it is missing or fails."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


def tool(name: str, package: str) -> str:
    """Path of a system program, installed from `package` if it is missing."""
    if not shutil.which(name):
        run([str(TOOLS / "need.sh"), name, package])
    path = shutil.which(name)
    assert path is not None, name
    return path


def wrk() -> str:
    return tool("wrk", "wrk")


def debian_program(name: str, package: str) -> Path:
    """Path of a program out of Debian's package, which is not installed, so that its server does not start."""
    path = PEERS / "debian" / name
    if not path.exists():
        run([str(TOOLS / "take-program.sh"), name, package, str(path.parent)])
    return path


def npm_package(name: str, version: str) -> Path:
    """Folder of an npm package in exactly this version; its install scripts are not run."""
    home = PEERS / "npm" / f"{name}-{version}"
    package = home / "node_modules" / name
    manifest = package / "package.json"
    if manifest.is_file() and json.loads(manifest.read_text())["version"] == version:
        return package
    npm = tool("npm", "npm")
    home.mkdir(parents=True, exist_ok=True)
    (home / "package.json").write_text('{"private": true}\n')
    flags = ["--no-audit", "--no-fund", "--save-exact", "--ignore-scripts"]
    run([npm, "install", *flags, f"{name}@{version}"], cwd=home)
    return package


def node(minimum: int = NODE_MIN) -> str:
    """Path of a node of at least that version: the machine's, or npm's build for this platform."""
    found = shutil.which("node")
    if found and _major(output_of([found, "--version"])) >= minimum:
        return found
    home = PEERS / f"node-{NODE_VERSION}"
    path = str(home / "bin" / "node")
    if not output_of([path, "--version"]):
        run([str(TOOLS / "install-node.sh"), NODE_VERSION, str(home)])
    return path


def java() -> str:
    """Path of a Java runtime of at least JAVA_MIN."""
    path = tool("java", "default-jre-headless")
    if _major(output_of([path, "-version"])) < JAVA_MIN:
        raise Missing(f"`{path}` is older than Java {JAVA_MIN}: install the package `default-jre-headless`")
    return path


def python_package(name: str, version: str) -> str:
    """Path of the interpreter of a separate virtual environment that contains this package."""
    home = PEERS / "python" / f"{name}-{version}"
    python = str(home / "bin" / "python")
    look = f"import importlib.metadata as m; print('version', m.version({name!r}))"
    if f"version {version}\n" in output_of([python, "-c", look]):
        return python
    # Debian's Python may lack ensurepip: create the environment without pip, and let our own pip fill it.
    run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)])
    run([sys.executable, "-m", "pip", "--python", python, "install", "-q", f"{name}=={version}"])
    return python


def _major(text: str) -> int:
    """First number of a version text: `v20.1.2` is 20, `openjdk version "17.0.1"` is 17; 0 if there is none."""
    match = re.search(r"(\d+)[.\d]*", text)
    return int(match.group(1)) if match else 0
