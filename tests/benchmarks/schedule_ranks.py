"""What the ranks of `schedules.py` do: op lists of sleeps, and the decoder under our schedules and under torch's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from mmlab.data.packed import PackedText
from mmlab.models.build import Part, build_part
from mmlab.models.layers import defer_weights
from mmlab.parallel.deferred import WeightQueue
from mmlab.parallel.exchange import Link
from mmlab.parallel.mesh import Mesh, build_mesh, close_mesh
from mmlab.parallel.tensor import TensorGroup
from mmlab.plan import Plan
from mmlab.plan.ops import PASSES, Op
from mmlab.train.stage import StageRunner

BETWEEN = frozenset({"send_forward", "recv_forward", "send_backward", "recv_backward"})
Busy = list[tuple[str, int, int, float, float]]
"""(kind, microbatch, chunk, start, end) of each pass; seconds of the clock that all processes of a host share."""


def join(plan: Plan, rank: int, host: str, port: int) -> Mesh:
    store = dist.TCPStore(host, port, is_master=False)
    return build_mesh(plan, plan.layout(), rank, store, torch.device("cpu"))


def pipeline_ops(plan: Plan, rank: int) -> list[Op]:
    """A rank's passes and what goes between stages, nothing else."""
    return [op for op in plan.schedule().ops[rank] if op.kind in PASSES | BETWEEN]


def run(ops: list[Op], handlers: dict[str, Callable[[Op], None]]) -> Busy:
    busy: Busy = []
    for op in ops:
        start = time.perf_counter()
        handlers[op.kind](op)
        if op.kind in PASSES:
            busy.append((op.kind, op.microbatch, op.chunk, start, time.perf_counter()))
    return busy


def sleep(rank: int, world: int, host: str, port: int, text: str, seconds: dict[str, float], steps: int) -> list[Busy]:
    """Steps whose passes sleep, with real transfers of a few bytes between the stages."""
    plan = Plan.loads(text)
    mesh = join(plan, rank, host, port)
    stages, me = mesh.layout.stages, mesh.place

    def stage(op: Op) -> int:
        return stages.at(me.pp, op.chunk)

    def doze(op: Op) -> None:
        time.sleep(seconds[op.kind])

    def send(link: Link, kind: str, lower: int) -> Callable[[Op], None]:
        return lambda op: link.send(torch.ones(8), op.peer, kind, op.microbatch, stage(op) - lower)

    def recv(link: Link, kind: str, lower: int) -> Callable[[Op], None]:
        def handler(op: Op) -> None:
            link.recv((8,), torch.float32, op.peer, kind, op.microbatch, stage(op) - lower)

        return handler

    handlers: dict[str, Callable[[Op], None]] = dict.fromkeys(PASSES, doze)
    handlers |= {
        "send_forward": send(mesh.forward, "forward", 0), "recv_forward": recv(mesh.forward, "forward", 1),
        "send_backward": send(mesh.backward, "backward", 1), "recv_backward": recv(mesh.backward, "backward", 0),
    }  # fmt: skip
    found = []
    for _ in range(steps):
        dist.barrier(group=mesh.control)
        found.append(run(pipeline_ops(plan, rank), handlers))
        mesh.forward.flush()
        mesh.backward.flush()
    close_mesh(mesh)
    return found


# -- the decoder, ours and torch's


def texts_of(plan: Plan, tokens: int) -> list[PackedText]:
    """One sequence of random tokens for each microbatch, every one of them with a target."""
    made = []
    for i in range(plan.parallel.microbatches):
        ids = torch.randint(plan.model.language.vocab_size, (tokens + 1,), generator=torch.Generator().manual_seed(i))
        made.append(PackedText(ids[:-1], torch.arange(tokens), ids[1:], (tokens,), ids[:0], (f"s{i}",)))
    return made


class Ours:
    """The decoder's chunks of this rank under our op list, on links of a backend."""

    def __init__(self, plan: Plan, mesh: Mesh, texts: list[PackedText], backend: str) -> None:
        layout, place = mesh.layout, mesh.place
        chunks = tuple(layout.layers_of(place.pp))
        self.part = build_part(
            plan,
            Part(chunks=chunks, embed=layout.embeds(place), head=layout.heads(place)),
            TensorGroup(),
            torch.float32,
        )
        queue = None
        if plan.parallel.splits_backward:
            queue = WeightQueue()
            defer_weights(self.part, queue)
        everyone = list(range(layout.world_size))
        groups = [dist.new_group(everyone, backend=backend) for _ in range(4)]
        forward, backward = (Link(groups[i], place.rank, mesh.device, mesh.traffic, groups[i + 2]) for i in range(2))
        mesh.forward, mesh.backward = forward, backward
        self.runner = StageRunner(plan, mesh, self.part, queue)
        self.handlers = {k: h for k, h in self.runner.handlers().items() if k in PASSES | BETWEEN}
        self.ops = pipeline_ops(plan, place.rank)
        self.texts, self.links = dict(enumerate(texts)), (forward, backward)

    def step(self) -> Busy:
        total = sum(text.tokens for text in self.texts.values())
        self.runner.begin(None, self.texts, total)
        busy = run(self.ops, self.handlers)
        for link in self.links:
            link.flush()
        return busy

    def loss(self) -> float:
        return float(self.runner.loss_sum) / sum(text.tokens for text in self.texts.values())

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.part.named_parameters())


