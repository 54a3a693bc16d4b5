"""`%load_ext mmlab`: the command line in a cell, and cells on live ranks.

`%mmlab WORD ...` says what `mmlab WORD ...` says in a terminal, about the run at work in the only live lab unless it is
told another one. `%%rank 2` and `%%ranks` run a cell in the engines of ranks, beside the training thread.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, cell_magic, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from mmlab.errors import LabError, MmlabError

if TYPE_CHECKING:
    from mmlab.lab import Lab, Run

HOLDING = {"run": "lab.train(plan)", "demo": 'lab.train("quickstart")', "lab": "this notebook"}
"""Commands that would hold the cell, and what there is instead."""
OPTIONS = "[--lab LAB] [--run RUN]"


@magics_class
class LabMagics(Magics):
    """`%mmlab`, `%%rank` and `%%ranks`."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._labs: dict[str, Lab] = {}

    @line_magic
    def mmlab(self, line: str) -> None:
        """%mmlab [--lab LAB] [--run RUN] WORD [ARGUMENTS]: what `mmlab WORD` does in a terminal.

        The run may be left out: it is the one at work in the only live lab (in LAB), else the newest. `%mmlab --help`
        lists the words, `%mmlab WORD --help` says what one takes.
        """
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise MmlabError(f"%mmlab {line}: {error}") from None
        lab, run, words = _options(words)
        if not words or words[0] in ("-h", "--help", "help"):
            print(overview())
        elif words[0] == "status":
            self._status(words[1:], lab, run)
        else:
            self._command(words, lab, run)

    def _command(self, words: list[str], lab: str, run: str) -> None:
        from mmlab.cli import run_command

        word, rest = words[0], words[1:]
        asks = any(one in ("-h", "--help") for one in rest)
        if word in HOLDING and not asks:
            raise MmlabError(
                f"%mmlab {word} would hold this cell until its end; in a notebook there is {HOLDING[word]}"
            )
        if takes_run(word) and not asks and not (rest and _names_run(rest[0])):
            rest = [str(self._run(lab, run).dir), *rest]
        code = run_command([word, *rest])
        if code:
            raise CommandFailed(f"%mmlab {word} did not succeed (exit code {code}); its message is above")

    def _status(self, rest: list[str], lab: str, run: str) -> None:
        """The live labs, and the run: state, ranks, last loss."""
        if rest and rest[0] in ("-h", "--help"):
            print(f"%mmlab {OPTIONS} status: the live labs, and the newest run: state, ranks, last loss")
            return
        from mmlab.lab import Lab
        from mmlab.ui.snapshot import snapshot

        labs = [one for one in Lab.live() if not lab or one.id == lab]
        print("\n".join(map(repr, labs)) or "no live labs")
        try:
            found = self._run(lab, run)
        except LabError as error:
            print(error)
            return
        print(snapshot(found.dir).text)

    def _run(self, lab: str, run: str) -> Run:
        """The run that is meant."""
        from mmlab.cli.shared import open_run
        from mmlab.lab import Lab
        from mmlab.messages.runs import runs_root
        from mmlab.tracking.record import list_runs

        if run:
            return open_run(run)
        if lab or Lab.live():
            found = self._lab(lab)
            if (current := found.current) is not None:
                return current
            if lab:
                raise LabError(f"lab {lab} has had no run yet")
        if not list_runs():
            raise LabError(f"no run yet in {runs_root()}; lab.train(plan) starts one")
        return open_run("last")

    def _lab(self, name: str = "") -> Lab:
        """The lab that is meant, kept with its connection; the only live one without a name."""
        from mmlab.lab import Lab

        live = [one.id for one in Lab.live()]
        if not name and len(live) > 1:
            raise LabError(f"several labs live: {', '.join(live)}; say which: --lab {live[-1]}")
        wanted = name or (live[0] if live else "")
        self._labs = {known: one for known, one in self._labs.items() if known in live}
        if wanted not in self._labs:
            self._labs[wanted] = Lab.attach(wanted)
        known = self._labs[wanted]
        newest = next((one.run for one in Lab.live() if one.id == known.id), None)
        if newest is not None and (known.run is None or known.run.dir != newest.dir):
            known.run = newest
        return known

    @magic_arguments()
    @argument("rank", type=int, help="the rank, such as 2")
    @argument("--lab", default="", help="the lab's id, where several live")
    @argument("--between", action="store_true", help="pause the run for the cell, so that no step is under way")
    @argument("--timeout", type=float, default=10.0, help="seconds within which the rank must begin (default 10)")
    @argument("line", nargs="*", help="as a line magic: what to run")
    @line_cell_magic
    def rank(self, line: str, cell: str | None = None) -> None:
        """Run a cell on one live rank, in its engine, beside the training thread. Output comes as it is printed.

        The cell finds `model`, `plan`, `step`, `rank`, `role`, `run_dir` and `session` of that rank, and what earlier
        cells there have left. Interrupting the kernel interrupts the cell, not the run.
        """
        options = _parsed(self.rank, line)
        if options is not None:
            self._ask([options.rank], cell if cell is not None else " ".join(options.line), options)

    @magic_arguments()
    @argument("ranks", nargs="?", default="all", help="ranks such as 0,2 or 0-3; default: all")
    @argument("--lab", default="", help="the lab's id, where several live")
    @argument("--between", action="store_true", help="pause the run for the cell, so that no step is under way")
    @argument("--timeout", type=float, default=10.0, help="seconds within which a rank must begin (default 10)")
    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run a cell on all live ranks, or on some, in their engines, beside the training threads.

        Each line of output comes as it is printed, with its rank before it. The cell finds `model`, `plan`, `step`,
        `rank`, `role`, `run_dir` and `session` of its rank. Interrupting the kernel interrupts the cell, not the run.
        """
        from mmlab.cluster.asking import parse_ranks

        options = _parsed(self.ranks, line)
        if options is not None:
            self._ask(parse_ranks(options.ranks), cell, options)

    def _ask(self, ranks: list[int] | None, source: str, options: argparse.Namespace) -> None:
        from mmlab.cluster.asking import ask, engines_of

        lab = self._lab(options.lab)
        view = lab.view
        run = lab.current
        chosen = engines_of(_in_rank_order(run, view), ranks)
        processes = {engine["engine"]: engine for engine in lab.info().get("up", [])}
        with between(run) if options.between else contextlib.nullcontext():
            ask(view, chosen, source, processes, say, show, options.timeout)


class CommandFailed(MmlabError):
    """A command did not succeed; it has said why."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def say(rank: int, line: str, error: bool) -> None:
    """Print one line that a rank has printed."""
    import sys

    print(f"[{rank}] {line}", file=sys.stderr if error else sys.stdout, flush=True)


