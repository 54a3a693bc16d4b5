"""What an installation brings: the server's extension always, the sidebar where Node is there."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake_node(folder: Path, version: str) -> None:
    folder.mkdir()
    for name in ("node", "npm"):
        (folder / name).write_text(f"#!/bin/sh\necho {version}\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(("version", "fits"), [
    ("v18.20.8", False), ("v20.18.3", False), ("v20.19.0", True), ("v21.7.0", False), ("v22.11.0", False),
    ("v22.12.0", True), ("v26.1.0", True), ("nothing", False),
])  # fmt: skip
def test_node_is_looked_at_before_it_is_used(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, fits: bool
) -> None:
    fake_node(tmp_path / "bin", version)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    if fits:
        hook._check_node()
    else:
        with pytest.raises(hook.SidebarError, match=r"Node 20\.19 or newer"):
            hook._check_node()


def test_a_bundle_is_built_anew_when_its_sources_change(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "index.ts").write_text("first")
    fake_node(tmp_path / "bin", "v22.12.0")
    (tmp_path / "bin" / "npm").write_text('#!/bin/sh\nmkdir -p labextension\necho "$@" >>calls\n')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    for text, calls in (("first", 2), ("first", 2), ("second", 4)):
        (tmp_path / "src" / "index.ts").write_text(text)
        assert hook.build(tmp_path) == tmp_path / "labextension"
        assert len((tmp_path / "calls").read_text().splitlines()) == calls


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_wheel_is_made_without_node_and_says_what_it_lacks(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    kept_out = shutil.ignore_patterns("node_modules", "lib", "labextension", "__pycache__")
    for name in ("mmlab", "notebooks", "jupyter-config", "extensions"):
        shutil.copytree(ROOT / name, source / name, ignore=kept_out)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    environment = os.environ | {"PATH": str(tmp_path), "MMLAB_SIDEBAR": ""}
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    ended = subprocess.run([*command, str(source)], env=environment, capture_output=True, text=True, timeout=380)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (wheel,) = tmp_path.glob("mmlab-*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("/etc/jupyter/jupyter_server_config.d/mmlab.json") for name in files)
    assert not any("labextension" in name for name in files)
    assert "without its JupyterLab sidebar: building it needs Node 20.19 or newer" in ended.stdout + ended.stderr
