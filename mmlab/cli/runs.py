"""Commands about runs: list, show and steer them. They work on any run whose folder is visible from here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmlab.cli.shared import JsonOption, RunArgument, check_writable, console, find_run, open_run, write_results
from mmlab.errors import MmlabError, RunFailed

if TYPE_CHECKING:
    from mmlab.tracking.sent import Sent

CheckpointStep = Annotated[int | None, typer.Option("--step", help="The step of the checkpoint; default: the newest.")]
CheckpointName = Annotated[str, typer.Option("--name", help="The name of the checkpoint.")]
ACK_TIMEOUT = 60.0
"""Seconds to wait for the step boundary that applies a command."""
CELL_TIMEOUT = 2.0
"""The same in a cell (`%mmlab`), which is to return soon."""


def register(app: typer.Typer) -> None:
    """Add the commands about runs."""
    looking = (list_all, show, placement, measured, traffic, compression, ledger, diagnose, doctor)
    steering = (pause, resume, step, set_, compress, relayout, checkpoint, restore, export, chaos, stop, abort)
    for command in (*looking, *steering):
        name = {"list_all": "runs", "set_": "set"}.get(command.__name__, command.__name__)
        app.command(name, rich_help_panel="Runs")(command)


def list_all() -> None:
    """List the runs in MMLAB_RUNS (else ./runs), newest last."""
    from rich.table import Table

    from mmlab.messages.runs import runs_root
    from mmlab.tracking.record import list_runs

    records = list_runs()
    if not records:
        console().print(f"no runs in {runs_root()}")
        return
    table = Table("run", "state", "step", "ranks", "loss", box=None)
    for record in reversed(records):
        status, last = record.status(), next(record.steps_back(), None)
        loss = f"{last['loss']:.3f}" if last else ""
        steps = f"{status['step']} / {status['steps']}"
        table.add_row(record.id, status["state"], steps, str(record.info.get("world_size", "")), loss)
    console().print(table)


def show(run: RunArgument, follow: Annotated[bool, typer.Option(help="Go on until the run ends.")] = False) -> None:
    """Show a run: state, ranks, last loss, checkpoints and events."""
    from mmlab.cli.progress import follow_run
    from mmlab.ui.snapshot import snapshot

    folder = find_run(run)
    console().print(snapshot(folder).text, markup=False)
    if follow:
        follow_run(folder)


def placement(run: RunArgument) -> None:
    """Show which rank is where, how it is (alive, waiting, slow, dead), what it does, and who talks to whom."""
    console().print(str(open_run(run).placement()), markup=False, soft_wrap=True)


def measured(
    run: RunArgument,
    step: Annotated[int | None, typer.Option("--step", help="The traced step; default: the last.")] = None,
) -> None:
    """Show a traced step's pipeline schedule as measured, with its bubble."""
    console().print(str(open_run(run).measured(step)), markup=False, soft_wrap=True)


def traffic(run: RunArgument) -> None:
    """Show what a run's ranks say to each other: groups, bytes a step, time under way and waited for."""
    console().print(str(open_run(run).traffic()), markup=False, soft_wrap=True)


def ledger(
    run: RunArgument,
    steps: Annotated[str, typer.Option("--steps", metavar="A[:B]", help="Name the samples of these steps.")] = "",
    json: JsonOption = None,
) -> None:
    """Show which samples a run has consumed, and prove that none was lost and none came twice (else exit code 2)."""
    check_writable(json)
    found = open_run(run).ledger()
    for number in _steps(steps):
        console().print("\n  ".join([f"step {number}", *found.samples(number)]), markup=False, soft_wrap=True)
    console().print(str(found), markup=False, soft_wrap=True)
    write_results(json, found.to_json() if json else {})
    if not found.ok:
        raise RunFailed(f"the ledger of run {run} does not hold: {found.problems[0]}")


def _steps(text: str) -> range:
    """The steps that A or A:B names, both ends included; none for an empty text."""
    first, colon, last = text.partition(":")
    try:
        found = range(int(first), int(last if colon else first) + 1) if text else range(0)
        if text and not found:
            raise ValueError
        return found
    except ValueError:
        raise MmlabError(f"--steps {text}: write a step such as 12, or a first and a last such as 10:14") from None


def compression(
    run: RunArgument,
    measure: Annotated[
        bool, typer.Option("--measure", help="Have a step reduced also without compression first, for the error.")
    ] = False,
) -> None:
    """Show how a run's gradients are compressed: bytes a step beside those without, time, what is left out."""
    found = open_run(run)
    if measure:
        _print_ack(sent := found.measure_compression())
        if found.status()["state"] == "paused":
            console().print("the run is paused: it is measured in its next step")
        else:
            found.wait(step=sent.wait().step + 1, timeout=ACK_TIMEOUT, progress=False)
    console().print(str(found.compression()), markup=False, soft_wrap=True)


def pause(run: RunArgument) -> None:
    """Pause after the step under way."""
    _steer(run, "pause")


def resume(run: RunArgument) -> None:
    """Go on after a pause."""
    _steer(run, "resume")


