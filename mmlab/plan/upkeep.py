"""The sections about a run's upkeep: what is saved, where it runs and how it recovers, what is recorded."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mmlab.plan.section import LIVE, Ranks, Section


class CheckpointConfig(Section):
    """When to save and what to keep."""

    every_steps: int = Field(0, ge=0, json_schema_extra=LIVE)
    """Steps between checkpoints; 0 means only on command and at the end."""
    every_minutes: float = Field(0.0, ge=0, json_schema_extra=LIVE)
    """Minutes after which a checkpoint is saved, counted from the one before (or the start), by rank 0's clock; 0 means
    that time does not matter."""
    at_end: bool = True
    """Whether a finished run saves a last checkpoint."""
    keep_last: int = Field(3, ge=0, json_schema_extra=LIVE)
    """Periodic checkpoints kept; 0 keeps all. Ones made on command are always kept."""
    keep_every: int = Field(0, ge=0, json_schema_extra=LIVE)
    """Steps between periodic checkpoints that are kept for good, beside the last ones; 0 keeps none."""
    asynchronous: bool = Field(True, json_schema_extra=LIVE)
    """Whether a periodic checkpoint is copied to host memory between two steps and written while the run goes on; else
    the run waits until it is written."""
    location: str = ""
    """A folder, or an address that fsspec knows (`s3://bucket/folder`), that all ranks reach; the run's checkpoints lie
    there below the run's name. Empty means in the run's own folder."""
    fall_back: bool = True
    """Whether a run that goes on from its newest checkpoint takes the one before where that is damaged. One that a
    person names is never exchanged for another."""


class ClusterConfig(Section):
    """The engines."""

    profile: str = ""
    """An ipyparallel profile, for which the lab must have been made; empty means the engines that the lab has (`mmlab
    run`: local ones)."""
    ranks_per_node: int = Field(0, ge=0)
    """Ranks that fit on one node; 0 means all on one."""
    threads: int = Field(0, ge=0)
    """torch threads of each rank; 0 means max(1, cores // ranks of the host)."""
    idle_timeout: float = Field(1800.0, gt=0)
    """Seconds without run or client after which a lab that trains this plan ends itself, unless it was told otherwise
    when it was made."""
    start_timeout: float = Field(180.0, gt=0)
    """Seconds that local engines may take to start (batch profiles wait without limit), likewise."""
    anchors: Ranks = ()
    """Ranks that must not be on expendable hosts (spot, preemptible), such as [0]."""
    notices: Literal["auto", "none", "aws", "gcp", "azure"] = "auto"
    """Whose metadata server each host asks whether it is about to be taken away; auto asks which one answers, within a
    second and beside the training, and none if none does."""
    grace: float = Field(30.0, gt=0)
    """Seconds between SIGTERM or SIGUSR1 and the end of a process, in which the run saves and leaves it."""
    max_recoveries: int = Field(3, ge=0)
    """Most times within `recovery_window` that a lab replaces what failed and lets the run go on from its newest
    checkpoint; then, and with 0 at once, the run fails."""
    recovery_window: float = Field(3600.0, gt=0)
    """Seconds within which recoveries count against `max_recoveries`."""
    hang_timeout: float = Field(300.0, ge=0)
    """Seconds without progress of any rank after which a run counts as hung and is recovered; ten times as long before
    a generation's first step has ended and while ranks evaluate or save; 0 means never. A pause is no hang."""
    elastic: bool = False
    """Whether a run that loses an engine which cannot be replaced within `start_timeout` goes on with fewer ranks (a
    smaller dp or vision_dp, the same global batch), and takes its full layout up again when the engine is back."""
    spares: int = Field(0, ge=0)
    """Engines beyond the plan's ranks that the lab keeps warm, so that a lost one is replaced at once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; auto takes CUDA where torch sees one GPU for each rank of the host."""
    collectives: Literal["auto", "shm", "gloo"] = "auto"
    """How CPU ranks talk: shm and auto take shared memory between ranks of one x86-64 Linux host, and gloo where that
    cannot be had, of which shm warns everywhere, auto only on such a host; gloo takes gloo. Ranks on CUDA take NCCL."""
    shm_mb: float = Field(256.0, gt=0)
    """Most shared memory that the process groups of the ranks of one host take together, in MB (1e6 bytes). A group
    takes a quarter of what is left of it, or of what /dev/shm has free if that is less; at most 8.4 MB."""


class TrackingConfig(Section):
    """What is recorded about a run."""

    telemetry: bool = True
    """Whether each step records time per phase for each rank."""
    trace_every: int = Field(10, ge=0)
    """Steps between full traces (start and end of every op); 0 means never."""
