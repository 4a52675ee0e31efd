"""Builds the accelerator (src/veilmq/accelerator), where there is a C compiler; hatchling runs it for a wheel.

    python tools/accelerator.py                   in place, or says in one line why not
    python tools/accelerator.py --must            the same, but without it the exit code is 1
    python tools/accelerator.py --later           as above, but says nothing: `make setup` again
    python tools/accelerator.py --sanitized DIR   a copy of the sources, built with ASan and UBSan: `make sanitized`

Without a compiler or Python's headers VeilMQ is plain Python, and does the same. A wheel is plain, too, so that one is
for every machine and a release has the same bytes each time. With `VEILMQ_ACCELERATOR=on` a wheel has the accelerator,
for this Python and processor, and it fails if it cannot; with `auto` it then is a plain one. Other values are refused.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from zlib import crc32

ROOT = Path(__file__).resolve().parent.parent
SOURCES = Path("src", "veilmq", "accelerator")
WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror=implicit-function-declaration"]
WARNINGS += ["-Wformat", "-Werror=format-security"]
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-fPIC", "-shared", "-fvisibility=hidden", *WARNINGS]
HARDENED = ["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3", "-fstack-protector-strong", "-Wl,-z,relro,-z,now"]
FAST = ["-O3", "-DNDEBUG", *HARDENED]
SANITIZED = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


LOAD = """
import sys
from importlib import machinery, util
util.module_from_spec(util.spec_from_loader("_native", machinery.ExtensionFileLoader("_native", sys.argv[1])))
"""


class NotBuilt(Exception):
    """The reason, in one line where it is ours."""


class NotHere(NotBuilt):
    """No compiler will help."""


def build(root: Path, *flags: str) -> Path:
    """Compile the sources below root, in place; returns the module's file. Raises NotBuilt."""
    include = Path(sysconfig.get_path("include"))
    if sys.implementation.name != "cpython" or not sys.platform.startswith("linux"):
        raise NotHere(f"it is for CPython on Linux, not {sys.implementation.name} on {sys.platform}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise NotHere("it is not for a Python without the interpreter lock")
    if not (include / "Python.h").exists():
        raise NotBuilt(f"{include}/Python.h is missing (on Debian: apt-get install python3-dev)")
    made = root / SOURCES / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    aside = made.with_name(f"{made.name}.{os.getpid()}")
    try:
        compiler = shlex.split(os.environ.get("CC") or "") or ["cc"]
    except ValueError as error:
        raise NotBuilt(f"CC is {os.environ['CC']!r}, which is no command: {error}") from None
    if shutil.which(compiler[0]) is None and not Path(compiler[0]).exists():
        raise NotBuilt(f"there is no C compiler `{compiler[0]}` (on Debian: apt-get install gcc libc6-dev)")
    try:
        files = sorted((root / SOURCES).glob("[!.]*.[ch]"))
        checksum = f"-DVEILMQ_SOURCES={crc32(b''.join(path.read_bytes() for path in files)) & 0x7FFFFFFF}L"
        sources = [str(path) for path in files if path.suffix == ".c"]
        command = [*compiler, *FLAGS, *flags, checksum, f"-I{include}", "-o", str(aside), *sources]
        done = subprocess.run(command, check=False, capture_output=True)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise NotBuilt(f"the compiler failed: {said or f'exit code {done.returncode}'}")
        if list(flags) != SANITIZED:  # those libraries come first in a process, or it does not load
            _load(aside)
        aside.replace(made)  # in one step: a server may have the older one open
    except OSError as error:
        raise NotBuilt(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None
    finally:
        aside.unlink(missing_ok=True)
    return made


def _load(made: Path) -> None:
    """Load the module in a process of its own. Raises NotBuilt."""
    done = subprocess.run([sys.executable, "-c", LOAD, str(made)], check=False, capture_output=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise NotBuilt(f"what the compiler made cannot be loaded: {said.splitlines()[-1]}")


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # hatchling is there only for a wheel
    pass
else:

    class AcceleratorHook(BuildHookInterface[Any]):
        """Puts the module into the wheel, whose name then tells for which Python it is."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Called before the wheel is put together. version: `editable` for an install of a checkout."""
            given = os.environ.get("VEILMQ_ACCELERATOR") or "off"
            wanted = given.lower()
            if wanted not in {"auto", "on", "off"}:
                self.app.abort(f"veilmq: no wheel was made: VEILMQ_ACCELERATOR is {given!r}: it may be auto, on or off")
            if wanted == "off" or version == "editable":  # tools/install.sh builds it in place
                return
            try:
                made = build(Path(self.root), *FAST)
            except NotBuilt as reason:
                if wanted == "on":
                    self.app.abort(f"veilmq: no wheel was made: {reason}")
                self.app.display_warning(f"veilmq: without the accelerator, which only makes it faster: {reason}")
                return
            build_data["artifacts"].append(f"/{made.relative_to(self.root)}")
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--must", action="store_true", help="exit with 1 if it was not built")
    parser.add_argument("--later", action="store_true", help="say nothing if it was not built")
    parser.add_argument("--sanitized", type=Path, metavar="DIR", help="a copy in DIR/src, with ASan and UBSan")
    options = parser.parse_args()
    try:
        if options.sanitized is None:
            build(ROOT, *FAST)
        else:
            shutil.copytree(
                ROOT / "src", options.sanitized / "src", ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True
            )
            build(options.sanitized, *SANITIZED)
    except NotBuilt as reason:
        again = "make sanitized" if options.sanitized else "make accelerator"
        then = "" if isinstance(reason, NotHere) else f"; then `{again}`"
        if not options.later:
            print(f"veilmq: without the accelerator, which only makes it faster: {reason}{then}", file=sys.stderr)
        sys.exit(1 if options.must or options.sanitized else 0)


if __name__ == "__main__":
    main()
