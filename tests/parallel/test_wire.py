"""The collectives that reductions are made of bring what torch's own bring, over each backend."""

import pytest
import wire_functions

SIZES = [[0, 3, 700], [5, 0, 0], [1, 2, 0]]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_several_calls_at_once_bring_what_torch_brings(pool, backend):
    pool.grow(3)
    found = pool.run(wire_functions.several_at_once, backend, SIZES, ranks=3, timeout=60)
    assert found == [[3 * 4 * (sum(row) + 5), 6] for row in SIZES]
