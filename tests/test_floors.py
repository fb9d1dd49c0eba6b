"""The rooms of src/holdfast stand on floors, and imports point down; what must start fast does not load torch.

To add a room, put its name on a floor in `FLOORS`. Rooms of one floor do not know of each other.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import holdfast

SOURCE = Path(holdfast.__file__).parent

FLOORS: list[set[str]] = [
    {"errors"},
    {"version", "patterns", "handle"},
    {"format", "layout"},
    {"plan"},
    {"store"},
    {"run"},
    {"policy"},
    {"coding"},
    {"tensors", "tree", "ranks", "preemption"},
    {"sharding"},
    {"live"},
    {"loading"},
    {"per_rank", "flat_state", "signature", "provider"},
    {"parts", "random_state"},
    {"state", "data"},
    {"interop"},
    {"address"},
    {"runs"},
    {"agent"},
    {"capture"},
    {"background"},
    {"api"},
    {"resuming"},
    {"checkpointer"},
    {"testing"},
    {"demo"},
    {"cli"},
]
"""From low to high. A room may import rooms of lower floors only."""

ONLY = {"testing": {"errors", "store"}}
"""Rooms that may import less than what lies below them."""

MAY_USE_THE_PUBLIC_NAMES = {"demo", "cli", "testing"}
"""Rooms that may say `import holdfast`: what stands on top of everything."""

NEVER_TORCH = {"errors", "version", "patterns", "handle", "format", "plan", "store", "run", "coding", "agent"}
"""No import of torch at all, not even inside a function."""

NO_TORCH_AT_IMPORT = NEVER_TORCH | {"layout", "policy", "preemption", "address", "runs", "api", "cli"}
"""Nothing that runs when the module is imported imports torch."""

LONGEST = 600


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    target: str
    """The dotted name of what is imported, `holdfast.store.Store` or `torch`."""
    is_deferred: bool
    """Inside a function: it runs when called, not when the module is imported."""
    is_for_types: bool
    """Under `if TYPE_CHECKING`."""

    @property
    def room(self) -> str:
        """The room it is in; `` for the package's own __init__."""
        parts = self.file.relative_to(SOURCE).parts
        return "" if parts == ("__init__.py",) else parts[0].removesuffix(".py")

    @property
    def target_room(self) -> str | None:
        """The room it reaches for; `` for the public names; None outside holdfast."""
        package, _, rest = self.target.partition(".")
        if package != "holdfast":
            return None
        first = rest.partition(".")[0]
        return first if first in ROOMS else ""

    def __str__(self) -> str:
        return f"{self.file.relative_to(SOURCE)}:{self.line} imports {self.target}"


def modules() -> list[Path]:
    return sorted(p for p in SOURCE.rglob("*.py") if "__pycache__" not in p.parts)


ROOMS = {p.relative_to(SOURCE).parts[0].removesuffix(".py") for p in modules()} - {"__init__", "__main__"}


