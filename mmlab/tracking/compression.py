"""How a run's gradients are compressed: what it saves, costs and loses, by module, from the events of its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmlab.plan.schema import MODULES, GroupCommunication
from mmlab.tracking.tables import WINDOW, Table, mean, milliseconds, size

Step = Mapping[str, Any]


@dataclass(frozen=True)
class ModuleCompression:
    """One module's gradients, mean of the last steps with the compressor that is in force."""

    module: str
    compressor: str
    """What coded them in the last step: "none" also while a warm-up lasts."""
    options: dict[str, Any] = field(default_factory=dict)
    """The fields of the plan that say how."""
    bytes: float | None = None
    """What its ranks together hand to collectives, bytes a step as counted; None where FSDP2 sums the gradients (they
    are then part of the "sharding" axis of the run's traffic)."""
    dense: float | None = None
    """What they would hand over without compression, bytes a step."""
    seconds: float | None = None
    """How long gradients were under way, seconds a step (on the rank where it was longest)."""
    exposed: float | None = None
    """How long of it the rank waited."""
    coding: float | None = None
    """Seconds a step spent coding (on the rank where it was longest); None without compression."""
    residual: float | None = None
    """What the ranks have left out so far: the root of the sum of their squared norms; None where it is nothing."""
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
        return self.dense / self.bytes if self.dense and self.bytes else 1.0


class CompressionTable(Table):
    """How gradients are compressed, by module; shows as a table. `rows` hold the numbers.

    `norms` is the ratio of the encoder's gradient norm to the language model's, mean of the last steps; None where one
    of them has no gradient.
    """

    header = ("gradients", "compressor", "bytes a step", "time a step", "left out", "error")
    nothing = (
        "no reduced gradients were counted: no step has ended yet, each module has one rank or is shared out without "
        "compression, or tracking.telemetry is off"
    )

    def __init__(self, steps: Iterable[Step]) -> None:
        done = list(steps)
        self.rows = [_row(m, done) for m in MODULES if done and _reduced(done[-1], m)]
        self.norms = _norm_ratio(done[-WINDOW:])

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """Module, compressor with the options that are not the plan's defaults, bytes, seconds, residual and what is
        kept, error: as shown, several lines a cell so that a row fits a terminal."""
        return [
            (row.module, _chosen(row), _bytes(row), _times(row), _left_out(row),
             "" if row.error is None else f"{row.error:.3g}\nstep {row.error_step}")
            for row in self.rows
        ]  # fmt: skip

    @property
    def below(self) -> str:
        """The ratio of the gradients' norms."""
        if self.norms is None:
            return ""
        return f"gradient norm of vision / language: {self.norms:.3g} (mean of the last {WINDOW} steps at most)"


class CompressionTrail:
    """What gradients were coded with, event by event, in bounded memory: for faces that follow a run.

    `errors` {module: (step, error)} as measured and `changes` {module: (step, compressor)} where another one came into
    force, oldest first.
    """

    def __init__(self, kept: int = 200) -> None:
        self.errors: dict[str, deque[tuple[int, float]]] = {module: deque(maxlen=kept) for module in MODULES}
        self.changes: dict[str, deque[tuple[int, str]]] = {module: deque(maxlen=kept) for module in MODULES}
        self._recent: deque[Step] = deque(maxlen=WINDOW)
        self._measured: dict[str, Step] = {}
        self._settings: dict[str, tuple[str, dict[str, Any]]] = {}

    def take(self, event: Step) -> None:
        """Note an event of the run."""
        kind = event.get("kind")
        if kind == "step":
            self._take_step(event)
        elif kind == "relayout":  # what came before was reduced over other ranks
            self._recent.clear()
            self._measured.clear()
        elif kind == "lineage" and event.get("parent"):
            self._cut(int(event.get("parent_step", 0)))

    def table(self) -> CompressionTable:
        """The table of the last steps."""
        steps = {step["step"]: step for step in (*self._measured.values(), *self._recent)}
        return CompressionTable(steps[number] for number in sorted(steps))

    def _take_step(self, event: Step) -> None:
        self._recent.append(event)
        timed, coded = event.get("communication", {}), event.get("compression", {})
        for module in MODULES:
            if module not in timed and module not in coded:
                continue
            setting = _setting(event, module)
            if setting != self._settings.get(module):
                if setting[0] != (self.changes[module][-1][1] if self.changes[module] else "none"):
                    self.changes[module].append((event["step"], setting[0]))
                self._settings[module] = setting
                self._measured.pop(module, None)
            error = coded.get(module, {}).get("error")
            if error is not None:
                self._measured[module] = event
                self.errors[module].append((event["step"], error))

    def _cut(self, step: int) -> None:
        """Forget what came after a step that the run went back to."""
        self._recent = deque((event for event in self._recent if event["step"] <= step), maxlen=WINDOW)
        self._measured = {m: event for m, event in self._measured.items() if event["step"] <= step}
        for errors, changes in zip(self.errors.values(), self.changes.values(), strict=True):
            while errors and errors[-1][0] > step:
                errors.pop()
            while changes and changes[-1][0] > step:
                changes.pop()


