"""Writing a checkpoint: in a thread of each rank, from a copy in host memory, complete when rank 0 writes the manifest.

Frozen parts come first, each once per content; then what changes. In each of them all ranks say what they hold, rank 0
deals out who writes what (replicas are written once), all write, and rank 0 completes the folder. What is not complete
does not count, so a process may end anywhere.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan

from mmlab.errors import CheckpointError, RunFailed
from mmlab.messages.checkpoints import FROZEN, MANIFEST, called, manifests, seal
from mmlab.messages.locations import Location
from mmlab.parallel.mesh import Mesh
from mmlab.train.checkpoint.exchange import Exchange, GivenUp
from mmlab.train.checkpoint.files import writer

FORMAT = 2
LEAVE = 5.0
"""Seconds that a save gets to end when its generation of the run does, and then once more to notice that it is given
up; one that a file system holds longer is left behind, and opens no further file."""


@dataclass(frozen=True)
class Content:
    """What one rank has to write.

    `tensors` change from step to step and are copies; `frozen` by module do not, and are the live ones; `contents` are
    hashes of all of a module's frozen part. `about` goes into the manifest.
    """

    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]
    frozen: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)


class Save:
    """One save under way on this rank; all ranks make the same one.

    Args:
        id: what tells this save from all others of the run.
        checkpoints: where; `name` the checkpoint's.
        at: called with each phase as it begins (save: plan, write, written, manifest, complete), for scripted faults.
        done: called in the thread with the save once it is complete or has failed, not when it was given up.
    """

    def __init__(
        self, mesh: Mesh, checkpoints: Location, name: str, content: Content, id: str,
        at: Callable[[str], None] = lambda _: None, done: Callable[[Save], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.checkpoints, self.name, self.content = checkpoints, name, content
        self.at, self.done = at, done
        self.rank, self.world = mesh.place.rank, mesh.world_size
        self.problem: BaseException | None = None
        self.manifest: dict[str, Any] = {}
        """Rank 0's, once complete."""
        self.folder = checkpoints
        """Where it lies, once all ranks know."""
        self.waited, self.step, self.stall = False, 0, 0.0
        """Whether the run waits for it; of which step it is; seconds for which that held up this rank, in the end (on
        rank 0) the one that was held up longest. Set by who made it."""
        self._stop = threading.Event()
        self._exchange = Exchange(mesh.store, f"save/{id}", self.rank, self.world, self._stop)
        self._began = time.time()
        self._thread = threading.Thread(target=self._run, name=f"mmlab-save-{self.rank}", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end. CheckpointError on all ranks when it could not be written; RunFailed when contact was lost.

        An abort of the run can break in.
        """
        while self._thread.is_alive():
            self._thread.join(0.05)
        if isinstance(self.problem, CheckpointError):
            raise self.problem
        if self.problem is not None:
            raise RunFailed(f"the ranks could not agree about checkpoint {self.name}: {self.problem}") from None

    def give_up(self) -> None:
        """The generation ends: complete what can be completed soon (a rank that has failed still has its copy), then
        write no further file and let go of everything. Where connections were cut the thread has ended by itself."""
        self._thread.join(LEAVE)
        self._stop.set()
        self._thread.join(LEAVE)

    def _run(self) -> None:
        try:
            self._write()
        except CheckpointError as error:
            self.problem = CheckpointError(f"checkpoint {self.name} could not be written: {error}")
        except (GivenUp, dist.DistError) as error:
            self.problem = error
        except BaseException as error:
            traceback.print_exc()
            self.problem = error
        finally:
            self.content = Content({}, {})
            if self.problem is not None:
                traceback.clear_frames(self.problem.__traceback__)
        if not self._stop.is_set():
            try:
                self.done(self)
            except Exception:  # a full disk, on which nothing can be said either
                traceback.print_exc()

    def _write(self) -> None:
        content, refer = self.content, {}
        for module, value in content.contents.items():
            store = self.checkpoints / FROZEN
            told = {"content": value, "module": module}
            part = self._part(store, f"{module}-{value[:32]}", content.frozen.get(module, {}), told, kept=value)
            refer[module] = part
        world = {"world_size": self.world, "frozen": refer}
        self._part(self.checkpoints, self.name, content.tensors, {**content.about, **world})
        self.at("save: complete")

    def _part(
        self, above: Location, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any], kept: str = ""
    ) -> dict[str, Any]:
        """Write tensors of all ranks into a new folder; with `kept`, only where none has this content. Returns, on all
        ranks, what a manifest says to refer to it."""
        planner = DefaultSavePlanner()
        made: dict[str, Any] = {}

        def plan() -> SavePlan:
            self.at("save: plan")
            planner.set_up_planner(dict(tensors), None, self.rank == 0)
            return planner.create_local_plan()

        def deal(plans: list[SavePlan]) -> list[Any]:
            there = _holding(above, name, kept) if kept else None
            if there is not None:
                return [(there, None)] * self.world
            parts, made["metadata"] = planner.create_global_plan(plans)
            _check_room(above, parts)
            folder, made["replaced"] = _free(above, name)
            folder.make()
            parts = writer(folder, self._stop, _nothing)[0].prepare_global_plan(parts)
            return [(folder.address, part) for part in parts]

        target, part = self._exchange.round(plan, deal)
        if part is None:
            return dict(target)
        folder = Location(target)
        self.folder = folder
        out, noted = writer(folder, self._stop, lambda: self.at("save: write"))
        out.set_up_storage_writer(self.rank == 0)

        def write() -> Any:
            try:
                results = out.write_data(planner.finish_plan(part), planner).wait()
            except Exception as error:
                raise noted.problem or error from None
            self.at("save: written")
            return results, noted.files, self.stall

        def complete(written: list[Any]) -> list[dict[str, Any]]:
            noted.begun = _nothing
            out.finish(made["metadata"], [results for results, _, _ in written])
            files = {name: entry for _, files, _ in written for name, entry in files.items()} | noted.files
            self.stall = max(stall for *_, stall in written)
            manifest = self._manifest(name, files, {**about, **made["replaced"]})
            self.at("save: manifest")
            if self._stop.is_set():
                raise GivenUp
            folder.write(MANIFEST, json.dumps(manifest, indent=1).encode())
            self.manifest = manifest
            return [{"folder": folder.name, "content": kept, "bytes": manifest["bytes"]}] * self.world

        try:
            return dict(self._exchange.round(write, complete))
        except CheckpointError:
            if self.rank == 0:
                _clear(folder)
            raise

    def _manifest(self, name: str, files: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
        now = time.time()
        manifest = {
            "format": FORMAT, "name": name, "time": now, "seconds": now - self._began,
            "bytes": sum(entry["size"] for entry in files.values()), "files": dict(sorted(files.items())), **about,
        }  # fmt: skip
        manifest = json.loads(json.dumps(manifest))  # as it will be read
        return {**manifest, "seal": seal(manifest)}


def _nothing() -> None:
    pass


def _free(above: Location, name: str) -> tuple[Location, dict[str, str]]:
    """A folder that is not there yet, and what it will replace: an older checkpoint of that name stays until the new
    one is complete."""
    number = 1
    folder = above / name
    while folder.exists():
        number += 1
        folder = above / f"{name}~{number}"
    older = [(old.name, m["time"]) for old, m in manifests(above, ("name", "time")) if called(old, m) == name]
    return folder, {"replaces": max(older, key=lambda pair: pair[1])[0]} if older else {}


def _holding(above: Location, name: str, content: str) -> dict[str, Any] | None:
    """The complete folder with this frozen content, as manifests refer to it; None when there is none."""
    for folder, manifest in manifests(above, ("name", "time")):
        sizes = {file: entry["size"] for file, entry in manifest.get("files", {}).items()}
        if called(folder, manifest) == name and manifest.get("content") == content:
            there = folder.sizes()
            if all(there.get(file) == size for file, size in sizes.items()):
                return {"folder": folder.name, "content": content, "bytes": manifest["bytes"]}
    return None


def _check_room(above: Location, parts: list[SavePlan]) -> None:
    """A disk that has not the room is not filled: whoever else writes to it goes on."""
    free = above.room()
    chunks = [(d.chunk.sizes.numel(), d.properties.dtype) for p in parts for i in p.items if (d := i.tensor_data)]
    needed = sum(count * dtype.itemsize for count, dtype in chunks)
    if free is not None and needed > free:
        raise CheckpointError(f"it needs {needed / 1e6:.1f} MB and {above} has {free / 1e6:.1f} MB free")


def _clear(folder: Location) -> None:
    """Remove what a failed save has written; what cannot be removed now is at the next start."""
    try:
        folder.remove(first=MANIFEST)
    except OSError:
        traceback.print_exc()
