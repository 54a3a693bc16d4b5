"""The decoder over tokens that several ranks share equals the decoder on one rank, however short the sequences."""

import pytest
import shared_text_functions

LENGTHS = [(1,), (2, 1), (3,), (5, 9, 2), (30, 17)]


@pytest.mark.parametrize(
    ("mode", "scope", "tp", "window"),
    [("ring", "all", 1, 0), ("ring", "image", 1, 0), ("ulysses", "all", 1, 7), ("ring", "image", 2, 7),
     ("ring", "all", 2, 0)],
)  # fmt: skip
def test_shared_tokens_equal_whole_ones(pool, mode, scope, tp, window):
    pool.grow(2 * tp)
    changes = {"parallel.cp": 2, "parallel.cp_mode": mode, "parallel.cp_scope": scope, "parallel.tp": tp,
               "parallel.sp": tp > 1, "model.language.attention_window": window}  # fmt: skip
    cases = [(lengths, images) for lengths in LENGTHS for images in (0, 1)]
    for result in pool.run(shared_text_functions.against_plain, changes, cases, ranks=2 * tp, timeout=60):
        assert len(result) == len(cases)
        for found in result:
            assert max(found.values()) < 1e-12, found
