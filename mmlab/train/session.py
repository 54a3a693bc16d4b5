"""One generation of a run on one rank: what the loop acts on, and what each command does."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmlab.data.balance import balance
from mmlab.data.manifest import StepManifest
from mmlab.data.order import Position
from mmlab.data.pipeline import DataSource
from mmlab.errors import CheckpointError, MmlabError, PlanError, RunFailed
from mmlab.messages import PHASES, Ack, Command, EventLog, RunPaths, answered, planned_steps, read_events
from mmlab.parallel.mesh import Mesh
from mmlab.parallel.watch import Watch
from mmlab.plan import Plan, set_live
from mmlab.plan.compression import OPTIONS, checked
from mmlab.plan.keys import flatten, get
from mmlab.plan.schema import MODULES
from mmlab.train.build import Built, communication
from mmlab.train.chaos import Chaos
from mmlab.train.control import Aborted, Boundary, Channel, Listener
from mmlab.train.evaluate import Evaluator
from mmlab.train.feed import Feed
from mmlab.train.leaving import Leaving
from mmlab.train.relayout import Relayout
from mmlab.train.reported import Coded, StepResult
from mmlab.train.runner import make_runner
from mmlab.train.saves import Saves
from mmlab.train.step import Ride

SLOW_FP16 = "fp16 on a CPU: a matrix product takes 4 to 200 times as long as in fp32 (two machines measured)"


def _finite(value: float) -> float | None:
    """A number for the event log; none for one that JSON does not have."""
    return value if math.isfinite(value) else None


@dataclass
class Steering:
    """Where the run stands between two steps, equal on every rank."""

    step: int = 0
    """Steps done."""
    paused: bool = False
    remaining: int | None = None
    """Steps until the next pause, None without one."""
    stopped: bool = False
    loss: float | None = None
    """Loss of the last step."""


class Session:
    """What one rank holds while a run goes on. Rank 0 writes events; all ranks compute the same decisions."""

    def __init__(self, plan: Plan, paths: RunPaths, mesh: Mesh, built: Built, watch: Watch, listener: Listener) -> None:
        self.plan, self.paths, self.mesh, self.built, self.watch = plan, paths, mesh, built, watch
        self.log = EventLog(paths.events) if mesh.place.rank == 0 else None
        self.ledger = EventLog(paths.ledger) if mesh.place.rank == 0 else None
        self.listener = listener
        self.channel = Channel(mesh)
        self.boundary = Boundary(self.channel, listener, self.emit)
        self.source = DataSource(plan)
        self.feed = Feed(plan, mesh, self.source)
        self.runner = make_runner(plan, mesh, built, watch)
        self.evaluator = Evaluator(self.runner, plan, mesh)
        self.steering = Steering()
        self.commands_wait = True
        """Whether the last step's reduction said that a command waits; true before the first step."""
        self.lineage = ""
        self.saves = Saves(self)
        self._told_over = False
        self.relayout = Relayout(self)
        self.moving = False
        """Whether the next generation takes over, in another layout or on other engines."""
        self.members: list[dict[str, Any]] = []
        """Every rank's {"rank", "role", "pid", "host"}, once all are there."""
        self.applying = ""
        """Id of the command that is being applied."""
        self._verbs: dict[str, Callable[[dict[str, Any]], str]] = {
            "pause": self._pause, "resume": self._resume, "step": self._step_n, "set": self._set,
            "measure": self._measure, "checkpoint": self._checkpoint, "restore": self._restore,
            "relayout": self.relayout.begin, "leave": Leaving(self).leave, "stop": self._stop, "abort": self._abort,
            "chaos": Chaos(watch, mesh.place.rank, mesh.world_size).act,
        }  # fmt: skip

    def emit(self, kind: str, **fields: Any) -> None:
        """Append an event (rank 0)."""
        if self.log is not None:
            self.log.emit(kind, **fields)

    def begin_lineage(self, parent: str, parent_step: int, cursors: Position) -> None:
        """Start a new lineage that branches off another one, with the data where it stood then; all ranks together."""
        self.lineage = self.channel.share(secrets.token_hex(4))
        if self.ledger is not None:  # first: a lineage that is known has its data in the ledger
            self.ledger.lineage = self.lineage
            self.ledger.emit("data", step=parent_step, cursors=cursors.to_json(), **self.source.identity())
        if self.log is not None:
            self.log.lineage = self.lineage
        self.emit("lineage", step=parent_step, id=self.lineage, parent=parent, parent_step=parent_step)
        self.feed.reset(cursors, parent_step)

    def start(self, restore: str | None) -> None:
        """From the beginning, or from a checkpoint's name ("latest" for the newest); all ranks together."""
        self.saves.begin()
        if restore is None:
            self.begin_lineage("", 0, self.feed.cursors)
        elif not self.relayout.arrive(restore):
            self.saves.go_on(restore)
            steps = self.plan.train.steps  # the length of the run is not the checkpoint's, but what was last asked for
            if self.mesh.place.rank == 0:
                steps = planned_steps(read_events(self.paths.events)[0], steps)
            self.plan = set_live(self.plan, {"train.steps": self.channel.share(steps)})
        if self.runner.scale.active and self.mesh.device.type == "cpu":
            self.emit("warning", step=self.steering.step, message=SLOW_FP16)

    def step(self) -> None:
        """One optimizer step, its event, and the count."""
        number = self.steering.step + 1
        every = self.plan.tracking.trace_every
        self.watch.begin_step(number, traced=every > 0 and (number - 2) % every == 0)
        began = time.perf_counter()
        with self.watch.timed("data"):
            batch = self.feed.batch()
        ride = Ride(self._wanted, self.feed.next_bad, self.plan.data.global_batch, self.feed.queued)
        result = self.runner.train(self.plan, number, batch, ride)
        self.feed.agree(result.next_bad)
        self.watch.end_step()
        self.steering.step, self.steering.loss = number, result.loss
        if self.ledger is not None:  # before the step's event: what is known to be done is in the ledger
            self.ledger.emit("step", step=number, samples=batch.manifest.places())
        if result.overflow:
            fields = {"modules": result.overflow, "loss_scale": self.runner.scale.value}
            self.emit("overflow", step=number, **fields)
        if batch.bad:
            self._name_bad(number, [batch.manifest.samples[position].key for position in sorted(batch.bad)])
        self._emit_step(result, time.perf_counter() - began, batch.manifest)
        self._after_step(result)

    def _wanted(self) -> bool:
        """Whether the boundary has something from rank 0 for all ranks: commands, or a save by the clock."""
        return self.listener.waiting() or self.saves.clock_due()

    def _name_bad(self, number: int, keys: list[str]) -> None:
        """Events for the undecodable images of a step; why is known to the rank that tried. All ranks together."""
        known = self.source.bad_reasons
        reasons: dict[str, str] = {}
        for found in self.channel.gather({key: known[key] for key in keys if key in known}):
            reasons |= found
        for key in keys:
            reason = f"{reasons.get(key, 'it could not be decoded')}; its targets are masked"
            self.emit("bad_image", step=number, sample=key, reason=reason)

    def _emit_step(self, result: StepResult, seconds: float, manifest: StepManifest) -> None:
        if self.log is None:
            return
        told, tokens, images, spread = result.reported, manifest.tokens, manifest.tiles, balance(manifest)
        if "over" in spread and not self._told_over:
            self._told_over = True
            self.emit("warning", step=self.steering.step, message=(
                f"the fullest microbatch has {spread['over']} tokens more than data.token_budget = "
                f"{self.plan.data.token_budget}; a larger data.bucket_window or more microbatches may help"
            ))  # fmt: skip
        self.emit(
            "step", step=self.steering.step, loss=result.loss, tokens=tokens, images=images,
            samples=self.plan.data.global_batch, targets=result.targets, seconds=round(seconds, 5),
            tokens_per_s=round(tokens / seconds, 2), images_per_s=round(images / seconds, 2),
            data_wait=self.watch_phase(result, "data"), balance=spread,
            **({"data_queue": told.queued} if told.queued is not None else {}),
            lr=result.lr, grad_norm={m: _finite(norm) for m, norm in result.grad_norm.items()},
            grad_norm_total=_finite(result.grad_norm_total),
            **({"reduced": "momentum"} if self.plan.train.reduces_momentum(self.steering.step) else {}),
            **({"loss_scale": result.loss_scale} if self.runner.scale.active else {}),
            **({"phases": [[round(s, 5) for s in row] for row in told.phases]} if told.phases else {}),
            **({"traffic": told.traffic} if told.traffic else {}),
            **({"communication": {m: {"seconds": round(s, 5), "exposed": round(e, 5)}
                                  for m, (s, e) in told.communication.items()}} if told.communication else {}),
            **({"compression": {m: self._coding(m, c) for m, c in told.coding.items()}} if told.coding else {}),
        )  # fmt: skip

    def _coding(self, module: str, coded: Coded) -> dict[str, Any]:
        """A module's compression in the step's event: what did it, what it cost, what it lost."""
        settings = self.built.reducer.settings[module]
        options = {name: getattr(settings, name) for name in OPTIONS[settings.compressor]}
        fields = {"compressor": settings.compressor, "options": options, "seconds": round(coded.seconds, 5),
                  "residual": _finite(coded.residual), "dense": coded.dense, "kept": coded.kept}  # fmt: skip
        return fields if coded.error is None else fields | {"error": _finite(coded.error)}

    @staticmethod
    def watch_phase(result: StepResult, phase: str) -> float | None:
        """The longest time that any rank spent in a phase of a step, seconds; None without telemetry."""
        index = PHASES.index(phase)
        return round(max(row[index] for row in result.reported.phases), 5) if result.reported.phases else None

    def _after_step(self, result: StepResult) -> None:
        if self.steering.remaining is not None:
            self.steering.remaining -= 1
            if self.steering.remaining <= 0:
                self.steering.remaining, self.steering.paused = None, True
                self.emit("state", step=self.steering.step, state="paused", reason="the steps asked for are done")
        self.commands_wait = result.commands

    def apply_commands(self) -> None:
        """The boundary: apply what waits, on all ranks; return when the run is to go on or has been stopped."""
        while (self.commands_wait or self.steering.paused) and not self.over:
            self.watch.enter("control")
            commands = self.boundary.commands(wait=self.steering.paused and not self.commands_wait)
            self.commands_wait = False
            for command in commands:
                if not self.moving:  # what comes after is the next generation's
                    self._apply(command)
        self.watch.enter("control")

    def _apply(self, command: Command) -> None:
        before, self.applying = self.state, command.id
        try:
            message, ok = self._verbs[command.verb](command.args), True
        except RunFailed:
            raise  # not a refusal: the run cannot go on
        except MmlabError as error:
            message, ok = str(error), False
        ack = self.boundary.outcome(command, self.steering.step, message, ok)
        if self.state != before and not self.steering.stopped:  # a stopped run still saves; it says so at its end
            self.emit("state", step=self.steering.step, state=self.state, reason=f"{command.verb} ({command.source})")
        self.listener.answer(ack)  # last: who has the answer finds the state in the log

    def refuse_rest(self) -> None:
        """Answer what came too late to be applied: nobody is to wait for a run that has ended (rank 0)."""
        for command in self.listener.take():
            ok, message = command.verb == "stop", "the run had done its last step"
            ack = Ack(command.id, ok, self.steering.step, [0], message, time.time())
            self.emit("command", **answered(command, ack))
            self.listener.answer(ack)

    @property
    def over(self) -> bool:
        """Whether this generation does no further step, though steps may be left: stopped, or on to the next one."""
        return self.steering.stopped or self.moving

    @property
    def state(self) -> str:
        """The run's state between steps."""
        return "stopped" if self.steering.stopped else "paused" if self.steering.paused else "running"

    def _pause(self, args: dict[str, Any]) -> str:
        self.steering.paused, self.steering.remaining = True, None
        return "paused"

    def _resume(self, args: dict[str, Any]) -> str:
        self.steering.paused, self.steering.remaining = False, None
        return "goes on"

    def _step_n(self, args: dict[str, Any]) -> str:
        count = args.get("n", 1)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise PlanError(f"step takes a number of steps of at least 1, not {count!r}")
        self.steering.paused, self.steering.remaining = False, count
        return f"{count} step{'s' if count > 1 else ''}, then a pause"

    def _set(self, args: dict[str, Any]) -> str:
        values = args.get("values")
        if not isinstance(values, dict) or not values:
            raise PlanError('set takes values by dotted key, such as {"train.language.lr": 1e-4}')
        args["values"] = values = dict(flatten(values))  # who reads the log looks for dotted keys
        self.plan = checked(self.plan, values)
        self.runner.configure(self.plan, self.steering.step + 1)
        return ", ".join(f"{key} = {get(self.plan, key)}" for key in values)

    def _measure(self, args: dict[str, Any]) -> str:
        """The next step is also reduced without compression."""
        number, groups = self.steering.step + 1, self.mesh.layout.groups
        if number > self.plan.train.steps:
            raise PlanError("the run has done its last step")
        trained = [m for m in MODULES if not getattr(self.plan.train, m).frozen and any(len(g) > 1 for g in groups(m))]
        asked = [communication(self.plan)[m] for m in trained]
        if all(settings.at(number).compressor == "none" for settings in asked):
            later = any(settings.compressor != "none" for settings in asked)
            why = ": the warm-up without compression lasts" if later else ""
            raise PlanError(f"no gradients are compressed in step {number}, so there is nothing to measure{why}")
        self.runner.measure_next = True
        return f"step {number} is also reduced without compression"

    def _stop(self, args: dict[str, Any]) -> str:
        self.steering.stopped = True
        return "stopped"

    def _abort(self, args: dict[str, Any]) -> str:
        """Only where the step boundary is faster than the control thread."""
        if args.get("generation", self.listener.generation) != self.listener.generation:
            raise PlanError("it was meant for an earlier generation of the run, which has ended")
        raise Aborted

    def _checkpoint(self, args: dict[str, Any]) -> str:
        name = args.get("name") or ""
        if not isinstance(name, str):
            raise PlanError(f"checkpoint takes a name, not {name!r}")
        return self.saves.save(name, periodic=False, reason="command")

    def _restore(self, args: dict[str, Any]) -> str:
        step = args.get("step")
        if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
            raise PlanError(f"restore takes a step number, not {step!r}")
        changes = args.get("changes")
        if changes:
            self.relayout.check(changes)  # before anything is loaded
        said = self.saves.load(step, args.get("name") or "")
        if not changes:
            return said
        try:
            return f"{said}; {self.relayout.begin({'changes': changes})}"
        except RunFailed:
            raise
        except MmlabError as error:
            raise CheckpointError(f"{said}, but not in another layout: {error}") from None

    def evaluate_if_due(self) -> None:
        """The periodic evaluation on held-out samples."""
        every = self.plan.train.eval_every
        if every and self.steering.step % every == 0 and self.steering.step < self.plan.train.steps:
            self.evaluate()

    def evaluate(self) -> None:
        """Held-out loss with the right and with swapped images, and pictures with what the model writes."""
        with self.watch.timed("eval"):
            found = self.evaluator.losses(self.plan, self.steering.step)
            if found is not None:
                self.emit("eval", step=self.steering.step, **found)
            folder = self.paths.samples / f"step-{self.steering.step:06d}-{self.lineage}"
            try:
                items = self.evaluator.samples(self.plan, folder)
            except OSError as error:  # rank 0 writes the pictures, after all that ranks do together
                items = []
                self.emit("warning", step=self.steering.step, message=f"pictures could not be written: {error}")
            if items:
                self.emit("samples", step=self.steering.step, folder=str(folder), items=items)

    def close(self) -> None:
        """End helpers of this rank."""
        self.saves.close()
        self.runner.close()
        self.feed.close()
        self.evaluator.close()
        for log in (self.log, self.ledger):
            if log is not None:
                log.close()