def telling(back: Iterable[Step]) -> list[Step]:
    """Of steps, the newest first, those of which a table says something, oldest first: the last ones, and that in which
    a module's error was last measured as it is coded now. Looks back no further than for these."""
    found: list[Step] = []
    sought: dict[str, tuple[str, dict[str, Any]]] = {}
    for step in back:
        coded = step.get("compression", {})
        if not found:
            sought = {module: _setting(step, module) for module in coded if coded[module]["compressor"] != "none"}
        sought = {module: setting for module, setting in sought.items() if _setting(step, module) == setting}
        measured = {module for module in sought if coded[module].get("error") is not None}
        if len(found) < WINDOW or measured:
            found.append(step)
        sought = {module: setting for module, setting in sought.items() if module not in measured}
        if len(found) >= WINDOW and not sought:
            break
    return found[::-1]


def _chosen(row: ModuleCompression) -> str:
    defaults = GroupCommunication()
    changed = {name: value for name, value in row.options.items() if value != getattr(defaults, name)}
    lines = ["no feedback" if name == "error_feedback" else f"{name}={value}" for name, value in changed.items()]
    return "\n".join([row.compressor, *lines])


def _bytes(row: ModuleCompression) -> str:
    if row.bytes is None:
        return "with sharding"
    return f"{size(row.bytes)}\nof {size(row.dense)}" + (f"\n{row.ratio:.3g} x less" if row.ratio != 1.0 else "")


def _times(row: ModuleCompression) -> str:
    lines = [] if row.exposed is None else [f"waited {milliseconds(row.exposed)}", f"of {milliseconds(row.seconds)}"]
    return "\n".join(lines + ([] if row.coding is None else [f"coding {milliseconds(row.coding)}"]))


def _left_out(row: ModuleCompression) -> str:
    lines = [] if row.residual is None else [f"{row.residual:.3g}"]
    lines += [] if row.residual_share is None else [f"{row.residual_share:.3g} of norm"]
    return "\n".join(lines + ([f"{size(row.kept)} kept"] if row.kept else []))


def _reduced(step: Step, module: str) -> bool:
    """Whether a step has something to tell about the reduction of a module's gradients."""
    return module in step.get("communication", {}) or module in step.get("compression", {})


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
        if not _reduced(step, module) or _setting(step, module) != (compressor, options):
            break
        alike.append(step)
    recent = alike[:WINDOW]
    coded = [step["compression"][module] for step in recent if module in step.get("compression", {})]
    timed = [step["communication"][module] for step in recent if module in step.get("communication", {})]
    counted = mean(sum(step["traffic"][module]) for step in recent if module in step["traffic"]) if timed else None
    measured = next((s for s in alike if s.get("compression", {}).get(module, {}).get("error") is not None), None)
    residual = coded[0]["residual"] if coded else None
    norm = last.get("grad_norm", {}).get(module)
    return ModuleCompression(
        module,
        compressor,
        options,
        bytes=counted,
        dense=coded[0]["dense"] if coded else counted,
        seconds=mean(t["seconds"] for t in timed) if timed else None,
        exposed=mean(t["exposed"] for t in timed) if timed else None,
        coding=mean(c["seconds"] for c in coded) if coded and compressor != "none" else None,
        residual=residual or None,
        residual_share=residual / norm if residual and norm else None,
        error=None if measured is None else measured["compression"][module]["error"],
        error_step=None if measured is None else measured["step"],
        kept=coded[0]["kept"] if coded else 0,
    )


def _norm_ratio(steps: list[Step]) -> float | None:
    """Mean ratio of the encoder's gradient norm to the language model's."""
    norms = [step.get("grad_norm", {}) for step in steps]
    ratios = [n["vision"] / n["language"] for n in norms if n.get("vision") and n.get("language")]
    return mean(ratios) if ratios else None
