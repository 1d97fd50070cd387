"""The import hook and the switch: a host is patched whenever it appears, and left exactly as it was."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fastgen.patching import import_hook
from fastgen.patching.import_hook import cancel, when_imported

pytestmark = pytest.mark.always  # also where CI draws a part of the tests

ROOT = Path(__file__).resolve().parents[2]
LEAF = "hooked.inner.leaf"

# ------------------------------------------------------------------------------------- the hook alone


@pytest.fixture
def leaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module on the path that nobody has imported."""
    folder = tmp_path / "hooked" / "inner"
    folder.mkdir(parents=True)
    (tmp_path / "hooked" / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "leaf.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield folder / "leaf.py"
    for name in ("hooked", "hooked.inner", LEAF):
        sys.modules.pop(name, None)


@pytest.fixture
def watch() -> Iterator[Callable[..., list[ModuleType]]]:
    """Watch a module; the list fills with what the callback gets."""
    watched: list[tuple[str, Callable[[ModuleType], None]]] = []

    def watch(name: str = LEAF, check: Callable[[ModuleType], object] = bool) -> list[ModuleType]:
        seen: list[ModuleType] = []

        def callback(module: ModuleType) -> None:
            check(module)
            seen.append(module)

        watched.append((name, callback))
        when_imported(name, callback)
        return seen

    yield watch
    for name, callback in watched:
        cancel(name, callback)
    assert LEAF not in import_hook._callbacks


def test_later_import(leaf: Path, watch: Callable[..., list[ModuleType]]) -> None:
    seen = watch(check=lambda module: module.value)
    importlib.import_module("hooked.inner")
    assert seen == []
    module = importlib.import_module(LEAF)
    assert seen == [module]
    importlib.import_module(LEAF)
    assert seen == [module]


def test_earlier_import(leaf: Path, watch: Callable[..., list[ModuleType]]) -> None:
    module = importlib.import_module(LEAF)
    assert watch() == [module]


def test_the_module_keeps_no_trace(leaf: Path, watch: Callable[..., list[ModuleType]]) -> None:
    plain = importlib.import_module(LEAF)
    expected = type(plain.__loader__), sorted(vars(plain)), sorted(vars(plain.__spec__))
    del sys.modules[LEAF]
    seen = watch()
    module = importlib.import_module(LEAF)
    assert seen == [module]
    assert type(module.__spec__) is type(plain.__spec__)
    assert module.__spec__.loader is module.__loader__
    assert (type(module.__loader__), sorted(vars(module)), sorted(vars(module.__spec__))) == expected
    assert inspect.getsource(module) == leaf.read_text()


def test_every_import_counts_once(leaf: Path, watch: Callable[..., list[ModuleType]]) -> None:
    seen = watch()
    first = importlib.import_module(LEAF)
    importlib.reload(first)
    assert seen == [first, first]
    del sys.modules[LEAF]
    second = importlib.import_module(LEAF)
    assert second is not first
    assert seen == [first, first, second]


def test_several_callbacks_in_order(leaf: Path) -> None:
    order: list[str] = []
    callbacks = [lambda module, name=name: order.append(name) for name in "abc"]
    for callback in (*callbacks, callbacks[0]):  # the same one again is one
        when_imported(LEAF, callback)
    cancel(LEAF, callbacks[1])
    importlib.import_module(LEAF)
    for callback in callbacks:
        cancel(LEAF, callback)
    assert order == ["a", "c"]


def test_the_last_cancel_restores_the_finders(leaf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # fastgen itself may be watching its hosts in this process
    monkeypatch.setattr(import_hook, "_callbacks", {})
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if f is not import_hook._finder])
    before = list(sys.meta_path)
    when_imported(LEAF, print)
    when_imported("hooked", print)
    assert len(sys.meta_path) == len(before) + 1
    cancel(LEAF, print)
    cancel(LEAF, print)
    assert len(sys.meta_path) == len(before) + 1
    cancel("hooked", print)
    assert sys.meta_path == before
    assert import_hook._callbacks == {}


