"""Facts of a format, which everyone else asks of its row."""

from compress.formats import CODECS, FORMATS
from compress.formats.bitsandbytes import codec as bitsandbytes
from compress.quant.scheme import QuantScheme


def test_facts_of_formats_are_in_their_rows() -> None:
    able = {name for name, fmt in FORMATS.items() if fmt.cache is not None}
    assert able == {"compressed-tensors", "modelopt"}
    assert [name for name, fmt in FORMATS.items() if not fmt.coded] == ["dense"]
    beside = {name: fmt.outliers.path for name, fmt in FORMATS.items() if fmt.outliers is not None}
    assert beside == {"bitsandbytes": bitsandbytes.SIDE_FILE}


def test_every_row_that_is_not_dense_says_how_it_is_read() -> None:
    """Module by module, or as one file; only such a file refuses every weight."""
    for name, fmt in FORMATS.items():
        assert (fmt.reader is not None) + (fmt.file is not None) == int(fmt.coded), name
    assert [name for name in FORMATS if name not in CODECS] == ["gguf"]
    assert FORMATS["gguf"].why_not(QuantScheme()) is not None
