"""How the package is built: imports go downwards only, in no circle; files are small; exceptions have a reason."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.always  # also where CI draws a part of the tests

ROOT = Path(__file__).resolve().parents[1]
# From the bottom to the top; what is in one line is on one floor. "fastgen" is the package's own `__init__`.
FLOORS = [
    "locks",
    "version config files installing phases",
    "report",
    "patching",
    "ops",
    "memory",
    "layers",
    "cache",
    "replay",
    "decoding",
    "optimizer",
    "models",
    "pipeline",
    "fastgen",
    "demo",
    "distributed",
    "serving",
    "bench",
    "cli",
]
HOSTS = {"transformers", "fairseq", "whisper"}
MAX_FILE, MAX_FUNCTION, MAX_METHODS = 400, 60, 25
# What is larger today: it may shrink, and a name that no longer needs its entry is to be taken out.
LARGE_FILES: dict[str, int] = {}
LARGE_FUNCTIONS = {
    "ops.triton_attention._attend": 84,  # a kernel: Triton compiles it as one
    "ops.triton_latent._attend": 100,  # the same
}
LARGE_CLASSES = {"cache.tree.BeamTree": 32}  # slots, ancestry, positions and masks change together, in one place
# Where any error is caught, and why.
CATCHES_ALL = {
    "bench.worker": "a side that fails is reported, and the others go on",
    "cli.check": "a host of another version may raise anything, which is what is looked for",
    "cli.exits": "a command ends with a sentence",
    "cli.generate": "a --user-dir is anybody's code",
    "distributed.worker": "what a block failed with is told to the driver",
    "files": "closes, and raises it again",
    "layers.attention_kernels": "a kernel is tried on this device",
    "memory.limits": "frees memory, and raises it again",
    "ops.builder": "ends the compilers, and raises it again",
    "optimizer.fairseq.cache.slim": "a model is tried",
    "optimizer.suspending": "is raised again in the thread that resumed it",
    "optimizer.together": "a call that fails ends alone: the others go on",
    "optimizer.transformers.cache.planning": "a model is tried",
    "optimizer.transformers.equivalence": "a model is tried",
    "optimizer.transformers.generate.joint_batch": "lets go of the batch, and raises it again",
    "optimizer.transformers.generate.suspended_call": "a call that fails ends alone: the others go on",
    "optimizer.transformers.judge": "whatever stock raises, fastgen must raise",
    "optimizer.verification": "the host is asked again, which is no reason for the user's call to fail",
    "pipeline.batch_trial": "a model is tried",
    "pipeline.fairseq.load": "a checkpoint is anybody's",
    "pipeline.remote": "each package that fsspec calls has errors of its own",
    "pipeline.resume": "writes what is known, and raises it again",
    "pipeline.transcription.load": "a checkpoint is anybody's",
    "pipeline.transcription.run": "a file that cannot be read is named: the others go on",
    "pipeline.transcription.together": "a recording that fails ends alone: the others go on",
    "pipeline.stages": "is raised again in the calling thread",
    "pipeline.workers": "is raised again where the result is asked for",
    "replay.tape": "puts the random numbers back, and raises it again",
    "serving.engine": "a request that fails ends alone: the service goes on",
    "serving.failures": "a device is tried",
    "serving.openai_logprobs": "a model that fails ends its own request",
    "serving.observed": "a status is logged, and it is raised again",
    "serving.speech_engine": "a recording that fails ends alone: the service goes on",
}
# Which attribute of an object of the host's is written to, and why.
WRITES_TO_HOST = {
    "optimizer.transformers: cache._is_user_defined": "what transformers 5 does, where 4.57 does not",
    "optimizer.transformers.equivalence: config.do_sample": "a copy",
    "optimizer.transformers.equivalence: config.max_length": "a copy",
    "optimizer.transformers.equivalence: config.num_beams": "a copy",
    "optimizer.transformers.equivalence: config.num_return_sequences": "a copy",
    "optimizer.transformers.equivalence: config.early_stopping": "a copy",
    "optimizer.transformers.equivalence: config.length_penalty": "a copy",
    "optimizer.transformers.equivalence: config.return_dict_in_generate": "a copy",
    "optimizer.transformers.equivalence: config.output_scores": "a copy",
    "optimizer.transformers.equivalence: config.output_logits": "a copy",
    "optimizer.transformers.equivalence: config._fastgen_sequence_scores_only": "a copy",
    "optimizer.transformers.word_times: config.output_attentions": "a copy",
    "optimizer.transformers.generate.chunked_prefill: config.prefill_chunk_size": "a copy",
}


def modules() -> dict[str, Path]:
    """Every module of the package, by its name."""
    paths = sorted((ROOT / "fastgen").rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


MODULES = modules()
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in MODULES.items()}


def imported(name: str) -> set[str]:
    """The modules that this one imports, inside functions and for types too."""
    found: set[str] = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports relatively"
            base = node.module or ""
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names}
    return found


IMPORTS = {name: imported(name) for name in MODULES}


def room(name: str) -> str:
    """The part of the package that a module is in."""
    return "fastgen" if name == "fastgen" else name.split(".")[1].replace("__main__", "cli")


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach one another (Tarjan 1972, strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in edges:
        if node not in index:
            visit(node)
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_import_circles() -> None:
    files = {name: (found & MODULES.keys()) - {name} for name, found in IMPORTS.items()}
    assert circles(files) == []
    rooms: dict[str, set[str]] = {}
    for name, found in files.items():
        rooms.setdefault(room(name), set()).update({room(other) for other in found} - {room(name)})
    assert circles(rooms) == []


def test_imports_go_downwards() -> None:
    floor = {each: number for number, line in enumerate(FLOORS) for each in line.split()}
    assert {room(name) for name in MODULES} == set(floor), "every room has a floor"
    wrong = [
        f"{name} imports {other}"
        for name, found in IMPORTS.items()
        for other in found & MODULES.keys()
        if room(name) != room(other) and floor[room(other)] >= floor[room(name)]
    ]
    assert wrong == []


def test_no_adapter_imports_another() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, found in IMPORTS.items()
        for other in found
        if name.startswith("fastgen.optimizer.") and other.startswith("fastgen.optimizer.")
        if len({name.split(".")[2], other.split(".")[2]} & HOSTS) == 2
    ]
    assert wrong == []


def test_hosts_are_imported_by_adapters_and_above() -> None:
    below = {each for line in FLOORS[: FLOORS.index("optimizer")] for each in line.split()}
    wrong = [f"{name} imports a host" for name in MODULES if room(name) in below and roots(name) & HOSTS]
    assert wrong == []
    for host in HOSTS:
        inside = [name for name in MODULES if name.startswith(f"fastgen.optimizer.{host}")]
        assert [name for name in inside if roots(name) & (HOSTS - {host})] == []


def roots(name: str) -> set[str]:
    return {other.partition(".")[0] for other in IMPORTS[name]}


# ---------------------------------------------------------------------------------------------- sizes
def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield prefix + node.name, node
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def length(node: ast.AST) -> int:
    """Lines of a function, without its docstring."""
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    body = node.body
    lines = (node.end_lineno or 0) - node.lineno + 1
    if (
        isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    ):
        lines -= (body[0].end_lineno or 0) - body[0].lineno + 1
    return lines


def short(name: str) -> str:
    return name.removeprefix("fastgen.")


def test_files_are_small() -> None:
    lines = {short(name): len(path.read_text("utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: count for name, count in lines.items() if count > MAX_FILE} == LARGE_FILES


def test_functions_are_small() -> None:
    found = {
        f"{short(name)}.{path}": length(node)
        for name, tree in TREES.items()
        for path, node in functions(tree)
        if not isinstance(node, ast.ClassDef) and length(node) > MAX_FUNCTION
    }
    assert found == LARGE_FUNCTIONS


def test_classes_have_few_methods() -> None:
    found = {
        f"{short(name)}.{path}": count
        for name, tree in TREES.items()
        for path, node in functions(tree)
        if isinstance(node, ast.ClassDef)
        if (count := sum(isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) for each in node.body)) > MAX_METHODS
    }
    assert found == LARGE_CLASSES


# ---------------------------------------------------------------------------------------------- what is not done
def test_errors_are_caught_by_name() -> None:
    """`except Exception` stands only where something is tried out, or where whatever goes wrong must be passed on."""
    found = {
        short(name)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        if node.type is None or {each.id for each in ast.walk(node.type) if isinstance(each, ast.Name)} & ANY_ERROR
    }
    assert found == set(CATCHES_ALL)


ANY_ERROR = {"Exception", "BaseException"}
OF_THE_HOST = {"model", "module", "config", "generation_config", "generator", "encoder", "cache"}


def test_nothing_is_written_to_objects_of_the_host() -> None:
    """A call's state is in the call: what another thread, or the user, sees of a model stays as it was."""
    found = {
        f"{short(name)}: {ast.unparse(target)}"
        for name, tree in TREES.items()
        if name.startswith("fastgen.optimizer.")
        for target in ast.walk(tree)
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, (ast.Store, ast.Del))
        if _owner(target.value) in OF_THE_HOST
    }
    assert found == set(WRITES_TO_HOST)


