"""What ranks of a pool compute in the tests of coded sums."""

import math
from datetime import timedelta

import torch
import torch.distributed as dist

from mmlab.parallel import shm
from mmlab.parallel.compression.codecs import Bf16, Codec, Fp16, Int8, OneBit, Plain, TopK
from mmlab.parallel.compression.feedback import Kept, Packed
from mmlab.parallel.compression.sums import BucketSum, CodedSum, DenseSum
from mmlab.parallel.compression.wire import Wire
from mmlab.parallel.traffic import Traffic

CODECS = ("plain", "bf16", "fp16", "int8", "topk", "onebit")
BACKENDS = ("gloo", "shm")
STEPS = 2


def codec_of(name: str) -> Codec:
    known = {"bf16": Bf16(), "fp16": Fp16(), "int8": Int8(), "topk": TopK(0.1), "onebit": OneBit()}
    return known.get(name) or Plain(torch.float64)


def gradient(rank: int, step: int, count: int) -> torch.Tensor:
    """A rank's gradient [count] in float64."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    spread = torch.rand(count, generator=generator, dtype=torch.float64) ** 4
    return torch.randn(count, generator=generator, dtype=torch.float64) * spread


def join(rank: int, world: int, host: str, port: int) -> dict[str, dist.ProcessGroup]:
    """A group of all ranks on each backend."""
    limit = timedelta(seconds=30)
    shm.register()
    store = dist.TCPStore(host, port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    return {backend: dist.new_group(backend=backend) for backend in BACKENDS}


def drive(cases: list[tuple[BucketSum, Packed]], wire: Wire, unit: float = 1.0) -> list[torch.Tensor]:
    """Reductions that are under way together, as the reducer drives them; the reduced gradients without `unit`."""
    under_way = []
    for how, packed in cases:
        packed.kept.begin()
        packed.flat.mul_(unit)
        rounds = how.rounds(packed, wire, unit)
        under_way.append((rounds, next(rounds, None)))
    while under_way:
        for _, work in under_way:
            work.wait()
        started = [(rounds, next(rounds, None)) for rounds, _ in under_way]
        under_way = [(rounds, work) for rounds, work in started if work is not None]
    return [packed.flat / unit for _, packed in cases]


def packed_of(flat: torch.Tensor, kept: Kept) -> Packed:
    return Packed(flat, {"all": flat.shape}, kept)


def steps(rank: int, world: int, wire: Wire, cases: list[tuple[str, int]], feedback: bool, unit: float) -> list:
    """For each step and case: the reduced gradient and this rank's residual after it."""
    kept, found = [Kept() for _ in cases], []
    for step in range(STEPS):
        given = [
            (CodedSum(codec_of(name), feedback), packed_of(gradient(rank, step, count), k))
            for (name, count), k in zip(cases, kept, strict=True)
        ]
        reduced = drive(given, wire, unit)
        residuals = [k.residual.clone() if k.residual is not None else None for k in kept]
        found.append(list(zip(reduced, residuals, strict=True)))
    return found


def sums(rank, world, host, port, cases) -> dict:
    """The same steps on both backends, with a loss scale, without error feedback; and what they counted."""
    groups, found, traffic = join(rank, world, host, port), {}, {}
    for backend, group in groups.items():
        counted = Traffic()
        found[backend] = steps(rank, world, Wire(group, "language", counted), cases, True, 1.0)
        traffic[backend] = counted.bytes["language"]
    wire = Wire(groups["shm"])
    found["scaled"] = steps(rank, world, wire, cases, True, 1024.0)
    found["forgetful"] = steps(rank, world, wire, cases, False, 1.0)
    return {"found": found, "traffic": traffic}


def spoilt(rank, world, host, port, count) -> dict:
    """Four steps of each codec, of which the last rank's second has a NaN and the first rank's third an infinity."""
    wire = Wire(join(rank, world, host, port)["shm"])
    kept, found = {name: Kept() for name in CODECS}, {name: [] for name in CODECS}
    for step in range(4):
        flats = {name: gradient(rank, step, count) for name in CODECS}
        for flat in flats.values():
            if step == 1 and rank == world - 1:
                flat[count // 3] = math.nan
            if step == 2 and rank == 0:
                flat[-1] = -math.inf
        reduced = drive([(CodedSum(codec_of(n), True), packed_of(flats[n], kept[n])) for n in CODECS], wire)
        for name, flat in zip(CODECS, reduced, strict=True):
            found[name].append((flat, kept[name].residual.clone()))
    return found


def left(rank, world, host, port) -> dict:
    """By policy: this rank's residual after a coded step, the dense sum of the next, what is left; then coded again."""
    wire, found = Wire(join(rank, world, host, port)["shm"]), {}
    for policy in ("flush", "keep", "drop"):
        kept, coded = Kept(), CodedSum(Int8(), True)
        drive([(coded, packed_of(gradient(rank, 0, 300), kept))], wire)
        before, memory = kept.residual.clone(), kept.bytes
        (dense,) = drive([(DenseSum(policy), packed_of(gradient(rank, 1, 300), kept))], wire)
        left, memory_left = kept.residual, kept.bytes
        (unbiased,) = drive(
            [(CodedSum(Plain(torch.float64), False, policy), packed_of(gradient(rank, 2, 300), kept))], wire
        )
        (again,) = drive([(CodedSum(Plain(torch.float64), True), packed_of(gradient(rank, 3, 300), kept))], wire)
        found[policy] = {"before": before, "memory": memory, "dense": dense, "left": left, "memory left": memory_left,
                         "unbiased": unbiased, "again": again}  # fmt: skip
    return found


def undone(rank, world, host, port) -> dict:
    """A step that is taken back and made again, beside a run that never made it the first time."""
    wire, found = Wire(join(rank, world, host, port)["shm"]), {}
    for overflowed in (False, True):
        kept, coded = Kept(undoable=True), CodedSum(Int8(), True)
        drive([(coded, packed_of(gradient(rank, 0, 300), kept))], wire, 8.0)
        before = kept.residual.clone()
        if overflowed:
            flat = gradient(rank, 1, 300)
            flat[rank] = math.inf
            drive([(coded, packed_of(flat, kept))], wire, 8.0)
            assert not torch.equal(kept.residual, before)
            assert kept.bytes == 2 * before.nbytes
            kept.undo()
            assert kept.bytes == before.nbytes
        same = torch.equal(kept.residual, before)
        (reduced,) = drive([(coded, packed_of(gradient(rank, 1, 300), kept))], wire, 4.0)
        found[overflowed] = {"same": same, "reduced": reduced, "residual": kept.residual}
    return found
