"""Builds the JupyterLab extension into the wheel where Node is there; without it the package installs all the same.

`MMLAB_SIDEBAR=0` leaves it out, `MMLAB_SIDEBAR=1` makes it an error when it cannot be built.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = ("package.json", "package-lock.json", "tsconfig.json", "src/**/*", "style/**/*")
"""What the bundle is made of."""
LEAST = ((20, 19), (22, 12))
"""Versions of Node that the builder runs on: 20 from 20.19 on, and all from 22.12 on (it requires ES modules, which
Debian 12's Node 18 refuses)."""
LIMIT = 600
"""Seconds that npm may take for one command; 9 + 6 s on two cores."""


class SidebarHook(BuildHookInterface):  # type: ignore[type-arg]  hatchling knows its hooks by this class
    """Adds `share/jupyter/labextensions/mmlab` to the wheel, editable ones too."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build what is out of date and name the bundle as shared data."""
        wish = os.environ.get("MMLAB_SIDEBAR", "")
        if self.target_name != "wheel" or wish == "0":
            return
        folder = Path(self.root, "extensions")
        try:
            bundle = build(folder)
        except SidebarError as error:
            if wish == "1":
                raise
            self.app.display_warning(f"mmlab is installed without its JupyterLab sidebar: {error}")
            return
        build_data["shared_data"][str(bundle)] = "share/jupyter/labextensions/mmlab"


class SidebarError(RuntimeError):
    """Why the extension cannot be built."""


def build(folder: Path) -> Path:
    """The folder of the bundle, built unless it is of the same sources already. SidebarError when it cannot be."""
    bundle, mark = folder / "labextension", folder / "labextension" / "built-from"
    sources = _checksum(folder)
    if mark.is_file() and mark.read_text() == sources:
        return bundle
    _check_node()
    shutil.rmtree(bundle, ignore_errors=True)
    for arguments in (["ci", "--no-audit", "--no-fund"], ["run", "build"]):
        _npm(folder, arguments)
    mark.write_text(sources)
    return bundle


def _checksum(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in folder.glob(pattern) if path.is_file()}):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _check_node() -> None:
    if not shutil.which("node") or not shutil.which("npm"):
        raise SidebarError("building it needs Node 20.19 or newer with npm, which is not on PATH")
    said = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    found = re.match(r"v(\d+)\.(\d+)", said)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if not (LEAST[0] <= version < (LEAST[0][0] + 1, 0) or version >= LEAST[1]):
        raise SidebarError(f"building it needs Node 20.19 or newer, and this is {said.strip() or 'unknown'}")


def _npm(folder: Path, arguments: list[str]) -> None:
    npm = str(shutil.which("npm"))
    try:
        ended = subprocess.run(
            [npm, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SidebarError(f"npm {arguments[0]}: {error}") from None
    if ended.returncode:
        raise SidebarError(f"npm {' '.join(arguments)} failed:\n{(ended.stdout + ended.stderr)[-2000:]}")