# Functions that make a tensor on torch's default device, unless they are told another.
FACTORIES = {
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones"),
    *("rand", "randint", "randn", "randperm", "tensor", "zeros"),
}


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    """Not on torch's default device, which the user sets; where that is meant, `device=None` says so."""
    found = []
    for name, path in modules().items():
        if name.startswith("fastgen.bench"):  # whose models are made on the default device
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            is_factory = isinstance(node, ast.Call) and ast.unparse(node.func) in {
                f"torch.{each}" for each in FACTORIES
            }
            if is_factory and not any(keyword.arg in ("device", None) for keyword in node.keywords):
                found.append(f"{name}, line {node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


def test_the_list_of_unwritten_operators_is_that_of_the_sources() -> None:
    """Each library registers all operators but those listed: it would be refused as incomplete."""
    pytest.importorskip("torch", reason="the operators are torch's")
    import fastgen.ops  # noqa: F401  # which defines them
    from fastgen.ops.library import _OF_RUNTIME, _UNWRITTEN
    from fastgen.ops.operator import OPERATORS

    operators = set(OPERATORS)
    written = {}
    for library in ("cpu", "runtime", "cuda"):
        sources = "".join(path.read_text("utf-8") for path in (ROOT / "csrc" / library).glob("*.c*"))
        written[library] = set(re.findall(r'm\.impl\("(\w+)"', sources))
    assert written["runtime"] == set(_OF_RUNTIME) and not written["cpu"] & written["runtime"]
    written["cpu"] |= written.pop("runtime")
    for device, found in written.items():
        assert found == operators - {operator for operator, of in _UNWRITTEN if of == device}, device


def _owner(node: ast.expr) -> str:
    """The last name of what an attribute is written to, such as `model` of `self.model.x = 1`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_importing_loads_nothing(tmp_path: Path) -> None:
    """Neither a host nor torch with fastgen; no library, and nothing to compile, with its operators."""
    pytest.importorskip("torch", reason="torch is not installed")
    code = (
        "import sys, fastgen\n"
        "assert not {'torch', 'transformers', 'fairseq', 'whisper'} & sys.modules.keys(), sorted(sys.modules)\n"
        "import fastgen.ops\n"
        "from fastgen.ops import library\n"
        "assert not library.was_loaded() and not fastgen.status().operators\n"
    )
    cache = tmp_path / "cache"
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "FASTGEN_CACHE_DIR": str(cache), "HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not cache.exists()