@pytest.mark.parametrize("early", [True, False], ids=["watched before", "watched from inside"])
def test_an_import_error_is_the_hosts_own(leaf: Path, watch: Callable[..., list[ModuleType]], early: bool) -> None:
    inside: list[list[ModuleType]] = []
    sys.modules["hooked_probe"] = probe = ModuleType("hooked_probe")
    probe.watch = lambda: inside.append(watch())  # type: ignore[attr-defined]
    leaf.write_text("import hooked_probe\nhooked_probe.watch()\nraise LookupError('the host is broken')\n")
    seen = watch() if early else []
    try:
        with pytest.raises(LookupError, match="the host is broken"):
            importlib.import_module(LEAF)
        assert LEAF not in sys.modules
        leaf.write_text("value = 'repaired, and of another length'\n")
        importlib.invalidate_caches()
        module = importlib.import_module(LEAF)
    finally:
        del sys.modules["hooked_probe"]
    assert inside == [[module]]
    assert seen == ([module] if early else [])


def test_a_missing_module_stays_missing(leaf: Path, watch: Callable[..., list[ModuleType]]) -> None:
    seen = watch("hooked.absent")
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module("hooked.absent")
    assert error.value.name == "hooked.absent"
    assert seen == []


def test_a_half_made_module_is_not_handed_out(leaf: Path, watch: Callable[..., list[ModuleType]]) -> None:
    """The module's own body asks to watch it (a circular import)."""
    seen: list[list[ModuleType]] = []
    sys.modules["hooked_probe"] = probe = ModuleType("hooked_probe")
    probe.watch = lambda: seen.append(watch(check=lambda module: module.value))  # type: ignore[attr-defined]
    leaf.write_text("import hooked_probe\nhooked_probe.watch()\nhooked_probe.watch()\nvalue = 1\n")
    try:
        module = importlib.import_module(LEAF)
    finally:
        del sys.modules["hooked_probe"]
    assert seen == [[module], [module]]
    assert type(module.__spec__) is importlib.machinery.ModuleSpec
    assert "_waiting" not in vars(module.__spec__)


@pytest.mark.parametrize("early", [True, False], ids=["another watches too", "nobody else watches"])
def test_an_import_in_another_thread_is_waited_for(
    leaf: Path, watch: Callable[..., list[ModuleType]], early: bool
) -> None:
    sys.modules["hooked_probe"] = probe = ModuleType("hooked_probe")
    started, go_on = threading.Event(), threading.Event()
    probe.wait = lambda: (started.set(), go_on.wait(10))  # type: ignore[attr-defined]
    leaf.write_text("import hooked_probe\nhooked_probe.wait()\nvalue = 1\n")
    seen = [watch(check=lambda module: module.value)] if early else []
    importing = threading.Thread(target=importlib.import_module, args=(LEAF,))
    try:
        importing.start()
        assert started.wait(10)
        seen += [watch(check=lambda module: module.value) for _ in range(2)]
        assert seen == [[] for _ in seen]
    finally:
        go_on.set()
        importing.join(10)
        del sys.modules["hooked_probe"]
    assert seen == [[sys.modules[LEAF]] for _ in seen]


