"""The engine's side of `%%rank` and `%%ranks`: a cell in the engine's main thread, beside the training thread.

What a cell finds, beside what earlier cells of this engine have left (while a rank trains on it):

- `rank`, `role`, `step` (steps done), `plan` (with its live values), `run_dir`
- `model`: this rank's part of the network (`vision`, `projector`, `language`; None where it has none)
- `session`: everything else (`mesh`, `built.optimizer`, `feed`, ...), `mmlab.train.session.Session`

They are there during the cell only, so that nothing of a generation outlives it. Training goes on meanwhile: reading is
safe, values may be from the middle of a step (`--between` pauses for the cell). Collectives are the training thread's:
a cell that enters one alone hangs, and with it the step.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import sys
import traceback
from collections.abc import Iterator
from types import CodeType
from typing import Any

BEGAN = "\x00mmlab cell began\x00"
"""What an engine prints when it begins a cell: until then it has not answered."""
FILE = "<cell>"
MOST_RICH = 2_000_000
"""Characters of a picture or table that come back from a rank."""
MOST_TEXT = 20_000
"""Characters of the text of a result."""
LAST_FRAMES = 3
"""Calls of other files that a traceback shows, the innermost."""


def run_cell(source: str) -> dict[str, Any]:
    """Run a cell; {"data": {mime type: text} of the last expression, None without}, or {"error": one line, "trace":
    [lines]}, or {"interrupted": True}. What it prints and
    displays goes to who asked, as it comes."""
    from IPython import get_ipython

    from mmlab.cluster.engine import NAME

    shell = get_ipython()
    print(BEGAN, flush=True)
    found = _outcome(shell, source, names_of(shell.user_ns.get(NAME)))
    sys.stdout.flush()
    sys.stderr.flush()
    return found


def _outcome(shell: Any, source: str, names: dict[str, Any]) -> dict[str, Any]:
    try:
        with offered(shell.user_ns, names):
            value = _run(shell, source)
            return {"data": _shown(shell, source, value)}
    except KeyboardInterrupt:
        return {"interrupted": True}
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}".strip().rstrip(":"), "trace": _trace(error)}


@contextlib.contextmanager
def offered(namespace: dict[str, Any], names: dict[str, Any]) -> Iterator[None]:
    """Names for what the training thread holds, in the namespace of cells, until the cell has ended."""
    before = {name: namespace[name] for name in names if name in namespace}
    namespace.update(names)
    try:
        yield
    finally:
        for name, value in names.items():
            if namespace.get(name) is value:  # else the cell has given the name to something of its own
                del namespace[name]
                if name in before:
                    namespace[name] = before[name]
        names.clear()


def names_of(engine: Any) -> dict[str, Any]:
    """What a cell finds; what is not there is left out (no run, or one that does not train yet)."""
    job = getattr(engine, "job", None)
    found: dict[str, Any] = {} if job is None else {"rank": job.rank, "run_dir": job.run_dir}
    session = getattr(engine, "session", None)
    for name, path in (
        ("role", "mesh.place.label"), ("step", "steering.step"), ("plan", "plan"), ("model", "built.part"),
    ):  # fmt: skip
        with contextlib.suppress(AttributeError):
            value = session
            for part in path.split("."):
                value = getattr(value, part)
            found[name] = value
    return found if session is None else found | {"session": session}


def _run(shell: Any, source: str) -> Any:
    """Run the statements; the value of the last one where it is an expression."""
    text = shell.transform_cell(source)
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    body = ast.parse(text, FILE).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    _execute(compile(ast.Module(body, []), FILE, "exec"), shell.user_ns)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), FILE, "eval"), shell.user_ns)


def _execute(code: CodeType, namespace: dict[str, Any]) -> None:
    exec(code, namespace)


def _shown(shell: Any, source: str, value: Any) -> dict[str, str] | None:
    """The value as a notebook shows it; None where there is nothing to show."""
    if value is None or source.rstrip().endswith(";"):
        return None
    data, _ = shell.display_formatter.format(value)
    if not data:  # it has displayed itself
        return None
    found = {kind: text for kind, text in data.items() if isinstance(text, str) and len(text) <= MOST_RICH}
    plain = found.get("text/plain", repr(value))
    return found | {"text/plain": plain if len(plain) <= MOST_TEXT else f"{plain[:MOST_TEXT]} ..."}


def _trace(error: BaseException) -> list[str]:
    """Where it went wrong: the lines of the cell, and the innermost calls outside it."""
    if isinstance(error, SyntaxError):
        return [line.rstrip("\n") for line in traceback.format_exception_only(error)][:-1]
    frames = traceback.extract_tb(error.__traceback__)
    own = [number for number, frame in enumerate(frames) if frame.filename == FILE]
    inside = frames[own[0] :] if own else frames
    outside = [frame for frame in inside if frame.filename != FILE]
    kept = [frame for frame in inside if frame.filename == FILE or frame in outside[-LAST_FRAMES:]]
    where = {True: "cell line {0.lineno}: {0.line}", False: "{0.filename}:{0.lineno} in {0.name}: {0.line}"}
    return [where[frame.filename == FILE].format(frame) for frame in kept]
