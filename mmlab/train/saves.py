"""When a run saves and restores: the step boundary's side of checkpoints. `checkpoint` writes and reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.data.order import Position
from mmlab.errors import CheckpointError, PlanError
from mmlab.plan import Plan, live_keys
from mmlab.plan.compression import checked
from mmlab.plan.keys import get
from mmlab.train import checkpoint

if TYPE_CHECKING:
    from mmlab.train.session import Session

LONGEST_NAME = 200
"""Bytes of a checkpoint's name: file systems admit 255, and a save under way has a longer one."""


class Saves:
    """Saves and restores of one generation of a run on one rank; all ranks call the same at the same boundary."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._saved: tuple[str, int] | None = None

    def save(self, name: str, periodic: bool) -> str:
        """Save a checkpoint of this step; all ranks together. CheckpointError when it fails.

        A periodic one is not saved where there is one of this step already: it would take the place of one made on
        command, which is kept for good.
        """
        here = self.session
        if name and (name != name.strip(". ") or not name.isprintable() or any(c in name for c in "/\\")):
            raise CheckpointError(f"{name!r} is not a name for a checkpoint: letters, digits, - _ . only")
        if len(name.encode()) > LONGEST_NAME:
            raise CheckpointError(f"a checkpoint's name has at most {LONGEST_NAME} bytes, not {len(name.encode())}")
        step = here.steering.step
        if periodic and self._saved == (here.lineage, step):
            return "saved before"
        folder = here.paths.checkpoints / (name or f"step-{step:06d}-{here.lineage}")
        manifest = self.write(folder, here.plan, periodic)
        self._saved = self._saved if name else (here.lineage, step)
        if here.mesh.place.rank == 0:
            took = {"seconds": round(manifest["seconds"], 3), "bytes": manifest["bytes"]}
            here.emit("checkpoint", step=step, name=folder.name, path=str(folder), **took)
            checkpoint.prune(here.paths.checkpoints, here.plan.checkpoint.keep_last)
        return f"saved {folder.name}"

    def write(self, folder: Path, plan: Plan, periodic: bool = False) -> dict[str, Any]:
        """Save this step into a folder, with `plan` as what it goes on by; the manifest on rank 0. CheckpointError."""
        here = self.session
        extra = {
            "step": here.steering.step, "lineage": here.lineage, "cursors": here.feed.cursors.to_json(),
            "periodic": periodic, "plan": plan.dumps(), "loss": here.steering.loss,
            "loss_scale": here.runner.scale.state(),
        }  # fmt: skip
        with here.watch.timed("checkpoint"):
            return checkpoint.save(here.plan, here.mesh, here.built, folder, extra)

    def load(self, step: int | None, name: str) -> str:
        """Load a checkpoint and stand where it was made, on a new lineage."""
        here = self.session
        problem = ""
        if here.mesh.place.rank == 0:
            try:
                name = checkpoint.find(here.paths.checkpoints, step, name, here.lineage).name
            except CheckpointError as error:
                problem = str(error)
        name, problem = here.channel.share([name, problem])
        if problem:
            raise CheckpointError(problem)
        manifest, values = self.take(here.paths.checkpoints / name)
        here.emit("restore", step=manifest["step"], name=name, from_step=manifest["step"], values=values)
        return f"restored {name} (step {manifest['step']})"

    def take(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Load what a folder holds and stand where it was made, on a new lineage: its manifest, and live values."""
        here, name = self.session, folder.name
        with here.watch.timed("checkpoint"):
            manifest = checkpoint.load(here.plan, here.mesh, here.built, folder)
        here.runner.scale.load(manifest.get("loss_scale", {}))
        saved = Plan.loads(manifest["plan"], f"checkpoint {name}")
        values = self._take_values({key: get(saved, key) for key in live_keys() if key != "train.steps"}, name)
        here.steering.step, here.steering.loss = manifest["step"], manifest["loss"]
        here.runner.configure(here.plan, here.steering.step + 1, restored=True)
        here.begin_lineage(manifest["lineage"], manifest["step"], Position.from_json(manifest["cursors"]))
        return manifest, values

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

    def if_due(self) -> None:
        """The periodic checkpoint. A save that fails is reported and the run goes on."""
        here = self.session
        every = here.plan.checkpoint.every_steps
        if every and here.steering.step % every == 0 and here.steering.step < here.plan.train.steps:
            self.attempt()

    def attempt(self) -> None:
        """Save; a failure becomes a warning event."""
        here = self.session
        try:
            self.save("", periodic=True)
        except CheckpointError as error:
            here.emit("warning", step=here.steering.step, message=str(error))
