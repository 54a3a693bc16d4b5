"""Events, numbers and times in words: the same in dashboard, picture, report and terminal."""

from __future__ import annotations

import math
import time
from typing import Any

from mmlab.messages import Event
from mmlab.plan import Plan


def number(value: float | None, digits: int = 3) -> str:
    """A number in few characters: 0.00123, 12.3, 4,510; a dash for none."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size == 0 or size >= 1e-3:
        text = f"{value:.{digits}g}"
        return text if "e" not in text else f"{value:.0f}"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def duration(seconds: float) -> str:
    """Seconds as 42 s, 3 min 20 s or 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def plan_text(plan: Plan) -> str:
    """Layout and batch of a plan in one line."""
    p = plan.parallel
    layout = ", ".join([f"encoder on {p.vision}".replace("_", " "), *p.degrees_text()])
    batches = f"{p.microbatches} microbatches ({p.schedule})" if p.microbatches > 1 else "1 microbatch"
    return f"{plan.name}: {plan.world_size} ranks, {layout}; {plan.data.global_batch} samples a step in {batches}"


def compression_text(step: Event) -> str:
    """What the gradients of a step were compressed with, in one line; empty where none were."""
    found = []
    for module, coded in step.get("compression", {}).items():
        sent = sum(step.get("traffic", {}).get(module, []))
        if coded["compressor"] != "none" and sent:
            found.append(f"{module} {coded['compressor']}, {number(coded['dense'] / sent)} times fewer bytes")
    return f"compressed gradients: {'; '.join(found)}" if found else ""


def data_text(step: Event) -> str:
    """How long a step waited for data and how many steps lay decoded ahead: "4 ms, 2 ahead"; a dash where not told."""
    wait, ahead = step.get("data_wait"), step.get("data_queue")
    if wait is None:
        return "-"
    return f"{number(1000 * wait)} ms" + ("" if ahead is None else f", {ahead} ahead")


def clock(event: Event) -> str:
    """The local time of an event."""
    return time.strftime("%H:%M:%S", time.localtime(event.get("t", 0.0)))


def event_text(event: Event) -> str:
    """One event in one line."""
    kind = event.get("kind", "")
    words = _WORDS.get(kind)
    return words(event) if words is not None else kind


def command_text(verb: str, args: dict[str, Any]) -> str:
    """A command as a person would give it."""
    if verb == "set":
        return f"set {_values(args.get('values'))}"
    if verb == "relayout":
        return f"relayout {_values(args.get('changes'))}"
    if verb == "step":
        return f"step {args.get('n', 1)}"
    if verb == "chaos":
        return "chaos " + ", ".join(f"{key}={value}" for key, value in args.items())
    if verb == "checkpoint" and args.get("name"):
        return f"checkpoint {args['name']}"
    if verb == "restore":
        name, step = args.get("name"), args.get("step")
        which = f"restore {name}" if name else "restore" if step is None else f"restore step {step}"
        changes = ", ".join(f"{key} = {_value(value)}" for key, value in (args.get("changes") or {}).items())
        return f"{which} with {changes}" if changes else which
    return verb


def _values(values: Any) -> str:
    """Fields with what they become; what is no dict (a command that somebody wrote by hand) as it is."""
    if not isinstance(values, dict):
        return str(values)
    return ", ".join(f"{key} = {_value(value)}" for key, value in values.items())


def _value(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _state(event: Event) -> str:
    reason = event.get("reason")
    return f"{event.get('state')}: {reason}" if reason else str(event.get("state"))


def _lineage(event: Event) -> str:
    return f"lineage {event.get('id')}" + (f" from step {event.get('parent_step')}" if event.get("parent") else "")


def _command(event: Event) -> str:
    text = command_text(event.get("verb", ""), event.get("args") or {})
    message = event.get("message") or ""
    note = f" ({message})" if message and message not in text else ""
    if not event.get("ok"):
        return f"{text}: refused{note}"
    return f"{text}: applied after step {event.get('step')} on {len(event.get('ranks') or [])} ranks{note}"


def _eval(event: Event) -> str:
    text = f"held-out loss {number(event.get('loss'), 4)}"
    swapped = event.get("loss_swapped")
    return text if swapped is None else f"{text}, images swapped {number(swapped, 4)}"


def _checkpoint(event: Event) -> str:
    size, seconds = event.get("bytes", 0) / 1e6, float(event.get("seconds", 0.0))
    stall = float(event.get("stall", seconds))
    held = f", {1e3 * stall:.0f} ms of it between steps" if stall < seconds else ""
    return f"checkpoint {event.get('name')}, {size:.1f} MB in {seconds:.1f} s{held}"


def _relayout(event: Event) -> str:
    changes = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in (event.get("changes") or {}).items())
    ranks = f"{event.get('before')} -> {event.get('after')} ranks"
    size = f"{event.get('bytes', 0) / 1e6:.1f} MB through {event.get('through')}"
    return f"another layout, {ranks}: {changes}; {size} in {event.get('seconds', 0.0):.1f} s"


def _overflow(event: Event) -> str:
    modules = ", ".join(event.get("modules") or [])
    return f"step {event.get('step')} left out: overflow in {modules}; loss scale now {number(event.get('loss_scale'))}"


def _recovery(event: Event) -> str:
    if not event.get("done"):
        return f"recovery {event.get('attempt')} of {event.get('of')}: {event.get('reason')}"
    replaced = event.get("replaced") or {}
    engines = f", rank {', '.join(replaced)} on another engine" if replaced else ""
    return f"recovered in {event.get('seconds', 0.0):.1f} s{engines}"


_WORDS = {
    "recovery": _recovery,
    "state": _state,
    "lineage": _lineage,
    "command": _command,
    "eval": _eval,
    "checkpoint": _checkpoint,
    "restore": lambda event: f"restored {event.get('name')} of step {event.get('from_step')}",
    "relayout": _relayout,
    "notice": lambda event: str(event.get("message")),
    "samples": lambda event: f"wrote text for {len(event.get('items') or [])} held-out pictures",
    "bad_image": lambda event: f"image of {event.get('sample')} cannot be decoded: {event.get('reason')}",
    "overflow": _overflow,
    "warning": lambda event: f"warning: {event.get('message')}",
}
