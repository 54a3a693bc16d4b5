"""Checkpoints: torch.distributed.checkpoint under global names, complete when the manifest, written last, exists.

Parameters are named globally, never by rank or stage, so any layout loads any
checkpoint: `model.<global name>`, `optimizer.<global name>.{step,exp_avg,exp_avg_sq}`; and what compression keeps
(see `kept`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from mmlab.errors import CheckpointError, MmlabError, RunFailed
from mmlab.messages import read_json, write_json
from mmlab.models.adapters import lost_adapters
from mmlab.models.sharding import LORA_A, LORA_B
from mmlab.parallel.mesh import Mesh
from mmlab.plan import Plan
from mmlab.train import kept
from mmlab.train.build import Built, is_tied_copy

MANIFEST = "manifest.json"
FORMAT = 1


def state_dict(plan: Plan, mesh: Mesh, built: Built, saving: bool) -> dict[str, Tensor]:
    """What this rank saves or loads into, by global name; the tensors share storage with the live ones.

    The last stage's copy of a tied embedding is loaded but not saved: the first stage's is the one that counts.
    """
    state: dict[str, Tensor] = built.zero.state_dict() if built.zero is not None else {}
    whole = built.part.named_parameters() if built.zero is None else built.zero.outside
    for name, param in whole:
        if not (saving and is_tied_copy(plan, mesh.place, name)):
            state[f"model.{name}"] = param.detach()
    for t in built.trained:
        if saving and is_tied_copy(plan, mesh.place, t.name):
            continue
        for key, value in built.optimizer.state(t).items():
            state[f"optimizer.{t.name}.{key}"] = value
    return state


@contextlib.contextmanager
def quiet() -> Any:
    """torch warns that it saves without process groups; a plan of one rank means to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized.*")
        yield


