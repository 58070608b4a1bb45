"""The targets that an export can name: one folder, one row here."""

from collections.abc import Mapping
from types import MappingProxyType

from compress_exporters.exporter import Exporter

EXPORTERS: Mapping[str, Exporter] = MappingProxyType({})
