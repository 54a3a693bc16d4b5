"""Shards that are elsewhere: there is such a protocol, and the package that reads it is here."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Iterator

from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import Plan

PACKAGES = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
"""Protocols and the package that fsspec reads each by."""
IN_THE_EXTRA = ("aiohttp", "s3fs")
"""Packages of mmlab's extra `remote`."""


def addresses(plan: Plan) -> Iterator[Problem]:
    """Each address that data are read from, or checkpoints kept at, has a known protocol, and its package is here."""
    data = plan.data
    named = [("data.sources", source) for source in data.sources] or [("data.path", data.path)]
    kept = ("checkpoint.location", plan.checkpoint.location)
    for field, address in [*named, ("data.held_out", data.held_out), kept]:
        kind, mark, rest = address.partition("://")
        if not mark or address.startswith("pipe:"):
            continue
        package = PACKAGES.get(kind.lower())
        if package and importlib.util.find_spec(package) is None:
            command = 'pip install "mmlab[remote]"' if package in IN_THE_EXTRA else f"pip install {package}"
            yield Problem(field, f"{kind}:// is read by {package}, which is not installed.", Fix(command))
        elif not package and kind.lower() not in _known():
            near = (difflib.get_close_matches(kind.lower(), PACKAGES) or ["s3" if field == kept[0] else "https"])[0]
            sources = [near + mark + rest if source == address else source for source in data.sources]
            value = repr(sources).replace("'", '"') if field == "data.sources" else near + mark + rest
            yield Problem(
                field, f"{kind}:// is no protocol that fsspec knows.", Fix(f"use {near}", (f"{field}={value}",))
            )


def _known() -> list[str]:
    return importlib.import_module("fsspec").available_protocols()
