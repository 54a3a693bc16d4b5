"""Routes of a Jupyter server that show and steer runs while kernels are busy or dead.

Only files are read and written: run folders, inboxes, the registry of labs. Never an ipyparallel client: with a
stopped controller one froze the whole server for 20 s.
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """What Jupyter's server asks for."""
    from mmlab.server.app import MmlabServer

    return [{"module": "mmlab.server", "app": MmlabServer}]
