"""How gradients are compressed: chosen per group, and what that saves, costs and loses beside the loss."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any

from mmlab.plan.compression import COMPRESSORS, GROUPS, OPTIONS, SHARED
from mmlab.plan.keys import known_keys
from mmlab.tracking.compression import ModuleCompression
from mmlab.ui.commands import newest, waiting
from mmlab.ui.panel import RunPanel

DRAWN = 120
"""Points of the small loss curve."""
MARKED = 40
"""Measured errors and changes of compressor that are drawn, the last ones."""


class Compression(RunPanel):
    """Per group the compressor and its parameters; bytes a step dense against sent, time, what is left out, error."""

    name = "compression"
    title = "Compression"
    spoken = ("fields.*.help", "fields.*.expects", "nothing", "controls.*.text", "controls.*.message")
    every = 0.5

    def frame(self) -> dict[str, Any]:
        """The fields with bounds and help, what is chosen, the figures of the last steps, the curve and its marks."""
        trail = self.feed.compression
        plan = self.feed.live_plan()
        table = trail.table()
        return {
            "state": self.feed.state,
            "step": self.feed.step,
            "compressors": [[name, list(OPTIONS[name])] for name in COMPRESSORS],
            "shared": list(SHARED),
            "fields": fields(),
            "chosen": {group: _settings(getattr(plan.communication, group)) for group in GROUPS},
            "projector": "vision" if plan.parallel.projector == "vision" else "language",
            "rows": [_row(row) for row in table.rows],
            "nothing": table.nothing,
            "loss": self._loss(),
            "errors": {m: list(e)[-MARKED:] for m, e in trail.errors.items() if e},
            "changes": {m: list(c)[-MARKED:] for m, c in trail.changes.items() if c},
            "controls": {
                key: told
                for key, told in newest(self.feed, waiting(self.feed)).items()
                if key == "measure" or key.startswith("compress ")
            },
        }

    def _loss(self) -> list[list[float]]:
        """[step, loss] of the run, at most DRAWN points."""
        x, y = self.feed.curves["loss"].points()
        stride = max(1, math.ceil(len(x) / DRAWN))
        kept = [i for i in range(len(x)) if (len(x) - 1 - i) % stride == 0 and math.isfinite(y[i])]
        return [[x[i], float(f"{y[i]:.4g}")] for i in kept]

    def handle(self, verb: str, args: dict[str, Any]) -> Any:
        """`compress` {group, compressor, options} and `measure`: the command's id, once it is in the inbox."""
        run = self.source.run
        if verb == "compress":
            group = str(args.get("group"))
            typed = {name: as_typed(name, text) for name, text in dict(args.get("options") or {}).items()}
            return {"id": run.compress(group, str(args.get("compressor")), **typed).id}
        if verb == "measure":
            return {"id": run.measure_compression().id}
        raise ValueError(f"unknown command {verb!r}")

    def text(self) -> str:
        """The table of `run.compression()`."""
        return str(self.feed.compression.table())

    def html(self) -> str:
        """The same table."""
        return self.feed.compression.table().html()


@cache
def fields() -> dict[str, dict[str, Any]]:
    """The parameters by name: {"kind": "choice" | "switch" | "number", "choices", "default", "expects", "help"}."""
    names = {"compressor", *SHARED, *(option for options in OPTIONS.values() for option in options)}
    found = {}
    for name in sorted(names):
        key = known_keys()[f"communication.vision.{name}"]
        kind = "switch" if key.kind is bool else "choice" if key.choices else "number"
        found[name] = {
            "kind": kind, "choices": list(key.choices), "default": key.default, "expects": key.expects, "help": key.doc,
            "whole": key.kind is int,
        }  # fmt: skip
    return found


def as_typed(name: str, text: Any) -> Any:
    """What a page has for a parameter, as the plan's type. ValueError says what it expects."""
    known = fields().get(name)
    if known is None or not isinstance(text, str) or known["kind"] != "number":
        return text
    try:
        return int(text) if known["whole"] else float(text)
    except ValueError:
        raise ValueError(f"{name} = {text!r}: it takes {known['expects']}") from None


def _settings(section: Any) -> dict[str, Any]:
    return {name: getattr(section, name) for name in fields()}


def _row(row: ModuleCompression) -> dict[str, Any]:
    """The figures of a module; numbers that JSON lacks become none."""
    found = dataclasses.asdict(row) | {"ratio": row.ratio}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in found.items()
    }
