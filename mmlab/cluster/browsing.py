"""What a person does with a run's checkpoints: look, compare, name, delete, go back to one, branch off one."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from mmlab.cluster.compare import TIMEOUT, compare
from mmlab.cluster.export import export
from mmlab.errors import CheckpointError, PlanError
from mmlab.messages import ENDED, new_command
from mmlab.messages.checkpoints import called, location_of
from mmlab.messages.moves import rescue_move
from mmlab.messages.runs import create_run, runs_root
from mmlab.plan import Plan
from mmlab.plan.branching import branched, live_as
from mmlab.plan.keys import known_keys
from mmlab.tracking import checkpoints
from mmlab.tracking.compare import Comparison
from mmlab.tracking.record import RunRecord
from mmlab.tracking.sent import Sent
from mmlab.tracking.steered import Steered
from mmlab.tracking.waiting import begin_layout

Change = Plan | str | Path | Mapping[str, Any]
"""A whole plan (or its path or preset), or a change such as "parallel.tp=2"."""


class Browsed(Steered):
    """A run whose checkpoints can be browsed."""

    def __init__(self, run_dir: str | Path, lab: Any = None) -> None:
        self._record = RunRecord(run_dir)
        self._lab = lab

    def _home(self) -> Any:
        """The lab that can start this run again."""
        raise NotImplementedError

    # looking

    def checkpoints(self) -> list[dict[str, Any]]:
        """Complete checkpoints by step: "name", "step", "lineage", "time", "loss", "layout", "samples", "bytes",
        "shared_bytes", "frozen" (modules stored once for all), "periodic" (may be removed), "reason", "path"."""
        return self._record.checkpoints()

    def checkpoint_info(self, name: str = "", step: int | None = None) -> dict[str, Any]:
        """All about one checkpoint (default: the newest): its row of `checkpoints()`, and "plan", "position" (of the
        data), "files", "seconds", "current" (whether the run as it stands inherits from it), "problem"."""
        return checkpoints.info(self._record, step, name)

    def lineages(self) -> list[dict[str, Any]]:
        """How the run went on, branch by branch: "id", "parent", "parent_step", "step" (the last), "why", "current"."""
        return checkpoints.lineages(self._record)

    def branches(self) -> list[dict[str, Any]]:
        """Runs that were branched off this one, among those beside it: "run", "dir", "name" and "step" of the
        checkpoint, "lineage"."""
        roots = (runs_root(), self._record.paths.root.parent)
        return checkpoints.branches(self._record, sorted({f.parent for root in roots for f in root.glob("*/run.json")}))

    def compare(
        self, first: str | int, second: str | int, of: Browsed | str | Path | None = None,
        timeout: float | None = TIMEOUT,
    ) -> Comparison:  # fmt: skip
        """What differs between two checkpoints, by name or step: the plan's fields, and the weights by module as
        ||second - first|| / ||first||; of any two layouts. A table.

        `of` is the run that has the second one (default: this one). Reads the weights in a process of its own.
        CheckpointError when there is none such, it is damaged, or `timeout` seconds are over.
        """
        record = self._record
        other = record if of is None else of._record if isinstance(of, Browsed) else RunRecord(of)
        return compare(_found(record, first), _found(other, second), timeout)

    def export(self, folder: str | Path, step: int | None = None, name: str = "", adapters: bool = False) -> list[Path]:
        """Write a checkpoint's weights for Hugging Face's classes, or LoRA's `adapters` alone for PEFT; the files."""
        name = self._record.find_checkpoint(step, name)["name"]
        return export(self._record.checkpoint_location, Path(folder).absolute(), name=name, adapters=adapters)

    # keeping

    def rename_checkpoint(self, name: str, new: str) -> dict[str, Any]:
        """Give a checkpoint a name; named ones are kept until they are deleted. Its row as it is then.

        CheckpointError for a name that cannot be one or is taken, and for a checkpoint that is damaged.
        """
        return checkpoints.rename(self._record, name, new)

    def delete_checkpoint(self, name: str, force: bool = False) -> dict[str, Any]:
        """Delete a checkpoint; its row as it was. Frozen parts go when no checkpoint refers to them any more (of a live
        run: at its next save).

        CheckpointError for the newest good one of a live run, from which it would recover, unless with `force`.
        """
        return checkpoints.delete(self._record, name, force)

    # going on from one

    def restore(
        self, step: int | None = None, name: str = "", lab: Any = None, plan: Change | Sequence[Change] | None = None
    ) -> Sent | Self:
        """Go back to a checkpoint, by step or name (default: the last one), with `plan` in another layout: a plan, or
        changes such as "parallel.tp=2" or ["parallel.tp=2", "parallel.pp=1"], as `relayout` takes them.

        A live run does so at its next step boundary. A run that has ended is started again from there, on the engines
        of `lab`, else of the lab it was made with, else of the only live one. CheckpointError when there is none such,
        PlanError when the plan cannot be gone on by.
        """
        changes: tuple[Any, ...] = () if plan is None else tuple(plan) if isinstance(plan, list | tuple) else (plan,)
        ended = self.status()["state"] in ENDED
        if ended:
            rescue_move(self._record.paths)
        found = self._record.find_checkpoint(step, name)
        newest = step is None and not name  # it is for the ranks to pass over one that is damaged
        if not ended:
            args = {} if newest else {"step": found["step"], "name": found["name"]}
            if not changes:
                return self._send("restore", **args)
            values, new = self._relaid(*changes)
            return self._send_in_layout(new_command("restore", {**args, "changes": values}), new)
        home = lab or self._home()
        live: dict[str, Any] = {}
        if changes:
            values, new = self._relaid(*changes)
            home._check_free(self._record.paths.root)
            begin_layout(self._record, found, new)
            live = {key: value for key, value in values.items() if known_keys()[key].live and key != "train.steps"}
        home._launch(self, restore="latest" if newest and not changes else found["name"])
        if live:  # a checkpoint brings its own values
            self._send_command(new_command("set", {"values": live}))
        return self

    def restored_plan(self, plan: Change, *changes: str | Mapping[str, Any]) -> Plan:
        """The plan that `restore(plan=[plan, *changes])` would go on by. PlanError with the reasons why it cannot."""
        return self._relaid(plan, *changes)[1]

    def branched_plan(self, *changes: Change, step: int | None = None, name: str = "") -> Plan:
        """The plan that `branch` would begin with. PlanError with the reasons why it cannot."""
        return self._branched(step, name, changes)[0]

    def branch(self, *changes: Change, step: int | None = None, name: str = "", lab: Any = None) -> Self:
        """Start a new run from a checkpoint of this one (default: the last): with the plan that saved it, or another
        one, or changes to it, such as "parallel.tp=2", "train.language.lr=1e-4", "train.steps=500".

        The model and the place in the data are the checkpoint's, so `model` and `data.lanes` stay. The new run has the
        checkpoint as its own and this run as "parent" in its `run.json`; it is started on the engines of `lab`, else
        of this run's, else of the only live one. Where a run has that lab, the new one is queued until that has ended,
        and its status says so: `lab=mmlab.Lab()` starts it at once. PlanError with the reasons, CheckpointError when
        there is none such, LabError when no lab lives.
        """
        plan, source = self._branched(step, name, changes)
        home = lab or self._home()
        home._check_fits(plan)
        folder, manifest = source
        saved = Plan.loads(manifest["plan"], f"checkpoint {folder.name}")
        parent = {
            "run": self._record.id, "dir": str(self._record.paths.root), "name": called(folder, manifest),
            "step": manifest["step"], "lineage": manifest["lineage"],
        }  # fmt: skip
        about = {
            "plan": live_as(saved, plan).dumps(), "periodic": False, "origin": parent,
            "reason": f"branched off run {self._record.id}",
        }  # fmt: skip
        paths = create_run(runs_root(), plan.name, plan.dumps(), plan.world_size, plan.train.steps, parent=parent)
        with contextlib.ExitStack() as undone:  # an impatient Ctrl-C too leaves no run without a beginning
            undone.callback(shutil.rmtree, paths.root, ignore_errors=True)
            try:
                checkpoints.copy(source, location_of(paths, plan.checkpoint.location), about)
            except (OSError, CheckpointError) as error:
                raise CheckpointError(f"checkpoint {parent['name']} cannot be taken over: {error}") from None
            undone.pop_all()
        run = type(self)(paths.root, home)
        home._launch(run, restore=parent["name"], queue=True)
        return run

    def _branched(self, step: int | None, name: str, changes: Sequence[Change]) -> tuple[Plan, Any]:
        """The plan of a branch, and the checkpoint that it begins with."""
        from mmlab.data.order import Position
        from mmlab.data.resume import misfit

        _, (folder, manifest) = self._record.found_checkpoint(step, name)
        if wrong := checkpoints.problem(folder, manifest):
            raise CheckpointError(wrong)
        saved = Plan.loads(manifest["plan"], f"checkpoint {called(folder, manifest)}")
        plan = branched(saved, manifest["step"], *changes)
        if wrong := misfit(plan, Position.from_json(manifest["cursors"])):
            raise PlanError(f"a branch keeps the order of the data: {wrong}")
        return plan, (folder, manifest)


def _found(record: RunRecord, which: str | int) -> dict[str, Any]:
    """The row of a checkpoint by name or step; digits are a step where no checkpoint is called so."""
    if isinstance(which, bool) or not isinstance(which, str | int) or which == "":
        raise CheckpointError(f"a checkpoint is named, or given by its step, not {which!r}")
    if isinstance(which, str) and which.isdecimal() and all(row["name"] != which for row in record.checkpoints()):
        which = int(which)
    step, name = (which, "") if isinstance(which, int) else (None, which)
    return {**record.find_checkpoint(step, name), "run": record.id}
