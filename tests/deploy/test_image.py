"""deploy/Containerfile: what it copies is there, is not ignored, and makes the wheel without the rest of a checkout."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.first_hour.image import BASE

from veilmq.server.config.settings import Settings
from veilmq.testing.for_each import for_each

ROOT = Path(__file__).parents[2]
FILE = (ROOT / "deploy" / "Containerfile").read_text()
SERVING = FILE[FILE.rindex("\nFROM ") :]


def test_what_it_copies_makes_the_wheel(tmp_path: Path) -> None:
    admitted = {
        line[1:] for line in (ROOT / "deploy" / "Containerfile.dockerignore").read_text().splitlines() if line[0] == "!"
    }
    copied = re.findall(r"^COPY (?!--from)(.+) (\S+)$", FILE, re.MULTILINE)
    assert len(copied) >= 3
    for sources, target in copied:
        for source in sources.split():
            assert any(source == each or source.startswith(f"{each}/") for each in admitted), source
            found, there = ROOT / source, tmp_path / target
            if found.is_dir():
                shutil.copytree(found, there, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                there.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(found, there / found.name)
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path / "wheel")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "wheel").iterdir())) == 1


@for_each(
    ("extras", "packages", "installed"),
    [
        ("", "", ""),
        ("large,telemetry", "", "a.whl[large,telemetry]"),
        ("large", "s3fs x", "a.whl[large] s3fs x"),
        ("", "x", "a.whl x"),
    ],
)
def test_extras_and_packages_are_installed_beside_the_wheel(
    tmp_path: Path, extras: str, packages: str, installed: str
) -> None:
    (tmp_path / "a.whl").touch()
    (script,) = re.findall(r"if \[ -n .*; fi", FILE)
    script = script.replace("/opt/veilmq/bin/pip install --no-cache-dir", "echo").replace("/wheel/", "")
    told = {"EXTRAS": extras, "PACKAGES": packages}
    done = subprocess.run(["sh", "-euc", script], cwd=tmp_path, env=told, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == installed


def test_it_serves_without_privileges_and_with_a_probe() -> None:
    """`make image` tries it on the base that it names, and so does the page."""
    assert set(re.findall(r"^FROM (\S+)", FILE, re.MULTILINE)) == {BASE}
    debian = BASE.rpartition(":")[2].removesuffix("-slim")
    assert f"It is Debian {debian} with its Python" in (ROOT / "docs" / "deploy.md").read_text()
    assert re.search(r"^USER (\d+):\1$", SERVING, re.MULTILINE)
    assert "\nSTOPSIGNAL SIGTERM\n" in SERVING
    # Docker Swarm ends what is unhealthy. A full disk is no reason, nor a start that migrates all of the data.
    assert f"'localhost', {Settings().admin.port}, timeout=5); c.request('GET', '/health/live')" in SERVING
    assert "--start-period=30m" in SERVING
    assert "gcc" not in SERVING
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"EXTRAS=([a-z,]+) adds", FILE)
    assert set(named.split(",")) <= set(extras)
