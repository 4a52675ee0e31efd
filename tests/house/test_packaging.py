"""What is locked is what pyproject.toml asks for, what is built is complete, and set-up says what it misses."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import apsw
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import veilmq
from veilmq import accelerator
from veilmq.cli.doctor.checks import TESTED
from veilmq.testing.for_each import for_each

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
BASE = PROJECT["project"]["dependencies"]
BUILD = PROJECT["build-system"]["requires"]

LINK = re.compile(r"\]\((?!https?:)([^)#]+)")

WANTED = [
    *(("run.txt", one) for one in [*BASE, *EXTRAS["server"], *BUILD]),
    *(("dev.txt", one) for one in [*BASE, *BUILD, *(one for extra in EXTRAS.values() for one in extra)]),
]


def locked(name: str) -> dict[str, str]:
    """Package and version of each entry of a lock."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^ ;\\]+)", (ROOT / "requirements" / name).read_text(), re.MULTILINE)
    return {canonicalize_name(package): version for package, version in found}


def test_the_locks_hold_what_is_asked_for() -> None:
    wrong = []
    for lock, text in WANTED:
        wanted = Requirement(text)
        version = locked(lock).get(canonicalize_name(wanted.name))
        if version is None or not wanted.specifier.contains(version):
            wrong.append(f"{lock}: {text}, but {version} is locked: run `make lock`")
    assert wrong == []


def test_both_locks_agree() -> None:
    assert locked("run.txt").items() <= locked("dev.txt").items()


