"""Lines of an event log, read as they are, from its start or from its end."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from mmlab.messages.events import lines_back, parse_event, read_lines
from mmlab.messages.files import whole

SCALARS = st.none() | st.integers() | st.floats() | st.text(max_size=4)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=4)


@given(value=VALUES, cut=st.integers(0, 400), new=st.binary(max_size=2))
@settings(max_examples=40, deadline=None)
def test_lines_are_read_as_pythons_own_reader_does(value, cut, new):
    line = json.dumps({"t": 1.5, "kind": "warning", "value": value, "half": "\ud800"}, ensure_ascii=False)
    data = line.encode(errors="surrogatepass" if cut % 2 else "replace")
    data = data[:cut] + new + data[cut:] if new else data
    try:
        wanted = repr(whole(json.loads(data)))
    except ValueError:
        wanted = "None"
    found = parse_event(data)
    assert repr(found) == wanted or (found is None and new)  # what was put in may have made it no event


def test_a_line_longer_than_what_is_read_at_once(tmp_path):
    (tmp_path / "log").write_bytes(b"a" * 100 + b"\nb\nc")
    assert read_lines(tmp_path / "log", 0, 8) == ([b"a" * 100, b"b"], 103)
    assert read_lines(tmp_path / "log", 103, 8) == ([], 103)
    assert [list(lines_back(tmp_path / "log", piece)) for piece in (1, 8, 1000)] == [[b"b", b"a" * 100]] * 3
    assert list(lines_back(tmp_path / "none")) == []
