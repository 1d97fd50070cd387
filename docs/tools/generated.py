"""The parts of the README and of the docs that follow from data and code, written into the pages.

    python docs/tools/generated.py           # writes them
    python docs/tools/generated.py --check   # says which are out of date; exit code 1 if any is

A part stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`. transformers is needed for two of them, the
flags of its `GenerationConfig` and the fields of a request, and they are of the version named in the page.
CHANGELOG.md is docs/changes.md with links that lead from the root.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import sources
from table_markup import table

DOCS = Path(__file__).resolve().parent.parent
ROOT = DOCS.parent
RESULTS = ROOT / "benchmarks" / "results"
MODELS = DOCS / "data" / "models.json"
VERSIONS = DOCS / "data" / "versions.json"
CHANGES, CHANGELOG = DOCS / "changes.md", ROOT / "CHANGELOG.md"
_LINK = re.compile(r"\]\((?!#|\w+:)")  # to another page
_PART = re.compile(r"( *)(<!-- generated: ([\w-]+) -->\n).*?(<!-- end of \3 -->)", re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def names(text: str) -> list[str]:
    """The generated parts of a page."""
    return [found[3] for found in _PART.finditer(text)]


def written(text: str, only: str | None = None) -> str:
    """A page with its parts made anew, or one of them."""

    def part(found: re.Match[str]) -> str:
        indent, begin, name, end = found.groups()
        if only not in (None, name):
            return found[0]
        return f"{indent}{begin}\n{textwrap.indent(PARTS[name]().strip(), indent)}\n\n{indent}{end}"

    return _PART.sub(part, text)


def changelog() -> str:
    """CHANGELOG.md: the page of changes, whose links lead to docs/."""
    return _LINK.sub("](docs/", CHANGES.read_text("utf-8"))


# ---------------------------------------------------------------------------------------------- models
_KINDS = {
    "causal": "Decoder-only",
    "seq2seq": "Encoder-decoder",
    "speech": "Speech",
    "image-text": "Images and text",
}
_ACCELERATED, _NOT_TRIED = "accelerated", "not tried"
_CELLS = {"fallback": "host", _NOT_TRIED: "not tried", "different": "**differs**"}


def _models() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(MODELS.read_text("utf-8"))
    return data


def models_state(one: dict[str, Any]) -> str:
    """What came of a class with inputs of its own, or with text if it reads nothing else."""
    state: str = (one["own"] or one["text"])["outcome"]
    return state


def models_count() -> str:
    classes = _models()["classes"].values()
    states = [models_state(one) for one in classes]
    by_rows = sum(
        models_state(one) == _ACCELERATED and (one["own"] or one["text"])["caches"] == "rows" for one in classes
    )
    return (
        f"Of the {len(states)} causal, seq2seq, speech and image-text classes of transformers "
        f"{_models()['transformers']}, **{states.count(_ACCELERATED)} are accelerated** on the inputs they are made "
        f"for ({by_rows} of them with one row per beam), {states.count('fallback')} fall back to the host, "
        f"{states.count(_NOT_TRIED)} could not be tried, and {states.count('different')} differ."
    )


def models_classes() -> str:
    parts = []
    for kind, title in _KINDS.items():
        names = sorted((name for name, one in _models()["classes"].items() if one["kind"] == kind), key=str.lower)
        rows = [_row(name, _models()["classes"][name]) for name in names]
        parts.append(f"### {title}\n\n{table(('class', 'on text', 'on its own inputs', 'why not'), rows)}")
    return "\n\n".join(parts)


def _row(name: str, one: dict[str, Any]) -> tuple[str, str, str, str]:
    text, own = one["text"], one["own"]
    why = [
        f"{where}{_plain(verdict['why'])}"
        for where, verdict in (("text: ", text), ("", own or {"why": ""}))
        if verdict["why"] and not (own and own["outcome"] == _ACCELERATED and verdict is text)
    ]
    return f"`{name}`", _cell(text), "" if own is None else _cell(own), "; ".join(why).removeprefix("text: ")


def _cell(verdict: dict[str, str]) -> str:
    if verdict["outcome"] != _ACCELERATED:
        return _CELLS[verdict["outcome"]]
    words = "rows" if verdict["caches"] == "rows" else "yes"
    return f"{words}, without {verdict['without']}" if verdict["without"] else words


def _plain(why: str) -> str:
    return why.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").strip()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names, key=str.lower))


# ---------------------------------------------------------------------------------------------- versions
def _versions(host: str) -> dict[str, Any]:
    """What came of the tests of features, the newest version first."""
    found: dict[str, Any] = json.loads(VERSIONS.read_text("utf-8"))[host]
    return found


def versions(host: str) -> str:
    found, notes = _versions(host), dict[str, str]()

    def cell(counts: dict[str, Any] | None) -> str:
        if counts is None:
            return "not tried"
        passed, others = counts.get("passed", 0), counts.get("skipped", 0) + counts.get("failed", 0)
        if not others:
            return f"yes ({passed})"
        mark = notes.setdefault(counts.get("why", "a test failed"), chr(ord("a") + len(notes)))
        return f"in part ({passed} of {passed + others}) [{mark}]" if passed else f"no [{mark}]"

    features = dict.fromkeys(feature for one in found.values() for feature in one["features"])
    rows = [(feature, *(cell(one["features"].get(feature)) for one in found.values())) for feature in features]
    reasons = "\n".join(f"- [{mark}] {why}" for why, mark in notes.items())
    return f"{table((host, *found), rows)}\n\n{reasons}"


def versions_families() -> str:
    found = _versions("transformers")
    families = sorted({family for one in found.values() for family in one["families"]})
    everywhere = [family for family in families if all(family in one["families"] for one in found.values())]
    rows = [
        (f"`{family}`", *("yes" if family in one["families"] else "left to the host" for one in found.values()))
        for family in families
        if family not in everywhere
    ]
    return f"With each of these versions: {_listed(everywhere)}. Others:\n\n{table(('model', *found), rows)}"


# ---------------------------------------------------------------------------------------------- commands
def _flags(actions: Iterable[argparse.Action]) -> str:
    rows = []
    for action in actions:
        if isinstance(action, argparse._HelpAction):
            continue
        flag = ", ".join(action.option_strings) or str(action.metavar)
        if action.choices:
            value = "{" + ",".join(map(str, action.choices)) + "}"
        else:
            value = str(action.metavar or action.dest.upper()) if action.nargs != 0 else ""
        shown = f"`{flag} {value}`" if action.option_strings and value else f"`{flag}`"
        default = action.default
        nothing = default is None or default is argparse.SUPPRESS or default is False or default == ""
        text = re.sub(r" *\(?default: %\(default\)s\)?", "", action.help or "") % vars(action)
        text = re.sub(r"^default: ", "by default: ", text)
        rows.append((shown.replace("|", " or "), "" if nothing else f"`{default}`", text.replace("|", "\\|")))
    return table(("option", "default", "what"), rows)


def command_bench() -> str:
    from fastgen.cli import bench

    return _flags(bench.parser()._actions)


def bench_suites() -> str:
    from fastgen.bench.suites import SUITES

    rows = []
    for name, suite in SUITES.items():
        tasks, quick = (sum(len(section.tasks) for section in suite(few)) for few in (False, True))
        rows.append((f"`{name}`", (suite.__doc__ or "").splitlines()[0].rstrip("."), str(tasks), str(quick)))
    return table(("suite", "what", "tasks", "with `--quick`"), rows)


def bench_sides() -> str:
    from fastgen.bench.sides import SIDES

    rows = ((f"`{name}`", side.label, "; ".join(side.settings)) for name, side in SIDES.items())
    return table(("side", "called", "how it is configured"), rows)


def bench_statements() -> str:
    from fastgen.bench.measure import STATEMENTS

    return "\n".join(f"- {statement}" for statement in STATEMENTS)


def command_demo() -> str:
    from fastgen.cli import demo

    return _flags(demo.parser()._actions)


def command_generate() -> str:
    from fastgen.cli import generate

    parser = argparse.ArgumentParser(add_help=False)
    generate.add_own_flags(parser)
    return _flags(parser._actions)


def command_generate_transformers() -> str:
    from fastgen.cli import generate_transformers

    actions = generate_transformers.parser()._actions
    return _flags(action for action in actions if not action.dest.startswith("generation."))


def command_serve() -> str:
    from fastgen.cli import serve

    return _flags(serve.parser()._actions)


def command_transcribe() -> str:
    from fastgen.cli import transcribe

    return _flags(transcribe.parser()._actions)


def serve_fields() -> str:
    """From the schema of a request's body, as the page /docs of a service shows it."""
    import transformers

    from fastgen.serving.limits import Limits
    from fastgen.serving.options import NOT_GENERATION, question

    fields = question(Limits()).model_json_schema()["properties"].items()
    rows = ((f"`{name}`", _value(schema)) for name, schema in fields if name not in NOT_GENERATION)
    return f"With transformers {transformers.__version__}:\n\n{table(('field', 'value'), rows)}"


