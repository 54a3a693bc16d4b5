"""The plan: what to train and which rank computes what.

Every field carries a docstring with its unit; it becomes help text, form label
and tooltip. Fields marked `LIVE` may change while a run goes on (`run.set`).
Nothing here imports torch: the checker and the notebook start in no time.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mmlab.plan.data import DataConfig
from mmlab.plan.model import LanguageConfig, ProjectorConfig, VisionConfig
from mmlab.plan.section import LIVE, MODULES, Compressor, Counts, Names, Precision, Section
from mmlab.plan.upkeep import CheckpointConfig, ClusterConfig, TrackingConfig

__all__ = ["LIVE", "MODULES", "LanguageConfig", "Plan", "ProjectorConfig", "Section", "VisionConfig"]


class ModelConfig(Section):
    """The three parts of the model."""

    vision: VisionConfig = VisionConfig()
    """The image encoder."""
    projector: ProjectorConfig = ProjectorConfig()
    """From image features to image tokens."""
    language: LanguageConfig = LanguageConfig()
    """The decoder."""


class ParallelConfig(Section):
    """Who computes what: degrees, placement and pipeline schedule."""

    vision: Literal["own_ranks", "first_stage", "all_ranks"] = "own_ranks"
    """Where the encoder runs: on ranks of its own, merged with the first language stage, or a share on every rank."""
    vision_dp: int = Field(1, ge=0)
    """Ranks of the encoder group (data parallel over images); 0 unless vision = "own_ranks"."""
    dp: int = Field(1, ge=1)
    """Data-parallel replicas of the language model."""
    tp: int = Field(1, ge=1)
    """Tensor-parallel ranks inside each stage."""
    pp: int = Field(1, ge=1)
    """Pipeline stages of the language model."""
    cp: int = Field(1, ge=1)
    """Context-parallel ranks (the sequence split)."""
    cp_mode: Literal["ring", "ulysses"] = "ring"
    """How context-parallel ranks attend over the whole sequence: keys and values travel from rank to rank, or each rank
    computes a share of the heads."""
    cp_scope: Literal["all", "image"] = "all"
    """Which tokens context parallelism splits: all, or image tokens alone (text is then computed on every rank)."""
    sp: bool = False
    """Megatron sequence parallel inside the tensor group: norms and residuals on a share of the tokens."""
    projector: Literal["vision", "first_stage"] = "vision"
    """Which side of the exchange computes the projector."""
    transfer: Literal["p2p", "all_gather"] = "p2p"
    """How image tokens reach the tensor group of the first stage: p2p sends all of them to each of its ranks,
    all_gather a share to each, which they then gather among themselves. Gradients take the same way back."""
    encoder_batch: int = Field(1, ge=1)
    """Microbatches whose images the encoder takes at once, forward and backward; image tokens are still sent as each
    microbatch needs them."""
    encoder_ahead: int = Field(0, ge=0)
    """Steps that a frozen encoder on ranks of its own encodes ahead of the pipeline, in a queue of that many steps'
    features; 0 means none."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"] = "1f1b"
    """Order of forward and backward of microbatches in the pipeline."""
    chunks: int = Field(0, ge=0)
    """Model chunks on each pipeline rank; 0 means what the schedule needs: 2 with interleaved and zb_v, else 1."""
    layers_per_stage: Counts = ()
    """Decoder blocks of each stage (pp x chunks numbers, in the order data flows); empty means what balance says."""
    balance: Literal["even", "measured"] = "even"
    """How decoder blocks are dealt to stages: evenly, or by times measured when a run starts (then written into the
    run's plan as layers_per_stage)."""
    microbatches: int = Field(1, ge=1)
    """Microbatches a step on each data-parallel replica."""
    sharding: Literal["none", "zero1", "zero2", "zero3"] = "none"
    """What is shared out over dp x cp: nothing, optimizer state, gradients too, weights too (see [sharding])."""
    engine: Literal["native", "deepspeed"] = "native"
    """What runs the training step."""

    @property
    def chunks_per_rank(self) -> int:
        """Model chunks on each pipeline rank, with 0 resolved."""
        return self.chunks or (2 if self.schedule in ("interleaved", "zb_v") else 1)

    @property
    def undecided(self) -> bool:
        """Whether the split of the decoder is still to be measured, when a run starts."""
        return self.balance == "measured" and not self.layers_per_stage and self.pp > 1

    @property
    def splits_backward(self) -> bool:
        """Whether backward runs as two ops, one for inputs and one for the weights of linear layers."""
        return self.schedule in ("zb_h1", "zb_v")

    def degrees_text(self) -> list[str]:
        """The degrees above 1, in words: ["vision_dp 2", "tp 2"]."""
        degrees = ("vision_dp", "dp", "tp", "pp", "cp")
        return [f"{name} {getattr(self, name)}" for name in degrees if getattr(self, name) > 1]


