"""A run's checkpoints as a tree: lineages with what each has saved, and runs that were branched off."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from mmlab.tracking.tables import Table, size


class Browsable(Protocol):
    """A run, as far as a tree needs it."""

    def checkpoints(self) -> list[dict[str, Any]]:
        """See `RunRecord`."""

    def lineages(self) -> list[dict[str, Any]]:
        """See `mmlab.tracking.checkpoints`."""

    def branches(self) -> list[dict[str, Any]]:
        """See `mmlab.tracking.checkpoints`."""


@dataclass(repr=False)
class CheckpointTree(Table):
    """Nodes from the start on, each branch below what it came from.

    `nodes`: {"kind": "lineage", "depth", ...} as in `lineages`, {"kind": "checkpoint", "depth", ..., "current"} as in
    `checkpoints`, {"kind": "run", "depth", ...} as in `branches`.
    """

    nodes: list[dict[str, Any]]

    header = ("checkpoint", "step", "loss", "layout", "samples", "size", "kept", "saved")
    nothing = "no checkpoint yet"

    @classmethod
    def of(cls, run: Browsable) -> CheckpointTree:
        """The tree of a run. CheckpointError when its location cannot be reached."""
        lineages, rows, runs = run.lineages(), run.checkpoints(), run.branches()
        known = {lineage["id"] for lineage in lineages}
        limit = _limits(lineages)
        for row in rows:
            row["current"] = row["step"] <= limit.get(str(row["lineage"]), -1)
        nodes: list[dict[str, Any]] = []
        others = [row for row in rows if row["lineage"] not in known]
        if others:  # what the run began with, of another one
            nodes += _of_lineage(others, runs, 0)
        roots = [lineage for lineage in lineages if lineage["parent"] not in known]
        for lineage in roots:
            nodes += _branch(lineage, lineages, rows, runs, 0)
        return cls(nodes)

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """One row a node that has checkpoints below it, or is one."""
        if not any(node["kind"] == "checkpoint" for node in self.nodes):
            return []
        return [_cells(node) for node in self.nodes]

    def to_json(self) -> dict[str, Any]:
        """{"nodes"}, as JSON values."""
        return {"nodes": self.nodes}


def _limits(lineages: list[dict[str, Any]]) -> dict[str, float]:
    """The last step of each lineage that the run as it stands goes through."""
    by_id = {lineage["id"]: lineage for lineage in lineages}
    limit: dict[str, float] = {}
    cut = float("inf")
    at = lineages[-1]["id"] if lineages else ""
    while at and at not in limit:
        limit[at] = cut
        if at not in by_id:
            break
        cut, at = min(cut, by_id[at]["parent_step"]), by_id[at]["parent"]
    return limit


Rows = list[dict[str, Any]]


def _branch(lineage: dict[str, Any], lineages: Rows, rows: Rows, runs: Rows, depth: int) -> Rows:
    """A lineage, what it has saved, and the lineages that begin in it."""
    nodes: list[dict[str, Any]] = [{"kind": "lineage", "depth": depth, **lineage}]
    nodes += _of_lineage([row for row in rows if row["lineage"] == lineage["id"]], runs, depth + 1)
    for other in (other for other in lineages if other["parent"] == lineage["id"]):
        nodes += _branch(other, lineages, rows, runs, depth + 1)
    return nodes


def _of_lineage(rows: Rows, runs: Rows, depth: int) -> Rows:
    nodes: list[dict[str, Any]] = []
    for row in rows:
        nodes.append({"kind": "checkpoint", "depth": depth, **row})
        taken = [run for run in runs if (run["lineage"], run["step"]) == (row["lineage"], row["step"])]
        nodes += [{"kind": "run", "depth": depth + 1, **run} for run in taken]
    return nodes


def lineage_text(lineage: dict[str, Any]) -> str:
    """A lineage in words."""
    why = lineage["why"] or "went on"
    why = f"{why} at step {lineage['parent_step']}" if lineage["parent"] else why
    here = "; the run stands here" if lineage.get("last") else ""
    return f"lineage {lineage['id']}: {why}, to step {lineage['step']}{here}"


def saved_text(row: dict[str, Any]) -> str:
    """When a checkpoint was saved and why."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"] or 0.0))
    return f"{when}, {row['reason']}" if row["reason"] else when


def _cells(node: dict[str, Any]) -> tuple[str, ...]:
    indent = "  " * node["depth"]
    if node["kind"] == "lineage":
        return (f"{indent}{lineage_text(node)}", *[""] * 7)
    if node["kind"] == "run":
        return (f"{indent}-> run {node['run']}", *[""] * 7)
    loss = "" if node["loss"] is None else f"{node['loss']:.4g}"
    shared = f" + {size(node['shared_bytes'])} frozen" if node["shared_bytes"] else ""
    samples = "" if node["samples"] is None else f"{node['samples']:,}"
    kept = "until newer ones" if node["periodic"] else "yes"
    name = f"{indent}{node['name']}" + ("" if node["current"] else " (taken back)")
    stored = f"{size(node['bytes'])}{shared}"
    return name, str(node["step"]), loss, node["layout"], samples, stored, kept, saved_text(node)
