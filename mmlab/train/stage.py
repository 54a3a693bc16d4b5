"""A pipeline stage's side of a step: image tokens and activations in, activations or the loss out, gradients back."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from mmlab.data.manifest import StepManifest
from mmlab.data.packed import PackedText
from mmlab.models.attention import SharedText, own_ends, share
from mmlab.models.build import PartModel
from mmlab.parallel.deferred import WeightQueue
from mmlab.parallel.mesh import Mesh
from mmlab.parallel.pipeline import Handler
from mmlab.plan.ops import Op
from mmlab.plan.schedule import needs_backward, tokens_need_grad
from mmlab.plan.schema import Plan
from mmlab.train.precision import compute_dtype
from mmlab.train.tokens import TokenExchange, token_dtype, token_width

Slot = tuple[int, int]
"""(microbatch, model chunk): what an activation belongs to."""


class StageRunner:
    """Handlers of a stage rank's ops, and the tensors of the microbatches under way.

    A rank with several model chunks holds several stages; what one hands to the next on the same rank is not sent.
    """

    def __init__(self, plan: Plan, mesh: Mesh, part: PartModel, weights: WeightQueue | None = None) -> None:
        assert part.language is not None
        self.plan, self.mesh, self.language, self.weights = plan, mesh, part.language, weights
        self.projector = part.projector if plan.parallel.projector == "first_stage" else None
        self.exchange = TokenExchange(plan, mesh)
        place, self.stages = mesh.place, mesh.layout.stages
        self.always_project = isinstance(self.projector, FSDPModule)
        """Whether a microbatch of text alone passes the projector too, which other ranks gather for their images."""
        self.replica = place.dp
        self.first, self.last = mesh.layout.embeds(place), mesh.layout.heads(place)
        self.dtype = compute_dtype(plan.precision.language)
        self.wants_token_grads = tokens_need_grad(plan)
        self.manifest: StepManifest | None = None
        self.texts: Mapping[int, PackedText] = {}
        self.total_targets = 1
        self.loss_sum = torch.zeros((), dtype=torch.float64)
        self.loss_scale = 1.0
        """What the loss is multiplied by, and with it all gradients (`LossScale`)."""
        self._inputs: dict[Slot, Tensor] = {}
        self._tokens: dict[int, Tensor] = {}
        self._outputs: dict[Slot, Tensor] = {}
        self._grads: dict[Slot, Tensor] = {}

    def begin(self, manifest: StepManifest, texts: Mapping[int, PackedText], total_targets: int) -> None:
        """Take a step's text: `texts[microbatch]`; `total_targets` counts target tokens over all ranks."""
        self.manifest, self.texts, self.total_targets = manifest, texts, max(1, total_targets)
        self.loss_sum = torch.zeros((), dtype=torch.float64)
        for store in (self._inputs, self._tokens, self._outputs, self._grads):
            store.clear()
        if self.weights is not None:
            self.weights.clear()

    def handlers(self) -> dict[str, Handler]:
        """Handler of each kind of op."""
        return {
            "recv_tokens": self.recv_tokens,
            "recv_forward": self.recv_forward,
            "forward": self.forward,
            "send_forward": self.send_forward,
            "recv_backward": self.recv_backward,
            "backward": self.backward,
            "backward_input": self.backward_input,
            "backward_weight": self.backward_weight,
            "send_backward": self.send_backward,
            "send_token_grads": self.send_token_grads,
        }

    def recv_tokens(self, op: Op) -> None:
        """Receive image tokens [N*P, D] from their owners, in the order of the images."""
        assert self.manifest is not None
        tokens = self.exchange.receive(self.manifest, op.microbatch)
        self._tokens[op.microbatch] = tokens.requires_grad_(
            self.wants_token_grads and (tokens.numel() > 0 or self.always_project)
        )

    def _stage(self, op: Op) -> int:
        """The stage that an op's chunk is."""
        return self.stages.at(self.mesh.place.pp, op.chunk)

    def _chunk_here(self, stage: int) -> int | None:
        """The chunk of this rank that a stage is; None where another rank holds it, or there is no such stage."""
        if not 0 <= stage < self.stages.count:
            return None
        pp, chunk = self.stages.holders[stage]
        return chunk if pp == self.mesh.place.pp else None

    def _rank_of(self, stage: int) -> int:
        """The rank of this pipeline that holds a stage."""
        place = self.mesh.place
        return self.mesh.layout.rank_of(pp=self.stages.holders[stage][0], dp=place.dp, cp=place.cp, tp=place.tp)

    def _shape(self, microbatch: int) -> tuple[int, int]:
        """Shape of what goes from stage to stage."""
        return self.language.hidden_shape(self.texts[microbatch])

    def recv_forward(self, op: Op) -> None:
        """Receive activations [S, D] from the stage before."""
        i, before = op.microbatch, self._stage(op) - 1
        self._inputs[i, op.chunk] = self.mesh.forward.recv(
            self._shape(i), self.dtype, self._rank_of(before), "forward", i, before
        )

    def _image_tokens(self, microbatch: int) -> Tensor | None:
        """What stands at this rank's placeholders; None where the microbatch has no image (and needs no projector)."""
        text, tokens = self.texts[microbatch], self._tokens.get(microbatch)
        if tokens is None or not (tokens.numel() or (self.projector is not None and self.always_project)):
            return None
        if isinstance(text, SharedText):  # also where it holds none: what needs a gradient is alike on all ranks
            tokens = tokens.index_select(0, text.image_rows)
        return tokens if self.projector is None else self.projector(tokens)

    def _blocks(self, op: Op, finish: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Output [S, D] of an op's chunk, or what `finish` makes of it; a next chunk on the same rank gets it as its
        input."""
        i, stage = op.microbatch, self._stage(op)
        hidden, tokens = self._inputs.get((i, op.chunk)), None
        if hidden is not None and needs_backward(self.plan, stage - 1) and torch.is_grad_enabled():
            hidden.requires_grad_()
        if stage == 0:
            tokens = self._image_tokens(i)
        output: Tensor = self.language(self.texts[i], hidden, tokens, finish, op.chunk)
        here = self._chunk_here(stage + 1)
        if here is not None:
            self._inputs[i, here] = output.detach()
        return output

    def forward(self, op: Op) -> None:
        """The blocks of a chunk; with the last stage the sum of the losses of the microbatch's targets."""
        targets, last = self.texts[op.microbatch].targets, self._is_last(op)
        output = self._blocks(op, (lambda hidden: self.language.loss(hidden, targets)) if last else None)
        if last:
            self.loss_sum += output.detach().double().cpu()
        self._outputs[op.microbatch, op.chunk] = output

    def _is_last(self, op: Op) -> bool:
        return self._stage(op) == self.stages.count - 1

    def write_forward(self, text: PackedText) -> Tensor | None:
        """Pass whole sequences through this rank's stages (generation); with the last stage the logits [K, V] of what
        follows the sequences whose ends this rank counts (`own_ends`), else None.

        Image tokens are those of the last `recv_tokens`.
        """
        self.texts = {0: text}
        logits = None
        for chunk, stage in enumerate(self.stages.of(self.mesh.place.pp)):
            op = Op("forward", 0, chunk=chunk)
            if stage > 0 and self._chunk_here(stage - 1) is None:
                self.recv_forward(op)
            if self._is_last(op):
                logits = self._blocks(op, self._next_logits(text))
                continue
            self._outputs[0, chunk] = self._blocks(op)
            if self._chunk_here(stage + 1) is None:
                self.send_forward(op)
        return logits

    def _next_logits(self, text: PackedText) -> Callable[[Tensor], Tensor]:
        _, rows = own_ends(text)
        return lambda hidden: self.language.logits(hidden, rows, text.tokens)

    def accompany(self) -> None:
        """A forward that is nobody's, for its collectives: where weights are sharded, replicas without sequences of
        their own take part in gathering them for those that write."""
        token = torch.zeros(1, dtype=torch.int64, device=self.mesh.device)
        text = share(PackedText(token, token, token, (1,), token[:0], ("",)), self.plan.model, self.mesh.cp)
        self.texts = {0: text}
        for chunk, stage in enumerate(self.stages.of(self.mesh.place.pp)):
            op, shape = Op("forward", 0, chunk=chunk), self._shape(0)
            if stage == 0:
                self._tokens[0] = torch.zeros(
                    0, token_width(self.plan), dtype=token_dtype(self.plan), device=token.device
                )
            elif self._chunk_here(stage - 1) is None:
                self._inputs[0, chunk] = torch.zeros(shape, dtype=self.dtype, device=token.device)
            self._blocks(op, self._next_logits(text) if self._is_last(op) else None)

    def send_forward(self, op: Op) -> None:
        """Send activations to the stage after."""
        i, stage = op.microbatch, self._stage(op)
        output = self._outputs[i, op.chunk].to(self.dtype)
        self.mesh.forward.send(output, self._rank_of(stage + 1), "forward", i, stage)

    def recv_backward(self, op: Op) -> None:
        """Receive the gradient of a chunk's output."""
        i, stage = op.microbatch, self._stage(op)
        self._grads[i, op.chunk] = self.mesh.backward.recv(
            self._shape(i), self.dtype, self._rank_of(stage + 1), "backward", i, stage
        )

    def backward(self, op: Op) -> None:
        """Backward of a microbatch; a loss is divided by the global count of targets (design, decision 7)."""
        slot, stage = (op.microbatch, op.chunk), self._stage(op)
        output = self._outputs.pop(slot)
        if not output.requires_grad:
            return  # a frozen first stage and a microbatch of text alone: nothing before it wants a gradient
        if self._is_last(op):
            (output / self.total_targets * self.loss_scale).backward()
        else:
            torch.autograd.backward(output, self._grads.pop(slot).to(output.dtype))
        here = self._chunk_here(stage - 1)
        if here is not None:
            self._grads[op.microbatch, here] = self._input_grad(slot)

    def backward_input(self, op: Op) -> None:
        """Backward of a microbatch without the weights of linear layers, whose part waits for `backward_weight`."""
        assert self.weights is not None
        with self.weights.collect((op.microbatch, op.chunk)):
            self.backward(op)

    def backward_weight(self, op: Op, done: Callable[[Tensor], None] | None = None) -> None:
        """The gradients that `backward_input` put off; `done` is told of each weight."""
        assert self.weights is not None
        self.weights.run((op.microbatch, op.chunk), done)

    def _input_grad(self, slot: Slot) -> Tensor:
        """The gradient of a chunk's input; zeros where nothing depends on it."""
        hidden = self._inputs.pop(slot)
        return hidden.grad if hidden.grad is not None else torch.zeros_like(hidden)

    def send_backward(self, op: Op) -> None:
        """Send the gradient of a chunk's input to the stage before."""
        i, before = op.microbatch, self._stage(op) - 1
        grad = self._input_grad((i, op.chunk))
        self.mesh.backward.send(grad, self._rank_of(before), "backward", i, before)

    def send_token_grads(self, op: Op) -> None:
        """Send the gradients of image tokens back to the images' owners."""
        tokens = self._tokens.pop(op.microbatch)
        if tokens.numel():
            grad = tokens.grad if tokens.grad is not None else torch.zeros_like(tokens)
            self.exchange.give_back(op.microbatch, grad)
