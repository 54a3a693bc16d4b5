"""The errors a person sees: one readable message each, never a traceback.

All derive from `MmlabError`; the command line turns them into exit codes and a
notebook cell shows only their text (IPython calls `_render_traceback_`).
"""

from __future__ import annotations


class MmlabError(Exception):
    """An error with a message that says what is wrong and what to do."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: the lines to show instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class PlanError(MmlabError):
    """The plan is at fault: names the field, the reason and a fix."""


class DataError(MmlabError):
    """Shards, images or a tokenizer are missing or unreadable: names the file."""


class CheckpointError(MmlabError):
    """A checkpoint is missing, incomplete, damaged or of another model."""


class DamagedError(CheckpointError):
    """A checkpoint is not, or no longer, what was saved: an older one may do."""


class LabError(MmlabError):
    """Engines could not be started, found or reached."""


class RunFailed(MmlabError):
    """The run failed: names rank, role, phase, step and where the log is. Or it was deleted while it was waited for.

    `cause` is the kind of the first failure (`mmlab.messages.Failure`); "input" means that the user's plan, data or
    checkpoint is at fault, which the command line's exit code says too.
    """

    exit_code = 2

    def __init__(self, message: str = "", cause: str = "") -> None:
        super().__init__(message)
        if cause == "input":
            self.exit_code = 1
