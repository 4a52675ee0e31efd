"""Builds the accelerator (src/veilmq/accelerator), where there is a C compiler; hatchling runs it for a wheel.

    python tools/accelerator.py                   in place, or says in one line why not
    python tools/accelerator.py --must            the same, but without it the exit code is 1
    python tools/accelerator.py --sanitized DIR   a copy of the sources, built with ASan and UBSan: `make sanitized`

Without a compiler or Python's headers VeilMQ is plain Python, and does the same. A wheel is plain, too, so that one is
for every machine and a release has the same bytes each time. With `VEILMQ_ACCELERATOR=on` a wheel has the accelerator,
for this Python and processor, and it fails if it cannot; with `auto` it then is a plain one.
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
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-fPIC", "-shared", "-fvisibility=hidden", *WARNINGS]
FAST = ["-O3", "-DNDEBUG"]
SANITIZED = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


class NotBuilt(Exception):
    """The reason is in one line."""


def build(root: Path, *flags: str) -> Path:
    """Compile the sources below root, in place; returns the module's file. Raises NotBuilt."""
    include = Path(sysconfig.get_path("include"))
    if sys.implementation.name != "cpython" or not sys.platform.startswith("linux"):
        raise NotBuilt(f"it is for CPython on Linux, not {sys.implementation.name} on {sys.platform}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise NotBuilt("it is not for a Python without the interpreter lock")
    if not (include / "Python.h").exists():
        raise NotBuilt(f"{include}/Python.h is missing (on Debian: apt-get install python3-dev)")
    made = root / SOURCES / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    aside = made.with_name(f"{made.name}.{os.getpid()}")
    compiler = shlex.split(os.environ.get("CC") or "cc")
    files = sorted((root / SOURCES).glob("*.[ch]"))
    checksum = f"-DVEILMQ_SOURCES={crc32(b''.join(path.read_bytes() for path in files))}L"
    sources = [str(path) for path in files if path.suffix == ".c"]
    try:
        subprocess.run(
            [*compiler, *FLAGS, *flags, checksum, f"-I{include}", "-o", str(aside), *sources],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        raise NotBuilt(f"there is no C compiler `{compiler[0]}` (on Debian: apt-get install gcc libc6-dev)") from None
    except subprocess.CalledProcessError as error:
        raise NotBuilt(f"the compiler failed: {error.stderr.decode().strip() or error}") from None
    aside.replace(made)  # in one step: a server may have the older one open
    return made


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # hatchling is there only for a wheel
    pass
else:

    class AcceleratorHook(BuildHookInterface[Any]):
        """Puts the module into the wheel, whose name then tells for which Python it is."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Called before the wheel is put together. version: `editable` for an install of a checkout."""
            wanted = os.environ.get("VEILMQ_ACCELERATOR") or "off"
            if wanted == "off" or version == "editable":  # tools/install.sh builds it in place
                return
            try:
                made = build(Path(self.root), *FAST)
            except NotBuilt as reason:
                if wanted == "on":
                    raise
                self.app.display_warning(f"veilmq: without the accelerator, which only makes it faster: {reason}")
                return
            build_data["artifacts"].append(f"/{made.relative_to(self.root)}")
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--must", action="store_true", help="exit with 1 if it was not built")
    parser.add_argument("--sanitized", type=Path, metavar="DIR", help="a copy in DIR/src, with ASan and UBSan")
    options = parser.parse_args()
    try:
        if options.sanitized is None:
            build(ROOT, *FAST)
        else:
            shutil.copytree(ROOT / "src", options.sanitized / "src", dirs_exist_ok=True)
            build(options.sanitized, *SANITIZED)
    except NotBuilt as reason:
        print(f"veilmq: without the accelerator, which only makes it faster: {reason}", file=sys.stderr)
        sys.exit(1 if options.must or options.sanitized else 0)


if __name__ == "__main__":
    main()