class PrecisionConfig(Section):
    """Number format of the computation; master weights and optimizer stay at least fp32.

    In fp16, norms and attention of the encoder are computed in fp32, and the loss is scaled dynamically.
    """

    vision: Precision = "fp32"
    """Format of the encoder's computation."""
    projector: Precision = "fp32"
    """Format of the projector's computation."""
    language: Precision = "fp32"
    """Format of the decoder's computation."""
    loss_scale_power: int = Field(16, ge=0, le=24)
    """With fp16: the power of two that the loss is multiplied by at the start, so that small gradients do not vanish;
    halved at each step in which a gradient overflows, whose update is left out."""
    loss_scale_window: int = Field(1000, ge=1)
    """With fp16: steps without overflow after which the loss scale is doubled (up to 2^24)."""

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled: a module computes in fp16 (and none in fp64, in which then all compute)."""
        formats = (self.vision, self.projector, self.language)
        return "fp16" in formats and "fp64" not in formats


class ShardingConfig(Section):
    """What `parallel.sharding` shares out over the ranks that hold copies of a module, and in which pieces."""

    vision: Literal["whole", "layer", "module"] = "whole"
    """The encoder: whole on each of its ranks (its gradients are still summed over them), or shared out over them, with
    zero2 and zero3 gathered block by block ("layer") or all at once ("module")."""
    projector: Literal["whole", "module"] = "whole"
    """The projector: whole on each rank that has it, or shared out over them."""
    language: Literal["whole", "layer", "module"] = "layer"
    """The decoder: whole, or shared out over dp x cp; "module" gathers a whole stage at once."""
    reduce: Literal["step", "microbatch"] = "step"
    """When zero2 and zero3 sum gradients: once a step (kept whole on every rank until then), or after each microbatch
    (never kept whole, moved that many times)."""


class OffloadConfig(Section):
    """What leaves device memory between uses."""

    mode: Literal["none", "optimizer", "parameters", "nvme"] = "none"
    """Nothing, the optimizer state, optimizer and parameters, or both to NVMe; of the language model alone (the encoder
    and the projector stay on the device). With engine = "deepspeed"."""
    nvme_path: str = ""
    """Folder on the NVMe disk, for mode = "nvme"; each rank has files of its own in it."""


class GroupCommunication(Section):
    """How the gradients of one module group are reduced over the ranks that hold copies of it."""

    compressor: Compressor = Field("none", json_schema_extra=LIVE)
    """What gradients are coded with on the wire: none; bf16, fp16 (scaled against overflow); int8 (blocks with a scale
    each); topk (the largest values and where they are); powersgd (low-rank factors of matrices); onebit (signs and
    scales)."""
    rank: int = Field(4, ge=1, json_schema_extra=LIVE)
    """With powersgd: columns of the factors of a matrix."""
    warm_start: bool = Field(True, json_schema_extra=LIVE)
    """With powersgd: whether a step's factors begin with those of the step before, rather than at random."""
    min_compression_rate: float = Field(2.0, ge=1, json_schema_extra=LIVE)
    """With powersgd: matrices whose factors are not this many times smaller are sent as they are, as is all that is no
    matrix."""
    ratio: float = Field(0.01, gt=0, le=1, json_schema_extra=LIVE)
    """With topk: share of the values that is sent, of 8 bytes each (from 0.5 on no fewer than without compression)."""
    error_feedback: bool = Field(True, json_schema_extra=LIVE)
    """Whether int8, topk, powersgd and onebit add what they left out to the next step's gradients; each rank keeps one
    number a parameter for it, with fp16 two (an overflow takes a step back)."""
    residual: Literal["flush", "keep", "drop"] = Field("flush", json_schema_extra=LIVE)
    """What becomes of what was left out when the compressor changes to one without error feedback: added to the next
    step's gradients, kept for a later compressor, or forgotten. A compressor with error feedback goes on with it,
    except with drop."""
    warmup_steps: int = Field(0, ge=0, json_schema_extra=LIVE)
    """Steps at the start of the run that are reduced without compression."""
    bucket_mb: float = Field(4.0, gt=0)
    """Size of a gradient bucket, in MB (1e6 bytes)."""

    @property
    def keeps_residual(self) -> bool:
        """Whether what is left out is kept for the next step."""
        return self.error_feedback and self.compressor in ("int8", "topk", "powersgd", "onebit")

    def at(self, step: int) -> GroupCommunication:
        """What holds in a step (1 is the first): no compressor during the warm-up."""
        return self.model_copy(update={"compressor": "none"}) if step <= self.warmup_steps else self


class CommunicationConfig(Section):
    """Gradient communication of the two data-parallel groups."""

    vision: GroupCommunication = GroupCommunication()
    """Encoder, and the projector where it lives beside the encoder."""
    language: GroupCommunication = GroupCommunication()
    """Decoder, and the projector where it lives on the first stage."""
    measure_every: int = Field(0, ge=0, json_schema_extra=LIVE)
    """Steps between those in which compressed gradients are reduced a second time without compression, to measure how
    far off they are (the next step that this number divides); 0 means never."""