def _value(schema: dict[str, Any]) -> str:
    """What a field of JSON may hold, in words."""
    if alternatives := schema.get("anyOf"):
        return ", or ".join(_value(one) for one in alternatives if one != {"type": "null"})
    if "const" in schema:
        return f'`"{schema["const"]}"`'
    if "prefixItems" in schema:
        return f"a list of {len(schema['prefixItems'])}: {'; '.join(map(_value, schema['prefixItems']))}"
    if schema["type"] == "array":
        least = "at least 1 and " if schema.get("minItems") else ""
        return f"a list of {least}at most {schema['maxItems']:,}, each {_value(schema['items'])}"
    if schema["type"] == "boolean":
        return "`true` or `false`"
    kind = {"integer": "a whole number", "number": "a number"}[schema["type"]]
    bounds = []
    for key, words in _BOUNDS.items():
        if key in schema and schema[key] != 2**31:  # of every number of tokens: nobody needs to be told
            bounds.append(f"{words} {schema[key]:,.10g}")
    return ", ".join((kind, " and ".join(bounds))) if bounds else kind


_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def cluster_measured() -> str:
    corpus, service = _result("ray-failures"), _result("serve")
    rows = [
        (
            "the command alone" if name == "plain" else f"`--ray --actors {name.removeprefix('ray-')}`",
            f"{statistics.median(seconds):.0f} s",
        )
        for name, seconds in corpus["seconds"].items()
    ]
    rates = [
        (clients, f"{one['per_second']:.1f}", f"{one['ratio']:.1f}x", f"{one['p50']:.2f} s", f"{one['p95']:.2f} s")
        for clients, one in service["summary"].items()
    ]
    machines = [f"{one['machine']['cpu']}, {one['machine']['threads']} cores, no GPU" for one in (corpus, service)]
    return (
        f"On one machine ({machines[0]}; Ray {corpus['versions']['ray']}). {corpus['what']}; "
        f"{corpus['outputs']}. More actors have the same cores:\n\n{table(('how', 'seconds'), rows)}\n\n"
        f"`fastgen-serve` ({machines[1]}), {service['what']}; {service['verified']}; clients that never wait, on the "
        "same cores:\n\n"
        f"{table(('clients', 'answers/s', 'one client', 'latency, median', '95%'), rates)}"
    )


