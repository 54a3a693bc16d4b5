"""What a batch system says about a job that has not started yet."""

from __future__ import annotations

import shutil
import subprocess
import time

EVERY = 5.0
"""Seconds between questions to the batch system, which serves others too."""


class Queue:
    """Watches one job. Only Slurm is asked; other systems give no state, and no job is ever taken for gone."""

    def __init__(self, slurm: bool = False, every: float = EVERY) -> None:
        self.state = ""
        self._slurm = slurm
        self._every = every
        self._asked = time.monotonic() - every + 1.0  # a job just submitted may not be listed yet
        self._listed = False

    def left(self, job: str) -> bool:
        """Whether a job that was in the queue is no longer there; asks at most every `every` seconds."""
        if not self._slurm or time.monotonic() - self._asked < self._every:
            return False
        self._asked = time.monotonic()
        answer = self._ask(job)
        if answer is None:
            return False
        left = self._listed and not answer
        self._listed = self._listed or bool(answer)
        self.state = answer
        return left

    def _ask(self, job: str) -> str | None:
        """State and reason of a job; empty when it is not listed, None when the question cannot be asked."""
        if shutil.which("squeue") is None:
            return None
        command = ["squeue", "--noheader", "--jobs", job, "--format", "%T (%r)"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.SubprocessError):
            return None
        if done.returncode != 0:
            return "" if "invalid job id" in done.stderr.lower() else None
        return done.stdout.strip()
