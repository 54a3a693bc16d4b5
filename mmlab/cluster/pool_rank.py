"""One rank of a `RankPool`: a plain process that runs the functions it is sent, one after the other."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from mmlab.errors import MmlabError


def _end_with_parent(parent: int) -> None:
    """End this process when its parent is gone, also while it hangs in a collective."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _resolve(name: str, path: list[str]) -> Any:
    """The function of "module:name"; `path` is the caller's sys.path, so that its modules are found here too."""
    for entry in path:
        if entry not in sys.path:
            sys.path.append(entry)
    module, _, function = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in function.split("."):
        found = getattr(found, part)
    return found


def _call(rank: int, request: dict[str, Any]) -> tuple[str, Any]:
    """Run one function; its result, or (when it was raised, its traceback, what the input is at fault for)."""
    import torch.distributed as dist

    try:
        function = _resolve(request["function"], request["path"])
        place = (rank, request["world"], request["host"], request["port"])
        return "result", pickle.dumps(function(*place, *request["args"], **request["kwargs"]))
    except BaseException as error:  # SystemExit too: the parent must hear of every end
        said = str(error) if isinstance(error, MmlabError) and error.exit_code == 1 else ""
        return "error", (time.monotonic(), traceback.format_exc(), said)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> None:
    """Arguments: the descriptor of the connection to the parent, the rank, the parent's pid, the file for stacks."""
    descriptor, rank, parent = (int(argument) for argument in sys.argv[1:4])
    stacks = open(sys.argv[4], "w")  # noqa: SIM115  stays open for faulthandler
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    store = None
    try:
        while True:
            request = pickle.loads(connection.recv_bytes())
            if request["kind"] == "store":  # rank 0 only: a fresh store for each call
                store = dist.TCPStore(request["host"], 0, is_master=True, wait_for_workers=False)
                reply: tuple[str, Any] = ("store", store.port)
            else:
                reply = _call(rank, request)
            sys.stdout.flush()
            connection.send_bytes(pickle.dumps(reply))
    except (EOFError, BrokenPipeError):
        pass
    del store


if __name__ == "__main__":
    main()
