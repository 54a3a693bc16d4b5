"""What ranks of a pool run to test the collectives that reductions are made of."""

from datetime import timedelta

import torch
import torch.distributed as dist

from mmlab.parallel import shm
from mmlab.parallel.compression.wire import Wire
from mmlab.parallel.traffic import Traffic


def several_at_once(rank: int, world: int, host: str, port: int, backend: str, sizes: list[list[int]]) -> list[float]:
    """Rounds of all-to-alls and all-gathers, all under way at once, waited for the last first; raises where one of them
    has not brought what torch's own brings. `sizes[i][j]`: elements from i to j. Returns bytes and calls."""
    shm.register()
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
    group = dist.new_group(backend=backend)
    traffic = Traffic()
    wire = Wire(group, "language", traffic)
    mine, theirs = sizes[rank], [row[rank] for row in sizes]
    under_way = []
    for number in range(3):
        data = torch.arange(float(sum(mine))) + 1000 * rank + 10000 * number
        own = torch.full((5,), float(10 * number + rank))
        pair = (torch.full((sum(theirs),), -1.0), torch.full((5 * world,), -1.0))
        works = (wire.all_to_all(pair[0], theirs, data, mine), wire.all_gather(pair[1], own))
        under_way.append((data, own, pair, works))
    for data, own, (received, gathered), works in reversed(under_way):
        ended: list[bool] = []
        for work in works:
            work.get_future().add_done_callback(lambda _, ended=ended: ended.append(True))
            work.wait()
        assert len(ended) == 2
        expected, all_own = torch.empty_like(received), torch.empty_like(gathered)
        dist.all_to_all_single(expected, data, theirs, mine)
        dist.all_gather_into_tensor(all_own, own)
        assert torch.equal(received, expected)
        assert torch.equal(gathered, all_own)
    return [traffic.bytes["language"], traffic.calls["language"]]
