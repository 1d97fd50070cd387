"""What a shared library expects of others: read from its file, where no binutils need be."""

from __future__ import annotations

import struct
from pathlib import Path

_DYNSYM = 11  # the type of the section that holds the symbols of the dynamic linker


def undefined_symbols(library: Path) -> set[str]:
    """The names, as the compiler mangled them, that a library leaves for other libraries to define.

    Raises:
        ValueError: for a file that is no ELF file of 64 bits, the lower byte first.
    """
    data = library.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{library} is no such ELF file")
    (at,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, at + i * size) for i in range(count)]
    names: set[str] = set()
    for header in headers:
        if header[1] != _DYNSYM:
            continue
        start, length, strings, entry = header[4], header[5], headers[header[6]][4], header[9]
        for place in range(start, start + length, entry):
            name, _, _, section = struct.unpack_from("<IBBH", data, place)
            if section == 0 and name:
                names.add(data[strings + name : data.index(b"\0", strings + name)].decode())
    return names
