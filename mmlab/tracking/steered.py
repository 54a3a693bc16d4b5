"""The verbs that leave a command in a run's inbox. All return at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmlab.errors import MmlabError
from mmlab.messages import Command, new_command, send
from mmlab.plan import Plan, set_live
from mmlab.plan.compression import checked, live_values
from mmlab.plan.keys import flatten
from mmlab.plan.relayout import differences, relaid
from mmlab.tracking.chaos import check_rank, chosen, here_and_now
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

        PlanError on a key that cannot change during a run (lists those that can), or a value that it does not admit.
        """
        values = dict(flatten({key: value} if isinstance(key, str) else key))
        checked(self._record.live_plan(), values)
        return self._send("set", values=values)

    def compress(self, group: str, compressor: str, /, **options: Any) -> Sent:
        """Change how gradients of a group are compressed while the run goes on: sugar for `set` of its live fields.

        `group` vision, language, or all for both; `compressor` none, bf16, fp16, int8, topk, powersgd or onebit.
        Options not given stay as they are. For topk `ratio` (share of the values that is sent); for powersgd `rank`,
        `warm_start`, `min_compression_rate`; for int8, topk, powersgd and onebit `error_feedback` (whether what was
        left out is added to the next step's gradients); for all `residual` ("flush", "keep", "drop": what becomes of
        what was left out so far) and `warmup_steps` (steps at the start of the run without compression). PlanError on
        what does not exist, what a compressor does not have, values out of bounds, and what the plan does not admit.
        """
        values = live_values(group, compressor, options)
        plan = self._record.live_plan()
        for key, value in values.items():  # one at a time: one sentence about the first that is wrong
            set_live(plan, {key: value})
        return Sent("compress", self.set(values).id, self._record.paths.control)

    def measure_compression(self) -> Sent:
        """Reduce the next step's gradients also without compression, to see how far off the compressed ones are.

        `compression()` then shows the relative error. `communication.measure_every` does it again and again. Refused
        where no gradients are compressed.
        """
        return self._send("measure")

    def checkpoint(self, name: str = "") -> Sent:
        """Save at the next step boundary; kept until it is deleted by hand."""
        return self._send("checkpoint", **({"name": name} if name else {}))

    def relayout(self, plan: Plan | str | Path | Mapping[str, Any], *changes: str | Mapping[str, Any]) -> Sent:
        """Go on in another layout from the next step boundary: on the living engines, with weights, optimizer state and
        data position as they are, through memory where they fit.

        A plan (or its path or preset), or changes to the running one such as "parallel.tp=2". With more ranks engines
        are started first, while the run goes on; with fewer some are idle. Live values that were set meanwhile stay,
        unless the plan says otherwise. PlanError when the model, the data or the training would be another, and when
        the new plan has problems.
        """
        values, new = self._relaid(plan, *changes)
        self._check_goes_on("relayout")
        return self._send_in_layout(new_command("relayout", {"changes": values}), new)

    def _send_in_layout(self, command: Command, new: Plan) -> Sent:
        """Give a command that leads to another layout; engines that this lacks are started first."""
        more = new.world_size > self._record.info.get("world_size", 0)
        if more and self._bring(new.world_size, command):
            return Sent(command.verb, command.id, self._record.paths.control)
        return self._send_command(command)

    def relaid(
        self, plan: Plan | str | Path | Mapping[str, Any], *changes: str | Mapping[str, Any]
    ) -> tuple[Plan, Plan]:
        """What `relayout` of the same would do, without doing it: the plan as it is now, and the one that it would
        become. PlanError as from `relayout`."""
        return self._record.live_plan(), self._relaid(plan, *changes)[1]

    def chaos(self, *, seconds: float | None = None, phase: str = "", **action: Any) -> Sent:
        """Do harm on purpose, to see what becomes of it; one action at a time.

        `kill=1` ends the process of rank 1 with SIGKILL: at once on this host, elsewhere in the next step. `hang=1` has
        rank 1 hang in the next step. `slow=1` with `seconds=` makes its steps so much slower (0: no longer).
        `notice=1` says that its process is about to be taken away, in `seconds` (default: the plan's grace).
        `corrupt="last"` flips a byte of the newest checkpoint, else of the named one. `phase` (such as "backward")
        says in which phase of the next step to kill or hang, or where to be slow; default: where the rank computes.
        MmlabError for a rank that does not exist, and for a run that has ended.
        """
        strike = chosen(action, seconds, phase)
        self._check_goes_on("chaos")
        check_rank(self._record, strike)
        return here_and_now(self._record, strike) or self._send("chaos", **strike.args())

    def _bring(self, n: int, command: Command) -> bool:
        """Have the run's lab give it a command as soon as there are n engines; False where no lab can."""
        return False

    def _relaid(
        self, plan: Plan | str | Path | Mapping[str, Any], *changes: str | Mapping[str, Any]
    ) -> tuple[dict[str, Any], Plan]:
        """What these make otherwise in the plan as it is now, by dotted key, and the plan that they lead to."""
        live = self._record.live_plan()
        whole = Plan.named(plan)
        if whole is not None:
            values = differences(self._record.plan, whole.with_(*changes))
        else:
            values = differences(live, live.with_(plan, *changes))  # type: ignore[arg-type]
        return values, relaid(live, values)

    def _send(self, verb: str, **args: Any) -> Sent:
        self._check_goes_on(verb)
        return self._send_command(new_command(verb, args))

    def _send_command(self, command: Command) -> Sent:
        control = self._record.paths.control
        try:
            send(control, command)
        except OSError as error:
            raise MmlabError(f"{command.verb}: the inbox {control} cannot be written: {error.strerror}") from None
        return Sent(command.verb, command.id, control)

    def _check_goes_on(self, verb: str) -> None:
        status = self.status()
        if status["state"] in ENDED:
            more = "; restore() (mmlab restore) starts it again from a checkpoint" if self._record.checkpoints() else ""
            raise MmlabError(f"{verb}: run {self._record.id} has ended ({status['state']}){more}")
