"""How a run's gradients are compressed: what it saves, costs and loses, by module, from the events of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmlab.plan.schema import MODULES
from mmlab.tracking.tables import Table, milliseconds, size

WINDOW = 20
"""Last steps over which bytes, seconds and the ratio of gradient norms are averaged."""
Step = Mapping[str, Any]


@dataclass(frozen=True)
class ModuleCompression:
    """One module's gradients, mean of the last steps with the compressor that is in force."""

    module: str
    compressor: str
    """What coded them in the last step: "none" also while a warm-up lasts."""
    options: dict[str, Any] = field(default_factory=dict)
    """The fields of the plan that say how."""
    bytes: float = 0.0
    """What its ranks together hand to collectives, bytes a step as counted."""
    dense: float = 0.0
    """What they would hand over without compression, bytes a step."""
    seconds: float = 0.0
    """How long gradients were under way, seconds a step (on the rank where it was longest)."""
    exposed: float = 0.0
    """How long of it the rank waited."""
    coding: float | None = None
    """Seconds a step spent coding (on the rank where it was longest); None without compression."""
    residual: float | None = None
    """Norm of what all ranks have left out so far; None where nothing is left out."""
    residual_share: float | None = None
    """The same, divided by the norm of the module's gradient."""
    error: float | None = None
    """||reduced - dense|| / ||dense|| when it was last measured with this compressor; None where it never was."""
    error_step: int | None = None
    """The step in which that was."""
    kept: int = 0
    """What its ranks together keep between steps: residuals and factors, bytes."""

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than without compression."""
        return self.dense / self.bytes if self.bytes else 1.0


class CompressionTable(Table):
    """How gradients are compressed, by module; shows as a table. `rows` hold the numbers.

    `norms` is the ratio of the encoder's gradient norm to the language model's, mean of the last steps; None where one
    of them has no gradient.
    """

    header = (
        "gradients of", "compressor", "a step", "dense", "ratio", "under way", "waited", "coding", "left out so far",
        "relative error", "kept",
    )  # fmt: skip
    nothing = (
        "no reduced gradients were counted: no step has ended yet, each module has one rank or is sharded by FSDP2, or "
        "tracking.telemetry is off"
    )

    def __init__(self, steps: Iterable[Step]) -> None:
        done = list(steps)
        self.rows = [_row(m, done) for m in MODULES if done and m in done[-1].get("communication", {})]
        self.norms = _norm_ratio(done[-WINDOW:])

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """Module, compressor, bytes and seconds, residual, error, state: as shown."""
        return [
            (
                row.module,
                " ".join([row.compressor, *(f"{name}={value}" for name, value in row.options.items())]),
                size(row.bytes),
                size(row.dense),
                f"{row.ratio:.3g} x",
                milliseconds(row.seconds),
                milliseconds(row.exposed),
                milliseconds(row.coding),
                _left_out(row),
                "" if row.error is None else f"{row.error:.3g} in step {row.error_step}",
                size(row.kept) if row.kept else "",
            )
            for row in self.rows
        ]

    @property
    def below(self) -> str:
        """The ratio of the gradients' norms."""
        if self.norms is None:
            return ""
        return f"gradient norm of vision / language: {self.norms:.3g} (mean of the last {WINDOW} steps at most)"


def _left_out(row: ModuleCompression) -> str:
    if row.residual is None:
        return ""
    share = "" if row.residual_share is None else f" ({row.residual_share:.3g} of the gradient)"
    return f"{row.residual:.3g}{share}"


def _setting(step: Step, module: str) -> tuple[str, dict[str, Any]]:
    """Compressor and options of a module in a step."""
    coded = step.get("compression", {}).get(module)
    return ("none", {}) if coded is None else (coded["compressor"], coded["options"])


def _row(module: str, done: list[Step]) -> ModuleCompression:
    """The module in the last steps that were coded as the very last one was."""
    last = done[-1]
    compressor, options = _setting(last, module)
    alike = []
    for step in reversed(done):
        if module not in step.get("communication", {}) or _setting(step, module) != (compressor, options):
            break
        alike.append(step)
    recent = alike[:WINDOW]
    coded = [step["compression"][module] for step in recent if module in step.get("compression", {})]
    counted = _mean(sum(step["traffic"][module]) for step in recent)
    measured = next((s for s in alike if s.get("compression", {}).get(module, {}).get("error") is not None), None)
    residual = coded[0]["residual"] if coded else None
    norm = last.get("grad_norm", {}).get(module)
    return ModuleCompression(
        module,
        compressor,
        options,
        bytes=counted,
        dense=coded[0]["dense"] if coded else counted,
        seconds=_mean(step["communication"][module]["seconds"] for step in recent),
        exposed=_mean(step["communication"][module]["exposed"] for step in recent),
        coding=_mean(c["seconds"] for c in coded) if coded and compressor != "none" else None,
        residual=residual or None,
        residual_share=residual / norm if residual and norm else None,
        error=None if measured is None else measured["compression"][module]["error"],
        error_step=None if measured is None else measured["step"],
        kept=coded[0]["kept"] if coded else 0,
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _norm_ratio(steps: list[Step]) -> float | None:
    """Mean ratio of the encoder's gradient norm to the language model's."""
    norms = [step.get("grad_norm", {}) for step in steps]
    ratios = [n["vision"] / n["language"] for n in norms if n.get("vision") and n.get("language")]
    return _mean(ratios) if ratios else None