def cluster_failures() -> str:
    """What `bench_ray.py --failures` killed, and what became of the runs."""
    result = _result("ray-failures")
    failures, plain = result["failures"], statistics.median(result["seconds"]["plain"])
    rows = [
        (what, f"{moment:.0f} s", str(parts), "" if number else f"{found['seconds']:.0f} s")
        for what, found, moments in (
            ("nodes, each followed by a new one", failures["nodes"], "at_seconds"),
            ("the command, resumed each time", failures["driver"], "at_seconds_of_its_run"),
        )
        for number, (moment, parts) in enumerate(zip(found[moments], found["parts_whole_then"], strict=True))
    ]
    return (
        f"{result['what']} ({result['machine']['cpu']}): {plain:.0f} s without Ray. On a head without CPUs and two "
        "nodes of one CPU each, with an actor on each. Both files equal the command's own, byte for byte, and resumed "
        "runs made none of the blocks again that were whole:\n\n"
        + table(("killed", "after", "blocks whole by then", "the whole run took"), rows)
    )


def _duration(hours: float) -> str:
    return f"{hours * 60:.0f} min" if hours < 1 else f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.0f} days"


def cluster_sizing() -> str:
    rate = _result("ray-failures")["lines_per_second"]["ray-1"]
    rows = []
    for lines in (10**6, 10**8, 10**9):
        hours = lines / rate / 3600
        days = (_duration(hours / replicas) for replicas in (1, 16, 256))
        rows.append((f"{lines:,}", *days))
    title = f"At the {rate:.0f} lines/s of one replica of 2 cores above (a small model; extrapolated, not measured):"
    return f"{title}\n\n{table(('lines', '1 replica', '16', '256'), rows)}"


