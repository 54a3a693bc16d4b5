"""Leaving a host that is about to be taken away: save within the deadline, end this generation, go on elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmlab.errors import CheckpointError
from mmlab.messages.moves import Move, write_move
from mmlab.messages.notices import Notice

if TYPE_CHECKING:
    from mmlab.train.session import Session

MARGIN = 1.5
"""Times the last save's seconds that have to be left for another one: the disk may be busier by now."""


class Leaving:
    """The step boundary's side of notices; all ranks call the same together."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def leave(self, args: Mapping[str, Any]) -> str:
        """Obey a notice (its fields): save, unless the time is too short for that, and leave unless it is advice."""
        here, notice = self.session, Notice(**args)
        ranks = [m["rank"] for m in here.members if notice.about(m["host"], m["pid"], m["started"])]
        if not ranks:
            return f"no rank of the run is on {notice.where}"
        deadline = notice.deadline or notice.time + here.plan.cluster.grace
        left, last = here.channel.share([deadline - time.time(), here.saves.last_seconds])
        step = here.steering.step
        saved, problem = "", ""
        if left < MARGIN * last:
            problem = f"{max(left, 0.0):.1f} s are too short for a save, the last of which took {last:.1f} s"
        else:
            try:
                saved = here.saves.now(f"notice ({notice.source})")
            except CheckpointError as error:
                problem = str(error)
        where = f"{notice.where} is about to be taken away ({notice.source})"
        message = f"{where}: {f'saved {saved}' if saved else problem}"
        here.emit(
            "notice", step=step, notice=notice.kind, source=notice.source, host=notice.host, pid=notice.pid,
            deadline=deadline, said=notice.said, ranks=ranks, saved=saved, message=message,
        )  # fmt: skip
        if problem:
            here.emit("warning", step=step, message=message)
        if notice.kind == "leave":
            self._move(saved, message)
        return message

    def _move(self, saved: str, message: str) -> None:
        """End this generation; the next one begins with what was saved, else with the newest checkpoint."""
        here = self.session
        if here.mesh.place.rank == 0:
            world, steering = here.plan.world_size, here.steering
            move = Move(
                generation=here.listener.generation + 1, command="", name=saved, folder="", host="", memory=False,
                step=steering.step, plan=here.paths.plan.read_text(),
                before=world, after=world, began=time.time(), bytes=0, changes={}, paused=steering.paused,
                remaining=steering.remaining, notice=message,
            )  # fmt: skip
            write_move(here.paths, move)
        here.moving = True