@pytest.mark.parametrize("after", [False, True], ids=["before us", "after us"])
def test_another_import_hook_that_asks_all_finders(
    leaf: Path, watch: Callable[..., list[ModuleType]], monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    class Other:
        busy = False

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if self.busy or name != LEAF:
                return None
            self.busy = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.busy = False

    seen = watch()
    finders = list(sys.meta_path)
    finders.insert(finders.index(import_hook._finder) + after, Other())
    monkeypatch.setattr(sys, "meta_path", finders)
    module = importlib.import_module(LEAF)
    assert seen == [module]


# -------------------------------------------------- the switch, in fresh processes, with a made-up host

FAKE_UTILS = """
class GenerationMixin:
    def _beam_search(self, input_ids, scorer):
        return "stock"
"""

# An adapter for the made-up host, put where fastgen looks for its own, and a way to ask what is in place.
PRELUDE = """
import importlib, sys, threading, types, warnings
warnings.simplefilter("error")

def install(patches, module):
    from fastgen.patching.patch_set import require_signature
    patches.replace(module, "added", 1)
    require_signature(module.GenerationMixin._beam_search, ["self", "input_ids", "scorer"])
    patches.replace(module.GenerationMixin, "_beam_search", lambda self, *args: "fast")

adapter = types.ModuleType("fastgen.optimizer.transformers")
adapter.install = install
sys.modules[adapter.__name__] = adapter

def ran():
    from transformers.generation.utils import GenerationMixin
    return GenerationMixin()._beam_search(1, 2)

def raw():
    utils = importlib.import_module("transformers.generation.utils")
    return [list((k, id(v)) for k, v in vars(o).items()) for o in (utils, utils.GenerationMixin)]

def state():
    import fastgen
    return fastgen.status().hosts[0].state
"""


def run_python(code: str, *paths: Path, **environment: str) -> str:
    """Run `code` in a fresh interpreter and return what it printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FASTGEN_")}
    clean["PYTHONPATH"] = os.pathsep.join(map(str, (*paths, ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=clean | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., str]:
    """Run code beside a package that calls itself transformers 9.9."""
    package = tmp_path / "transformers" / "generation"
    package.mkdir(parents=True)
    (tmp_path / "transformers" / "__init__.py").write_text("__version__ = '9.9'\n")
    (package / "__init__.py").touch()

    def run(code: str, utils: str = FAKE_UTILS, **environment: str) -> str:
        (package / "utils.py").write_text(utils)
        return run_python(PRELUDE + textwrap.dedent(code), tmp_path, **environment)

    return run


def test_fastgen_first(fake: Callable[..., str]) -> None:
    fake("""
        import fastgen
        assert state() == "not imported" and fastgen.status().enabled
        import transformers
        assert state() == "not imported"
        assert ran() == "fast" and state() == "ready"
        assert fastgen.status().hosts[0].version == "9.9"
        fastgen.disable()
        assert ran() == "stock" and state() == "disabled" and not fastgen.status().enabled
        fastgen.enable()
        assert ran() == "fast" and state() == "ready"
    """)


def test_the_host_first(fake: Callable[..., str]) -> None:
    fake("""
        assert ran() == "stock"
        before, finders = raw(), list(sys.meta_path)
        import fastgen
        assert ran() == "fast" and raw() != before
        fastgen.disable()
        assert raw() == before and sys.meta_path == finders
        fastgen.disable()
        fastgen.enable()
        fastgen.enable()
        assert ran() == "fast"
        fastgen.disable()
        assert raw() == before
    """)


def test_fastgen_from_inside_the_host(fake: Callable[..., str]) -> None:
    fake("assert ran() == 'fast' and state() == 'ready'", utils="import fastgen\n" + FAKE_UTILS)


def test_the_environment_switches_it_off(fake: Callable[..., str]) -> None:
    code = """
        finders = list(sys.meta_path)
        import fastgen
        assert sys.meta_path == finders
        assert state() == "not imported" and not fastgen.status().enabled
        assert ran() == "stock" and state() == "disabled"
        with fastgen.disabled():
            pass
        assert ran() == "stock"
        fastgen.enable()
        assert ran() == "fast" and state() == "ready"
    """
    fake(code, FASTGEN_DISABLE="1")


def test_a_mismatch_leaves_the_host_alone_with_one_warning(fake: Callable[..., str]) -> None:
    fake(
        """
        import transformers.generation.utils
        before = raw()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import fastgen
            fastgen.disable()
            fastgen.enable()
            with fastgen.disabled():
                pass
        assert [str(w.message).partition(". ")[0] for w in caught] == [
            "fastgen leaves transformers 9.9 alone: GenerationMixin._beam_search has other parameters "
            "than expected: cache unexpected"
        ]
        assert "The newest version tested is" in str(caught[0].message)
        assert caught[0].category is RuntimeWarning
        assert raw() == before and ran() == "stock"
        host = fastgen.status().hosts[0]
        assert host.state == "left alone" and "cache unexpected" in host.detail
        assert "cache unexpected" in str(fastgen.status())
        """,
        utils=FAKE_UTILS.replace("scorer", "scorer, cache=None"),
    )


@pytest.mark.parametrize("where", ["when imported", "when installed"])
def test_names_the_host_lacks_are_a_mismatch_too(fake: Callable[..., str], where: str) -> None:
    body = "from transformers.generation.utils import Absent"
    if where == "when imported":
        arrange = f"""
            del sys.modules[adapter.__name__]
            import importlib.abc, importlib.util

            class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
                def find_spec(self, name, path=None, target=None):
                    if name == adapter.__name__ or name == "fastgen.optimizer":
                        return importlib.util.spec_from_loader(name, self, is_package=True)

                def exec_module(self, module):
                    if module.__name__ == adapter.__name__:
                        exec({body!r}, vars(module))

            sys.meta_path.insert(0, Finder())
        """
    else:
        arrange = f"""
            def broken(patches, module):
                install(patches, module)
                exec({body!r})

            adapter.install = broken
        """
    fake(
        textwrap.dedent(arrange)
        + textwrap.dedent("""
            import fastgen
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert ran() == "stock"
            assert len(caught) == 1 and "Absent" in str(caught[0].message)
            assert state() == "left alone"
            assert not hasattr(sys.modules["transformers.generation.utils"], "added")
        """)
    )


def test_disabled_nests_and_survives_exceptions(fake: Callable[..., str]) -> None:
    fake("""
        import fastgen
        assert ran() == "fast"
        try:
            with fastgen.disabled():
                assert ran() == "stock" and state() == "disabled"
                with fastgen.disabled():
                    assert ran() == "stock"
                assert ran() == "stock"
                fastgen.enable()  # waits for the end of the block
                assert ran() == "stock"
                raise LookupError
        except LookupError:
            pass
        assert ran() == "fast"
        with fastgen.disabled():
            fastgen.disable()
        assert ran() == "stock" and not fastgen.status().enabled
    """)


def test_the_host_arrives_inside_a_disabled_block(fake: Callable[..., str]) -> None:
    fake("""
        import fastgen
        with fastgen.disabled():
            assert ran() == "stock"
        assert ran() == "fast"
    """)


def test_switched_off_while_the_adapter_is_being_imported(fake: Callable[..., str]) -> None:
    fake("""
        import fastgen
        real = importlib.import_module

        def import_module(name, *rest):
            if name == adapter.__name__:
                fastgen.disable()
            return real(name, *rest)

        importlib.import_module = import_module
        assert ran() == "stock" and state() == "disabled"
        importlib.import_module = real
        fastgen.enable()
        assert ran() == "fast"
    """)


def test_blocks_of_two_threads_overlap(fake: Callable[..., str]) -> None:
    fake("""
        import fastgen
        assert ran() == "fast"
        inside, leave = threading.Event(), threading.Event()

        def other():
            with fastgen.disabled():
                inside.set()
                leave.wait(10)

        thread = threading.Thread(target=other)
        with fastgen.disabled():
            thread.start()
            assert inside.wait(10)
        assert ran() == "stock"  # the other thread's block is still open
        leave.set()
        thread.join()
        assert ran() == "fast"
    """)


def test_many_threads_switching_at_once(fake: Callable[..., str]) -> None:
    fake("""
        import transformers.generation.utils
        before = raw()
        sys.setswitchinterval(1e-5)
        import fastgen
        problems = []

        def work(number):
            try:
                for turn in range(100):
                    with fastgen.disabled():
                        if ran() != "stock":
                            problems.append("fast inside a block")
                    fastgen.enable()
            except BaseException as error:
                problems.append(repr(error))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == [], problems[:3]
        assert ran() == "fast" and state() == "ready"
        fastgen.disable()
        assert raw() == before
    """)


def test_threads_importing_host_and_fastgen_at_once(fake: Callable[..., str]) -> None:
    fake("""
        start = threading.Barrier(2)

        def work(name):
            start.wait()
            importlib.import_module(name)

        threads = [threading.Thread(target=work, args=(name,), daemon=True)
                   for name in ("fastgen", "transformers.generation.utils")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "deadlock"
        assert ran() == "fast"
    """)


def test_a_reloaded_host_is_patched_again(fake: Callable[..., str]) -> None:
    fake("""
        import fastgen
        import transformers.generation.utils as utils
        old = utils.GenerationMixin
        importlib.reload(utils)
        assert utils.GenerationMixin is not old
        assert ran() == "fast"
        assert old()._beam_search(1, 2) == "stock"  # one set of patches at a time
        fastgen.disable()
        assert ran() == "stock"
        assert not hasattr(utils, "added")
    """)


def test_a_later_patch_of_someone_else_survives(fake: Callable[..., str]) -> None:
    fake("""
        import fastgen
        from transformers.generation.utils import GenerationMixin
        GenerationMixin._beam_search = lambda self, *args: "theirs"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fastgen.disable()
        assert ran() == "theirs"
        assert ["GenerationMixin._beam_search as it is" in str(w.message) for w in caught] == [True]
    """)


# ------------------------------------------------------------------------ the switch, with the real host


def test_import_fastgen_imports_nothing_heavy() -> None:
    loaded = run_python("""
        import sys
        import fastgen
        fastgen.status()
        heavy = ("torch", "transformers", "fairseq", "numpy", "fastgen.optimizer", "fastgen.layers.attention")
        print([name for name in heavy if name in sys.modules])
    """)
    assert loaded.strip() == "[]"


REAL = """
import sys, warnings
warnings.filterwarnings("error", message="fastgen")

class Same:
    # Equal only for the very same object, which it keeps alive: a freed one's id could be used again.
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value is other.value

def raw():
    # Every attribute of the host's modules and classes, and of torch's that an adapter might touch.
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] != "transformers" and not name.startswith("torch.nn"):
            continue
        found[name] = [(k, Same(v)) for k, v in vars(module).items()]
        for key, value in list(vars(module).items()):
            if type(value) is type and value.__module__ == name:
                found[name, key] = [(k, Same(v)) for k, v in vars(value).items() if k != "__dict__"]
    return found

def check():
    import importlib, fastgen
    import transformers
    from transformers.generation.utils import GenerationMixin as mixin
    import transformers.models.bart.modeling_bart
    assert fastgen.status().hosts[0].state == "ready", fastgen.status()
    assert fastgen.status().hosts[0].version == transformers.__version__
    patched = raw()
    fastgen.disable()
    stock = raw()
    assert mixin._beam_search.__globals__["__name__"] == "transformers.generation.utils"
    changed = {k for k in stock if stock[k] != patched[k]}
    assert ("transformers.generation.utils", "GenerationMixin") in changed
    fastgen.enable()
    assert mixin._beam_search.__globals__["__name__"] != "transformers.generation.utils"
    with fastgen.disabled():
        assert raw() == stock
    fastgen.disable()
    assert raw() == stock
    return stock
"""


def test_real_host_after_fastgen() -> None:
    pytest.importorskip("transformers")
    run_python(REAL + "import fastgen\nimport transformers\ncheck()\n")


def test_real_host_before_fastgen_comes_back_bit_for_bit() -> None:
    """Compared with a snapshot from before fastgen was imported at all."""
    pytest.importorskip("transformers")
    run_python(
        REAL
        + """
import transformers
import transformers.models.bart.modeling_bart
before = raw()
import fastgen
after = check()
for name in before:
    old, new = dict(before[name]), dict(after[name])
    gained = {key for key in new if key not in old}
    assert {key: new[key] for key in old} == old, name
    # A package gains an attribute for every submodule that is imported later: nothing else may be new.
    assert all(isinstance(name, str) and f"{name}.{key}" in sys.modules for key in gained), (name, gained)
"""
    )


def test_real_host_switched_off() -> None:
    pytest.importorskip("transformers")
    code = """
import fastgen
from transformers import GenerationMixin
import transformers.generation.utils
assert GenerationMixin._beam_search.__globals__["__name__"] == "transformers.generation.utils"
assert fastgen.status().hosts[0].state == "disabled"
assert "fastgen.optimizer.transformers" not in sys.modules
"""
    run_python(REAL + code, FASTGEN_DISABLE="1")
