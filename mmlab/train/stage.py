"""A pipeline stage's side of a step: image tokens and activations in, activations or the loss out, gradients back."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mmlab.data.manifest import StepManifest
from mmlab.data.packed import PackedText
from mmlab.models.build import PartModel
from mmlab.parallel.mesh import Mesh
from mmlab.parallel.pipeline import Handler
from mmlab.plan.ops import Op
from mmlab.plan.schedule import needs_backward, tokens_need_grad
from mmlab.plan.schema import Plan
from mmlab.train.precision import compute_dtype
from mmlab.train.tokens import TokenExchange


class StageRunner:
    """Handlers of a stage rank's ops, and the tensors of the microbatches under way."""

    def __init__(self, plan: Plan, mesh: Mesh, part: PartModel) -> None:
        assert part.language is not None
        self.plan, self.mesh, self.language = plan, mesh, part.language
        self.projector = part.projector if plan.parallel.projector == "first_stage" else None
        self.exchange = TokenExchange(plan, mesh)
        place, layout = mesh.place, mesh.layout
        self.replica = place.dp
        self.first, self.last = place.pp == 0, place.pp == plan.parallel.pp - 1
        neighbour = {"dp": place.dp, "cp": place.cp, "tp": place.tp}
        self.before = -1 if self.first else layout.rank_of(pp=place.pp - 1, **neighbour)
        self.after = -1 if self.last else layout.rank_of(pp=place.pp + 1, **neighbour)
        self.dtype = compute_dtype(plan.precision.language)
        self.wants_token_grads = tokens_need_grad(plan)
        self.wants_input_grads = not self.first and needs_backward(plan, place.pp - 1)
        self.manifest: StepManifest | None = None
        self.texts: Mapping[int, PackedText] = {}
        self.total_targets = 1
        self.loss_sum = torch.zeros((), dtype=torch.float64)
        self._inputs: dict[int, Tensor] = {}
        self._tokens: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._grads: dict[int, Tensor] = {}

    def begin(self, manifest: StepManifest, texts: Mapping[int, PackedText], total_targets: int) -> None:
        """Take a step's text: `texts[microbatch]`; `total_targets` counts target tokens over all ranks."""
        self.manifest, self.texts, self.total_targets = manifest, texts, max(1, total_targets)
        self.loss_sum = torch.zeros((), dtype=torch.float64)
        for store in (self._inputs, self._tokens, self._outputs, self._grads):
            store.clear()

    def handlers(self) -> dict[str, Handler]:
        """Handler of each kind of op."""
        return {
            "recv_tokens": self.recv_tokens,
            "recv_forward": self.recv_forward,
            "forward": self.forward,
            "send_forward": self.send_forward,
            "recv_backward": self.recv_backward,
            "backward": self.backward,
            "send_backward": self.send_backward,
            "send_token_grads": self.send_token_grads,
        }

    def recv_tokens(self, op: Op) -> None:
        """Receive image tokens [N*P, D] from their owners, in the order of the images."""
        assert self.manifest is not None
        tokens = self.exchange.receive(self.manifest, op.microbatch)
        self._tokens[op.microbatch] = tokens.requires_grad_(self.wants_token_grads and tokens.numel() > 0)

    def recv_forward(self, op: Op) -> None:
        """Receive activations [T, D] from the stage before."""
        microbatch = op.microbatch
        shape = (self.texts[microbatch].tokens, self.plan.model.language.hidden)
        self._inputs[microbatch] = self.mesh.forward.recv(shape, self.dtype, self.before, "forward", microbatch)

    def _blocks(self, microbatch: int, finish: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        hidden = self._inputs.get(microbatch)
        if hidden is not None and self.wants_input_grads and torch.is_grad_enabled():
            hidden.requires_grad_()
        tokens = self._tokens.get(microbatch)
        if tokens is not None and self.projector is not None and tokens.numel():
            tokens = self.projector(tokens)
        output: Tensor = self.language(self.texts[microbatch], hidden, tokens, finish)
        return output

    def forward(self, op: Op) -> None:
        """This stage's blocks; on the last stage the sum of the losses of the microbatch's targets."""
        microbatch = op.microbatch
        targets = self.texts[microbatch].targets
        output = self._blocks(microbatch, (lambda hidden: self.language.loss(hidden, targets)) if self.last else None)
        if self.last:
            self.loss_sum += output.detach().double().cpu()
        self._outputs[microbatch] = output

    def write_forward(self, text: PackedText) -> Tensor | None:
        """Pass whole sequences through this stage (generation); on the last stage the logits [B, V] of what follows
        each sequence, else None.

        Image tokens are those of the last `recv_tokens`.
        """
        self.texts = {0: text}
        if not self.first:
            self.recv_forward(Op("recv_forward", 0))
        self._outputs[0] = self._blocks(0, self._next_logits(text) if self.last else None)
        if self.last:
            return self._outputs[0]
        self.send_forward(Op("send_forward", 0))
        return None

    def _next_logits(self, text: PackedText) -> Callable[[Tensor], Tensor]:
        ends = (torch.tensor(text.seqlens).cumsum(0) - 1).to(self.mesh.device)
        return lambda hidden: self.language.logits(hidden[ends])

    def accompany(self) -> None:
        """A forward that is nobody's, for its collectives: where weights are sharded, replicas without sequences of
        their own take part in gathering them for those that write."""
        token = torch.zeros(1, dtype=torch.int64, device=self.mesh.device)
        text = PackedText(token, token, token, (1,), token[:0], ("",))
        hidden = None
        if not self.first:
            hidden = torch.zeros(1, self.plan.model.language.hidden, dtype=self.dtype, device=self.mesh.device)
        self.language(text, hidden, None, self._next_logits(text) if self.last else None)

    def send_forward(self, op: Op) -> None:
        """Send activations to the stage after."""
        microbatch = op.microbatch
        self.mesh.forward.send(self._outputs[microbatch].to(self.dtype), self.after, "forward", microbatch)

    def recv_backward(self, op: Op) -> None:
        """Receive the gradient of this stage's output."""
        microbatch = op.microbatch
        shape = (self.texts[microbatch].tokens, self.plan.model.language.hidden)
        self._grads[microbatch] = self.mesh.backward.recv(shape, self.dtype, self.after, "backward", microbatch)

    def backward(self, op: Op) -> None:
        """Backward of a microbatch; a loss is divided by the global count of targets (design, decision 7)."""
        microbatch = op.microbatch
        output = self._outputs.pop(microbatch)
        if not output.requires_grad:
            return  # a frozen first stage and a microbatch of text alone: nothing before it wants a gradient
        if self.last:
            (output / self.total_targets).backward()
        else:
            torch.autograd.backward(output, self._grads.pop(microbatch).to(output.dtype))

    def send_backward(self, op: Op) -> None:
        """Send the gradient of this stage's input to the stage before."""
        microbatch = op.microbatch
        hidden = self._inputs.pop(microbatch)
        grad = hidden.grad if hidden.grad is not None else torch.zeros_like(hidden)
        self.mesh.backward.send(grad, self.before, "backward", microbatch)

    def send_token_grads(self, op: Op) -> None:
        """Send the gradients of image tokens back to the images' owners."""
        assert self.manifest is not None
        tokens = self._tokens.pop(op.microbatch)
        if tokens.numel():
            grad = tokens.grad if tokens.grad is not None else torch.zeros_like(tokens)
            self.exchange.give_back(self.manifest, op.microbatch, grad)
