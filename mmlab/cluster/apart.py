"""Work that needs torch, in a process of its own: whoever asks (a kernel, the command line) does not load it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from mmlab.errors import CheckpointError


def apart(module: str, given: Any, doing: str, timeout: float | None = None) -> Any:
    """What a module that is started with `given` as JSON prints as JSON. CheckpointError with its last line, or with
    what it was `doing`, when it fails, and when that takes more than `timeout` seconds. It ends with whoever waits."""
    command = [sys.executable, "-m", module, json.dumps(given)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"{doing} was not done after {timeout:g} s; give it a longer timeout") from None
    if done.returncode != 0:
        raise CheckpointError(done.stderr.strip().rpartition("\n")[2] or f"{doing} ended with {done.returncode}")
    return json.loads(done.stdout)
