"""One optimizer step of the hybrid-parallel model, run from the op list."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mmlab.data.manifest import StepManifest
from mmlab.data.packed import PackedText
from mmlab.errors import RunFailed
from mmlab.messages import AXES
from mmlab.models.sharding import EMBED_TOKENS
from mmlab.parallel.buckets import local_tensor
from mmlab.parallel.gradients import reduce_tied
from mmlab.parallel.mesh import Mesh
from mmlab.parallel.pipeline import Handler, forward_ops, run_ops
from mmlab.parallel.watch import Watch
from mmlab.plan.holders import beside_encoder
from mmlab.plan.ops import Op
from mmlab.plan.schema import MODULES, Plan
from mmlab.train.ahead import Pixels
from mmlab.train.build import Built, communication
from mmlab.train.complete import closing_ops
from mmlab.train.encoder import EncoderRunner
from mmlab.train.optim import learning_rates
from mmlab.train.precision import LossScale
from mmlab.train.reported import COLUMNS, Reported, StepResult, row
from mmlab.train.stage import StageRunner


@dataclass(frozen=True)
class StepInput:
    """What a rank needs for a step: `texts[microbatch]` on stage ranks, `pixels[position]` on ranks that encode.

    `bad` are the positions whose image could not be decoded, agreed by all ranks; their targets are masked. `coming`
    are the steps that the encoder is to work ahead on.
    """

    manifest: StepManifest
    bad: frozenset[int]
    texts: Mapping[int, PackedText] = field(default_factory=dict)
    pixels: Mapping[int, Tensor] = field(default_factory=dict)
    coming: Sequence[tuple[StepManifest, Pixels]] = ()

    @property
    def targets(self) -> int:
        """Target tokens of the step over all ranks."""
        return self.manifest.targets(self.bad)


class NotFinite(RunFailed):
    """A gradient or the loss is not a finite number; the message names the module."""


@dataclass
class Ride:
    """What rides in the step's own reduction: the flag "a command waits", the next step's undecodable images, and the
    steps decoded ahead (-1 on a rank that decodes none)."""

    commands: Callable[[], bool] = lambda: False
    next_bad: Callable[[], Collection[int]] = tuple
    next_size: int = 0
    queued: Callable[[], int] = lambda: -1


class Inspected(Protocol):
    """Whose tensors a test of correctness looks at, between reduction and clipping."""

    def gradients(self) -> dict[str, Tensor]:
        """This rank's part of the reduced gradients, by global name."""

    def weights(self) -> dict[str, Tensor]:
        """This rank's part of the weights, by global name."""


class Stage(Protocol):
    """What runs decoder ops on a rank, as steps and evaluations see it."""

    plan: Plan
    replica: int
    first: bool
    loss_sum: Tensor
    loss_scale: float

    def begin(self, manifest: StepManifest, texts: Mapping[int, PackedText], total_targets: int) -> None:
        """Take a step's text."""

    def recv_tokens(self, op: Op) -> None:
        """Have image tokens of a microbatch."""

    def write_forward(self, text: PackedText) -> Tensor | None:
        """Logits [B, V] at the end of each sequence, where the last stage is; None elsewhere."""

    def accompany(self) -> None:
        """Take part in another replica's `write_forward`, where parameters are shared out."""


class Encoder(Protocol):
    """What encodes images on a rank, as steps and evaluations see it."""

    owner: int

    def begin(
        self, manifest: StepManifest, pixels: Mapping[int, Tensor], coming: Sequence[tuple[StepManifest, Pixels]] = ()
    ) -> None:
        """Take a step's images, and the steps that may be encoded ahead."""

    def encode(self, op: Op) -> None:
        """Encode images of a microbatch."""

    def send_tokens(self, op: Op) -> None:
        """Send their tokens where they are needed."""

    def close(self) -> None:
        """End what works in the background."""


