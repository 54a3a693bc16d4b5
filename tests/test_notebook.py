"""The quickstart notebook runs from top to bottom."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from mmlab.cli.labs import packaged_notebook


def test_notebook_is_saved_without_outputs() -> None:
    notebook = nbformat.read(packaged_notebook(), as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    source = "\n".join(cell.source for cell in code)
    for verb in ("Lab(", "check()", "layout()", "schedule()", "train(", "pause()", "step(", "set(", "checkpoint(",
                 "restore(", "stop()", "close()"):  # fmt: skip
        assert verb in source


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("MMLAB_RUNS", str(tmp_path / "runs"))
    (tmp_path / "runtime").mkdir()
    notebook = nbformat.read(packaged_notebook(), as_version=4)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    (dashboard,) = [output for source, output in outputs.items() if source.endswith("\nrun")]
    assert "image/png" in dashboard[0].data
    assert "stopped" in dashboard[0].data["text/plain"]
    text = "\n".join(output.get("text", "") for cell in outputs.values() for output in cell)
    assert "paused after step" in text
    assert "restored before" in text
    assert "cannot change during a run" in text