def checksum(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save(plan: Plan, mesh: Mesh, built: Built, folder: Path, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Save what all ranks hold into a folder; all ranks together. Returns the manifest (on rank 0, else {}).

    `extra` goes into the manifest (step, lineage, cursors, plan, ...): it is how further parts are added. An older
    checkpoint of that name is replaced once the new one is whole. CheckpointError on every rank when it cannot be
    written; nothing of it is left then.
    """
    began = time.time()
    state = state_dict(plan, mesh, built, saving=True) | kept.saved(plan, mesh, built)
    partial = folder.with_name(f".{folder.name}.partial")
    first = mesh.place.rank == 0
    if first:
        for left in folder.parent.glob(".*.partial"):  # by a process that was killed while it saved
            shutil.rmtree(left, ignore_errors=True)
    _agree(mesh, f"{partial} of an interrupted save cannot be removed" if first and partial.exists() else "")
    try:
        with quiet():
            dcp_save(state, checkpoint_id=partial, process_group=mesh.control, no_dist=mesh.control is None)
    except (dcp.CheckpointException, OSError) as error:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"checkpoint {folder} could not be written: {_cause(error)}") from None
    manifest: dict[str, Any] = {}
    problem = ""
    if first:
        try:
            manifest = _complete(partial, folder, {"world_size": mesh.world_size, "began": began, **extra})
        except OSError as error:
            problem = f"checkpoint {folder} could not be completed: {error}"
            shutil.rmtree(partial, ignore_errors=True)
    _agree(mesh, problem)
    return manifest


def _complete(partial: Path, folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Give a saved folder its manifest and its name. What needs room on the disk is done before the old one goes."""
    files: dict[str, dict[str, Any]] = {
        p.name: {"size": p.stat().st_size, "sha256": checksum(p)} for p in sorted(partial.iterdir())
    }
    now = time.time()
    about = dict(about)
    manifest = {
        "format": FORMAT, "name": folder.name, "time": now, "seconds": now - about.pop("began"),
        "bytes": sum(f["size"] for f in files.values()), "files": files, **about,
    }  # fmt: skip
    write_json(partial / f"{MANIFEST}.partial", manifest)
    if folder.exists():
        _remove(folder)
    os.replace(partial, folder)
    os.replace(folder / f"{MANIFEST}.partial", folder / MANIFEST)
    return manifest


def _remove(folder: Path) -> None:
    (folder / MANIFEST).unlink(missing_ok=True)  # first: without it the rest does not count
    shutil.rmtree(folder)


def _agree(mesh: Mesh, problem: str) -> None:
    """Raise CheckpointError on every rank when any rank has a problem, so that none waits for the others."""
    problems = [problem]
    if mesh.control is not None:
        problems = [""] * mesh.world_size
        dist.all_gather_object(problems, problem, group=mesh.control)
    first = next((p for p in problems if p), None)
    if first:
        raise CheckpointError(first)


def _cause(error: BaseException) -> str:
    """The first rank's reason inside a CheckpointException."""
    if isinstance(error, dcp.CheckpointException):
        rank, wrapped = next(iter(error.failures.items()))
        cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        return f"rank {rank}: {str(cause).splitlines()[0]}"
    return str(error)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. CheckpointError when there is none or a file is missing or of another size."""
    manifest = read_json(folder / MANIFEST)
    if manifest is None:
        raise CheckpointError(f"{folder} holds no complete checkpoint (no {MANIFEST}).")
    for name, wanted in manifest["files"].items():
        path = folder / name
        size = path.stat().st_size if path.exists() else -1
        if size != wanted["size"]:
            found = "is missing" if size < 0 else f"has {size} bytes, not {wanted['size']}"
            raise CheckpointError(f"checkpoint {folder.name} is damaged: {name} {found}. Restore another one.")
    return dict(manifest)


def _manifests(checkpoints: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Folders of complete checkpoints with their manifests; a manifest that is damaged is passed over."""
    found = [(path.parent, read_json(path)) for path in checkpoints.glob(f"*/{MANIFEST}")]
    return [
        (folder, m) for folder, m in found if isinstance(m, dict) and m.keys() >= {"step", "time", "lineage", "files"}
    ]


def find(checkpoints: Path, step: int | None = None, name: str = "", lineage: str = "") -> Path:
    """The checkpoint with a name, else the newest of a step (of a lineage if it has one), else the newest.

    CheckpointError lists what there is when nothing fits.
    """
    found = _manifests(checkpoints)
    fits = [(p, m) for p, m in found if (not name or p.name == name) and (step is None or m["step"] == step)]
    fits = [(p, m) for p, m in fits if m["lineage"] == lineage] or fits
    if not fits:
        wanted = f"named {name}" if name else f"of step {step}" if step is not None else "at all"
        there = sorted(found, key=lambda pair: pair[1]["time"])
        have = ", ".join(f"{p.name} (step {m['step']})" for p, m in there) or "none"
        raise CheckpointError(f"there is no checkpoint {wanted}; there are: {have}.")
    return max(fits, key=lambda pair: pair[1]["time"])[0]


class _Loadable(NamedTuple):
    """What can be loaded, the manifest, what tensors the file has, and what is wrong ("" when nothing is)."""

    wanted: dict[str, Tensor]
    manifest: dict[str, Any]
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]]
    problem: str


