"""A step of a decoder as data, run by csrc/program.cpp in one call.

A program is a list of compiled functions with what each is given, a structure of addresses and
sizes. From run to run these stay as they are but for a few of their numbers, which a run names: how
many rows, where the positions lie.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compress_kernels.cpu.library import native


@dataclass(frozen=True, slots=True)
class Given:
    """A number of a run, by its name."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class CompiledOp:
    """function: of csrc, by its name. about: what it is given. given: the fields of `about` that
    each run writes, those of a structure in it as "outer.inner". keeps: tensors whose addresses
    `about` has, and what else it must outlive."""

    function: str
    about: ctypes.Structure
    given: Mapping[str, Given]
    keeps: tuple[object, ...] = ()


class CallStruct(ctypes.Structure):
    """Mirrors `Call` in csrc/program.h."""

    _fields_ = [("function", ctypes.c_void_p), ("about", ctypes.c_void_p)]


class PlaceStruct(ctypes.Structure):
    """Mirrors `Place` in csrc/program.h."""

    _fields_ = [
        ("at", ctypes.c_void_p),
        ("value", ctypes.c_int32),
        ("bytes", ctypes.c_int32),
    ]


class ProgramStruct(ctypes.Structure):
    """Mirrors `Program` in csrc/program.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("calls", "places")),
        *((name, ctypes.c_int64) for name in ("call_count", "place_count")),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """ops: in order. names: of the numbers that a run gives. given: those of the last run, int64
    [names]. One thread at a time runs it."""

    ops: tuple[CompiledOp, ...]
    names: tuple[str, ...]
    struct: ProgramStruct = field(repr=False)
    given: ctypes.Array[ctypes.c_int64] = field(repr=False)
    _run: Callable[..., None] = field(repr=False)
    _arrays: tuple[object, ...] = field(repr=False)

    @classmethod
    def of(cls, ops: Sequence[CompiledOp], first: Sequence[str] = ()) -> "Program":
        """first: names that are there in any case, before the others, in this order."""
        library = native().library
        assert library is not None, "a program is made of compiled code"
        names = tuple(dict.fromkeys([*first, *(x.name for op in ops for x in op.given.values())]))
        calls = (CallStruct * len(ops))(
            *(
                CallStruct(
                    ctypes.cast(getattr(library, op.function), ctypes.c_void_p).value,
                    ctypes.addressof(op.about),
                )
                for op in ops
            )
        )
        found = [
            _place(op.about, name, given, names) for op in ops for name, given in op.given.items()
        ]
        places = (PlaceStruct * len(found))(*found)
        struct = ProgramStruct(
            ctypes.addressof(calls), ctypes.addressof(places), len(calls), len(places)
        )
        given = (ctypes.c_int64 * len(names))()
        return cls(tuple(ops), names, struct, given, library.run_program, (calls, places))

    def numbers(self, values: Mapping[str, int]) -> "ctypes.Array[ctypes.c_int64]":
        """Of all names, in their order."""
        return (ctypes.c_int64 * len(self.names))(*(values[name] for name in self.names))

    def write(self, values: Mapping[str, int]) -> None:
        """`given` is of these values."""
        self.given[:] = [values[name] for name in self.names]

    def run(self, numbers: "ctypes.Array[ctypes.c_int64]") -> None:
        """numbers: as numbers() makes them; addresses are of memory that stays until it returns."""
        ctypes.memmove(self.given, numbers, ctypes.sizeof(numbers))
        self.again()

    def again(self) -> None:
        """With the numbers that `given` has: those of the run before, where nobody wrote others."""
        self._run(ctypes.byref(self.struct), self.given)


def _place(about: ctypes.Structure, name: str, given: Given, names: tuple[str, ...]) -> PlaceStruct:
    kind: Any = type(about)
    at = ctypes.addressof(about)
    *outer, last = name.split(".")
    for part in outer:
        at += getattr(kind, part).offset
        kind = next(of for called, of, *_ in kind._fields_ if called == part)
    where = getattr(kind, last)
    return PlaceStruct(at + where.offset, names.index(given.name), where.size)
