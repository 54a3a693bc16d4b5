"""How far apart the weights of two checkpoints are. `mmlab.cluster.compare` starts this module as a process.

Tensors are read whole, some at a time, by global name: layouts do not matter. A module whose frozen parts have the same
content in both is not read.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from mmlab.errors import CheckpointError, DamagedError, MmlabError
from mmlab.messages.locations import Location
from mmlab.plan.schema import MODULES
from mmlab.train.checkpoint.catalog import damage
from mmlab.train.checkpoint.loading import Opened
from mmlab.train.checkpoint.state import MODEL

MOST = 10
"""Tensors that are listed: those that changed most."""
AT_ONCE = 1 << 26
"""Bytes of each checkpoint that are held at once, unless one tensor has more."""


def compare_weights(first: Location, second: Location) -> dict[str, Any]:
    """ "modules", "tensors", "only" and "reshaped" of a `Comparison`.

    CheckpointError when one of them is incomplete, damaged or cannot be read.
    """
    before, after = Opened.of(first), Opened.of(second)
    frozen = before.manifest.get("frozen", {})
    same = {module for module, part in frozen.items() if _content(after, module) == part["content"]}
    held = [_names(opened, place, same) for opened, place in ((before, first), (after, second))]
    both = [name for name in held[0] if name in held[1]]
    reshaped = [name for name in both if _shape(before, name) != _shape(after, name)]
    found = []
    for opened, names in ((before, held[0]), (after, held[1])):
        _check(opened, names)
    for names in _batches(before, [name for name in both if name not in reshaped]):
        values = zip(_read(before, names), _read(after, names), strict=True)
        found += [_measure(name, a, b) for name, (a, b) in zip(names, values, strict=True)]
    modules = [_module(name, [f for f in found if f["module"] == name], name in same) for name in MODULES]
    found.sort(key=lambda f: -f["difference"] if math.isfinite(f["difference"]) else -math.inf)
    return {
        "modules": [m for m in modules if m["tensors"] or m["same"]],
        "tensors": [_told(f) for f in found[:MOST] if f["difference"] != 0],
        "only": [[name for name in mine if name not in others] for mine, others in (held, held[::-1])],
        "reshaped": reshaped,
    }


def _content(opened: Opened, module: str) -> str:
    return str(opened.manifest.get("frozen", {}).get(module, {}).get("content", ""))


def _names(opened: Opened, folder: Location, same: set[str]) -> list[str]:
    """The weights of a checkpoint, without the frozen parts that need no comparison."""
    names = [key.removeprefix(MODEL) for key in sorted(opened.tensors) if key.startswith(MODEL)]
    frozen = {name for name in names if opened.tensors[MODEL + name][0].address != folder.address}
    return [name for name in names if not (name in frozen and name.partition(".")[0] in same)]


def _shape(opened: Opened, name: str) -> tuple[int, ...]:
    return tuple(opened.tensors[MODEL + name][1].size)


def _bytes(opened: Opened, name: str) -> int:
    entry = opened.tensors[MODEL + name][1]
    return math.prod(entry.size) * int(entry.properties.dtype.itemsize)


def _check(opened: Opened, names: list[str]) -> None:
    """DamagedError when a file that is about to be read is not what was saved."""
    read = {opened.tensors[MODEL + name][0].address for name in names}
    for place, own in opened.places:
        if place.address in read and (wrong := damage(place, own, sorted(own["files"]))):
            raise DamagedError(wrong)


def _batches(opened: Opened, names: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    held = 0
    for name in names:
        if batch and held + _bytes(opened, name) > AT_ONCE:
            yield batch
            batch, held = [], 0
        batch.append(name)
        held += _bytes(opened, name)
    if batch:
        yield batch


def _read(opened: Opened, names: list[str]) -> list[Tensor]:
    values = {}
    for name in names:
        entry = opened.tensors[MODEL + name][1]
        values[MODEL + name] = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
    opened.read(dict(values), None, alone=True)
    return list(values.values())


def _measure(name: str, a: Tensor, b: Tensor) -> dict[str, Any]:
    """Norms in float64."""
    difference, norm = float((b.double() - a.double()).norm()), float(a.double().norm())
    return {"name": name, "module": name.partition(".")[0], "difference": difference, "norm": norm,
            "shape": list(a.shape), "count": a.numel()}  # fmt: skip


def _module(name: str, found: list[dict[str, Any]], same: bool) -> dict[str, Any]:
    difference, norm = (math.hypot(*(f[key] for f in found)) for key in ("difference", "norm"))
    return {
        "module": name, "change": _ratio(difference, norm), "norm": norm if math.isfinite(norm) else None,
        "parameters": sum(f["count"] for f in found), "tensors": len(found),
        "changed": sum(f["difference"] != 0 for f in found), "same": same,
    }  # fmt: skip


def _told(found: dict[str, Any]) -> dict[str, Any]:
    difference = found["difference"]
    return {
        "name": found["name"], "module": found["module"], "change": _ratio(difference, found["norm"]),
        "difference": difference if math.isfinite(difference) else None, "shape": found["shape"],
    }  # fmt: skip


def _ratio(difference: float, norm: float) -> float | None:
    """A relative change; None where it is not finite (from zero, or with values that are not numbers)."""
    if difference == 0:
        return 0.0
    ratio = difference / norm if norm else math.inf
    return ratio if math.isfinite(ratio) else None


def main(arguments: list[str]) -> int:
    """The addresses of two checkpoints as JSON; prints the result as JSON. 1 and a sentence when it fails."""
    try:
        found = compare_weights(*(Location(address) for address in json.loads(arguments[0])))
    except (MmlabError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except (dcp.CheckpointException, EOFError, RuntimeError) as error:
        print(CheckpointError(f"a checkpoint cannot be read: {str(error).splitlines()[0]}"), file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    os.nice(5)  # a run beside it comes first
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
