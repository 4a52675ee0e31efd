"""The notebooks of docs/notebooks run, cell by cell, in a kernel of Jupyter, and draw what they are said to draw."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JUPYTER = ROOT / ".tools" / "notebook" / "bin" / "python"
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
PROGRAM = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
for cell in notebook.cells:
    for output in cell.get("outputs", []):
        print(output.get("text", ""), *output.get("data", {}).values(), *output.get("data", {}))
"""

pytestmark = pytest.mark.slow


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == ["history.ipynb"]


def test_the_history_is_learnt_from(tmp_path: Path) -> None:
    assert JUPYTER.exists(), "Jupyter is missing: run `make setup-clients`"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), sysconfig.get_paths()["purelib"]]),
        "TMPDIR": str(tmp_path),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "jupyter"),
    }
    command = [str(JUPYTER), "-c", PROGRAM, str(NOTEBOOKS[0])]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3_000:]
    assert "exported 450 events" in done.stdout
    assert "image/png" in done.stdout
    assert "takes longer than its lease of 30 s" in done.stdout
    assert "visibility timeout of 30 s." in done.stdout
    assert "to change it: veilmq queues set jobs --visibility-timeout" in done.stdout, "as the last cell says"
