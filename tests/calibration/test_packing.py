"""Rows cut out of a stream of tokens: nothing is lost but the tail."""

from hypothesis import given
from hypothesis import strategies as st

from compress_calibration.packing import pack_rows, pad_rows, with_ends

DOCUMENTS = st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=20)


@given(DOCUMENTS, st.integers(1, 17))
def test_packed_rows_are_the_joined_stream_without_its_tail(documents, length):
    stream = [token for ids in documents for token in ids]
    rows = list(pack_rows(documents, length))
    assert [token for row in rows for token in row.ids] == stream[: len(stream) // length * length]
    assert all(len(row.ids) == length for row in rows)


@given(DOCUMENTS, st.integers(1, 17))
def test_packed_rows_count_every_document_where_it_begins(documents, length):
    begins, offset = [], 0
    for ids in documents:
        begins += [offset] if ids else []
        offset += len(ids)
    for number, row in enumerate(pack_rows(documents, length)):
        inside = [b for b in begins if number * length <= b < (number + 1) * length]
        assert row.documents == len(inside)


@given(DOCUMENTS, st.integers(1, 17))
def test_padded_rows_keep_one_document_each(documents, length):
    rows = list(pad_rows(documents, length))
    kept = [ids for ids in documents if ids]
    assert [row.ids for row in rows] == [ids[:length] for ids in kept]
    assert [row.cut + len(row.ids) for row in rows] == [len(ids) for ids in kept]


def test_one_separator_and_never_two():
    assert with_ends([5, 6], 1, 2) == [1, 5, 6]
    assert with_ends([1, 5], 1, 2) == [1, 5]
    assert with_ends([5, 6], None, 2) == [5, 6, 2]
    assert with_ends([5, 2], None, 2) == [5, 2]
    assert with_ends([5], None, None) == [5]