def show(rank: int, data: Mapping[str, Any]) -> None:
    """Show what a rank has displayed, or what its last expression is."""
    rich = [kind for kind in data if kind != "text/plain"]
    text = str(data.get("text/plain", ""))
    if not rich:
        for line in text.splitlines():
            print(f"[{rank}] {line}", flush=True)
        return
    from IPython.display import display

    print(f"[{rank}]", flush=True)
    display(dict(data), raw=True)


def overview() -> str:
    """The words of `%mmlab`, each with what it does."""
    rows = [("status", "Show the live labs, and the newest run: state, ranks, last loss.")]
    rows += [(name, _first_line(command)) for name, command in sorted(_commands().items()) if name not in HOLDING]
    width = max(len(name) for name, _ in rows)
    listed = [f"  {name:{width}}  {text}" for name, text in rows]
    usage = f"%mmlab {OPTIONS} WORD [ARGUMENTS]   about the run at work in the only live lab, unless told otherwise"
    more = "%mmlab WORD --help says what a word takes. %%rank --help, %%ranks --help: cells on live ranks."
    return "\n".join([usage, "", *listed, "", more])


def takes_run(word: str) -> bool:
    """Whether a command is about a run, which it takes as its first argument."""
    command = _commands().get(word)
    return command is not None and bool(command.params) and command.params[0].name == "run"


def _commands() -> dict[str, Any]:
    from typer.main import get_command

    from mmlab.cli import build_app

    return dict(getattr(get_command(build_app()), "commands", {}))


def _first_line(command: Any) -> str:
    return " ".join((command.help or "").split("\n\n")[0].split())


def _options(words: list[str]) -> tuple[str, str, list[str]]:
    """--lab and --run before the word, and the rest."""
    found = {"--lab": "", "--run": ""}
    while words and words[0].partition("=")[0] in found:
        name, equals, value = words[0].partition("=")
        if not equals and len(words) < 2:
            raise MmlabError(f"%mmlab {name} takes a name; %mmlab labs and %mmlab runs list them")
        found[name] = value if equals else words[1]
        words = words[1:] if equals else words[2:]
    return found["--lab"], found["--run"], words


def _names_run(word: str) -> bool:
    """Whether a word is a run's folder or its whole name: `%mmlab pause RUN` does as `mmlab pause RUN`."""
    from mmlab.cli.shared import find_run

    try:
        return find_run(word).name == Path(word).name
    except LabError:
        return False


def _parsed(magic: Any, line: str) -> argparse.Namespace | None:
    """The options of a cell magic; None where help was asked for and shown."""
    if any(word in ("-h", "--help") for word in line.split()):
        print(magic.__doc__ or "")
        return None
    try:
        found: argparse.Namespace = parse_argstring(magic, line)
    except Exception as error:  # IPython's UsageError is no error of ours
        raise MmlabError(f"%%{magic.__name__} {line}: {error}") from None
    return found


def _in_rank_order(run: Run | None, view: Any) -> list[int]:
    """Engines by rank: those of a run, else all that are up."""
    record = run._record.info.get("engines", []) if run is not None else []
    return list(record) or list(view.targets)


@contextlib.contextmanager
def between(run: Run | None) -> Iterator[None]:
    """Pause a run that goes on, and let it go on afterwards, whatever happens meanwhile."""
    if run is None or run.status()["state"] != "running":
        yield
        return
    sent = run.pause()
    try:  # from here on, also when the wait for the pause is interrupted
        sent.wait()
        yield
    finally:
        with contextlib.suppress(MmlabError):  # it has ended meanwhile
            run.resume()


def register(shell: Any) -> None:
    """What `%load_ext mmlab` does."""
    shell.register_magics(LabMagics)
