"""Where a process and those that it has started listen, as Linux tells it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import struct
from pathlib import Path

_LISTENS = "0A"


def below(ancestor: int) -> set[int]:
    """The process, and those that it has started, and so on."""
    parents = dict[int, int]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
    found, before = {ancestor}, 0
    while len(found) > before:
        before = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found


def addresses(pids: set[int]) -> list[tuple[str, int, str]]:
    """Address, port and the process's name of each socket on which they listen."""
    sockets = dict[str, str]()
    for pid in pids:
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets[os.readlink(file)] = name
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            name = sockets.get(f"socket:[{fields[9]}]", "")
            if fields[3] == _LISTENS and name:
                address, port = fields[1].split(":")
                found.append((_shown(address), int(port, 16), name))
    return found


def is_loopback(address: str) -> bool:
    """Of IPv4, also where IPv6 wraps it."""
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def _shown(address: str) -> str:
    """Linux writes words of 32 bits in the order of the machine."""
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    return str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))