def command_generation_flags() -> str:
    import transformers

    from fastgen.cli import flags

    parser = argparse.ArgumentParser(add_help=False)
    flags.add_flags(parser)
    shown = ", ".join(
        f"`{action.option_strings[0]}`" if action.nargs == "?" else f"`{action.option_strings[0]} {action.metavar}`"
        for action in parser._actions
    )
    return f"With transformers {transformers.__version__}: {shown}."


# ---------------------------------------------------------------------------------------------- results
def _newest(name: str) -> Path:
    """The newest of a scenario's results."""
    found = sources.newest(RESULTS).get(name)
    if found is None:
        sys.exit(f"there is no result {name} in {RESULTS}")
    return found


def _result(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_newest(name).read_text("utf-8"))
    return data


_SHORT = "bart-base gpt2 transformer-base-32 transformer-base-1 ddtp whisper smollm".split()
_SUITES = """peers fairseq-gpt2 longer captions int8 int8-zen5-avx2 int8-intel int8-intel-more fastseq-table1
    fastseq-table2 fastseq-table3 fastseq-table4 slim-whisper lightseq-fig5 lightseq-fig6 scale wide
    wide-qwen3 wide-qwen3-400 wide-zen4""".split()


def _timed(result: dict[str, Any]) -> tuple[str, ...]:
    timed = result["end_to_end"]
    spread = f"**{timed['ratio']:.2f}x** ({timed['min']:.2f} to {timed['max']:.2f})"
    return f"{timed['stock']:.2f} s", f"{timed['fastgen']:.2f} s", spread


def results_machine() -> str:
    result = _result("peers")
    machine, versions = result["machine"], result["versions"]
    threads, day = result["settings"]["threads"], result["date"][:10]
    return (
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {threads} threads, no GPU. Versions: "
        f"torch {versions['torch']}, transformers {versions['transformers']}. Measured on {day}."
    )


def results_short() -> str:
    from fastgen.bench.report import facts

    tasks = {task["name"]: task for task in _result("peers")["tasks"]}
    rows = []
    for name in _SHORT:
        stock, ours = (facts.results(tasks[name])[side] for side in ("transformers", "fastgen"))
        seconds = (facts.seconds(one["seconds"]) for one in (stock, ours))
        rows.append((tasks[name]["what"], *seconds, facts.ratio(ours)))
    return table(("task", "stock", "fastgen", "faster"), rows)


def results_gains() -> str:
    import gains

    return gains.shown(_result)


def results_other_hosts() -> str:
    import gains

    return gains.of_other_hosts(_result)


