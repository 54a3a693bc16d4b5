"""What holds a run back: data, encoder, pipeline, communication or optimizer, from the times that its ranks report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmlab.messages import PHASES
from mmlab.plan.holders import beside_encoder
from mmlab.plan.schema import MODULES
from mmlab.tracking.balance import spread
from mmlab.tracking.tables import WINDOW, Table, mean, milliseconds

if TYPE_CHECKING:
    from mmlab.plan import Plan

SKIPPED = 2
"""First steps of a run, which make buffers and are left out as soon as there are others."""
CODING = 1e9
"""Bytes a second that a link must carry for compression not to pay: coding and decoding take a core about 4 ms for a
bucket of 4 MB (`tests/benchmarks/coded_sums.py`), shared memory less than one."""
NOTICED = 0.1
"""Share of a step below which nothing is said to hold a run back: two cores' noise is as large."""
_SUBJECTS = {"data": "Data hold", "communication": "Communication holds"}
Changes = tuple[str, ...]


@dataclass(frozen=True)
class Wait:
    """How much shorter a step could be at most if one cause took no time."""

    cause: str
    seconds: float
    """Of a step, on the ranks that `what` names."""
    share: float
    """The same, divided by the time of a step."""
    what: str
    """What the seconds are, in words."""


class Bottleneck(Table):
    """What holds a run back, in one sentence, with what to try; the table below it has all causes, largest first.

    `waits` are the causes; `cause` is the one that counts: data, encoder, pipeline, communication or optimizer, or
    "compute" where none takes a tenth of the step; `changes` are overrides of the plan to try, which the plan admits
    (empty where nothing is known to help); `seconds` the mean time of a step; `ahead` the mean number of steps that
    lay decoded when the next one was asked for (None where nobody told).
    """

    header = ("what", "a step", "share", "how it is measured")
    nothing = "nothing was timed: no step has ended yet, or tracking.telemetry is off"

    def __init__(self, plan: Plan, steps: Iterable[Mapping[str, Any]]) -> None:
        steps = list(steps)
        self._spread = spread(plan, steps)
        timed = [step for step in steps if step.get("phases")]
        timed = (timed[SKIPPED:] or timed)[-WINDOW:]
        self.plan = plan
        self.seconds = mean(step["seconds"] for step in timed)
        self.waits: list[Wait] = []
        self.changes: Changes = ()
        self.cause = "compute"
        self.ahead: float | None = None
        if not timed:
            return
        rows = [[mean(step["phases"][rank][i] for step in timed) for i in range(len(PHASES))]
                for rank in range(plan.world_size)]  # fmt: skip
        self._times = [dict(zip(PHASES, row, strict=True)) for row in rows]
        depths = [step["data_queue"] for step in timed if "data_queue" in step]
        self.ahead = mean(depths) if depths else None
        found = [*self._of_ranks(), self._communication(timed)]
        self.waits = sorted(found, key=lambda wait: -wait.seconds)
        if self.waits[0].share >= NOTICED:
            self.cause = self.waits[0].cause
        self.changes = next((c for c in self._ideas(timed) if _admitted(plan, c)), ())

    def _wait(self, cause: str, seconds: float, what: str) -> Wait:
        return Wait(cause, seconds, seconds / self.seconds if self.seconds else 0.0, what)

    def _of_ranks(self) -> Iterator[Wait]:
        """What the phases of the ranks tell."""
        layout, p = self.plan.layout(), self.plan.parallel
        stages = [place for place in layout.places if place.role == "language"]
        most = max(times["data"] for times in self._times)
        ahead = "" if self.ahead is None else f", {self.ahead:.1f} steps decoded ahead in the mean"
        yield self._wait("data", most, f"waiting for images and text, on the rank that waits most{ahead}")
        if p.vision == "own_ranks":
            first = [self._times[place.rank]["exchange"] for place in stages if place.pp == 0]
            yield self._wait("encoder", mean(first), "waiting for image tokens, mean of the first stage's ranks")
        else:
            most = max(self._times[rank]["encode"] for rank in layout.vision_ranks)
            yield self._wait("encoder", most, "encoding, on the rank that encodes longest")
        if p.pp > 1:
            least = min(self._times[place.rank]["pipeline"] for place in stages)
            yield self._wait("pipeline", least, "waiting for other stages, on the stage that waits least")
        most = max(times["optimizer"] for times in self._times)
        yield self._wait("optimizer", most, "updating weights, on the rank where it takes longest")

    def _communication(self, steps: list[Mapping[str, Any]]) -> Wait:
        """What is not hidden behind backward, and what coding costs."""
        sides = dict.fromkeys((True, False), 0.0)  # the encoder's ranks and the others wait at the same time
        for module in MODULES:
            sides[beside_encoder(self.plan, module)] += self._waited(steps, module) + self._coding(steps, module)
        seconds = max(sides.values())
        return self._wait("communication", seconds, "waiting for gradients and coding them, where it takes longest")

    @staticmethod
    def _waited(steps: list[Mapping[str, Any]], module: str) -> float:
        return mean(step.get("communication", {}).get(module, {}).get("exposed", 0.0) for step in steps)

    @staticmethod
    def _coding(steps: list[Mapping[str, Any]], module: str) -> float:
        return mean(step.get("compression", {}).get(module, {}).get("seconds", 0.0) for step in steps)

    def _ideas(self, steps: list[Mapping[str, Any]]) -> Iterator[Changes]:
        """What may help against the cause, the likeliest first."""
        plan, p = self.plan, self.plan.parallel
        if self.cause == "data":
            if self.ahead is not None and self.ahead >= 1:  # it decodes fast enough, but not evenly
                yield (f"data.prefetch={2 * plan.data.prefetch}",)
            yield (f"data.workers={plan.data.workers + 1}",)
        elif self.cause == "encoder" and p.vision == "own_ranks":
            if plan.train.vision.frozen and not p.encoder_ahead:
                yield ("parallel.encoder_ahead=1",)
            yield (f"parallel.vision_dp={p.vision_dp + 1}",)
            yield (f"parallel.vision_dp={2 * p.vision_dp}",)
            yield (f"parallel.encoder_batch={2 * p.encoder_batch}",)
        elif self.cause == "encoder":
            yield ("parallel.vision=own_ranks", "parallel.vision_dp=1")
        elif self.cause == "pipeline":
            yield (f"parallel.microbatches={2 * p.microbatches}",)
            yield ("parallel.schedule=zb_h1",) if p.schedule != "zb_h1" else ("parallel.balance=measured",)
        elif self.cause == "communication":
            yield from self._less_communication(steps)
        elif self.cause == "optimizer" and p.sharding == "none":
            yield ("parallel.sharding=zero1",)

    def _less_communication(self, steps: list[Mapping[str, Any]]) -> Iterator[Changes]:
        """Less coding where that takes longer than the wait, fewer bytes where the link is slower than coding is; else
        more computing for each reduction."""
        plan = self.plan
        most = max(MODULES, key=lambda module: self._waited(steps, module) + self._coding(steps, module))
        side = "vision" if beside_encoder(plan, most) else "language"
        compressor = f"communication.{side}.compressor"
        now = steps[-1].get("compression", {}).get(most, {}).get("compressor", "none")
        if now != "none" and self._coding(steps, most) > self._waited(steps, most):
            yield (f"{compressor}=none",)
        elif self._speed(steps, most) < CODING and getattr(plan.communication, side).compressor == now:
            if now in ("none", "bf16", "fp16", "int8"):
                yield (f"{compressor}=powersgd",)
            if now == "none":
                yield (f"{compressor}=bf16",)
        samples, microbatches = 2 * plan.data.global_batch, 2 * plan.parallel.microbatches
        yield (f"data.global_batch={samples}", f"parallel.microbatches={microbatches}")

    def _speed(self, steps: list[Mapping[str, Any]], module: str) -> float:
        """Bytes a second at which a rank's gradients were reduced."""
        told = [s for s in steps if module in s.get("communication", {}) and module in s.get("traffic", {})]
        ranks = sum(map(len, self.plan.layout().groups(module)))
        seconds = mean(step["communication"][module]["seconds"] for step in told)
        return mean(sum(step["traffic"][module]) for step in told) / ranks / seconds if seconds else 0.0

    @property
    def sentence(self) -> str:
        """What holds the run back, with the numbers and what to try."""
        if not self.waits:
            return self.nothing
        most = self.waits[0]
        if self.cause == "compute":
            return (
                f"Nothing but computing takes {NOTICED:.0%} of a step ({self.seconds * 1e3:.0f} ms): the largest other "
                f"part is {most.cause}, {most.share:.0%}. More ranks or faster ones are what would help."
            )
        hint = f" Try {' '.join(self.changes)}." if self.changes else ""
        times = f"{most.seconds * 1e3:.0f} of {self.seconds * 1e3:.0f} ms of a step ({most.share:.0%})"
        subject = _SUBJECTS.get(self.cause, f"The {self.cause} holds")
        return f"{subject} the run back: {times}, {most.what}.{hint}"

    @property
    def below(self) -> str:
        """How evenly the work of a step is spread."""
        return self._spread

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """Cause, time, share, how it is measured."""
        return [(w.cause, milliseconds(w.seconds), f"{w.share:.0%}", w.what) for w in self.waits]

    def __str__(self) -> str:
        return f"{self.sentence}\n\n{super().__str__()}" if self.waits else super().__str__()

    def html(self) -> str:
        """The sentence and the table as HTML."""
        return f"<p>{self.sentence}</p>{super().html()}" if self.waits else super().html()


def _admitted(plan: Plan, changes: Changes) -> bool:
    """Whether a plan with changes has no problem."""
    return not plan.with_(*changes).check()
