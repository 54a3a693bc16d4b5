"""Another layout while a run goes on: the generation that ends leaves its whole state, the next one takes it up."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.errors import CheckpointError, PlanError
from mmlab.messages import read_json
from mmlab.messages.locations import Location
from mmlab.messages.moves import Move, forget_move, memory_with_room, read_move, say_moved, write_move
from mmlab.messages.runs import TORCHRUN
from mmlab.plan import Plan
from mmlab.plan.relayout import differences, relaid
from mmlab.train import checkpoint, kept

if TYPE_CHECKING:
    from mmlab.train.session import Session


class Relayout:
    """The step boundary's side of `run.relayout`; all ranks call the same together."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def begin(self, args: Mapping[str, Any]) -> str:
        """Leave this step's state for a generation in another layout, in memory where it fits, else on disk.

        PlanError when the plan cannot become that, CheckpointError when the state cannot be written: the run goes on.
        """
        here, began = self.session, time.time()
        new = self.check(args.get("changes"))
        name = f"relayout-step-{here.steering.step:06d}-{here.lineage}"
        memory = self._memory()
        folder, manifest = self._save(memory, name, new)
        move = Move(
            generation=here.listener.generation + 1, command=here.applying, name=name, folder=str(folder),
            host=socket.gethostname(), memory=folder.parent == memory, step=here.steering.step, plan=new.dumps(),
            before=here.plan.world_size, after=new.world_size, began=began, bytes=manifest.get("bytes", 0),
            changes=_both(here.plan, new), paused=here.steering.paused, remaining=here.steering.remaining,
        )  # fmt: skip
        problem = ""
        if here.mesh.place.rank == 0:
            try:
                write_move(here.paths, move)
            except OSError as error:
                problem = f"the run's folder cannot be written: {error.strerror}"
                shutil.rmtree(folder, ignore_errors=True)
        if problem := here.channel.share(problem):
            raise CheckpointError(problem)
        here.moving = True
        return move.reason

    def check(self, changes: Any) -> Plan:
        """The plan that changes by dotted key lead to; PlanError when the run cannot go on by it. All ranks do."""
        if not isinstance(changes, dict) or not changes:
            raise PlanError('another layout takes changes by dotted key, such as {"parallel.tp": 2}')
        new = relaid(self.session.plan, changes)
        self._check_world(new)
        return new

    def _check_world(self, new: Plan) -> None:
        """torchrun starts a fixed number of ranks."""
        here, fixed = self.session, False
        if here.mesh.place.rank == 0:
            fixed = (read_json(here.paths.run) or {}).get("launcher") == TORCHRUN
        if here.channel.share(fixed) and new.world_size != here.mesh.world_size:
            raise PlanError(
                f"the new layout needs {new.world_size} ranks and torchrun started {here.mesh.world_size}, which stay; "
                "stop the run, and start it again from its last checkpoint with another --nproc-per-node"
            )

    def _memory(self) -> Path | None:
        """A folder in memory with room for the state, where all ranks of now and then share one host."""
        here = self.session
        state = checkpoint.state_dict(here.plan, here.mesh, here.built, saving=True)
        state |= kept.saved(here.plan, here.mesh, here.built)
        sizes: dict[str, int] = {}
        hosts = set()
        for host, found in here.channel.gather([socket.gethostname(), {k: v.nbytes for k, v in state.items()}]):
            hosts.add(host)
            sizes |= found
        folder = None
        if here.mesh.place.rank == 0 and len(hosts) == 1 and (read_json(here.paths.run) or {}).get("one_host", True):
            folder = memory_with_room(here.paths, sum(sizes.values()))
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)  # of a relayout that was cut short
                folder.mkdir(mode=0o700)
        found = here.channel.share(str(folder) if folder is not None else "")
        return Path(found) if found else None

    def _save(self, memory: Path | None, name: str, new: Plan) -> tuple[Path, dict[str, Any]]:
        here = self.session
        if memory is not None:
            try:
                return memory / name, here.saves.write(memory / name, new)
            except CheckpointError as error:
                here.emit("warning", step=here.steering.step, message=f"not through memory: {error}")
                if here.mesh.place.rank == 0:
                    shutil.rmtree(memory, ignore_errors=True)
        folder = here.paths.checkpoints / name
        return folder, here.saves.write(folder, new)

    def arrive(self, restore: str) -> bool:
        """Take up the state that the generation before has left; False where `restore` names an ordinary checkpoint."""
        here = self.session
        first = here.mesh.place.rank == 0
        move = read_move(here.paths) if first else None
        fits = move is not None and (move.generation, move.name) == (here.listener.generation, restore)
        found = here.channel.share(vars(move) if move is not None and fits and not move.notice else None)
        if found is None:
            return False
        move = Move(**found)
        here.saves.take(Path(move.folder))
        here.steering.paused, here.steering.remaining = move.paused, move.remaining
        here.channel.gather(True)  # every rank has read its part
        if first:
            with contextlib.suppress(OSError):
                forget_move(here.paths)  # first: half a state that is still on its way would be taken for a checkpoint
                if not move.memory:
                    Location(move.folder).remove(first=checkpoint.MANIFEST)
            say_moved(here.paths, move, here.plan.train.steps, here.emit)
        return True


def _both(before: Plan, after: Plan) -> dict[str, list[Any]]:
    """{key: [before, after]} of what differs."""
    old = differences(after, before)
    return {key: [old[key], value] for key, value in differences(before, after).items()}