def _suite(name: str) -> str:
    import suites

    return f"{suites.shown(_result(name))} Raw result: `{_newest(name).name}`."


def results_equal() -> str:
    import suites

    return suites.equal_outputs({name: _result(name) for name in _SUITES})


def results_sources() -> str:
    return sources.shown(RESULTS)


def results_phases() -> str:
    import suites

    return suites.phases(_result("peers"))


def results_speech() -> str:
    result = _result("speech")
    parts = []
    for task in result["tasks"]:
        rounds = task["rounds"]
        what = {"clip": "One clip", "long": "One recording", "files": "30 files"}[task["task"]]
        rows = []
        for side, about in task["sides"].items():
            times = [one[side]["seconds"] for one in rounds if side in one]
            against = [one["faster-whisper"]["seconds"] / one[side]["seconds"] for one in rounds if side in one]
            seconds = statistics.median(times)
            spread = f" ({min(against):.2f} to {max(against):.2f})" if len(against) > 1 else ""
            same = f"{about['same']} of {about['of']}" if "same" in about else ""
            rows.append(
                (
                    side,
                    f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s",
                    f"{task['sound'] / seconds:.1f}",
                    f"{statistics.median(against):.2f}x{spread}",
                    f"{about['word_error_rate']:.1f}%",
                    f"{about['peak_bytes'] / 1e9:.2f} GB",
                    same,
                )
            )
        names = "side, time, s of sound a second, times faster-whisper, words wrong, peak memory, as whisper"
        parts.append(f"**{what}, {task['sound']:.0f} s of speech**\n\n{table(names.split(', '), rows)}")
    versions = result["versions"]
    count = min(len(task["rounds"]) for task in result["tasks"])
    cores = [each["other_processes"] for task in result["tasks"] for one in task["rounds"] for each in one.values()]
    busy = sum(each is not None and each > 0.1 for each in cores)
    parts.append(
        f"{result['date'][:10]}, {result['machine']['cpu']}, {result['machine']['threads']} threads, {count} rounds, "
        f"whisper itself 1; 5 beams; openai-whisper {versions['whisper']}, "
        f"faster-whisper {versions['faster-whisper']}, CTranslate2 {versions['ctranslate2']}, "
        f"torch {versions['torch']}. In {busy} of {len(cores)} timings other processes kept more than 0.1 cores busy."
    )
    return "\n\n".join(parts)


def results_operators() -> str:
    wide, narrow = _result("ops-avx512"), _result("ops-avx2")

    def ngrams(against: str) -> str:
        return " ".join(
            shown.format(one["ngrams"]["ratios"][against]["ratio"])
            for one, shown in ((wide, "{:.0f}x"), (narrow, "({:.0f}x)"))
        )

    def topk(against: str, median: bool = False) -> str:
        parts = []
        for one in (wide, narrow):
            found = [each["ratios"][against]["ratio"] for each in one["topk"]]
            parts.append((min(found), max(found), statistics.median(found)))
        (a, b, c), (d, e, f) = parts
        if median:
            return f"{a:.1f}x to {b:.1f}x, median {c:.0f}x ({d:.1f}x to {e:.1f}x, median {f:.0f}x)"
        return f"{a:.1f}x to {b:.1f}x ({d:.1f}x to {e:.1f}x)"

    shapes = wide["topk"]
    rows_, vocabularies = ({each[name] for each in shapes} for name in ("rows", "vocabulary"))
    ks = " and ".join(str(k) for k in sorted({each["k"] for each in shapes}))
    sizes = f"{min(rows_)} to {max(rows_)} rows, V {min(vocabularies):,} to {max(vocabularies):,}, k {ks}"
    what = f"`topk_log_softmax`, {sizes}"
    attention = [1 / each["native_over_better"] for each in _result("attention")["results"]]
    microseconds = wide["ngrams"]["seconds"]["fastgen"] * 1e6
    rows = [
        (
            f"`ban_repeated_ngrams_`, 128 rows, 140 tokens, V 50,264, n 3: {microseconds:.0f} us",
            "fairseq's Python fallback",
            ngrams("fairseq"),
        ),
        ("the same", "transformers' processor, which copies the scores", ngrams("transformers")),
        (what, "`log_softmax` + `topk`, per row", topk("log_softmax+topk")),
        (
            "the same, and the choice of k candidates from beams x k",
            "copy, `log_softmax`, sum, `topk` of beams x V",
            topk("hosts' chain", median=True),
        ),
        (
            f"`beam_attention`, {len(attention)} shapes",
            "the better of torch's own and two batched products",
            f"{min(attention):.1f}x to {max(attention):.1f}x, median {statistics.median(attention):.1f}x",
        ),
    ]
    return table(("operator", "against", "faster with AVX-512 (with AVX2)"), rows)


