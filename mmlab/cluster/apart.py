"""Work that needs torch, in a process of its own: whoever asks (a kernel, the command line) does not load it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from mmlab.errors import CheckpointError


def apart(module: str, given: Any, doing: str) -> Any:
    """What a module that is started with `given` as JSON prints as JSON. CheckpointError with its last line, or with
    what it was `doing`, when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(given)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise CheckpointError(done.stderr.strip().rpartition("\n")[2] or f"{doing} ended with {done.returncode}")
    return json.loads(done.stdout)
