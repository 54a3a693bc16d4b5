"""Processes that a command works with."""

from __future__ import annotations

import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor

from mmlab.data.worker import end_with_parent


def start_pool(workers: int) -> ProcessPoolExecutor:
    """A pool of spawned processes that end with this one and never see an interrupt: that is for this process.

    They inherit a mask that holds it back; ignored from an initializer on, it would still end those that are starting
    up, with a traceback.
    """
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=end_with_parent)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pool.submit(int)  # starts all of them
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pool