@for_each("lock", sorted(path.name for path in (ROOT / "requirements").glob("*.txt")))
def test_every_locked_package_has_hashes_and_no_index_is_named(lock: str) -> None:
    text = (ROOT / "requirements" / lock).read_text()
    entries = re.split(r"^(?=\S)", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    packages = [entry for entry in entries if entry.strip()]
    assert {canonicalize_name(entry.partition("==")[0]) for entry in packages} == set(locked(lock))
    assert [entry for entry in packages if "--hash=sha256:" not in entry] == []
    assert "://" not in text
    assert "index" not in text


def test_every_javascript_client_is_locked_with_a_hash_and_no_registry_is_named() -> None:
    directory = ROOT / "tests/clients/js"
    asked = json.loads((directory / "package.json").read_text())["dependencies"]
    packages = json.loads((directory / "package-lock.json").read_text())["packages"]
    assert packages.pop("")["dependencies"] == asked, "run `make lock`"
    assert {name: packages[f"node_modules/{name}"]["version"] for name in asked} == asked, "run `make lock`"
    assert [name for name, found in packages.items() if not found["integrity"].startswith("sha512-")] == []
    assert [name for name, found in packages.items() if "resolved" in found] == []


def test_sqlite_is_past_the_corruption() -> None:
    assert tuple(map(int, apsw.sqlite_lib_version().split("."))) >= (3, 51, 3)


def test_pythons_are_those_that_were_tried() -> None:
    named = {each.rpartition(" ")[2] for each in PROJECT["project"]["classifiers"] if "Python :: 3." in each}
    page = (ROOT / "docs" / "releases.md").read_text()
    rows = re.findall(r"^\|.*Python (3\.\d+).*\| (.*) \|$", page, re.MULTILINE)
    assert {version for version, said in rows if not said.startswith("not tried")} == named == set(TESTED)


def test_the_site_of_the_documentation_needs_no_package_of_development() -> None:
    asked = ["make", "--dry-run", "--always-make", "docs"]
    assert "requirements/dev.txt" not in subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout
    texts = [path.read_text() for path in (ROOT / "tools" / "site").glob("*.py")]
    imported = set(re.findall(r"^(?:import|from) (\w+)", "\n".join(texts), re.MULTILINE)) - {"reference", "veilmq"}
    places = metadata.packages_distributions()
    assert [place for name in imported for place in places.get(name, ()) if place not in locked("run.txt")] == []


def test_every_make_target_of_tests_is_in_the_list_of_a_release() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipes = re.findall(r"^([a-z-]+)(?: [a-z-]+)*:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    runs = re.compile(r"\(PYTEST\)|-m pytest|-m tests\.|/fuzz\.py")
    of_tests = {target for target, recipe in recipes if runs.search(recipe)}
    assert {"test", "faults", "sanitized", "fuzz"} < of_tests
    listed = (ROOT / "docs" / "releases.md").read_text().partition("## How a release is cut")[2]
    assert {target for target in of_tests if not re.search(rf"\bmake {target}(?![a-z-])", listed)} == set()


def test_every_dependency_is_explained() -> None:
    note = (ROOT / "docs/decisions/0001-dependencies.md").read_text()
    asked = {Requirement(one).name for one in [*BASE, *BUILD, *(one for extra in EXTRAS.values() for one in extra)]}
    assert sorted(name for name in asked if not re.search(rf"\b{re.escape(name)}\b", note)) == []
    told = re.findall(r"is an extra: (.*?)\. There", (ROOT / "docs" / "client.md").read_text(), re.DOTALL)
    assert set(re.findall(r"`([a-z]+)`", told[0])) == EXTRAS.keys() - {"test", "dev"}


def test_the_wheel_is_complete(tmp_path: Path) -> None:
    (wheel,) = build(ROOT, tmp_path, "wheel")
    assert wheel.name == f"veilmq-{veilmq.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as content:
        names = {name for name in content.namelist() if ".dist-info/" not in name}
        metadata = content.read(f"veilmq-{veilmq.__version__}.dist-info/METADATA").decode()
        scripts = content.read(f"veilmq-{veilmq.__version__}.dist-info/entry_points.txt").decode()
    source = ROOT / "src"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert {name for name in files if not name.endswith((".pyc", ".c", ".h", ".so"))} <= names
    assert [name for name in names if name.endswith((".c", ".h", ".so"))] == []
    assert all(name.startswith("veilmq/") for name in names)
    assert "License-Expression: Apache-2.0" in metadata
    assert "veilmq = veilmq.__main__:main" in scripts


@pytest.mark.skipif(accelerator.status != "on", reason=f"the accelerator is {accelerator.status}")
def test_a_wheel_can_have_the_accelerator(tmp_path: Path) -> None:
    (wheel,) = build(ROOT, tmp_path, "wheel", wanted="ON")
    assert re.search(r"-(cp3\d+)-\1-linux_\w+\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as content:
        names = [name for name in content.namelist() if name.startswith("veilmq/accelerator/")]
    assert len(names) == 2
    assert names[1].endswith(".so")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && echo cp399')
    python.chmod(0o755)
    command = ["sh", str(ROOT / "tools" / "install-service.sh"), "veilmq-1-cp398-cp398-linux_x86_64.whl"]
    done = subprocess.run(command, env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the wheel has the accelerator for Python 3.98, which " in done.stderr


def test_a_service_is_not_installed_with_an_old_python_nor_without_systemd(tmp_path: Path) -> None:
    """/opt/veilmq is of an earlier run with the old Python."""
    python, left = tmp_path / "python", tmp_path / "opt" / "veilmq" / "bin" / "python"
    left.parent.mkdir(parents=True)
    for path in (python, left):
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 10, 13); $2"\n')
        path.chmod(0o755)
    own = [] if os.geteuid() == 0 else ["--map-root-user"]
    script = f"mount --bind {tmp_path}/opt /opt && exec sh {ROOT}/tools/install-service.sh veilmq-1-py3-none-any.whl"
    command = ["unshare", "--mount", *own, "sh", "-c", script]
    done = subprocess.run(command, env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    told = f"veilmq: {python} is not Python 3.11 or later. Nothing was installed; run it again with PYTHON=python3.11\n"
    assert done.stderr == told
    assert [path.name for path in (tmp_path / "opt").rglob("*")] == ["veilmq", "bin", "python"]
    left.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for name in ("basename", "cut", "dirname", "id", "sh"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    command[-1] = script.replace("exec sh ", f"PATH={tmp_path} exec sh ")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    told = "veilmq: this machine has no systemd (on Debian: apt-get install systemd). Nothing was installed.\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_a_wheel_with_something_else_is_refused_and_a_release_is_plain(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="VEILMQ_ACCELERATOR is 'Yes': it may be auto, on or off") as refused:
        build(ROOT, tmp_path, "wheel", wanted="Yes")
    assert "Traceback" not in str(refused.value)
    with pytest.raises(AssertionError, match="veilmq: no wheel was made: ") as refused:
        build(ROOT, tmp_path, "wheel", wanted="on", CC="none")
    assert "Traceback" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []
    assert "\nVEILMQ_ACCELERATOR=off .venv/bin/python -m hatchling" in (ROOT / "tools" / "release.sh").read_text()


def build(source: Path, into: Path, *targets: str, wanted: str = "off", **others: str) -> list[Path]:
    """What hatchling builds of a tree. wanted: of the accelerator. others: further variables."""
    environment = os.environ | {accelerator.VARIABLE: wanted} | others
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(into)]
    command += [word for target in targets for word in ("--target", target)]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(into.iterdir())


@pytest.mark.slow
def test_the_source_distribution_is_complete_and_makes_the_same_bytes_again(tmp_path: Path) -> None:
    """Elsewhere, with other modes and at another time."""
    wheel, archive = sorted(
        build(ROOT, tmp_path / "dist", "wheel", "sdist"), key=lambda path: path.suffix, reverse=True
    )
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
        safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not before Python 3.11.4
        content.extractall(tmp_path / "elsewhere", **safe)
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py")}
    further = {"README.md", "LICENSE", "SECURITY.md", "docs/deploy.md", "deploy/Containerfile", "requirements/run.txt"}
    assert source | further | {"src/veilmq/py.typed", "pyproject.toml", "tools/accelerator.py"} <= names
    assert {f"src/veilmq/accelerator/{path.name}" for path in Path(accelerator.__file__).parent.glob("*.[ch]")} <= names
    assert [name for name in names if name.endswith(".so")] == []
    pages = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
    linked = {target for page in pages for target in LINK.findall((ROOT / page).read_text())}
    assert len(linked) > 15
    assert {target for target in linked if target not in names and f"{target}/README.md" not in names} == set()
    assert [name for name in names if "__pycache__" in name] == []
    (unpacked,) = (tmp_path / "elsewhere").iterdir()
    (unpacked / "deploy" / "credentials.toml").write_text("keys that deploy/compose.yaml has one make there")
    for path in unpacked.rglob("*"):
        path.chmod(path.stat().st_mode | 0o020)
        os.utime(path, (1_700_000_000, 1_700_000_000))
    again = build(unpacked, tmp_path / "again", "wheel", "sdist")
    assert {path.name: path.read_bytes() for path in again} == {
        path.name: path.read_bytes() for path in (wheel, archive)
    }


def test_the_bill_of_materials_says_of_which_release_it_is_and_what_runs(tmp_path: Path) -> None:
    """In the form in which cyclonedx-py makes it."""
    needs = {"root-component": ["aiohttp==3"], "aiohttp==3": ["yarl==1", "idna==3"], "yarl==1": ["idna==3"]}
    needs |= {"idna==3": [], "hatchling==1": ["pluggy==1", "idna==3"], "pluggy==1": []}
    bill = {
        "metadata": {"component": {"bom-ref": "root-component", "name": "veilmq", "type": "application"}},
        "components": [{"bom-ref": ref, "name": ref.partition("=")[0]} for ref in needs if "==" in ref],
        "dependencies": [{"ref": ref} | ({"dependsOn": refs} if refs else {}) for ref, refs in needs.items()],
    }
    file = tmp_path / "bill.json"
    file.write_text(json.dumps(bill))
    assert "tools/bill.py" in (ROOT / "tools" / "release.sh").read_text()
    subprocess.run([sys.executable, str(ROOT / "tools" / "bill.py"), str(file), "1.2.3"], check=True, timeout=60)
    made = json.loads(file.read_text())
    assert (made["metadata"]["component"]["name"], made["metadata"]["component"]["version"]) == ("veilmq", "1.2.3")
    assert [each["name"] for each in made["components"]] == ["aiohttp", "yarl", "idna"]
    assert [each["ref"] for each in made["dependencies"]] == ["root-component", "aiohttp==3", "yarl==1", "idna==3"]


def test_importing_the_package_needs_no_dependency() -> None:
    script = "import sys, veilmq; print(sorted({'apsw', 'msgspec', 'asyncio'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n")


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [("typer", ["--help"]), ("httptools", ["serve"]), ("rich", ["queues", "list", "--data", "{}"])],
)
def test_a_command_of_a_plain_installation_says_what_it_lacks(
    tmp_path: Path, missing: str, arguments: list[str]
) -> None:
    with veilmq.connect(f"veil://{tmp_path}/data?queue=jobs&create=1"):
        pass
    words = [word.format(tmp_path / "data") for word in arguments]
    script = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv[1:] = {words!r}; from veilmq.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        f"veilmq: the package {missing} is missing\n  It comes with the extra `server`: pip install 'veilmq[server]'.\n"
    )


class TestNeed:
    """tools/need.sh on machines that have nothing but the commands in one folder."""

    @staticmethod
    def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(directory), "HOME": str(directory)}
        command = [str(ROOT / "tools/need.sh"), *arguments]
        return subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )

    @staticmethod
    def add(directory: Path, name: str, script: str = "") -> None:
        (directory / name).write_text(f"#!/bin/sh\n{script}\n")
        (directory / name).chmod(0o755)

    @staticmethod
    def link(directory: Path, *names: str) -> None:
        for name in names:
            (directory / name).symlink_to(
                next(Path(at, name) for at in os.defpath.split(":") if Path(at, name).exists())
            )

    def test_says_nothing_when_the_command_is_there(self, tmp_path: Path) -> None:
        self.add(tmp_path, "strace")
        done = self.run(tmp_path, "strace", "strace")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_without_apt_it_says_what_to_install(self, tmp_path: Path) -> None:
        done = self.run(tmp_path, "strace", "strace-package")
        assert done.returncode == 1
        assert "strace is missing and this machine has no apt-get" in done.stderr
        assert "apt-get install strace-package" in done.stderr

    def test_a_user_without_sudo_is_told_what_to_install(self, tmp_path: Path) -> None:
        self.add(tmp_path, "apt-get", "exit 99")
        self.add(tmp_path, "id", "echo 1000")
        done = self.run(tmp_path, "strace", "strace-package")
        assert done.returncode == 1
        assert "only root may install it" in done.stderr
        assert "apt-get install strace-package" in done.stderr

    def test_what_apt_said_is_shown_when_it_fails(self, tmp_path: Path) -> None:
        self.link(tmp_path, "mktemp", "rm", "cat", "env")
        self.add(tmp_path, "id", "echo 0")
        self.add(tmp_path, "apt-get", "echo no such package; exit 100")
        done = self.run(tmp_path, "strace", "strace-package")
        assert (done.returncode, done.stdout) == (1, "")
        assert "no such package" in done.stderr
        assert "apt-get install strace-package" in done.stderr

    def test_it_installs_and_looks_again(self, tmp_path: Path) -> None:
        self.link(tmp_path, "mktemp", "rm", "cat", "env", "chmod")
        self.add(tmp_path, "id", "echo 0")
        body = f'case "$*" in *strace-package) echo "#!/bin/sh" > {tmp_path}/strace; chmod 755 {tmp_path}/strace;; esac'
        self.add(tmp_path, "apt-get", body)
        assert self.run(tmp_path, "strace", "strace-package").returncode == 0
        assert self.run(tmp_path, "other", "strace-package").returncode == 1
