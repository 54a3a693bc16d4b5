"""A command on its way, and the two ways in which waiting ends early."""

from __future__ import annotations

import time
from dataclasses import dataclass
from html import escape
from pathlib import Path

from mmlab.errors import MmlabError
from mmlab.messages import Ack, read_ack, wait_ack
from mmlab.tracking.record import ENDED, RunRecord

LOOK = 0.5
"""Seconds between looks at whether the run still lives while an answer is waited for."""


class WaitTimeout(MmlabError, TimeoutError):
    """What was waited for did not happen in time; the run or lab goes on."""


class WaitInterrupted(KeyboardInterrupt):
    """Waiting was interrupted; the run goes on."""

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: one line instead of a traceback."""
        return [str(self)]


@dataclass(frozen=True)
class Sent:
    """A command on its way: every verb returns at once, and the run applies it at its next step boundary."""

    verb: str
    id: str
    control: Path

    @property
    def ack(self) -> Ack | None:
        """What became of it; None while the run has not come to it."""
        return read_ack(self.control, self.id)

    def wait(self, timeout: float = 60.0) -> Ack:
        """Wait for the answer. MmlabError when the run refused or has ended, WaitTimeout after `timeout` seconds."""
        record = RunRecord(self.control.parent)
        end = time.monotonic() + timeout
        while (ack := wait_ack(self.control, self.id, min(LOOK, end - time.monotonic()))) is None:
            state = record.status()["state"]
            if state in ENDED and (ack := self.ack or self._logged(record)) is not None:
                break
            if state in ENDED:
                raise MmlabError(f"{self.verb} was not applied: the run has ended ({state})")
            if time.monotonic() > end:
                raise WaitTimeout(
                    f"{self.verb} was not applied within {timeout:g} s; it still waits in the run's inbox"
                )
        if not ack.ok:
            raise MmlabError(f"{self.verb} was refused: {ack.message}")
        return ack

    def _logged(self, record: RunRecord) -> Ack | None:
        """What became of it by the run's log: an aborted run says there that it has ended before it answers, and on a
        full disk there is no other answer. None where it says nothing."""
        events = (event for event in record.rare_events() if event["kind"] == "command" and event.get("id") == self.id)
        return next((Ack(self.id, e["ok"], e["step"], e.get("ranks", []), e.get("message", "")) for e in events), None)

    def __repr__(self) -> str:
        ack = self.ack
        if ack is None:
            return f"{self.verb}: sent, applied at the next step boundary"
        if not ack.ok:
            return f"{self.verb}: refused: {ack.message}"
        return f"{self.verb}: applied after step {ack.step}{', ' + ack.message if ack.message else ''}"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>"
