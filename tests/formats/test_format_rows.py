"""Facts of a format, which everyone else asks of its row."""

from compress.formats import FORMATS
from compress.formats.bitsandbytes import codec as bitsandbytes


def test_facts_of_formats_are_in_their_rows() -> None:
    able = {name for name, fmt in FORMATS.items() if fmt.cache is not None}
    assert able == {"compressed-tensors", "modelopt"}
    assert [name for name, fmt in FORMATS.items() if not fmt.coded] == ["dense"]
    beside = {name: fmt.outliers.path for name, fmt in FORMATS.items() if fmt.outliers is not None}
    assert beside == {"bitsandbytes": bitsandbytes.SIDE_FILE}
