"""The engine's process: ipyparallel's engine, plus an eye on the keeper. Arguments are those of `ipengine`."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

from mmlab.messages.files import process_alive, read_json

KEEPER = "MMLAB_KEEPER"
"""Environment variable: {"pid", "started", "host"} of the keeper, JSON."""
CONNECTION = "MMLAB_CONNECTION"
"""Environment variable: the controller's connection file, waited for here, so that engine and controller start side by
side."""
DEFAULTS = [
    "--IPEngine.out_stream_factory=mmlab.cluster.streams.EngineStream",
    "--IPEngine.timeout=120",  # registration on a machine that is busy with other engines' imports (default: 5 s)
    "--IPEngine.max_heartbeat_misses=0",  # a stopped controller ends no run; the keeper ends engines
]
CONNECTION_TIMEOUT = 120.0
"""Seconds that the controller may take to write its connection file."""


def _end_with_keeper(keeper: dict[str, float]) -> None:
    """End the engine when its keeper was killed: nobody else would end it."""
    while process_alive(int(keeper["pid"]), keeper["started"]):
        time.sleep(1.0)
    os._exit(1)


def _wait_for_connection(path: Path) -> None:
    end = time.monotonic() + CONNECTION_TIMEOUT
    while (found := read_json(path)) is None:  # absent, or not yet whole
        if time.monotonic() > end:
            sys.exit(f"the controller wrote no connection file: {path}")
        time.sleep(0.02)
    os.environ["IPP_CONNECTION_INFO"] = json.dumps(found)


def main() -> None:
    """Run an engine until it is told to end."""
    keeper = json.loads(os.environ.get(KEEPER, "null"))
    if keeper and keeper["host"] == socket.gethostname():
        threading.Thread(target=_end_with_keeper, args=(keeper,), name="mmlab-keeper", daemon=True).start()
    from ipyparallel.engine.app import IPEngine

    connection = os.environ.get(CONNECTION)
    if connection:
        _wait_for_connection(Path(connection))
    IPEngine.launch_instance(argv=DEFAULTS + sys.argv[1:])


if __name__ == "__main__":
    main()
