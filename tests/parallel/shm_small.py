"""Twelve groups of three ranks where /dev/shm is small; run in a namespace of its own by test_shm.py."""

import os
import sys

import shm_functions

from mmlab.cluster.pool import RankPool

if __name__ == "__main__":
    megabytes = int(sys.argv[1])
    with RankPool(3) as pool:
        results = pool.run(shm_functions.crowd, 12, ranks=3, timeout=60)
    for sizes, transports, total, free in results:
        assert total == 12 * 3 * 500_000, total
        assert sum(sizes) <= megabytes << 20, sizes
        assert free >= 0
        if megabytes == 64:
            assert len(sizes) == 13, sizes
            assert transports == ["shared memory in /dev/shm"], transports
        else:
            assert any("/dev/shm has no room" in text for text in transports), transports
    assert os.listdir("/dev/shm") == []
    print("ok")