def _loadable(plan: Plan, state: Mapping[str, Tensor], folder: Path) -> _Loadable:
    try:
        manifest = read_manifest(folder)
        saved = Plan.loads(manifest["plan"], f"checkpoint {folder.name}")
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except MmlabError as error:
        return _Loadable({}, {}, {}, str(error))
    except Exception as error:  # the metadata is a pickle: a damaged one can raise anything
        return _Loadable({}, {}, {}, f"checkpoint {folder.name} is damaged: its metadata cannot be read ({error}).")
    wanted: dict[str, Tensor] = {}
    for key, tensor in state.items():
        entry = stored.get(key)
        if entry is None and key.startswith("optimizer.") and plan.train.reduces_momentum(manifest["step"] + 1):
            name, step = key.removeprefix("optimizer.").rpartition(".")[0], manifest["step"]
            problem = f"has no second moment of {name}, which onebit_adam needs after its freeze"
            fix = f"Raise train.freeze_step above {step}, or train with adamw."
            return _Loadable({}, {}, {}, f"checkpoint {folder.name} {problem}. {fix}")
        if entry is None and (key.startswith("optimizer.") or key.endswith((LORA_A, LORA_B))):
            continue
        size = getattr(entry, "size", None)
        if size is None or tuple(size) != tuple(tensor.shape):
            found = f"{tuple(size)}" if size is not None else "absent"
            name = key.removeprefix("model.")
            problem = f"{name} is {found} in it and {tuple(tensor.shape)} in the plan"
            return _Loadable({}, {}, {}, f"checkpoint {folder.name} is of another model: {problem}.")
        wanted[key] = tensor
    lost = lost_adapters(plan, saved)
    there = {key: entry for key, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
    step = manifest["step"]
    if saved.train.reduces_momentum(step) != plan.train.reduces_momentum(step + 1):
        there = {key: entry for key, entry in there.items() if not key.startswith(kept.PREFIX)}  # in another unit
    tensors = {key: (tuple(entry.size), entry.properties.dtype) for key, entry in there.items()}
    return _Loadable(wanted, manifest, tensors, f"checkpoint {folder.name} {lost}" if lost else "")


def _damage(folder: Path, manifest: Mapping[str, Any], mesh: Mesh) -> str:
    """Which of this rank's share of the files is not what was saved; "" when all are."""
    for name in sorted(manifest["files"])[mesh.place.rank :: mesh.world_size]:
        try:
            if checksum(folder / name) != manifest["files"][name]["sha256"]:
                return f"checkpoint {folder.name} is damaged: {name} is not what was saved. Restore another one."
        except OSError as error:
            return f"checkpoint {folder.name}: {name} cannot be read: {error}"
    return ""


def load(plan: Plan, mesh: Mesh, built: Built, folder: Path) -> dict[str, Any]:
    """Load a checkpoint of any layout into this rank's part, in place; all ranks together. Returns its manifest.

    A module that was frozen when saved has no optimizer state in the file: it starts from zero. Adapters that were not
    there start anew (B at zero, so they change nothing). What compression keeps is what the file has of it, or nothing;
    also nothing where gradients were compressed and now first moments are (1-bit Adam), or the other way round.
    CheckpointError when the checkpoint is incomplete, damaged or of another model (names the first parameter that
    differs); nothing is changed then. RunFailed when reading breaks off: weights are then neither the old ones nor the
    checkpoint's.
    """
    state = state_dict(plan, mesh, built, saving=False)
    wanted, manifest, stored, problem = _loadable(plan, state, folder)
    _agree(mesh, problem or _damage(folder, manifest, mesh))
    communication = kept.Incoming(stored, plan, mesh, built)
    everything = wanted | communication.tensors
    try:
        with quiet():
            dcp.load(everything, checkpoint_id=folder, process_group=mesh.control, no_dist=mesh.control is None)
    except (dcp.CheckpointException, OSError) as error:
        raise RunFailed(f"reading checkpoint {folder.name} broke off: {_cause(error)}") from None
    for key in state.keys() - wanted.keys():
        if not (key.startswith("model.") and key.endswith(LORA_A)):
            state[key].zero_()
    communication.take()
    if built.zero is not None:
        built.zero.take(state)
    return manifest


def prune(checkpoints: Path, keep_last: int) -> list[str]:
    """Remove periodic checkpoints beyond the newest `keep_last` (0 keeps all); returns the names removed."""
    if keep_last == 0:
        return []
    found = [(m["time"], folder) for folder, m in _manifests(checkpoints) if m.get("periodic")]
    old = [folder for _, folder in sorted(found)[:-keep_last]]
    for folder in old:
        with contextlib.suppress(OSError):  # what cannot be removed is no reason to end a run
            _remove(folder)
    return [folder.name for folder in old]
