"""What works with which version of a host, from the tests that show it: the data of docs/versions.md.

    pytest --features=docs/data/versions.json
    python docs/tools/generated.py

runs the tests named here, with the hosts that are installed, and notes what came of them under the hosts' versions.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

# Host -> feature -> the functions whose cases show it.
FEATURES: dict[str, dict[str, str]] = {
    "transformers": {
        "beam search": "optimizer/transformers/test_families.py::test_identical_with_one_sentence_and_two_beams",
        "beam search, options combined": "optimizer/transformers/test_options.py::test_combination",
        "diverse beam search": "optimizer/transformers/test_diverse.py::test_families",
        "greedy search and sampling": "optimizer/transformers/test_sampling.py::test_identical",
        "Whisper's own `generate`, short and long recordings": (
            "optimizer/transformers/test_families.py::test_whisper_*"
        ),
        "recorded steps": "optimizer/transformers/test_replay.py::test_identical",
        "slim caches": "optimizer/transformers/test_slim.py::test_identical",
        "batches that are kept full": "optimizer/transformers/test_refill.py::test_identical",
        "prompts in chunks": "optimizer/transformers/test_prefill.py::test_chunks",
        "`fastgen.encode`": "optimizer/transformers/test_encode.py::test_outputs",
        "`FASTGEN_VERIFY`": "optimizer/transformers/test_verification.py::test_equal",
        "UniLM": "models/test_unilm_tree.py::test_beam_search",
        "GPT-2 that decodes latents": "models/test_vae.py::test_beam_search",
    },
    "fairseq": {
        "beam search, translation": "optimizer/fairseq/test_models.py::test_translators",
        "beam search, language models": "optimizer/fairseq/test_models.py::test_language_models",
        "ensembles": "optimizer/fairseq/test_models.py::test_ensembles",
        "options": "optimizer/fairseq/test_options.py::test_options",
        "diverse beams, sampling": "optimizer/fairseq/test_options.py::test_strategies",
        "lexical constraints": "optimizer/fairseq/test_options.py::test_constraints",
        "prefixes": "optimizer/fairseq/test_options.py::test_prefixes",
        "hub models": "optimizer/fairseq/test_hub.py::*",
        "recorded steps": "optimizer/fairseq/test_replay.py::test_identical",
        "slim caches": "optimizer/fairseq/test_slim.py::test_translators",
        "batches that are kept full": "optimizer/fairseq/test_refill.py::test_identical",
        "`FASTGEN_VERIFY`": "optimizer/fairseq/test_verification.py::*",
        "ProphetNet": "optimizer/fairseq/test_prophetnet.py::test_the_*_finds_what_*_finds",
    },
    "whisper": {
        "`decode`": "optimizer/whisper/test_whisper.py::test_decode",
        "`transcribe`": "optimizer/whisper/test_whisper.py::test_transcribe",
        "`FASTGEN_VERIFY`": "optimizer/whisper/test_whisper.py::test_verified*",
    },
}
# The host whose model families are listed one by one: one parameter of that feature's tests.
FAMILIES_OF, FAMILIES_IN = "transformers", "beam search"


def _is_of(nodeid: str, functions: str) -> bool:
    pattern = re.escape(functions).replace(r"\*", r"\w*")
    return re.fullmatch(rf"(?:.*/)?{pattern}(\[.*\])?", nodeid) is not None


def feature_of(nodeid: str) -> tuple[str, str] | None:
    """The host and the feature that a test belongs to."""
    for host, features in FEATURES.items():
        for feature, functions in features.items():
            if _is_of(nodeid, functions):
                return host, feature
    return None


def version_of(host: str) -> str:
    return version(packages_distributions()[host][0])


class Recorder:
    """A plugin of pytest's: runs the tests of features alone, and adds what came of them to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.outcomes: dict[str, tuple[str, str]] = {}  # nodeid -> outcome and, of a skipped test, the reason

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        others = [item for item in items if feature_of(item.nodeid) is None]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if feature_of(item.nodeid) is not None]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = ("failed", "")
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.outcomes[report.nodeid] = ("skipped", reason.removeprefix("Skipped: "))
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, ("passed", ""))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):  # a worker's part; the controller has all
            return
        data = json.loads(self.file.read_text("utf-8")) if self.file.exists() else {}
        for host in {found[0] for found in map(feature_of, self.outcomes) if found}:
            _add(data.setdefault(host, {}).setdefault(version_of(host), {"features": {}}), host, self.outcomes)
        newest_first = {
            host: dict(sorted(found.items(), key=lambda one: Version(one[0]), reverse=True))
            for host, found in data.items()
        }
        self.file.write_text(json.dumps(newest_first, indent=1) + "\n", "utf-8")


def _add(summary: dict[str, Any], host: str, outcomes: dict[str, tuple[str, str]]) -> None:
    """Replace what is known of the features that were run."""
    known = summary["features"]
    summary["features"] = {feature: known.get(feature) for feature in FEATURES[host]}
    for feature in FEATURES[host]:
        of_it = {nodeid: found for nodeid, found in outcomes.items() if feature_of(nodeid) == (host, feature)}
        if not of_it:
            continue
        summary["features"][feature] = _counted(of_it.values())
        if (host, feature) == (FAMILIES_OF, FAMILIES_IN):
            summary["families"] = sorted(_families(of_it))


def _counted(outcomes: Iterable[tuple[str, str]]) -> dict[str, Any]:
    outcomes = list(outcomes)
    counts = Counter(outcome for outcome, _ in outcomes)
    reasons = Counter(reason for _, reason in outcomes if reason)
    return {**counts, **({"why": reasons.most_common(1)[0][0]} if reasons else {})}


def _families(outcomes: dict[str, tuple[str, str]]) -> set[str]:
    """Those of which every test passed."""
    named = [
        (found[1], outcome) for nodeid, (outcome, _) in outcomes.items() if (found := re.search(r"\[(\w+)-", nodeid))
    ]
    return {name for name, _ in named} - {name for name, outcome in named if outcome != "passed"}
