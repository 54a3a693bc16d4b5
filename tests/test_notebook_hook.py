"""The hook that keeps outputs out of committed notebooks."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOOK = ROOT / ".githooks" / "pre-commit"


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("pre_commit_hook", str(HOOK))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_committed_notebooks_are_as_the_hook_leaves_them(hook: ModuleType, path: Path) -> None:
    assert hook.stripped(path.read_text()) == path.read_text()


def test_a_commit_has_no_outputs_and_the_open_file_keeps_them(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@localhost", "-c", f"core.hooksPath={HOOK.parent}")
        return subprocess.run(
            ["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30
        ).stdout

    source = json.loads((ROOT / "notebooks" / "01_quickstart.ipynb").read_text())
    code = next(cell for cell in source["cells"] if cell["cell_type"] == "code")
    code["outputs"], code["execution_count"] = [{"name": "stdout", "output_type": "stream", "text": ["hello"]}], 7
    code["metadata"] = {"execution": {"iopub.status.busy": "now"}, "tags": ["kept"]}
    source["metadata"]["widgets"] = {"state": "large"}
    name = "a notebook with spaces é.ipynb"
    (tmp_path / name).write_text(json.dumps(source))
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    committed = json.loads(git("show", f"HEAD:{name}"))
    cell = next(cell for cell in committed["cells"] if cell["cell_type"] == "code")
    assert (cell["outputs"], cell["execution_count"], cell["metadata"]) == ([], None, {"tags": ["kept"]})
    assert set(committed["metadata"]) == {"kernelspec", "language_info"}
    assert [one["source"] for one in committed["cells"]] == [one["source"] for one in source["cells"]]
    assert "hello" in (tmp_path / name).read_text()


def test_what_is_no_notebook_is_not_committed(tmp_path: Path) -> None:
    (tmp_path / "broken.ipynb").write_text("{")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True, timeout=30)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True, timeout=30)
    done = subprocess.run([HOOK], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "broken.ipynb is no notebook" in done.stderr
