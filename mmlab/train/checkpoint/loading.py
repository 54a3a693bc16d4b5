"""Loading a checkpoint of any layout: held against the plan and its checksums first, then read in place."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, TensorStorageMetadata

from mmlab.data.order import Position
from mmlab.data.resume import misfit
from mmlab.errors import CheckpointError, DamagedError, MmlabError, RunFailed
from mmlab.messages.locations import Location
from mmlab.models.adapters import lost_adapters
from mmlab.models.sharding import LORA_A, LORA_B
from mmlab.parallel.mesh import Mesh
from mmlab.plan import Plan
from mmlab.train import kept, rng
from mmlab.train.build import Built
from mmlab.train.checkpoint.catalog import damage, parts, read_manifest
from mmlab.train.checkpoint.files import METADATA, reader
from mmlab.train.checkpoint.state import MODEL, OPTIMIZER, state_dict

Stored = dict[str, tuple[tuple[int, ...], torch.dtype]]


@contextlib.contextmanager
def quiet() -> Any:
    """torch warns that it saves without process groups; a plan of one rank means to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized.*")
        yield


def agree(mesh: Mesh, error: Exception | None) -> None:
    """Raise CheckpointError on every rank when any rank has a problem, so that none waits for the others: DamagedError
    when that is what the first problem is."""
    mine = None if error is None else (str(error), isinstance(error, DamagedError))
    problems = [mine]
    if mesh.control is not None:
        problems = [None] * mesh.world_size
        dist.all_gather_object(problems, mine, group=mesh.control)
    first = next((p for p in problems if p is not None), None)
    if first is not None:
        raise (DamagedError if first[1] else CheckpointError)(first[0])


def _cause(error: BaseException) -> str:
    """The first rank's reason inside a CheckpointException."""
    if isinstance(error, dcp.CheckpointException):
        rank, wrapped = next(iter(error.failures.items()))
        cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        return f"rank {rank}: {str(cause).splitlines()[0]}"
    return str(error)


@dataclass
class Opened:
    """A checkpoint whose manifests have been read: its folders with their manifests (those of frozen modules after its
    own), and where each tensor lies."""

    manifest: dict[str, Any]
    places: list[tuple[Location, dict[str, Any]]]
    tensors: dict[str, tuple[Location, TensorStorageMetadata]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Location) -> Opened:
        """CheckpointError when it is incomplete, DamagedError when a table of tensors is not what was saved."""
        manifest = read_manifest(folder)
        opened = cls(manifest, parts(folder, manifest))
        for place, own in opened.places:
            if wrong := damage(place, own, [METADATA]):  # before it is unpickled
                raise DamagedError(wrong)
            for key, entry in reader(place).read_metadata().state_dict_metadata.items():
                if isinstance(entry, TensorStorageMetadata):
                    opened.tensors[key] = place, entry
        return opened

    def damage(self, rank: int, world: int) -> str:
        """Which of a rank's share of the files is not what was saved; "" when all are."""
        every = [(place, own, name) for place, own in self.places for name in sorted(own["files"])]
        return next((wrong for place, own, name in every[rank::world] if (wrong := damage(place, own, [name]))), "")

    def read(self, tensors: STATE_DICT_TYPE, group: dist.ProcessGroup | None, alone: bool) -> None:
        """Read into tensors, each from where it lies; all ranks together unless `alone`."""
        for place, _ in self.places:
            here = {key: value for key, value in tensors.items() if self.tensors[key][0].address == place.address}
            with quiet():
                dcp.load(here, storage_reader=reader(place), process_group=group, no_dist=alone)


def _fits(plan: Plan, state: Mapping[str, Tensor], name: str, opened: Opened) -> dict[str, Tensor]:
    """The tensors of `state` that the checkpoint has. CheckpointError when it is not for this plan."""
    manifest, saved = opened.manifest, Plan.loads(opened.manifest["plan"], f"checkpoint {name}")
    if saved.data.lanes != plan.data.lanes:
        raise CheckpointError(
            f"checkpoint {name} was saved with data.lanes = {saved.data.lanes} and the plan has {plan.data.lanes}, so "
            f"its place in the data means nothing here; set data.lanes={saved.data.lanes}."
        )
    if len(saved.data.sources) != len(plan.data.sources):
        raise CheckpointError(
            f"checkpoint {name} was saved with {len(saved.data.sources)} sources of data and the plan has "
            f"{len(plan.data.sources)}, so its place in the data means nothing here."
        )
    if bool(saved.data.text_share) != bool(plan.data.text_share):
        raise CheckpointError(
            f"checkpoint {name} was saved with data.text_share = {saved.data.text_share:g} and the plan has "
            f"{plan.data.text_share:g}: text and pictures are in one order or in two; set data.text_share="
            f"{saved.data.text_share:g}."
        )
    if wrong := misfit(plan, Position.from_json(manifest["cursors"])):
        raise CheckpointError(f"checkpoint {name}: {wrong}")
    wanted: dict[str, Tensor] = {}
    for key, tensor in state.items():
        entry = opened.tensors.get(key)
        if entry is None and key.startswith(OPTIMIZER) and plan.train.reduces_momentum(manifest["step"] + 1):
            parameter, step = key.removeprefix(OPTIMIZER).rpartition(".")[0], manifest["step"]
            problem = f"has no second moment of {parameter}, which onebit_adam needs after its freeze"
            fix = f"Raise train.freeze_step above {step}, or train with adamw."
            raise CheckpointError(f"checkpoint {name} {problem}. {fix}")
        if entry is None and (key.startswith(OPTIMIZER) or key.endswith((LORA_A, LORA_B))):
            continue
        if entry is None or tuple(entry[1].size) != tuple(tensor.shape):
            found = f"{tuple(entry[1].size)}" if entry is not None else "absent"
            problem = f"{key.removeprefix(MODEL)} is {found} in it and {tuple(tensor.shape)} in the plan"
            raise CheckpointError(f"checkpoint {name} is of another model: {problem}.")
        wanted[key] = tensor
    if lost := lost_adapters(plan, saved):
        raise CheckpointError(f"checkpoint {name} {lost}")
    return wanted