def results_slots() -> str:
    result = _result("cache-smollm")
    rows = [
        tuple(f"{mark[name]:,.0f}" for name in ("T", "greedy", "stock", "unpruned", "allocated", "in use", "ancestors"))
        for mark in result["marks"]
    ]
    header = (
        "new tokens",
        "greedy search",
        "stock's copies",
        "tree, not pruned",
        "tree, allocated",
        "in use",
        "ancestors",
    )
    return table(header, rows)


def slim_bytes() -> str:
    rows = []
    for one in _result("slim")["bytes"]:
        alone, five, pruned = one["1 beams"], one["5 beams"], one["5 beams, pruned"]
        stock, claimed = five["stock"], f"{alone[one['of']] / alone['slim without e']:.1f}x ({one['claim']:g}x)"
        if one["of"] != "stock":  # of self-attention alone
            rows.append((f"{one['model']}, self-attention", "", claimed, *[""] * 5))
            continue
        rows.append(
            (
                one["model"],
                _mb(alone["stock"]),
                claimed,
                f"{alone['stock'] / alone['slim']:.1f}x" if one["e"] else "",
                _mb(stock),
                f"{stock / five['kv']:.1f}x",
                f"{stock / five['slim']:.1f}x",
                f"{stock / pruned['slim']:.1f}x",
            )
        )
    header = (
        "model",
        "stock, 1 sequence",
        "slim, E left out (the paper's figure)",
        "slim, with E",
        "stock, 5 beams",
        "tree of K and V",
        "slim",
        "slim and pruned",
    )
    return table(header, rows)


