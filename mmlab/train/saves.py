"""When a run saves and restores: the step boundary's side of checkpoints. `checkpoint` writes and reads them."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.data.order import Position
from mmlab.errors import CheckpointError, DamagedError, PlanError
from mmlab.messages import Event, read_events
from mmlab.messages.checkpoints import called, check_name, location_of, manifests
from mmlab.messages.locations import Location
from mmlab.plan import Plan, live_keys
from mmlab.plan.compression import checked
from mmlab.plan.keys import get
from mmlab.train import checkpoint, rng

if TYPE_CHECKING:
    from mmlab.train.session import Session


class Saves:
    """Saves and restores of one generation of a run on one rank; all ranks call the same at the same boundary.

    At most one save is under way: whatever needs its outcome, the next save included, waits for it.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.checkpoints = location_of(session.paths, session.plan.checkpoint.location)
        self.staging = checkpoint.Staging(session.mesh.device)
        self.retention = checkpoint.Retention(self.checkpoints)
        self._saved: tuple[str, int, str] | None = None
        """Lineage, step and name of the last one that was not given a name."""
        self._under_way: checkpoint.Save | None = None
        self._contents: dict[str, str] | None = None
        self._count = 0
        self.last_seconds = 0.0
        """What the last save took (rank 0); 0 before the first."""
        self._clock = time.monotonic()

    def begin(self) -> None:
        """Before anything is saved or restored: see that the location can be written, and remove what interrupted saves
        have left; all ranks together. CheckpointError when it cannot be written."""
        here, left, error = self.session, [], None
        if here.mesh.place.rank == 0:
            try:
                self.checkpoints.make()
                if self.checkpoints.local is None:
                    self.checkpoints.write(".reached", b"")
                left = self.retention.clean()
            except OSError as problem:
                error = CheckpointError(f"checkpoint.location {self.checkpoints} cannot be written: {problem}")
        checkpoint.agree(here.mesh, error)
        if left:
            names = ", ".join(left)
            message = f"removed what interrupted saves had left: {names}"
            here.emit("warning", step=here.steering.step, message=message)
        rng.seed(here.plan.train.seed, here.mesh.device)

    def save(self, name: str, periodic: bool, reason: str = "", wait: bool = True) -> str:
        """Save a checkpoint of this step; all ranks together. CheckpointError when it fails.

        Without `wait` it is written while the run goes on; a failure is then a warning event. A periodic one is not
        saved where there is one of this step already: it would take the place of one made on command, which is kept
        for good. Returns a sentence.
        """
        here = self.session
        check_name(name)
        self.finish()
        step = here.steering.step
        if periodic and self._saved is not None and self._saved[:2] == (here.lineage, step) and self._there():
            return "saved before"
        named = name or f"step-{step:06d}-{here.lineage}"
        self._saved = self._saved if name else (here.lineage, step, named)
        with here.watch.timed("checkpoint"):
            self._start(named, periodic, reason, wait)
            if wait:
                self.finish(raises=True)
        return f"saved {named}"

    def _there(self) -> bool:
        """Whether the last one that was not given a name still is: it may have been deleted or given one meanwhile."""
        here, found = self.session, False
        if here.mesh.place.rank == 0 and self._saved is not None:
            try:
                found = any(called(*pair) == self._saved[2] for pair in manifests(self.checkpoints))
            except OSError:
                found = False
        return bool(here.channel.share(found))

    def now(self, reason: str) -> str:
        """Save at once, whatever the plan says of when, and wait until it is complete; all ranks together. Returns the
        checkpoint's name: that of one of this step where there is one. CheckpointError when it fails."""
        self.save("", periodic=True, reason=reason)
        assert self._saved is not None
        return self._saved[2]

    def _start(self, name: str, periodic: bool, reason: str, wait: bool) -> None:
        here = self.session
        stall = time.perf_counter()
        at = functools.partial(self._at, here.steering.step)
        at("save: stage")
        state, frozen = checkpoint.saved_state(here.plan, here.mesh, here.built)
        if self._contents is None:  # what is frozen does not change in a generation
            self._contents = checkpoint.contents(here.mesh, frozen)
        if not wait:
            state = self.staging.copy(state)
        self._count += 1
        content = checkpoint.Content(state, self._about(here.plan, periodic, reason), frozen, self._contents)
        known = f"{here.lineage}/{self._count}"
        made = checkpoint.Save(here.mesh, self.checkpoints, name, content, known, at, self._done)
        made.waited, made.step, made.stall = wait, here.steering.step, time.perf_counter() - stall
        self._under_way, self._clock = made, time.monotonic()
        made.start()

    def _about(self, plan: Plan, periodic: bool, reason: str) -> dict[str, Any]:
        """What the manifest of a checkpoint of this step says besides what it holds."""
        here = self.session
        return {
            "step": here.steering.step, "lineage": here.lineage, "cursors": here.feed.cursors.to_json(),
            "periodic": periodic, "plan": plan.dumps(), "loss": here.steering.loss,
            "loss_scale": here.runner.scale.state(), "began": time.time(), "reason": reason,
            "steering": {"paused": here.steering.paused, "remaining": here.steering.remaining},
        }  # fmt: skip

    def write(self, folder: Path, plan: Plan, periodic: bool = False) -> dict[str, Any]:
        """Save this step into a folder of its own, frozen modules too, with `plan` as what it goes on by, and wait; all
        ranks together. The manifest on rank 0. CheckpointError when it fails."""
        here = self.session
        self.finish()
        with here.watch.timed("checkpoint"):
            about = self._about(plan, periodic, "relayout")
            return checkpoint.save(here.plan, here.mesh, here.built, folder, about)

    def _at(self, step: int, phase: str) -> None:
        """A phase of the save of a step begins, in whatever thread: where scripted faults strike."""
        if self.session.watch.fault is not None:
            self.session.watch.fault(step, phase)

    def _done(self, made: checkpoint.Save) -> None:
        """A save has ended: say so, and remove what is no longer kept (in the thread that wrote it; rank 0)."""
        here = self.session
        if here.mesh.place.rank != 0:
            return
        step = made.step
        if isinstance(made.problem, CheckpointError) and not made.waited:
            here.emit("warning", step=step, message=f"{made.problem}; the run goes on without it")
        elif made.problem is None:
            m = made.manifest
            self.last_seconds = m["seconds"]
            stall = m["seconds"] if made.waited else made.stall
            shared = sum(part["bytes"] for part in m["frozen"].values())
            here.emit("checkpoint", step=step, name=m["name"], path=str(made.folder), seconds=round(m["seconds"], 3),
                      stall=round(stall, 4), bytes=m["bytes"], shared_bytes=shared, periodic=m["periodic"],
                      reason=m["reason"])  # fmt: skip
            keep = here.plan.checkpoint
            self.retention.prune(keep.keep_last, keep.keep_every)

    @property
    def idle(self) -> bool:
        """Whether this rank has nothing left to write."""
        return self._under_way is None or self._under_way.ended

    def finish(self, raises: bool = False) -> None:
        """Wait for the save under way; all ranks together. With `raises`, CheckpointError when it has failed."""
        made = self._under_way
        if made is None:
            return
        try:
            made.wait()
        except CheckpointError:
            self._saved = None if self._saved is not None and self._saved[2] == made.name else self._saved
            if raises:
                raise
        finally:
            self._under_way = None

    def end(self) -> None:
        """The end of a run: the last checkpoint, or what is under way."""
        here = self.session
        if here.plan.checkpoint.at_end and here.steering.step > 0:
            self.attempt(reason="end")
        self.finish()

    def close(self) -> None:
        """The generation is over: a save that is still under way is given up."""
        if self._under_way is not None:
            self._under_way.give_up()
        self._under_way = None

    def if_due(self) -> None:
        """The periodic checkpoint. A save that fails is reported and the run goes on."""
        here, keep = self.session, self.session.plan.checkpoint
        if here.steering.step >= here.plan.train.steps:
            return
        if keep.every_steps and here.steering.step % keep.every_steps == 0:
            self.attempt(reason=f"every {keep.every_steps} steps", wait=not keep.asynchronous)
        elif keep.every_minutes and here.commands_wait and here.channel.share(self.clock_due()):
            self.attempt(reason=f"every {keep.every_minutes:g} minutes", wait=not keep.asynchronous)

    def clock_due(self) -> bool:
        """Whether `checkpoint.every_minutes` have passed since the last save, by this rank's clock. Rank 0's counts: it
        rides in the step's reduction like a command that waits."""
        minutes = self.session.plan.checkpoint.every_minutes
        return self.session.mesh.place.rank == 0 and minutes > 0 and time.monotonic() - self._clock >= 60.0 * minutes

    def attempt(self, reason: str = "", wait: bool = True) -> None:
        """Save; a failure becomes a warning event."""
        here = self.session
        try:
            self.save("", periodic=True, reason=reason, wait=wait)
        except CheckpointError as error:
            here.emit("warning", step=here.steering.step, message=str(error))

    # -- restoring

    def load(self, step: int | None, name: str) -> str:
        """Load a checkpoint (neither step nor name: the newest of this lineage that is not damaged) and stand where it
        was made, on a new lineage; all ranks together."""
        manifest, name = self._load(step, name)
        return f"restored {name} (step {manifest['step']})"

    def go_on(self, restore: str) -> None:
        """Begin a generation of a run from one of its checkpoints, by name or "latest", and steered as the one before
        was: a run that was paused, or had some steps left until a pause, pauses at the same step."""
        here = self.session
        manifest, _ = self._load(None, "" if restore == "latest" else restore)
        stood: tuple[bool, int | None] = (False, None)
        if here.mesh.place.rank == 0:
            stood = steered(manifest, read_events(here.paths.events)[0])
        here.steering.paused, here.steering.remaining = here.channel.share(stood)

    def _load(self, step: int | None, name: str) -> tuple[dict[str, Any], str]:
        here = self.session
        self.finish()
        manifest, folder = self._read(self._candidates(step, name), newest=step is None and not name)
        name = called(folder, manifest)
        values = self._stand(manifest, name)
        here.emit("restore", step=manifest["step"], name=name, from_step=manifest["step"], values=values)
        return manifest, name

    def take(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Load what a folder holds and stand where it was made, on a new lineage: its manifest, and live values."""
        here = self.session
        with here.watch.timed("checkpoint"):
            manifest = checkpoint.load(here.plan, here.mesh, here.built, folder)
        return manifest, self._stand(manifest, folder.name)

    def _stand(self, manifest: dict[str, Any], name: str) -> dict[str, Any]:
        """Stand where a checkpoint that has been loaded was made, on a new lineage; returns its live values."""
        here = self.session
        here.runner.scale.load(manifest.get("loss_scale", {}))
        saved = Plan.loads(manifest["plan"], f"checkpoint {name}")
        values = self._take_values({key: get(saved, key) for key in live_keys() if key != "train.steps"}, name)
        here.steering.step, here.steering.loss = manifest["step"], manifest["loss"]
        here.runner.configure(here.plan, here.steering.step + 1, restored=True)
        here.begin_lineage(manifest["lineage"], manifest["step"], Position.from_json(manifest["cursors"]))
        return values

    def _candidates(self, step: int | None, name: str) -> list[Location]:
        """Where to look, the best first, as rank 0 sees it."""
        here, found, problem = self.session, [], ""
        if here.mesh.place.rank == 0:
            try:
                events = read_events(here.paths.events)[0]
                found = checkpoint.candidates(self.checkpoints, step, name, here.lineage, events)
            except CheckpointError as error:
                problem = str(error)
        names, problem = here.channel.share([[folder.name for folder in found], problem])
        if problem:
            raise CheckpointError(problem)
        return [self.checkpoints / each for each in names]

    def _read(self, folders: list[Location], newest: bool) -> tuple[dict[str, Any], Location]:
        """The first of these checkpoints that is not damaged; only of the newest are the older ones tried."""
        here = self.session
        if not (newest and here.plan.checkpoint.fall_back):
            folders = folders[:1]
        problems: list[str] = []
        for folder in folders:
            try:
                with here.watch.timed("checkpoint"):
                    manifest = checkpoint.load(here.plan, here.mesh, here.built, folder)
            except DamagedError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                message = f"{problem} Went back to {called(folder, manifest)} instead."
                here.emit("warning", step=manifest["step"], message=message)
            return manifest, folder
        more = f" ({len(problems) - 1} older ones are damaged as well)" if len(problems) > 1 else ""
        raise CheckpointError(problems[0] + more)

    def _take_values(self, values: dict[str, Any], name: str) -> dict[str, Any]:
        """Go on with a checkpoint's live values; what this plan cannot run with (it may have been saved in another
        layout) stays as it is, a group's communication as a whole. Returns what holds."""
        here = self.session
        groups: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            group = key.rpartition(".")[0] if key.startswith("communication.") else key
            groups.setdefault(group, {})[key] = value
        try:
            here.plan = checked(here.plan, values)
        except PlanError:
            for group, part in groups.items():
                try:
                    here.plan = checked(here.plan, part)
                except PlanError as error:
                    message = f"{group} of checkpoint {name} is not taken over: {error}"
                    here.emit("warning", step=here.steering.step, message=message)
        return {key: get(here.plan, key) for key in values}


def steered(manifest: Mapping[str, Any], events: Sequence[Event]) -> tuple[bool, int | None]:
    """(paused, steps until the next pause) of a run that goes on from a checkpoint: as saved, with the commands that
    were applied since. After an end that somebody wanted, and in another run, it runs on."""
    step, saved = manifest["step"], manifest.get("steering", {})
    left = 0 if saved.get("paused") else saved.get("remaining")
    pause = None if left is None else step + left
    if not any(event["kind"] == "lineage" and event["id"] == manifest["lineage"] for event in events):
        return False, None
    for event in events:
        if event["t"] < manifest.get("began", 0.0):
            continue
        if event["kind"] == "state" and event["state"] in ("paused", "stopped", "finished"):
            pause = event["step"] if event["state"] == "paused" else None
        elif event["kind"] == "command" and event["ok"] and event["verb"] in ("resume", "step"):
            pause = event["step"] + event["args"].get("n", 1) if event["verb"] == "step" else None
    if pause is None:
        return False, None
    return (True, None) if pause <= step else (False, pause - step)