class ModuleTrain(Section):
    """Optimizer (AdamW) of one module."""

    lr: float = Field(1e-3, ge=0, json_schema_extra=LIVE)
    """Base learning rate that the schedule scales, dimensionless."""
    weight_decay: float = Field(0.0, ge=0, json_schema_extra=LIVE)
    """Decoupled weight decay of matrices (not of biases and norms), per unit learning rate; of LoRA's factors too."""
    frozen: bool = False
    """Whether the module stays as it is: no gradient, no optimizer state."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the first moment, dimensionless."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the second moment, dimensionless."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon, in units of the gradient."""
    warmup_steps: int = Field(0, ge=0, json_schema_extra=LIVE)
    """Steps of linear warm-up from 0 to the base learning rate."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1, json_schema_extra=LIVE)
    """Learning rate at the end of the cosine, as a share of the base."""
    init_from: str = ""
    """A safetensors file or folder with this module's weights; empty means fresh from the seed."""
    lora_rank: int = Field(0, ge=0)
    """Rank of the low-rank adapters (LoRA) that train beside the module's frozen weights; 0 means none: the weights
    themselves train."""
    lora_alpha: float = Field(16.0, gt=0)
    """What adapters add is scaled by lora_alpha / lora_rank, dimensionless."""
    lora_targets: Names = ("all",)
    """Linear layers with an adapter, by the last part of their names (such as ["q_proj", "v_proj"]), or ["all"]."""

    @property
    def base_frozen(self) -> bool:
        """Whether the module's own weights stay as they are: it is frozen, or adapters train beside them."""
        return self.frozen or self.lora_rank > 0


class TrainConfig(Section):
    """How long and how to train."""

    steps: int = Field(100, ge=1, json_schema_extra=LIVE)
    """Optimizer steps of the run (also the length of the cosine)."""
    seed: int = Field(0, ge=0)
    """Seed of the initial weights, dimensionless."""
    optimizer: Literal["adamw", "onebit_adam"] = "adamw"
    """AdamW, or 1-bit Adam: AdamW up to freeze_step; from then on the second moment stays as it is and what ranks
    reduce is the first moment instead of gradients, through each group's compressor (onebit is the paper's)."""
    freeze_step: int = Field(20, ge=1)
    """With onebit_adam: steps of plain AdamW, reduced without compression, after which the second moment stays: about a
    fifth of the run, and no fewer than the learning rates' warm-up."""
    clip_norm: float = Field(1.0, ge=0, json_schema_extra=LIVE)
    """Largest global gradient norm, in units of the gradient; 0 means no clipping."""
    activation_checkpointing: bool = False
    """Recompute each block's activations in backward instead of keeping them."""
    eval_every: int = Field(0, ge=0, json_schema_extra=LIVE)
    """Steps between evaluations on held-out samples; 0 means only at the end, if there are any."""
    eval_samples: int = Field(64, ge=0)
    """Held-out samples an evaluation uses (rounded up to whole global batches); 0 means no evaluation."""
    sample_images: int = Field(8, ge=0)
    """Held-out pictures for which an evaluation writes text."""
    vision: ModuleTrain = ModuleTrain()
    """The encoder's optimizer."""
    projector: ModuleTrain = ModuleTrain()
    """The projector's optimizer."""
    language: ModuleTrain = ModuleTrain()
    """The decoder's optimizer."""

    def reduces_momentum(self, step: int) -> bool:
        """Whether a step (1 is the first) reduces first moments rather than gradients: 1-bit Adam after the freeze."""
        return self.optimizer == "onebit_adam" and step > self.freeze_step


class Plan(Section):
    """One run: model, layout, data, training. Methods are attached in `mmlab.plan`."""

    name: str = "run"
    """Name of the run; part of its folder's name."""
    model: ModelConfig = ModelConfig()
    """What is trained."""
    parallel: ParallelConfig = ParallelConfig()
    """Which rank computes what."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    sharding: ShardingConfig = ShardingConfig()
    """What is shared out over data-parallel ranks."""
    offload: OffloadConfig = OffloadConfig()
    """What leaves device memory."""
    communication: CommunicationConfig = CommunicationConfig()
    """Gradient communication."""
    data: DataConfig = DataConfig()
    """Samples and their order."""
    train: TrainConfig = TrainConfig()
    """Optimization."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""
    cluster: ClusterConfig = ClusterConfig()
    """Engines."""
    tracking: TrackingConfig = TrackingConfig()
    """Records."""

    @property
    def world_size(self) -> int:
        """Ranks the plan needs: the encoder group plus dp x pp x cp x tp."""
        p = self.parallel
        own = p.vision_dp if p.vision == "own_ranks" else 0
        return own + p.dp * p.pp * p.cp * p.tp

    @property
    def microbatch_size(self) -> int:
        """Samples of one microbatch on one data-parallel replica."""
        return self.data.global_batch // (self.parallel.dp * self.parallel.microbatches)