def step(run: RunArgument, n: Annotated[int, typer.Argument(min=1, help="Steps to run.")] = 1) -> None:
    """Run N steps, then pause."""
    _steer(run, "step", n)


def set_(run: RunArgument, values: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...")]) -> None:
    """Change the plan's live values, such as train.language.lr=1e-4."""
    _steer(run, "set", _pairs(values, "train.language.lr=1e-4"))


def compress(
    run: RunArgument,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="vision, language, or all.")],
    compressor: Annotated[
        str, typer.Argument(metavar="COMPRESSOR", help="none, bf16, fp16, int8, topk, powersgd or onebit.")
    ],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Options of it, such as rank=4 or ratio=0.01.")
    ] = None,
) -> None:
    """Change how a group's gradients are compressed."""
    _print_ack(open_run(run).compress(group, compressor, **_pairs(options or [], "rank=4")))


def relayout(
    run: RunArgument,
    changes: Annotated[list[str], typer.Argument(metavar="[PLAN] [KEY=VALUE]...", help="Such as parallel.tp=2.")],
) -> None:
    """Go on in another layout: a plan, or changes to the running one, on more or fewer ranks too."""
    _steer(run, "relayout", *changes)


def chaos(
    run: RunArgument,
    action: Annotated[
        list[str],
        typer.Argument(metavar="ACTION=TARGET...", help="kill=1, hang=1, slow=1 seconds=1, notice=1, corrupt=last."),
    ],
) -> None:
    """Do harm on purpose: kill or hang a rank, make it slow, give it notice, damage the newest checkpoint."""
    _print_ack(open_run(run).chaos(**_pairs(action, "kill=1")))


def checkpoint(
    run: RunArgument, name: Annotated[str, typer.Argument(help="Its name; empty: after the step.")] = ""
) -> None:
    """Save a checkpoint after the step under way."""
    _steer(run, "checkpoint", *([name] if name else []))


def restore(
    run: RunArgument,
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[PLAN] [KEY=VALUE]...", help="Another layout, such as parallel.tp=2.")
    ] = None,
    step: CheckpointStep = None,
    name: CheckpointName = "",
) -> None:
    """Go back to a checkpoint, in another layout too; a run that has ended is started again from it, in a live lab or
    in one of its own."""
    from mmlab.cli.training import continue_run
    from mmlab.lab import Lab
    from mmlab.messages import ENDED
    from mmlab.tracking.sent import Sent

    found = open_run(run)
    if found.status()["state"] in ENDED and not Lab.live():
        continue_run(found, step, name, changes or [])
        return
    sent = found.restore(step=step, name=name, plan=changes)
    if isinstance(sent, Sent):
        _print_ack(sent)
    else:
        console().print(f"restore: run {sent.id} starts again")


def export(
    run: RunArgument,
    folder: Annotated[Path, typer.Argument(help="Where to write vision/, projector/ and language/.")],
    step: CheckpointStep = None,
    name: CheckpointName = "",
    adapters: Annotated[bool, typer.Option(help="Write LoRA's adapters alone, as PEFT reads them.")] = False,
) -> None:
    """Write a checkpoint's weights as safetensors that Hugging Face classes read, LoRA's adapters merged into them."""
    for file in open_run(run).export(folder, step=step, name=name, adapters=adapters):
        console().print(str(file), soft_wrap=True)


def diagnose(run: RunArgument) -> None:
    """Say what makes a run's steps slow, with the times and what to try."""
    console().print(str(open_run(run).diagnose()), markup=False, soft_wrap=True)


def doctor(run: RunArgument) -> None:
    """Say what holds a run up: which rank has not joined which call, and where in its code it is."""
    console().print(str(open_run(run).doctor()), markup=False, soft_wrap=True)


def abort(run: RunArgument) -> None:
    """End a run at once, also one that is stuck; its engines live on. Nothing is saved."""
    _steer(run, "abort")


def stop(run: RunArgument) -> None:
    """End the run after the step under way."""
    _steer(run, "stop")


def _pairs(values: list[str], example: str) -> dict[str, Any]:
    """KEY=VALUE texts as a dict."""
    found: dict[str, Any] = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals:
            raise MmlabError(f"{value!r} is not KEY=VALUE, such as {example}")
        found[key.strip()] = _value(text.strip())
    return found


def _value(text: str) -> Any:
    """A value in TOML's notation; a bare word is a string."""
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _steer(name: str, verb: str, *arguments: Any) -> None:
    """Give a run a command and say where it was applied."""
    _print_ack(getattr(open_run(name), verb)(*arguments))


def _print_ack(sent: Sent) -> None:
    from mmlab.tracking.progress import in_kernel
    from mmlab.tracking.sent import WaitTimeout

    try:
        ack = sent.wait(CELL_TIMEOUT if in_kernel() else ACK_TIMEOUT)
    except WaitTimeout:
        if not in_kernel():
            raise
        console().print(f"{sent}; it goes on meanwhile")
        return
    note = f" ({ack.message})" if ack.message else ""
    console().print(f"{sent.verb}: applied after step {ack.step} on {len(ack.ranks)} ranks{note}")
