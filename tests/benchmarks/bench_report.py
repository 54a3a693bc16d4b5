"""What benchmarks have in common: arguments, the machine they ran on, PyTorch's own step, how results are kept."""

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


def plain_step(model: Any, rank: int) -> Any:
    """A function that runs one step of a wrapped plain model on a batch as PyTorch's examples do it; rank's samples are
    those of its first microbatch."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: Any) -> float:
        own = batch.manifest.microbatch(rank, 0)
        pixels = torch.cat([batch.pixels[position] for position in own])
        loss = model(batch.texts[0], pixels) / batch.targets
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def keep(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Write rows with the machine as JSON, where a path is given."""
    if path:
        path.write_text(json.dumps({"machine": machine(), "rows": rows}))
