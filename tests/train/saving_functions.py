"""What rank processes do in the tests of saving: small saves without a model, killed at every phase; runs on full
disks."""

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist

from mmlab.messages.checkpoints import FROZEN
from mmlab.messages.locations import Location
from mmlab.train.checkpoint.catalog import Retention, candidates, read_manifest
from mmlab.train.checkpoint.loading import Opened
from mmlab.train.checkpoint.writing import Content, Save

PHASES = ("save: plan", "save: write", "save: written", "save: manifest", "save: complete", "save: prune")


def content(rank, step, about=()):
    """What a rank holds at a step: something of its own, something that all hold, and a frozen part."""
    own = {f"own.{rank}": torch.full((40, 50), float(step + rank)), "shared": torch.full((3000,), float(step))}
    frozen = {"vision": {f"model.vision.{rank}": torch.full((700,), 7.0)}}
    told = {"step": step, "lineage": "a", "periodic": True, "plan": "", **dict(about)}
    return Content(own, told, frozen, {"vision": "f" * 64})


def save(store, rank, world, folder, step, name="", at=lambda _: None, **about):
    """Save as one rank; returns the save, ended."""
    mesh = SimpleNamespace(store=store, place=SimpleNamespace(rank=rank), world_size=world)
    made = Save(mesh, Location(folder), name or f"step-{step}", content(rank, step, about), f"{step}", at)
    made.start()
    with contextlib.suppress(Exception):
        made.wait()
    return made


def _child(rank, world, folder, victim, phase):
    """One rank process: a save that is complete, then one in which the victim is killed."""
    store = dist.FileStore(f"{folder}.store", world)

    def at(reached):
        if (rank, reached) == (victim, phase):
            os.kill(os.getpid(), signal.SIGKILL)

    save(store, rank, world, folder, 1)
    save(store, rank, world, folder, 2, at=at)
    if rank == 0:
        at("save: prune")
        Retention(Location(folder)).prune(1, 0)
    if (rank, phase) == (victim, "save: complete"):
        at(phase)
    time.sleep(60)


def killed(folder, victims):
    """For every phase and victim: (phase, victim, the newest checkpoint, what was removed, whether all is as saved)."""
    found = []
    for phase in PHASES:
        for victim in range(victims):
            if phase in ("save: manifest", "save: prune") and victim:
                continue  # rank 0's alone
            place = f"{folder}/{phase[6:]}-{victim}"
            pids = []
            for member in range(victims):
                pid = os.fork()
                if pid == 0:
                    try:
                        _child(member, victims, place, victim, phase)
                    finally:
                        os._exit(1)
                pids.append(pid)
            _, status = os.waitpid(pids[victim], 0)
            assert os.WTERMSIG(status) == signal.SIGKILL
            for pid in pids[:victim] + pids[victim + 1 :]:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            found.append((phase, victim, *judge(place, victims)))
            shutil.rmtree(place)
    return found


def judge(folder, world):
    """(name of the newest checkpoint, names removed at the next start, whether it is what was saved)."""
    where = Location(folder)
    removed = Retention(where).clean()
    newest = candidates(where)[0]
    return newest.name, removed, whole(newest, world)


def whole(folder, world):
    """Whether a checkpoint, frozen parts included, is what all ranks had at its step."""
    opened = Opened.of(folder)
    step = read_manifest(folder)["step"]
    if opened.damage(0, 1):
        return False
    wanted = {}
    for rank in range(world):
        made = content(rank, step)
        wanted |= dict(made.tensors) | dict(made.frozen["vision"])
    read = {key: torch.zeros_like(value) for key, value in wanted.items()}
    opened.read(read, None, alone=True)
    return opened.tensors.keys() == wanted.keys() and all(torch.equal(read[key], wanted[key]) for key in wanted)


def limited(rank, world, host, port, folder, at_rank, limit):
    """One rank may not write files beyond a limit: what the save says on each rank, and what it leaves."""
    store = dist.TCPStore(host, port, is_master=False)
    save(store, rank, world, folder, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == at_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        problem = str(save(store, rank, world, folder, 2).problem)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    after = save(store, rank, world, folder, 3).problem
    return problem, after, sorted(os.listdir(folder)), sorted(os.listdir(f"{folder}/{FROZEN}"))


if __name__ == "__main__":  # a process without threads, which may fork
    print(json.dumps(killed(sys.argv[1], int(sys.argv[2]))))
