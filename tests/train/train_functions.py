"""What tests run in rank processes."""

import os
import signal
import time

from mmlab.train.job import Job
from mmlab.train.worker import run_worker


def fail_at(kind, rank, step, phase):
    """A scripted fault: the given rank does something bad when it enters a phase of a step."""

    def fault(at_rank, at_step, at_phase):
        if (at_rank, at_step, at_phase) != (rank, step, phase):
            return
        if kind == "memory":
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 64 TB")
        if kind == "raise":
            raise ValueError("scripted fault")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "slow":
            time.sleep(1.0)

    return fault


def run(rank, world, host, port, run_dir, generation=1, restore=None, fault=None):
    job = Job(run_dir, rank, world, host, port, generation, restore)
    return run_worker(job, fail_at(*fault) if fault else None)
