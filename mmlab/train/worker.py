"""One rank of a run, from the rendezvous to the end, in the calling thread or process."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from mmlab.errors import MmlabError
from mmlab.messages import (
    Ack,
    Beacon,
    Command,
    EventLog,
    Failure,
    Inbox,
    RunPaths,
    answered,
    claim_report,
    process_alive,
    process_started,
    read_abort,
    read_aborted,
    read_beacons,
    read_events,
    read_failures,
    write_failure,
)
from mmlab.messages.moves import falls_back, moving_on
from mmlab.parallel import shm
from mmlab.parallel.abort import Connections
from mmlab.parallel.mesh import Mesh, build_mesh, close_mesh
from mmlab.parallel.watch import Watch
from mmlab.plan import Layout, Plan
from mmlab.train.balance import settle
from mmlab.train.build import build
from mmlab.train.control import Aborted, Interrupted, Listener
from mmlab.train.job import Job
from mmlab.train.loop import train
from mmlab.train.session import Session
from mmlab.train.spot import SpotWatch

Fault = Callable[[int, int, str], None]
"""A scripted fault: called with (rank, step, phase) whenever a phase begins."""

Show = Callable[[Session], None]
"""Called with the session of a rank once it is there, for who wants to look at it while it trains."""
STORE_TIMEOUT = datetime.timedelta(seconds=120)
SETTLE = 1.0
"""Seconds in which survivors look for the one that failed first before one of them reports."""
_PEER = ("gloo", "connection", "socket", "broken pipe", "reset by peer", "timed out waiting", "nccl")
_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


def routable_address(hint: str = "") -> str:
    """An address of this host that the other ranks can reach: the hint, else the one that routes lead out by."""
    if hint:
        return hint
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # TEST-NET-1; a UDP connect sends nothing, it only picks the interface
        return str(probe.getsockname()[0])
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    return "127.0.0.1"


def bind_gloo(store_host: str) -> None:
    """Let gloo use the interface that leads to the store: by itself it takes whatever the host's name resolves to.

    The user's own GLOO_SOCKET_IFNAME is left as it is.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME") or not store_host:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((store_host, 9))
        mine = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(address.address == mine for address in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = name
                return


def open_store(host_hint: str = "") -> tuple[str, int, dist.TCPStore]:
    """Rank 0's rendezvous store on a routable address and a free port; keep it as long as the generation lives."""
    host = routable_address(host_hint)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
    return host, store.port, store


def pick_device(plan: Plan, layout: Layout, rank: int) -> torch.device:
    """This rank's device; the current CUDA device is per thread, so it is set here, in the thread that trains."""
    mates = [place.rank for place in layout.places if place.node == layout.place(rank).node]
    wanted = plan.cluster.device
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= len(mates)
    if wanted == "cuda" and not enough:
        raise MmlabError(
            f"cluster.device = cuda, but torch sees {torch.cuda.device_count()} GPUs for {len(mates)} ranks of this "
            "host; use cluster.device = cpu, or fewer ranks."
        )
    if wanted == "cpu" or not enough:
        return torch.device("cpu")
    device = torch.device("cuda", mates.index(rank))
    torch.cuda.set_device(device)
    return device


def set_threads(plan: Plan, layout: Layout, rank: int) -> None:
    """torch threads: the plan's number, else cores over ranks of this host."""
    mates = sum(1 for place in layout.places if place.node == layout.place(rank).node)
    torch.set_num_threads(plan.cluster.threads or max(1, (os.cpu_count() or 1) // mates))


def run_worker(job: Job, fault: Fault | None = None, show: Show | None = None) -> str:
    """Do a whole generation of a run on this rank; returns finished, stopped, failed, or moved: the next generation
    takes over in another layout, as `relayout.json` says.

    Never raises for what goes wrong in training: a failure is recorded (`failures/`), one survivor appends the
    `state failed` event, and everything of this generation is dropped, so that the next one can start in the same
    process (design, decision 11).
    """
    paths = RunPaths(Path(job.run_dir))
    connections = Connections()
    listener = Listener(paths, job.rank, job.generation, connections)
    state, watch, mesh = "failed", Watch(), None
    try:
        try:
            plan = Plan.load(paths.plan)
            watch = _watch(plan, paths, job, fault)
            set_threads(plan, plan.layout(), job.rank)
            mesh = build_mesh(plan, plan.layout(), job.rank, _join(job), pick_device(plan, plan.layout(), job.rank))
            state = _run(plan, paths, mesh, watch, listener, job, show)
        except BaseException as error:
            state = _end_early(job, paths, watch, listener, error)
    except Interrupted as late:  # raised by the control thread just when something else had ended the run
        state = _end_early(job, paths, watch, listener, late)
    finally:
        listener.close()
        if mesh is not None:
            close_mesh(mesh)
        elif dist.is_initialized():  # a rank died while groups were made: the next generation makes them anew
            dist.destroy_process_group()
        if watch.beacon is not None:
            watch.beacon.close()
        mesh = None
        gc.collect()
    return state


def _watch(plan: Plan, paths: RunPaths, job: Job, fault: Fault | None) -> Watch:
    role = plan.layout().place(job.rank).label
    beacon = Beacon(paths.ranks / f"rank-{job.rank}.beacon", job.rank, role, socket.gethostname(), job.generation)
    watch = Watch(beacon, paths.traces / f"rank-{job.rank}.jsonl", plan.tracking.telemetry)
    if fault is not None:
        watch.fault = functools.partial(fault, job.rank)
    return watch


def _join(job: Job) -> dist.Store | None:
    if not job.store_host:
        return None  # torchrun: the environment says where
    bind_gloo(job.store_host)
    store = dist.TCPStore(job.store_host, job.store_port, is_master=False, timeout=STORE_TIMEOUT)
    return dist.PrefixStore(f"generation-{job.generation}", store)  # torchrun's store outlives a generation


def _run(plan: Plan, paths: RunPaths, mesh: Mesh, watch: Watch, listener: Listener, job: Job, show: Show | None) -> str:
    if job.rank == 0:
        reason = "ranks are connected; opening the data, building the model"
        _emit(paths, "state", state="starting", reason=reason)
    plan, measured = settle(plan, mesh)
    if measured is not None and job.rank == 0:
        plan.save(paths.plan)
        _emit(paths, "balance", **measured)
    built = build(plan, mesh)  # DeepSpeed makes groups of its own
    listener.connections.mark()
    session = Session(plan, paths, mesh, built, watch, listener)
    spot = None
    try:
        session.start(job.restore)
        if show is not None:
            show(session)
        mine = {"rank": job.rank, "role": mesh.place.label, "pid": os.getpid(), "host": socket.gethostname(),
                "started": process_started(os.getpid())}  # fmt: skip
        found = session.channel.gather([mine, mesh.transports])
        transport = _say_transport(session, {text for _, texts in found for text in texts})
        session.members = ranks = [rank for rank, _ in found]
        if plan.cluster.notices != "none" and mine == next(m for m in ranks if m["host"] == mine["host"]):
            spot = SpotWatch(paths, plan.cluster.notices)  # one a host is enough
        session.emit(
            "state", step=session.steering.step, state=session.state, reason="", ranks=ranks, transport=transport
        )  # fmt: skip
        state = train(session)
        session.channel.gather(True)  # nobody says finished before everybody is
        listener.uninterruptible()  # an abort that comes now is too late: what follows is not cut short
        if state == "moved":  # commands that still wait are the next generation's, and it has the last word
            return state
        session.refuse_rest()
        session.emit("state", step=session.steering.step, state=state, reason="")
        return state
    except BaseException:
        listener.uninterruptible()  # an abort does not interrupt the tidying up
        raise
    finally:
        if spot is not None:
            spot.close()
        session.close()


def _say_transport(session: Session, found: set[str]) -> str:
    """What the ranks talk through, in one line; a warning where it is less than the plan could expect."""
    line = "; ".join(sorted(found))
    wanted = session.plan.cluster.collectives
    short = [text for text in found if text != shm.BEST and (wanted == "shm" or "no room" in text or "shm_mb" in text)]
    if short and wanted != "gloo":
        session.emit("warning", step=session.steering.step, message=f"some ranks talk through {'; '.join(short)}")
    if line and session.log is not None:
        print(f"ranks talk through {line}", flush=True)
    return line


def _kind(error: BaseException) -> str:
    """input (the user's), memory, peer (a collective broke because another rank left) or exception."""
    if isinstance(error, MmlabError):
        return "input" if error.exit_code == 1 else "exception"
    text = str(error).lower()
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(mark in text for mark in _MEMORY):
        return "memory"
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(mark in text for mark in _PEER)):
        return "peer"
    return "exception"


def _describe(error: BaseException, watch: Watch, plan_role: str) -> str:
    if isinstance(error, MmlabError):
        return str(error)
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if _kind(error) == "memory":
        return (
            f"out of memory in {watch.phase} on {plan_role} ({line}); "
            "use smaller microbatches (parallel.microbatches), train.activation_checkpointing, or more ranks"
        )
    return f"{type(error).__name__}: {line}"


def _end_early(job: Job, paths: RunPaths, watch: Watch, listener: Listener, error: BaseException) -> str:
    """What becomes of a run that ends by an exception: moved when its state is on its way to the next generation,
    stopped when it was aborted, else failed."""
    listener.uninterruptible()
    if moving_on(paths, job.generation):  # the state is whole: who left before the others costs nothing
        traceback.clear_frames(error.__traceback__)
        listener.connections.cut()
        return "moved"
    command = listener.aborted or read_aborted(paths.failures, job.generation)
    if isinstance(error, Aborted) or (command is not None and _kind(error) == "peer"):
        traceback.clear_frames(error.__traceback__)
        listener.connections.cut()
        with contextlib.suppress(OSError):
            _report_abort(job, paths, watch, command or read_abort(paths.control, job.generation, set()))
        return "stopped"
    _fail(job, paths, watch, listener.connections, error)
    return "failed"


def _report_abort(job: Job, paths: RunPaths, watch: Watch, command: Command | None) -> None:
    """The first rank that is free answers the abort and writes the run's last state."""
    if not claim_report(paths.failures, job.generation):
        return
    source = command.source if command is not None else "api"
    where = f"rank {job.rank} ({watch.role}) was in {watch.phase} of step {watch.step}"
    if command is not None:
        ack = Ack(command.id, True, watch.step, [job.rank], where, time.time())
        _emit(paths, "command", **answered(command, ack))
    _emit(paths, "state", step=watch.step, state="stopped", reason=f"aborted ({source}); {where}")
    if command is not None:
        Inbox(paths.control).answer(ack)


def _fail(job: Job, paths: RunPaths, watch: Watch, connections: Connections, error: BaseException) -> None:
    """Record the failure, free the other ranks, and see that the run's log says who failed first."""
    role = watch.role
    details = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        print(details, flush=True)  # into this rank's log
    with contextlib.suppress(OSError):
        if not paths.log(job.rank).exists():  # torchrun: what ranks print goes to the terminal
            paths.log(job.rank).write_text(details)
    failure = Failure(job.rank, role, watch.phase, watch.step, _kind(error), _describe(error, watch, role), details)
    traceback.clear_frames(error.__traceback__)  # frames hold the old model and groups (design, decision 11)
    with contextlib.suppress(OSError):
        if not any(known.rank == job.rank for known in read_failures(paths.failures, job.generation)):
            write_failure(paths.failures, job.generation, failure)  # else the keeper has said what is wrong with it
    connections.cut()  # also where the disk is full: nobody waits for this rank
    if (job.recovers and failure.kind != "input") or falls_back(paths, job.generation):
        return  # the keeper says what becomes of the run
    with contextlib.suppress(OSError):
        first = _first_cause(paths, job.generation, failure)
        if claim_report(paths.failures, job.generation):
            _emit(
                paths, "state", step=first.step, state="failed", reason=first.sentence(), cause=first.kind,
                rank=first.rank, role=first.role, phase=first.phase, log=str(paths.log(first.rank)),
            )  # fmt: skip


def _first_cause(paths: RunPaths, generation: int, mine: Failure) -> Failure:
    """Who failed first: a rank with a cause of its own, else one whose process is gone, else whoever spoke first."""
    end = time.monotonic() + SETTLE
    host = socket.gethostname()
    while True:
        known = read_failures(paths.failures, generation)
        if known and known[0].kind != "peer":
            return known[0]
        for beacon in read_beacons(paths.ranks):
            gone = beacon.host == host and not process_alive(beacon.pid, beacon.started)
            if beacon.generation == generation and not beacon.done and gone:
                lost = Failure(beacon.rank, beacon.role, beacon.phase, beacon.step, "lost", "its process ended")
                write_failure(paths.failures, generation, lost)
                return lost
        if time.monotonic() > end:
            return known[0] if known else mine
        time.sleep(0.02)


def _emit(paths: RunPaths, kind: str, **fields: Any) -> None:
    """Append an event where no session does: before there is one, and after its end."""
    log = EventLog(paths.events, _lineage(paths))
    log.emit(kind, **fields)
    log.close()


def _lineage(paths: RunPaths) -> str:
    events, _ = read_events(paths.events)
    return next((event["lineage"] for event in reversed(events) if event.get("lineage")), "")
