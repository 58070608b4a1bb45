"""Documents come out of every kind of source, and every fault names its place."""

import json
import time
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import DataError
from compress.text.tokenizer import load_tokenizer
from compress_calibration import hub, readers
from compress_calibration.config import SourceConfig
from compress_calibration.readers import cut
from compress_calibration.sources import check_source, documents, drawn_documents, shuffled

TEXTS = ["one small story", "two\nlines", "three: ü"]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
RENDERED = "<user>hi<assistant>yo"


@pytest.fixture(scope="session")
def tokenizer(demo_model, tmp_path_factory):
    """The demo's tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (folder / name).write_bytes((demo_model / name).read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(folder)


def read(tokenizer, kind, **fields):
    return list(documents(SourceConfig(kind, **fields), tokenizer))


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


class TestText:
    def test_the_separator_parts_documents_and_blank_ones_are_none(self, tmp_path, tokenizer):
        joined = "<|endoftext|>\n".join([*TEXTS, "  ", ""])
        assert read(tokenizer, "text", path=write(tmp_path / "a.txt", joined)) == TEXTS

    def test_a_file_without_it_is_one_document(self, tmp_path, tokenizer):
        path = write(tmp_path / "a.txt", "\n\n".join(TEXTS) + "\n")
        assert read(tokenizer, "text", path=path) == ["\n\n".join(TEXTS)]

    def test_another_separator(self, tmp_path, tokenizer):
        path = write(tmp_path / "a.txt", "a<|endoftext|>b\n---\nc")
        assert read(tokenizer, "text", path=path, separator="---") == ["a<|endoftext|>b", "c"]

    def test_several_paths_and_patterns_in_order(self, tmp_path, tokenizer):
        for name in "cab":
            write(tmp_path / f"{name}.txt", name)
        write(tmp_path / "z.md", "z")
        paths = (str(tmp_path / "z.md"), str(tmp_path / "*.txt"))
        assert read(tokenizer, "text", path=paths) == ["z", "a", "b", "c"]

    @given(
        texts=st.lists(st.text("ab \n<|", min_size=1, max_size=60), max_size=12),
        chunk=st.integers(1, 40),
    )
    def test_the_size_of_a_read_does_not_show(self, tmp_path_factory, texts, chunk):
        path = write(tmp_path_factory.mktemp("t") / "a.txt", "<|endoftext|>".join(texts))
        source = SourceConfig("text", path=path)
        expected = [text.strip() for text in texts if text.strip()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(readers, "CHUNK_CHARS", chunk)
            assert list(documents(source, None)) == expected
            pieces = list(readers.read_text(source, 64, None))
        assert "".join("".join(pieces).split()) == "".join("".join(texts).split())
        assert all(len(piece) <= 96 for piece in pieces)

    def test_files_that_are_not_utf8_are_refused(self, tmp_path, tokenizer):
        (tmp_path / "a.txt").write_bytes(b"abc\xff")
        with pytest.raises(DataError, match=r"a\.txt is not UTF-8 text \(byte 0xff"):
            read(tokenizer, "text", path=str(tmp_path / "a.txt"))

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("none.txt", "none.txt: there is no such file"),
            ("*.csv", r"\*\.csv: there is no such file"),
            ("", "is a folder; name its files, for example '.*\\*.txt'"),
        ],
    )
    def test_paths_that_are_not_there_are_refused(self, tmp_path, name, message):
        source = SourceConfig("text", path=str(tmp_path / name))
        with pytest.raises(DataError, match=message):
            check_source(source)


class TestJsonl:
    def test_text_and_messages(self, tmp_path, tokenizer):
        rows = [{"text": TEXTS[0]}, {"messages": CHAT}, {"text": ""}, {"text": TEXTS[2], "id": 3}]
        path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
        assert read(tokenizer, "jsonl", path=path) == [TEXTS[0], RENDERED, TEXTS[2]]

    def test_a_named_field(self, tmp_path, tokenizer):
        rows = [{"text": "no", "body": "yes"}, {"text": "no", "body": CHAT}]
        path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
        assert read(tokenizer, "jsonl", path=path, field="body") == ["yes", RENDERED]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{oops", r"a\.jsonl:2 is not JSON: Expecting property name"),
            ("[" * 100_000, r"a\.jsonl:2 is not JSON"),
            ("[1]", r"a\.jsonl:2 holds a list; a line must be a JSON object"),
            ('{"body": 1}', r"a\.jsonl:2 has neither 'text' nor 'messages'; .*\(it has body\)"),
            ('{"text": null}', r"a\.jsonl:2: field 'text' holds null; it must be text"),
            ('{"text": 5}', r"a\.jsonl:2: field 'text' holds a int"),
            ('{"messages": ["x"]}', r"a\.jsonl:2: the chat template cannot render this chat: a me"),
            ('{"text": "\\ud800"}', r"a\.jsonl:2: field 'text' holds half a surrogate pair"),
        ],
        ids=["syntax", "deep", "list", "field", "null", "number", "chat", "surrogate"],
    )
    def test_a_faulty_line_is_named(self, tmp_path, tokenizer, line, message):
        path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line)
        with pytest.raises(DataError, match=message):
            read(tokenizer, "jsonl", path=path)

    def test_bytes_that_are_not_utf8_are_named(self, tmp_path, tokenizer):
        (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}')
        with pytest.raises(DataError, match=r"a\.jsonl:1 is not JSON: 'utf-8' codec"):
            read(tokenizer, "jsonl", path=str(tmp_path / "a.jsonl"))

    def test_a_missing_named_field_lists_those_there(self, tmp_path, tokenizer):
        path = write(tmp_path / "a.jsonl", '{"text": "a", "n": 1}')
        with pytest.raises(DataError, match=r"a\.jsonl:1 has no field 'x'; its fields: text, n"):
            read(tokenizer, "jsonl", path=path, field="x")

    def test_messages_without_a_template_are_refused(self, tmp_path, demo_model):
        path = write(tmp_path / "a.jsonl", json.dumps({"messages": CHAT}))
        with pytest.raises(DataError, match=r"a\.jsonl:1: .* has no chat template"):
            read(load_tokenizer(demo_model), "jsonl", path=path)


class TestParquet:
    @pytest.fixture
    def path(self, tmp_path):
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        import pyarrow.parquet as pq

        table = pa.table({"n": list(range(10)), "text": [f"row {i}" for i in range(10)]})
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
        return str(tmp_path / "a.parquet")

    def test_rows_in_order_and_drawn(self, path, tokenizer):
        expected = [f"row {i}" for i in range(10)]
        assert read(tokenizer, "parquet", path=path) == expected
        source = SourceConfig("parquet", path=path)
        drawn = list(drawn_documents(source, tokenizer, Random(1), 100))
        assert drawn != expected
        assert sorted(drawn) == expected

    def test_chats(self, tmp_path, tokenizer):
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"messages": [CHAT]}), tmp_path / "b.parquet")
        assert read(tokenizer, "parquet", path=str(tmp_path / "b.parquet")) == [RENDERED]

    def test_faults_are_named(self, path, tmp_path, tokenizer):
        with pytest.raises(DataError, match=r"a\.parquet has no field 'x'; its fields: n, text"):
            read(tokenizer, "parquet", path=path, field="x")
        with pytest.raises(DataError, match=r"a\.parquet row 0: field 'n' holds a int"):
            read(tokenizer, "parquet", path=path, field="n")
        broken = write(tmp_path / "b.parquet", "no parquet at all")
        with pytest.raises(DataError, match=r"b\.parquet cannot be read as parquet"):
            read(tokenizer, "parquet", path=broken)


class TestDatasetFolder:
    @pytest.fixture
    def datasets(self):
        return pytest.importorskip("datasets", reason="datasets is not installed")

    def test_rows_of_one_and_of_a_split(self, datasets, tmp_path, tokenizer):
        one = datasets.Dataset.from_dict({"text": TEXTS, "n": [1, 2, 3]})
        one.save_to_disk(tmp_path / "one")
        assert read(tokenizer, "dataset", path=str(tmp_path / "one")) == TEXTS
        several = datasets.DatasetDict({"train": one, "test": one.select([2])})
        several.save_to_disk(tmp_path / "several")
        path = str(tmp_path / "several")
        assert read(tokenizer, "dataset", path=path, split="test") == [TEXTS[2]]

    def test_the_split_must_be_clear(self, datasets, tmp_path, tokenizer):
        one = datasets.Dataset.from_dict({"text": TEXTS})
        datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "s")
        one.save_to_disk(tmp_path / "one")
        path = str(tmp_path / "s")
        with pytest.raises(DataError, match=r"has several splits; .*split: \(train, test\)"):
            read(tokenizer, "dataset", path=path)
        with pytest.raises(DataError, match="has no split 'dev'; its splits: train, test"):
            read(tokenizer, "dataset", path=path, split="dev")
        with pytest.raises(DataError, match="has no splits; take out split 'train'"):
            read(tokenizer, "dataset", path=str(tmp_path / "one"), split="train")

    def test_other_paths_are_refused(self, datasets, tmp_path, tokenizer):
        with pytest.raises(DataError, match="is no saved data set"):
            read(tokenizer, "dataset", path=str(tmp_path))
        file = write(tmp_path / "a.arrow", "x")
        with pytest.raises(DataError, match="is a file; a source of kind 'dataset' takes a folder"):
            read(tokenizer, "dataset", path=file)
        with pytest.raises(DataError, match="none: there is no such folder"):
            read(tokenizer, "dataset", path=str(tmp_path / "none"))


class TestHub:
    @pytest.fixture(autouse=True)
    def _datasets(self):
        pytest.importorskip("datasets", reason="datasets is not installed")

    def test_out_of_reach_is_said_quickly(self, monkeypatch, tokenizer):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        began = time.monotonic()
        message = r"data set 'owner/name': the hub is out of reach \(.*\); use a local file"
        with pytest.raises(DataError, match=message):
            read(tokenizer, "hub", id="owner/name")
        with pytest.raises(DataError, match=message):
            check_source(SourceConfig("hub", id="owner/name"))
        assert time.monotonic() - began < 2 * hub.PROBE_SECONDS

    def test_an_impossible_name_is_refused(self, tokenizer):
        with pytest.raises(DataError, match="the hub refuses data set 'a/b/c'"):
            read(tokenizer, "hub", id="a/b/c")

    def test_rows_are_streamed(self, monkeypatch, tokenizer):
        import datasets

        asked = []

        def load_dataset(name, subset, *, streaming):
            asked.append((name, subset, streaming))
            rows = datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()
            return datasets.IterableDatasetDict({"train": rows, "test": rows.take(1)})

        monkeypatch.setattr(hub, "probe", lambda name: None)
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        assert read(tokenizer, "hub", id="o/n", subset="s", split="train") == TEXTS
        assert asked == [("o/n", "s", True)]
        with pytest.raises(DataError, match=r"o/n has several splits; .*\(train, test\)"):
            read(tokenizer, "hub", id="o/n")

    def test_a_break_on_the_way_names_the_row(self, monkeypatch, tokenizer):
        import datasets

        def rows():
            yield {"text": "a"}
            raise ConnectionError("gone")

        monkeypatch.setattr(hub, "probe", lambda name: None)
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"train": rows()})
        with pytest.raises(DataError, match="o/n: reading row 1 failed: gone"):
            read(tokenizer, "hub", id="o/n")


@given(st.text("abc \n", max_size=400), st.integers(8, 60))
def test_pieces_joined_are_the_document(document, piece):
    pieces = cut(document, piece)
    assert "".join(pieces) == document
    assert all(piece // 2 <= len(part) <= piece for part in pieces[:-1])
    assert len(pieces[-1]) <= piece + piece // 2


@given(
    st.lists(st.text("ab", max_size=5), max_size=30),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 5),
)
def test_a_shuffle_keeps_every_text_and_its_bounds(texts, limit, chars, seed):
    ahead = held = 0

    def counted():
        nonlocal ahead
        for text in texts:
            ahead += 1
            yield text

    out = []
    for text in shuffled(counted(), Random(seed), limit, chars):
        out.append(text)
        held = max(held, ahead - len(out))
    assert sorted(out) == sorted(texts)
    assert held <= limit
    assert out == list(shuffled(texts, Random(seed), limit, chars))


def test_another_seed_draws_other_text_of_one_long_file(tmp_path, tokenizer):
    path = write(tmp_path / "a.txt", "\n".join(f"line {i}" for i in range(3000)))
    source = SourceConfig("text", path=path)
    first, again, other = (
        next(drawn_documents(source, tokenizer, Random(seed), 500)) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_files_come_in_a_drawn_order(tmp_path, monkeypatch, tokenizer):
    for number in range(20):
        write(tmp_path / f"{number:02}.txt", f"file {number:02}")
    source = SourceConfig("text", path=str(tmp_path / "*.txt"))
    # A shuffle that holds one text shows the order of the files alone.
    monkeypatch.setattr("compress_calibration.sources.BUFFER_DOCUMENTS", 1)
    drawn = list(drawn_documents(source, tokenizer, Random(3), 100))
    assert sorted(drawn) == read(tokenizer, "text", path=str(tmp_path / "*.txt"))
    assert [text[-2:] for text in drawn[:3]] != ["00", "01", "02"]


def test_a_document_too_long_to_be_read_whole(tmp_path, monkeypatch, tokenizer):
    """Such a file may never end in memory; parted, or drawn in pieces, it is read."""
    monkeypatch.setattr(readers, "CHUNK_CHARS", 16)
    monkeypatch.setattr(readers, "MOST_CHARS", 64)
    path = tmp_path / "long.txt"
    source = SourceConfig(kind="text", path=str(path))
    path.write_text("word " * 100)
    with pytest.raises(DataError, match=r"long\.txt holds a document of more than 64 characters"):
        list(documents(source, tokenizer))
    assert "".join(drawn_documents(source, tokenizer, Random(0), 20)).count("word") == 100
    path.write_text("<|endoftext|>".join(["word " * 5] * 20))
    assert len(list(documents(source, tokenizer))) == 20