def imports_of(file: Path) -> Iterator[Import]:
    """Every import of a module, with relative ones resolved, and `import_module` of a literal name."""
    package = ["holdfast", *file.relative_to(SOURCE).parent.parts]

    def visit(node: ast.AST, deferred: bool, types: bool) -> Iterator[Import]:
        def found(target: str) -> Import:
            return Import(file, node.lineno, target, deferred, types)  # type: ignore[attr-defined]

        if isinstance(node, ast.Import):
            yield from (found(a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (found(f"{module}.{a.name}") for a in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                target = node.args[0].value
                level = len(target) - len(target.lstrip("."))
                yield found(".".join([*package[: len(package) - level + 1], target[level:]]) if level else target)
        inner = deferred or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.body:
                yield from visit(child, inner, True)
            for child in node.orelse:
                yield from visit(child, inner, types)
        else:
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inner, types)

    yield from visit(ast.parse(file.read_text()), False, False)


IMPORTS = [i for file in modules() for i in imports_of(file)]


def floor(room: str) -> int:
    return next(n for n, rooms in enumerate(FLOORS) if room in rooms)


def test_every_room_stands_on_one_floor() -> None:
    named = [room for rooms in FLOORS for room in rooms]
    assert len(named) == len(set(named))
    assert set(named) >= ROOMS, f"give these rooms a floor in FLOORS: {sorted(ROOMS - set(named))}"


def test_arrows_point_down() -> None:
    wrong = []
    for arrow in IMPORTS:
        room, target = arrow.room, arrow.target_room
        if room in ("", "__main__") or target is None or target == room:
            continue
        if target == "":
            is_allowed = room in MAY_USE_THE_PUBLIC_NAMES
        elif room in ONLY:
            is_allowed = target in ONLY[room]
        else:
            is_allowed = floor(target) < floor(room)
        if not is_allowed:
            wrong.append(str(arrow))
    assert not wrong, "imports that point up or sideways:\n  " + "\n  ".join(wrong)


def test_the_lower_floors_never_import_torch() -> None:
    wrong = [str(i) for i in IMPORTS if i.room in NEVER_TORCH and i.target.partition(".")[0] == "torch"]
    assert not wrong, wrong


def test_no_fast_room_imports_torch_when_it_is_imported() -> None:
    wrong = [
        str(i)
        for i in IMPORTS
        if i.room in NO_TORCH_AT_IMPORT | {""} and i.target.partition(".")[0] == "torch" and not (i.is_deferred or i.is_for_types)
    ]
    assert not wrong, wrong


def test_no_source_file_is_too_long() -> None:
    lengths = {str(p.relative_to(SOURCE)): len(p.read_text().splitlines()) for p in modules()}
    too_long = {name: n for name, n in lengths.items() if n > LONGEST}
    assert not too_long, f"over {LONGEST} lines; each of these has more than one job: {too_long}"


# --- what really gets loaded ------------------------------------------------------------------------------------------


def loaded_by(code: str, cwd: Path | None = None) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `code`."""
    tail = "\nimport sys, json\nprint('\\n' + json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code + tail], cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_holdfast_loads_neither_torch_nor_numpy() -> None:
    assert not loaded_by("import holdfast\ndir(holdfast)") & {"torch", "numpy"}


def test_naming_a_run_or_a_policy_does_not_load_torch() -> None:
    code = "import holdfast\nholdfast.Run, holdfast.Every, holdfast.Keep, holdfast.NoCheckpoint"
    assert "torch" not in loaded_by(code)


def test_no_command_module_loads_torch() -> None:
    code = """
import importlib, pkgutil, holdfast.cli
for module in pkgutil.walk_packages(holdfast.cli.__path__, "holdfast.cli."):
    importlib.import_module(module.name)
"""
    assert "torch" not in loaded_by(code)


@pytest.fixture(scope="module")
def run_of_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three committed steps."""
    import torch

    run = tmp_path_factory.mktemp("floors") / "run"
    for step in (1, 2, 3):
        holdfast.save(str(run), {"w": torch.full((10, 3), float(step)), "step": step}, step)
    return run


COMMANDS = [
    ["ls", "--json", "RUN"],
    ["ls", "RUN"],
    ["inspect", "RUN"],
    ["inspect", "--json", "RUN@2"],
    ["verify", "RUN"],
    ["verify", "--json", "RUN@1"],
    ["prune", "--dry-run", "RUN"],
    ["prune", "--dry-run", "--json", "RUN"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_command_runs_without_torch(command: list[str], run_of_three: Path) -> None:
    argv = ["holdfast", *(word.replace("RUN", str(run_of_three)) for word in command)]
    code = f"""
import sys
sys.argv = {argv!r}
from holdfast.cli import main
try:
    code = main()
except SystemExit as end:
    code = end.code
assert code in (0, None), code
"""
    assert "torch" not in loaded_by(code)