def _judge(
    plan: Plan, mesh: Mesh, state: Mapping[str, Tensor], folder: Location
) -> tuple[Opened | None, dict[str, Tensor], MmlabError | None]:
    """The checkpoint, what is wanted of it, and what is wrong with it as far as this rank knows."""
    opened, wanted = None, {}
    try:
        opened = Opened.of(folder)
        wanted = _fits(plan, state, folder.name, opened)
        if wrong := opened.damage(mesh.place.rank, mesh.world_size):
            raise DamagedError(wrong)
    except MmlabError as error:
        return opened, wanted, error
    except Exception as error:  # a table of tensors is a pickle, and a location may answer anything
        said = f"checkpoint {folder.name} is damaged: its metadata cannot be read ({error})."
        return opened, wanted, DamagedError(said)
    return opened, wanted, None


def _communicated(plan: Plan, opened: Opened) -> Stored:
    """The tensors of what compression keeps; none where they are of another unit than this plan's."""
    manifest, step = opened.manifest, opened.manifest["step"]
    saved = Plan.loads(manifest["plan"], "checkpoint")
    if saved.train.reduces_momentum(step) != plan.train.reduces_momentum(step + 1):
        return {}
    entries = ((key, entry) for key, (_, entry) in opened.tensors.items() if key.startswith(kept.PREFIX))
    return {key: (tuple(entry.size), entry.properties.dtype) for key, entry in entries}


def load(plan: Plan, mesh: Mesh, built: Built, folder: Location | Path) -> dict[str, Any]:
    """Load a checkpoint of any layout into this rank's part, in place; all ranks together. Returns its manifest.

    A module that was frozen when saved has no optimizer state in the file: it starts from zero. Adapters that were not
    there start anew (B at zero, so they change nothing). What compression keeps is what the file has of it, or nothing;
    also nothing where gradients were compressed and now first moments are (1-bit Adam), or the other way round.
    CheckpointError when the checkpoint is of another model or another order of data (names what differs), DamagedError
    when it is incomplete or not what was saved; nothing is changed then. RunFailed when reading breaks off: weights are
    then neither the old ones nor the checkpoint's.
    """
    folder = folder if isinstance(folder, Location) else Location(folder)
    state = state_dict(plan, mesh, built, saving=False)
    opened, wanted, problem = _judge(plan, mesh, state, folder)
    agree(mesh, problem)
    assert opened is not None
    communication = kept.Incoming(_communicated(plan, opened), plan, mesh, built)
    streams = {
        key: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for key, (_, entry) in opened.tensors.items() if key.startswith(rng.PREFIX)
    }  # fmt: skip
    try:
        opened.read(wanted | communication.tensors | streams, mesh.control, alone=mesh.control is None)
    except (dcp.CheckpointException, OSError) as error:
        raise RunFailed(f"reading checkpoint {folder.name} broke off: {_cause(error)}") from None
    rng.restore(streams, mesh.device)
    for key in state.keys() - wanted.keys():
        if not (key.startswith(MODEL) and key.endswith(LORA_A)):
            state[key].zero_()
    communication.take()
    if built.zero is not None:
        built.zero.take(state)
    return opened.manifest


def read_weights(folder: Location, names: Sequence[str] = ()) -> dict[str, Tensor]:
    """The whole weights of a checkpoint by parameter, without process groups; those of `names`, or all.

    CheckpointError when it is incomplete or cannot be read.
    """
    try:
        opened = Opened.of(folder)
        values = {
            key: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
            for key, (_, entry) in opened.tensors.items()
            if key.startswith(MODEL) and (not names or key.removeprefix(MODEL) in names)
        }
        opened.read(dict(values), None, alone=True)
    except (dcp.CheckpointException, OSError, EOFError) as error:
        raise CheckpointError(f"checkpoint {folder.name} cannot be read: {error}") from None
    return {key.removeprefix(MODEL): value for key, value in values.items()}
