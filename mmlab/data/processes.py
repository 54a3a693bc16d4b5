"""Processes that a command works with."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import resource_tracker
from typing import Any

from mmlab.data.worker import end_with_parent


class Pool(ProcessPoolExecutor):
    """Spawned processes that end with this one and never see an interrupt: that is for this process.

    They inherit a mask that holds it back; ignored from an initializer on, it would still end those that are starting
    up, with a traceback. Each call may start one: the executor spawns them as they are needed, on the calling thread.
    """

    def __init__(self, workers: int) -> None:
        resource_tracker.ensure_running()  # it unblocks interrupts once it has started, which the first spawn would do
        super().__init__(workers, multiprocessing.get_context("spawn"), initializer=end_with_parent)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As the executor's."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(fn, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
