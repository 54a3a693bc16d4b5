"""Kernels of tests, which talk over files: the ports of a kernel are picked before it listens on them, a second later,
and meanwhile engines of another test on this machine are given some."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from typing import TypeVar

from jupyter_client.manager import AsyncKernelManager, KernelManager

Manager = TypeVar("Manager", KernelManager, AsyncKernelManager)


def kernel_manager() -> KernelManager:
    """Starts one kernel."""
    return _over_files(KernelManager)


def notebook_kernel_manager() -> AsyncKernelManager:
    """Starts the kernel of a notebook (`nbclient.NotebookClient`'s `km`)."""
    return _over_files(AsyncKernelManager)


def _over_files(kind: type[Manager]) -> Manager:
    """The sockets lie in a folder of their own, with a short path: their names have at most 107 characters."""
    folder = tempfile.mkdtemp(prefix="kernel-")
    manager = kind(kernel_name="python3", transport="ipc", ip=f"{folder}/k")
    weakref.finalize(manager, shutil.rmtree, folder, ignore_errors=True)
    return manager