class Chunk(nn.Module):
    """One stage as torch's pipelining wants it: ids [T] or [T, D] -> [T, D], no view (its split backward asks so)."""

    def __init__(self, plan: Plan, part: Part, text: PackedText) -> None:
        super().__init__()
        self.part = build_part(plan, part, TensorGroup(), torch.float32)
        self.text, self.embeds = text, part.embed

    def forward(self, x: Tensor) -> Tensor:
        text = self.text
        if self.embeds:
            text = PackedText(x, text.position_ids, text.targets, text.seqlens, text.image_positions, text.samples)
            return self.part.language(text)
        return self.part.language(text, x)


class TimedStage(PipelineStage):
    """A stage that notes when it computes."""

    busy: Busy
    chunk = 0

    def _timed(self, kind: str, call: Callable[[], Any], index: int) -> Any:
        start = time.perf_counter()
        result = call()
        self.busy.append((kind, index, self.chunk, start, time.perf_counter()))
        return result

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        call = super().forward_one_chunk
        return self._timed("forward", lambda: call(fwd_chunk_id, *args, **kwargs), fwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        call = super().backward_one_chunk
        return self._timed("backward", lambda: call(bwd_chunk_id, *args, **kwargs), bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        call = super().backward_weight_one_chunk
        return self._timed("backward_weight", lambda: call(bwd_chunk_id, *args, **kwargs), bwd_chunk_id)


SCHEDULES = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B,
    "zb_h1": ScheduleInterleavedZeroBubble, "zb_v": ScheduleZBVZeroBubble,
}  # fmt: skip


class Theirs:
    """The same chunks under torch.distributed.pipelining, on gloo."""

    def __init__(self, plan: Plan, mesh: Mesh, texts: list[PackedText]) -> None:
        place, stages, m = mesh.place, mesh.layout.stages, plan.parallel.microbatches
        group = dist.new_group(list(range(mesh.layout.world_size)), backend="gloo")
        tokens = texts[0].tokens
        self.busy: Busy = []
        self.modules, made = [], []
        for chunk, stage in enumerate(stages.of(place.pp)):
            last = stage == stages.count - 1
            module = Chunk(plan, Part(chunks=(stages.layers[stage],), embed=stage == 0, head=last), texts[0])
            self.modules.append(module)
            made.append(TimedStage(module, stage, stages.count, mesh.device, group=group))  # finds the shapes itself
            made[-1].busy, made[-1].chunk = self.busy, chunk
        head = next((module for module in self.modules if module.part.language.parts.head), None)

        def loss(output: Tensor, target: Tensor) -> Tensor:
            start = time.perf_counter()
            found = head.part.language.loss(output, target) / (m * tokens)
            self.busy.append(("forward", -1, 0, start, time.perf_counter()))
            return found

        kind = SCHEDULES[plan.parallel.schedule]
        single = kind in (ScheduleGPipe, Schedule1F1B)
        self.schedule = kind(made[0] if single else made, m, loss_fn=loss, scale_grads=False)
        self.first, self.last = mesh.layout.embeds(place), head is not None
        self.ids = torch.cat([text.input_ids for text in texts])  # cut into microbatches along dim 0
        self.targets = torch.cat([text.targets for text in texts])
        self.losses: list[Tensor] = []

    def step(self) -> Busy:
        self.busy.clear()
        self.losses.clear()
        inputs = (self.ids,) if self.first else ()
        ends = {"target": self.targets, "losses": self.losses} if self.last else {}
        self.schedule.step(*inputs, return_outputs=False, **ends)
        return list(self.busy)

    def loss(self) -> float:
        return float(sum(self.losses)) if self.losses else 0.0

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for module in self.modules for name, p in module.part.named_parameters()}


def compare(rank: int, world: int, host: str, port: int, text: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Rounds of one step of each side in turn, the first of which only warms up.

    {"steps": {side: [(start, end, processor seconds, passes), ...]}, "error": largest relative difference of a gradient
    between the sides, "loss": {side: loss}}.
    """
    plan = Plan.loads(text)
    mesh = join(plan, rank, host, port)
    texts = texts_of(plan, tokens)
    sides: dict[str, Any] = {backend: Ours(plan, mesh, texts, backend) for backend in ("gloo", "shm")}
    sides["torch"] = Theirs(plan, mesh, texts)
    steps: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            for parameter in side.parameters().values():
                parameter.grad = None
            dist.barrier(group=mesh.control)
            start, processor = time.perf_counter(), time.process_time()
            busy = side.step()
            if number:
                steps[name].append((start, time.perf_counter(), time.process_time() - processor, busy))
    peer = sides["torch"].parameters()
    error = 0.0
    for name, parameter in sides["shm"].parameters().items():
        error = max(error, float((parameter.grad - peer[name].grad).norm() / peer[name].grad.norm()))
    close_mesh(mesh)
    return {"steps": steps, "error": error, "loss": {name: side.loss() for name, side in sides.items()}}
