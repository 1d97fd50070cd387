"""Where the figures come from: the newest raw results, what made them, and of which commit they are."""

from __future__ import annotations

import json
from pathlib import Path

from table_markup import table


def newest(results: Path) -> dict[str, Path]:
    """By scenario, the newest of the files `<scenario>-<date>.json`."""
    return {file.stem[:-11]: file for file in sorted(results.glob("*-20[0-9][0-9]-[0-9][0-9]-[0-9][0-9].json"))}


def shown(results: Path) -> str:
    """A row for each scenario's newest result."""
    rows = []
    for scenario, file in newest(results).items():
        document = json.loads(file.read_text("utf-8"))
        program = f"bench_{scenario.partition('-')[0]}.py"
        if "command" not in document and not (results.parent / program).is_file():
            raise ValueError(f"{file.name} names no command, and there is no {program}")
        command = document.get("command", f"python benchmarks/{program}")
        commit = document.get("commit")
        rows.append((f"`{file.name}`", f"`{command}`", f"`{commit}`" if commit else ""))
    return table(("raw result", "made by", "commit"), rows)
