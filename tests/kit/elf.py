"""What a shared library expects of others: read from its file, where no binutils need be."""

from __future__ import annotations

import struct
from pathlib import Path

_DYNAMIC, _DYNSYM = 6, 11  # types of sections: what the dynamic linker reads first, and its symbols
_NEEDED = 1  # the tag of a library that is to be loaded first


def needed_libraries(library: Path) -> set[str]:
    """The names of the libraries that a library is linked with.

    Raises:
        ValueError: as `undefined_symbols` does.
    """
    data, headers = _read(library)
    names: set[str] = set()
    for header in headers:
        if header[1] == _DYNAMIC:
            start, length, strings = header[4], header[5], headers[header[6]][4]
            entries = struct.iter_unpack("<qQ", data[start : start + length])
            names |= {_string(data, strings + place) for tag, place in entries if tag == _NEEDED}
    return names


def undefined_symbols(library: Path) -> set[str]:
    """The names, as the compiler mangled them, that a library leaves for other libraries to define.

    Raises:
        ValueError: for a file that is no ELF file of 64 bits, the lower byte first.
    """
    data, headers = _read(library)
    names: set[str] = set()
    for header in headers:
        if header[1] != _DYNSYM:
            continue
        start, length, strings, entry = header[4], header[5], headers[header[6]][4], header[9]
        for place in range(start, start + length, entry):
            name, _, _, section = struct.unpack_from("<IBBH", data, place)
            if section == 0 and name:
                names.add(_string(data, strings + name))
    return names


def _read(library: Path) -> tuple[bytes, list[tuple[int, ...]]]:
    """The file, and the headers of its sections."""
    data = library.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{library} is no such ELF file")
    (at,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    return data, [struct.unpack_from("<IIQQQQIIQQ", data, at + i * size) for i in range(count)]


def _string(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()
