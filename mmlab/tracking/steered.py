"""The verbs that leave a command in a run's inbox. All return at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmlab.errors import MmlabError
from mmlab.messages import new_command, send
from mmlab.plan import set_live
from mmlab.plan.keys import flatten
from mmlab.tracking.record import ENDED, RunRecord
from mmlab.tracking.sent import Sent


class Steered:
    """A run that can be steered, by its record."""

    _record: RunRecord

    def status(self) -> dict[str, Any]:
        """The state of the run right now."""
        return self._record.status()

    def pause(self) -> Sent:
        """Pause after the step under way."""
        return self._send("pause")

    def resume(self) -> Sent:
        """Go on."""
        return self._send("resume")

    def step(self, n: int = 1) -> Sent:
        """Run n steps, then pause."""
        if n < 1:
            raise MmlabError(f"step takes a number of steps of at least 1, not {n}")
        return self._send("step", n=int(n))

    def stop(self) -> Sent:
        """End the run at the next step boundary; checkpoints stay."""
        return self._send("stop")

    def abort(self) -> Sent:
        """End the run at once, also one that is stuck: the ranks are freed from whatever call they wait in.

        Engines and their namespaces live on; nothing is saved, and what ranks held is built anew by the next run. The
        state becomes "stopped". The answer names the rank that was freed first.
        """
        return self._send("abort", generation=self._record.info.get("generation", 0))

    def set(self, key: str | Mapping[str, Any], value: Any = None) -> Sent:
        """Change fields of the plan while the run goes on: a dotted key and its value, or a dict of them.

        PlanError on a key that cannot change during a run (lists those that can), a value that it does not admit, or
        one with which the plan could not run (says what to do about it).
        """
        values = dict(flatten({key: value} if isinstance(key, str) else key))
        set_live(self._record.current_plan, values)
        return self._send("set", values=values)

    def checkpoint(self, name: str = "") -> Sent:
        """Save at the next step boundary; kept until it is deleted by hand."""
        return self._send("checkpoint", **({"name": name} if name else {}))

    def _send(self, verb: str, **args: Any) -> Sent:
        status = self.status()
        if status["state"] in ENDED:
            more = "; restore() (mmlab restore) starts it again from a checkpoint" if self._record.checkpoints() else ""
            raise MmlabError(f"{verb}: run {self._record.id} has ended ({status['state']}){more}")
        command = new_command(verb, args)
        control = self._record.paths.control
        try:
            send(control, command)
        except OSError as error:
            raise MmlabError(f"{verb}: the inbox {control} cannot be written: {error.strerror}") from None
        return Sent(verb, command.id, control)