class HybridStep:
    """Runs steps of one rank: pipeline, exchange, reductions, clipping, update."""

    def __init__(self, plan: Plan, mesh: Mesh, built: Built, watch: Watch) -> None:
        self.plan, self.mesh, self.built, self.watch = plan, mesh, built, watch
        self.scale = LossScale(plan)
        self.measure_next = False
        """Whether the next step is also reduced without compression, beside those that the plan says."""
        self._groups = {axis: mesh.layout.groups(axis) for axis in AXES}
        self.encoder: Encoder | None = None
        self.stage: Stage | None = None
        self._handlers: dict[str, Handler] = {}
        self._closing = closing_ops(mesh.layout, mesh.place, built.ops, built.trained)
        self._make_runners()

    def _make_runners(self) -> None:
        """Make what runs this rank's ops, and their handlers."""
        place, part = self.mesh.place, self.built.part
        if place.vision >= 0:
            self.encoder = encoder = EncoderRunner(self.plan, self.mesh, part, self.watch.background)
            self._handlers |= encoder.handlers()
        if place.role == "language":
            self.stage = stage = StageRunner(self.plan, self.mesh, part, self.built.weights)
            self._handlers |= stage.handlers()
            if self.built.weights is not None:
                self._handlers["backward_weight"] = lambda op: self._backward_weight(stage, op)
        for kind in ("backward", "encode_backward"):
            if kind in self._handlers:
                self._handlers[kind] = self._arming(kind, self._handlers[kind])

    def _arming(self, kind: str, handler: Handler) -> Handler:
        """A handler of backward that says first which gradients the op completes."""
        closing = {op.chunk: op for op in self.built.ops if op.kind == kind}
        last = next((op for op in reversed(self.built.ops) if op.kind == kind), None)
        beside = kind == "encode_backward"
        sharded = [s for name, s in self.built.sharded.items() if beside_encoder(self.plan, name) == beside]

        def handle(op: Op) -> None:
            self.built.reducer.arm(t.name for t in self._closing.get(op, ()))
            for module in sharded:
                module.before_backward(op.chunk, closes=op == closing[op.chunk], last=op == last)
            handler(op)

        return handle

    def _backward_weight(self, stage: StageRunner, op: Op) -> None:
        """The weight half of backward; gradients that it completes go to the reducer one by one."""
        assert self.built.weights is not None
        reducer = self.built.reducer
        closing = {id(t.param): t for t in self._closing.get(op, ())}
        coming = {id(weight) for weight in self.built.weights.weights((op.microbatch, op.chunk))}
        for t in closing.values():
            if id(t.param) not in coming:  # norms and biases: complete since the chunk's last input half
                reducer.complete(t)

        def done(weight: Tensor) -> None:
            if id(weight) in closing:
                reducer.complete(closing[id(weight)])

        stage.backward_weight(op, done)

    def configure(self, plan: Plan, step: int, restored: bool = False) -> None:
        """Reduce gradients as the plan says for a step (1 is the first); between two steps, all ranks alike."""
        self.built.reducer.configure(communication(plan), step, restored)
        self.built.reducer.set_share(self.built.optimizer.sharing(plan, step), restored)

    def _begin(self, batch: StepInput) -> None:
        if self.encoder is not None:
            self.encoder.begin(batch.manifest, batch.pixels, batch.coming)
        if self.stage is not None:
            self.stage.begin(batch.manifest, batch.texts, batch.targets)
            self.stage.loss_scale = self.scale.value

    def flush(self) -> None:
        """Wait until everything sent has left."""
        for link in self.mesh.links:
            link.flush()

    def train(
        self, plan: Plan, step: int, batch: StepInput, ride: Ride, inspect: Callable[[Inspected], None] | None = None
    ) -> StepResult:
        """Forward, backward, reduction, clipping and update of one step.

        `plan` holds the live values (learning rates, clipping). `inspect` sees the reduced gradients before clipping.
        NotFinite when a norm or the loss is not a number (and no smaller loss scale could help): weights are then left
        as they were.
        """
        self._begin(batch)
        self.configure(plan, step)
        every = plan.communication.measure_every
        measure = self.measure_next or (every > 0 and step % every == 0)
        self.built.reducer.begin(self.scale.value, measure)
        self.measure_next = False
        state: dict[str, StepResult] = {}

        def norm(_: Op) -> None:
            self.flush()
            self.end_sharded()  # also where nothing trains and so nothing was reduced
            self.built.reducer.scale(1.0 / self.scale.value)
            if inspect is not None:
                inspect(self)
            state["result"] = self._norm(plan, batch, ride)

        def update(_: Op) -> None:
            result = state["result"]
            if result.overflow:
                self.built.reducer.undo()
                result.lr = learning_rates(plan, step)
                return
            norm, limit = result.grad_norm_total, plan.train.clip_norm
            factor = min(1.0, limit / (norm + 1e-6)) if limit else 1.0  # torch.nn.utils.clip_grad_norm_'s formula
            result.lr = self._update(plan, step, factor)

        handlers = self._handlers | {
            "reduce": lambda _: self._reduce(),
            "reduce_embedding": lambda _: self._reduce_embedding(),
            "norm": norm,
            "update": update,
        }
        run_ops(self.built.ops, handlers, self.watch)
        return state["result"]

    def gradients(self) -> dict[str, Tensor]:
        """This rank's part of the reduced gradients, by global name."""
        return self.built.reducer.grads

    def weights(self) -> dict[str, Tensor]:
        """This rank's part of the weights, by global name."""
        return {name: local_tensor(param) for name, param in self.built.part.named_parameters()}

    def _reduce(self) -> None:
        self.end_sharded()
        self.built.reducer.finish()

    def _squares(self) -> Tensor:
        """This rank's share of the squared gradient norm of each module, float64 [len(MODULES)]."""
        return self.built.reducer.squared_norms(MODULES)

    def _update(self, plan: Plan, step: int, factor: float) -> dict[str, float]:
        """Multiply the gradients (clipping) and apply them; returns the learning rates."""
        self.built.reducer.scale(factor)
        rates = self.built.optimizer.step(plan, step, self.built.reducer.grads)
        self.built.reducer.release()
        return rates

    def forward(self, batch: StepInput, microbatches: int) -> float:
        """The forward half alone, without gradients; returns this rank's sum of losses (0 except on last stages)."""
        self._begin(batch)
        with torch.no_grad():
            run_ops(forward_ops(self.built.ops, microbatches), self._handlers, self.watch)
            self.flush()
        self.end_sharded()
        return float(self.stage.loss_sum) if self.stage is not None and self.mesh.place.tp == 0 else 0.0

    def close(self) -> None:
        """End what works in the background."""
        if self.encoder is not None:
            self.encoder.close()

    def end_sharded(self) -> None:
        """Wait for gradients that FSDP2 sums, and drop the weights that it has gathered."""
        for module in self.built.sharded.values():
            module.finish()

    def _reduce_embedding(self) -> None:
        if self.mesh.embedding is not None and EMBED_TOKENS in self.built.reducer.grads:
            grad = self.built.reducer.grads[EMBED_TOKENS]
            self.mesh.traffic.add("embedding", grad)
            reduce_tied(grad, self.mesh.embedding)

    def _norm(self, plan: Plan, batch: StepInput, ride: Ride) -> StepResult:
        """The one reduction over all ranks: norms, loss, waiting commands, the next step's bad images, times."""
        bad, queued = torch.zeros(ride.next_size, dtype=torch.float64), ride.queued()
        with self.watch.timed("data"):
            for position in ride.next_bad():
                bad[position] = 1.0
        norms = self._squares()
        loss = self.stage.loss_sum.view(1) if self.stage and self.mesh.place.tp == 0 else torch.zeros(1).double()
        flag = torch.tensor([float(ride.commands())], dtype=torch.float64)
        times = torch.zeros((self.mesh.world_size if self.watch.telemetry else 0, COLUMNS), dtype=torch.float64)
        if self.watch.telemetry:
            mine = row(self.watch.take_seconds(), self.mesh.traffic.take(), self.built.reducer, queued)
            times[self.mesh.place.rank] = torch.tensor(mine, dtype=torch.float64)
        packed = torch.cat([norms, loss, flag, bad, times.flatten()])
        if self.mesh.control is not None:
            dist.all_reduce(packed, group=self.mesh.control)
        squares = packed[: len(MODULES)].tolist()
        total_loss, commands = packed[len(MODULES) : len(MODULES) + 2].tolist()
        rest = packed[len(MODULES) + 2 :]
        scale, overflow = self.scale.value, self._judge(squares, total_loss)
        reported = Reported.of(rest[ride.next_size :].view(-1, COLUMNS), self._groups, self._compressing())
        return StepResult(
            loss=total_loss / max(1, batch.targets),
            targets=batch.targets,
            grad_norm={m: math.sqrt(s) for m, s in zip(MODULES, squares, strict=True)},
            grad_norm_total=math.sqrt(sum(squares)),
            lr={},
            commands=commands > 0,
            next_bad=frozenset(rest[: ride.next_size].nonzero().flatten().tolist()),
            reported=reported,
            overflow=overflow,
            loss_scale=scale,
        )

    def _compressing(self) -> set[str]:
        """Modules that the plan says to compress in this step."""
        return {m for m, settings in self.built.reducer.settings.items() if settings.compressor != "none"}

    def _judge(self, squares: list[float], loss: float) -> list[str]:
        """What is not finite on any rank: then the loss scale falls, or where it cannot the run ends (NotFinite)."""
        named = zip(("loss", *MODULES), (loss, *squares), strict=True)
        wrong = [name for name, value in named if not math.isfinite(value)]
        if self.scale.judge(not wrong) or not wrong:
            return wrong
        what = " and ".join(f"the gradient of {name}" if name in MODULES else f"the {name}" for name in wrong)
        least = f" at the smallest loss scale ({self.scale.value:g})" if self.scale.active else ""
        other = ", compute in another format (precision.<module>)" if self.scale.active else ""
        raise NotFinite(
            f"{what} is not a finite number{least}; weights are as they were before this step. "
            f"Lower the learning rate (train.<module>.lr) or train.clip_norm{other}, or restore an older checkpoint."
        )
