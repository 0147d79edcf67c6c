"""The shape of the project: which module may import which, who may act, and that nothing goes without its tests."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "splitproxy"
TESTS = ROOT / "tests"


def levels() -> list[list[str]]:
    """The table of docs/architecture.md: the modules of each level, the lowest level first."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| [^|]+ \| (`[^|]+`) \|$", text.partition("\n## Levels\n")[2].partition("\n## ")[0], re.MULTILINE
    )
    return [re.findall(r"`([^`]+)`", row) for row in rows]


LEVELS = levels()
PURE_LEVELS = 3
LEVEL = {module: number for number, modules in enumerate(LEVELS) for module in modules}

# What waits, talks or writes. The exceptions say why they are none.
ACTING = {
    *("aiohttp", "asyncio", "concurrent", "http", "logging", "multiprocessing", "os", "prometheus_client", "shutil"),
    *("signal", "socket", "ssl", "subprocess", "tempfile", "threading"),
}
EXCEPTIONS = {("engines.adapter", "asyncio")}  # `to_the_end` is part of what an engine's methods promise

# Libraries that only these modules know.
KNOWN_TO = {
    "brotli": {"api.packing"},
    "aiohttp": {"serve.app", "engines.http", "measure.load", "run.processes"},
    "jinja2": {"engines.strata_prompt"},
    "matplotlib": {"measure.charts"},
    "prometheus_client": {"serve.metrics"},
    "pydantic": {"checked", "config", "run.strata.runconfig"},
    "rich": {"measure.charts", "cli", "run.demo", "measure.screen"},
    "tiktoken": {"tokens.codec", "tokens.rank_file"},
    "uvloop": {"cli"},
    "xllamacpp": {"engines.embedded"},
}

# Modules whose tests have another name than theirs.
TESTED_IN = {
    "__main__": "test_live_up.py",
    "serve.assembly": "test_exchange.py",
    "serve.status": "test_exchange.py",
    "measure.charts": "test_bench.py",
    "checked": "test_config.py",
    "cli": "test_live_up.py",
    "engines.http": "test_llama_server.py",
    "engines.strata_pipe": "test_strata_process.py",
    "fleet.fleet": "test_faults.py",
    "books.growth": "test_many.py",
    "fleet.health": "test_faults.py",
    "measure.load": "test_bench.py",
    "run.processes": "test_launch.py",
    "fleet.member": "test_faults.py",
    "fleet.pairs": "test_faults.py",
    "serve.request": "test_exchange.py",
    "serve.course": "test_exchange.py",
    "serve.reading": "test_exchange.py",
    "serve.answering": "test_exchange.py",
    "measure.screen": "test_live_up.py",
    "serve.service": "test_exchange.py",
    "fleet.slots": "test_cancel.py",
    "tokens.gguf_file": "test_tokens_codec.py",
    "tokens.hf_file": "test_tokens_files.py",
    "tokens.names": "test_tokens_files.py",
    "tokens.patterns": "test_tokens_files.py",
    "tokens.rank_file": "test_tokens_files.py",
    "tokens.trials": "test_tokenize.py",
    "tokens.vocabulary": "test_tokens_files.py",
    "fleet.watch": "test_many.py",
}
# Modules whose tests have yet to be written. None is to stay here.
AWAITED: set[str] = set()


def files() -> dict[str, Path]:
    """Every module but the packages' own: its name below splitproxy, and its file."""
    found = sorted(PACKAGE.rglob("*.py"))
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in found if path.stem != "__init__"
    }


FILES = files()


def imported(module: str) -> Iterator[str]:
    """The full names that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own(module: str) -> set[str]:
    """The modules of this package that a module imports."""
    found = set()
    for name in imported(module):
        place = name.removeprefix("splitproxy.")
        if place != name:
            found |= {place} & FILES.keys() or {place.rpartition(".")[0]} & FILES.keys()
    return found


def test_every_module_has_a_level() -> None:
    """The table holds each module once, and none that is not there."""
    listed = [module for modules in LEVELS for module in modules]
    assert sorted(listed) == sorted(FILES)


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module: str) -> None:
    """A module imports from lower levels only."""
    assert {other for other in own(module) if LEVEL[other] >= LEVEL[module]} == set()


@pytest.mark.parametrize("module", [module for module, level in LEVEL.items() if level < PURE_LEVELS])
def test_what_decides_does_not_act(module: str) -> None:
    """The lowest levels import nothing that waits, talks, logs or writes."""
    acting = {name.partition(".")[0] for name in imported(module)} & ACTING
    assert {name for name in acting if (module, name) not in EXCEPTIONS} == set()


@pytest.mark.parametrize("library", KNOWN_TO)
def test_a_library_is_known_to_few(library: str) -> None:
    """What could be exchanged one day is named where it would be exchanged, and nowhere else."""
    assert {m for m in FILES if library in {name.partition(".")[0] for name in imported(m)}} == KNOWN_TO[library]


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(module, marks=pytest.mark.xfail(strict=True, reason="take it off the list when it has tests"))
        if module in AWAITED
        else module
        for module in FILES
    ],
)
def test_every_module_has_its_tests(module: str) -> None:
    """Where a module's tests are can be told from its name, or from the table."""
    parts = module.split(".")
    named = tuple(f"test_{'_'.join(parts[first:])}.py" for first in range(len(parts)))
    names = (TESTED_IN[module],) if module in TESTED_IN else named
    assert any((TESTS / name).is_file() for name in names), f"none of {names}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_opens_with_what_it_is(path: Path) -> None:
    """The first thing in a file is what it owns."""
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", sorted(TESTS.glob("test_*.py")), ids=lambda path: path.name)
def test_every_test_says_which_rule_it_keeps(path: Path) -> None:
    """Each file of tests says what it keeps, and each test has one sentence for its rule."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tests = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    assert ast.get_docstring(tree)
    assert [node.name for node in tests if not ast.get_docstring(node)] == []
