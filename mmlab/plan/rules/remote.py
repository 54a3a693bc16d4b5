"""Shards that are elsewhere: the package that reads such an address is here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import Plan

PACKAGES = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
"""Protocols and the package that fsspec reads each by."""
IN_THE_EXTRA = ("aiohttp", "s3fs")
"""Packages of mmlab's extra `remote`."""


def packages(plan: Plan) -> Iterator[Problem]:
    """Each address that the data are read from has its package."""
    data = plan.data
    named = [("data.sources", source) for source in data.sources] or [("data.path", data.path)]
    for field, address in [*named, ("data.held_out", data.held_out)]:
        kind, mark, _ = address.partition("://")
        package = PACKAGES.get(kind.lower()) if mark else None
        if package and importlib.util.find_spec(package) is None:
            command = 'pip install "mmlab[remote]"' if package in IN_THE_EXTRA else f"pip install {package}"
            yield Problem(field, f"{kind}:// is read by {package}, which is not installed.", Fix(command))
