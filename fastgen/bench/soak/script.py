"""A Python script, of nothing but torch, transformers and fastgen, that plays one case again."""

from __future__ import annotations

import inspect
import json
import re
from types import ModuleType
from typing import Any

from fastgen.bench.soak import edits, models, modes, play

_PARTS: tuple[ModuleType, ...] = (models, modes, edits, play)
_OURS = re.compile(r"^from (__future__|fastgen\.bench\.soak\.\w+) import .*\n", re.MULTILINE)
_MAIN = '''
CASE = json.loads(r"""
{case}
""")

if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads({threads})
    for call in played(CASE):
        tiers = ", ".join(f"{{each.tier}} ({{each.reason}})" if each.reason else each.tier for each in call.calls)
        print(f"call {{call.number}}: {{call.verdict.kind}}; ran in {{tiers or 'no tier'}}. {{call.verdict.why}}")
        if call.verdict.kind == DIFFERENT:
            sys.exit(1)
'''


def script(case: dict[str, Any], why: str, threads: int) -> str:
    """Its exit code is 1 if fastgen still differs from stock. `why`: in which way it did."""
    described = "".join(f"# {line}\n" for line in why.splitlines())
    parts = [_OURS.sub("", inspect.getsource(part)) for part in _PARTS]
    main = _MAIN.format(case=json.dumps(case, indent=1), threads=threads)
    return f"{described}from __future__ import annotations\n\nimport json\nimport sys\n\n{''.join(parts)}{main}"
