"""The command line: a thin view of `mmlab.lab`.

Exit codes: 0 done; 1 the input or the plan is at fault; 2 the run failed; 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from mmlab.cli import bench, checkpoints, data, deepspeed, labs, plans, runs, training
from mmlab.errors import MmlabError

INTERRUPTED = 130


def build_app() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(
        name="mmlab",
        help="Train vision-language models with hybrid parallelism from a notebook, and steer them live.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for commands in (training, plans, deepspeed, data, bench, runs, checkpoints, labs):
        commands.register(app)
    return app


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one command and end the process with its exit code."""
    sys.exit(run_command(arguments))


def run_command(arguments: list[str] | None = None) -> int:
    """Run one command; its exit code. Errors of the user are one message on stderr."""
    try:
        build_app()(arguments, prog_name="mmlab")
    except MmlabError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
        return 1 if code == 2 else code  # wrong usage is the user's input at fault: 2 is kept for failed runs
    return 0
