"""The user's side of ipyparallel, loaded when asked: whether a profile exists, and the view of a lab's engines."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from mmlab.errors import LabError

CONNECT = 10.0
"""Seconds that the controller may take to answer a new client."""
NOTICE = 5.0
"""Seconds in which the controller tells a client of engines that are up: it tells all clients at once."""


def check_profile(profile: str) -> None:
    """LabError when there is no ipyparallel profile of that name."""
    if not profile:
        return
    from IPython.paths import get_ipython_dir

    folder = Path(get_ipython_dir(), f"profile_{profile}")
    if not folder.is_dir():
        known = sorted(path.name.removeprefix("profile_") for path in folder.parent.glob("profile_*"))
        raise LabError(
            f"no ipyparallel profile {profile!r} (profiles: {', '.join(known) or 'none'}); make it with "
            f"`ipython profile create --parallel {profile}` and name the batch system in {folder}/ipcluster_config.py, "
            'for Slurm: c.Cluster.engine_launcher_class = "slurm"'
        )


class LabView:
    """Connects once to a lab's controller, and again when the lab has another one."""

    def __init__(self) -> None:
        self._client: Any = None
        self._file = ("", 0)
        """The controller's connection file, and when it was written: the next controller's has the same name."""
        self._known: set[int] = set()
        """Engines that the controller has told of, or was waited for in vain to: for them nothing is waited again."""

    def of(self, info: dict[str, Any], ranks: list[int]) -> Any:
        """The DirectView of these engines in this order while all of them live, else of those that are up.

        `info` is what the keeper wrote. LabError when there are none, or the controller does not answer.
        """
        up = [engine["engine"] for engine in info.get("up", [])]
        if not info.get("cluster_id") or not (up or ranks):
            raise LabError("the engines are not up yet; lab.wait() waits for them")
        file = os.path.join(info["profile_dir"], "security", f"ipcontroller-{info['cluster_id']}-client.json")
        import ipyparallel as ipp

        source = (file, 0)
        with contextlib.suppress(OSError):
            source = (file, os.stat(file).st_mtime_ns)
        if self._client is None or self._file != source:
            self.close()
            try:
                self._client = ipp.Client(file, timeout=CONNECT)
            except (OSError, TimeoutError, ipp.error.TimeoutError) as error:
                raise LabError(
                    f"the controller does not answer ({error or type(error).__name__}); steering works without it"
                ) from None
            self._file = source
            self._known = set()
        wanted, end = (set(ranks) & set(up) or set(up)) - self._known, time.monotonic() + NOTICE
        while not wanted <= set(self._client.ids) and time.monotonic() < end:
            time.sleep(0.02)
        self._known |= wanted.union(self._client.ids)
        there = set(self._client.ids) - set(info.get("gone", []))  # of an end the controller hears later
        ids = ranks if ranks and set(ranks) <= there else [one for one in up if one in there]
        if not ids:
            raise LabError("no engine is registered; lab.status() shows whether new ones are up")
        return self._client.direct_view(list(ids))

    def close(self) -> None:
        """Disconnect."""
        if self._client is not None:
            self._client.close()
            self._client = None
