import re

from hypothesis import given
from hypothesis import strategies as st

from hvdrun.output.times import Stamped

TIME = rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "

pieces = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 2), st.text("a\r\n", min_size=1).map(str.encode))
)


@given(pieces)
def test_each_line_of_each_stream_has_one_time_in_front_however_it_is_cut(pieces):
    stamped = Stamped()
    written: dict[tuple[int, int], bytes] = {}
    given: dict[tuple[int, int], bytes] = {}
    for rank, fd, data in pieces:
        given[rank, fd] = given.get((rank, fd), b"") + data
        written[rank, fd] = written.get((rank, fd), b"") + stamped(rank, fd, data)
    for stream, text in given.items():
        lines = re.findall(rb"[^\n]*\n|[^\n]+", text)
        expected = b"".join(TIME + re.escape(line) for line in lines)
        assert re.fullmatch(expected, written[stream])
