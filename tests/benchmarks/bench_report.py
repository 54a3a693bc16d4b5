"""What benchmarks have in common: their arguments, the machine they ran on, and how results are shown and kept."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the module's description as it stands, and --json."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--json", type=Path, help="write the results to this file")
    return found


def machine() -> str:
    """What this was measured on."""
    import torch

    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, torch {torch.__version__}, load {load}"


def keep(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Write rows with the machine as JSON, where a path is given."""
    if path:
        path.write_text(json.dumps({"machine": machine(), "rows": rows}))