def _mb(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"


def slim_speed() -> str:
    rows = []
    for one in _result("slim")["speed"]:
        seconds = one["seconds"]
        ratios = (f"{seconds['kv'] / seconds[kind]:.2f}x" for kind in ("e+kv", "x+kv", "x+e"))
        milliseconds = (f"{seconds[kind] * 1e3:,.0f} ms" for kind in ("stock", "kv"))
        rows.append((one["what"], *milliseconds, *ratios, f"`{one['picked']}`", f"{one['behind']:.2f}"))
    header = ("shape", "stock", "fastgen, K and V", "E", "X", "X and E", "the plan picks", "time / fastest cache's")
    return table(header, rows)


def captions_parts() -> str:
    """What precedes the second token of a caption, beside a large product's rate, and the decode steps."""
    result, rows = _result("captions-parts"), []
    for one in result["records"]:
        median = one["median"]
        sides = [(median[f"{side} 2"], median[f"{side} 32"]) for side in ("stock", "fastgen")]
        rates = (one["operations"] / before / result["limit"] for before, _ in sides)
        steps = [whole - before for before, whole in sides]
        rows.append(
            (
                f"{one['model']}, {one['images']} images",
                " / ".join(f"{whole:.1f} s" for _, whole in sides),
                f"{sides[0][1] / sides[1][1]:.2f}x",
                " / ".join(f"{before:.1f} s" for before, _ in sides),
                " / ".join(f"{rate:.0%}" for rate in rates),
                f"{' / '.join(f'{each:.1f} s' for each in steps)}, {steps[0] / steps[1]:.2f}x",
            )
        )
    header = ("stock / fastgen", "32 tokens", "", "the first two", "of the limit", "the other 30")
    return table(header, rows)


# ---------------------------------------------------------------------------------------------- on a GPU
def gpu(name: str) -> str:
    """A table of one of `benchmarks/bench_gpu.py`'s results."""
    from fastgen.bench.sections import sizes_of

    result = _result(name)
    sides = list(result["records"][0]["ratio"])
    rows = []
    for one in result["records"]:
        seconds, steps = one["median"], " / ".join(f"{one['step_ms'][side]:.2f}" for side in ("stock", *sides))
        ratios = (
            f"{median:.2f}x ({least:.2f} to {most:.2f})" for median, least, most in (one["ratio"][s] for s in sides)
        )
        equal = (f"{one['equal'][side]} of {one['rows']}" for side in sides)
        peaks = " / ".join(f"{one['peak'][side] / 2**30:.1f}" for side in ("stock", *sides))
        shape = sizes_of({"beams": 1, "source": 0, **one["task"]})
        rows.append(
            (
                f"{one['host']}, {one['task']['model']}, {shape}",
                f"{seconds['stock']:.2f} s",
                *ratios,
                *equal,
                f"{peaks} GiB",
                f"{steps} ms",
                f"{one['bound_ms']:.2f} ms",
            )
        )
    header = (
        "",
        "stock",
        *sides,
        *(f"outputs equal{'' if len(sides) == 1 else f', {side}'}" for side in sides),
        f"most memory, {' / '.join(('stock', *sides))}",
        "a step",
        "bound",
    )
    machine, versions = result["device"], result["versions"]
    about = ", ".join(f"{name} {version}" for name, version in versions.items())
    said = f"{machine}, {result['bandwidth'] / 1e12:.1f} TB/s; {about}; {result['date'][:10]}."
    return f"{table(header, rows)}\n\n{said}"


PARTS: dict[str, Callable[[], str]] = {
    "bench-sides": bench_sides,
    "bench-statements": bench_statements,
    "bench-suites": bench_suites,
    "command-bench": command_bench,
    "command-demo": command_demo,
    "command-generate": command_generate,
    "command-generate-transformers": command_generate_transformers,
    "command-generation-flags": command_generation_flags,
    "command-serve": command_serve,
    "command-transcribe": command_transcribe,
    "cluster-failures": cluster_failures,
    "cluster-measured": cluster_measured,
    "cluster-sizing": cluster_sizing,
    "gpu-float16": functools.partial(gpu, "gpu"),
    "gpu-float32": functools.partial(gpu, "gpu-float32"),
    "gpu-graphs": functools.partial(gpu, "gpu-graphs"),
    "captions-parts": captions_parts,
    "models-classes": models_classes,
    "models-count": models_count,
    "results-machine": results_machine,
    "results-operators": results_operators,
    **{f"results-{name}": functools.partial(_suite, name) for name in _SUITES},
    "results-equal": results_equal,
    "results-gains": results_gains,
    "results-phases": results_phases,
    "results-short": results_short,
    "results-other-hosts": results_other_hosts,
    "results-slots": results_slots,
    "results-sources": results_sources,
    "results-speech": results_speech,
    "serve-fields": serve_fields,
    "slim-bytes": slim_bytes,
    "slim-speed": slim_speed,
    "versions-fairseq": functools.partial(versions, "fairseq"),
    "versions-families": versions_families,
    "versions-transformers": functools.partial(versions, "transformers"),
    "versions-whisper": functools.partial(versions, "whisper"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    check = parser.parse_args(argv).check
    stale = 0
    for page in [*pages(), CHANGELOG]:
        text = page.read_text("utf-8") if page.exists() else ""
        if (new := changelog() if page == CHANGELOG else written(text)) != text:
            stale += 1
            print(f"{page.relative_to(ROOT)} {'is out of date' if check else 'written'}")
            if not check:
                page.write_text(new, "utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
