"""What the pages show is run: a page's Python blocks in one namespace, and the commands between them.

A page runs top to bottom, in a process of its own, in an empty directory. A block with `title="train.py"` behind its language
is a program: it is written to that file. In a ```` ```console ```` block the lines that begin with `$ holdfast` or `$ torchrun`
are commands; each must end with exit code 0, or with N where it says `# exit N`. What the block shows of their output is not
compared. A block in an HTML comment is run and not shown; one after a line `<!-- no-run -->`, or with `no-run` behind its
language, is shown and not run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

NOT_PROGRAMS = {"docs/interface.md": "signatures, which test_public_names.py compares with the code"}

PAGES = sorted(
    str(p.relative_to(ROOT))
    for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if str(p.relative_to(ROOT)) not in NOT_PROGRAMS
)

_FENCE = re.compile(r"^([ ]*)```(\w+)([^\n`]*)\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([\w.-]+)"')
_COMMANDS = {
    "holdfast": '-m holdfast "$@"',
    "torchrun": '-m torch.distributed.run --standalone "$@"',
}
_EXIT = re.compile(r"#\s*exit (\d+)\s*$")


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int
    """Of its first line of code in the page, counted from 1."""
    file: str | None = None
    """Where it is a program: its name."""


def blocks_of(text: str) -> list[Block]:
    """The blocks to run, in order."""
    return [
        Block(match[2], textwrap.dedent(match[4]), text.count("\n", 0, match.start(4)) + 1, title[1] if title else None)
        for match in _FENCE.finditer(text)
        if match[2] in ("python", "console") and not is_only_shown(text, match)
        for title in [_TITLE.search(match[3])]
    ]


def is_only_shown(text: str, fence: re.Match[str]) -> bool:
    return "no-run" in fence[3] or text[: fence.start()].rstrip().endswith("<!-- no-run -->")


def commands_of(block: Block) -> list[tuple[str, int, int]]:
    """(command, expected exit code, line of the page) for each command of a console block."""
    commands = []
    lines = block.code.replace("\\\n", "\\\0").split("\n")
    line = block.line
    for text in lines:
        if text.startswith(tuple(f"$ {name} " for name in _COMMANDS)):
            expected = _EXIT.search(text)
            commands.append((text[2:].replace("\\\0", " "), int(expected[1]) if expected else 0, line))
        line += 1 + text.count("\0")
    return commands


PAGES_TO_RUN = [page for page in PAGES if blocks_of((ROOT / page).read_text())]


@pytest.mark.slow
@pytest.mark.timeout(260)  # some pages start ranks, each of which imports torch
@pytest.mark.parametrize("page", PAGES_TO_RUN)
def test_the_page_runs_as_printed(page: str, tmp_path: Path) -> None:
    work, tools = tmp_path / "work", tmp_path / "bin"
    work.mkdir()
    tools.mkdir()
    for name, arguments in _COMMANDS.items():
        (tools / name).write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments}\n")
        (tools / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "COLUMNS": "160", "NO_COLOR": "1"}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, __file__, str(ROOT / page)],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{page}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


def test_the_pages_are_found() -> None:
    assert {"README.md", "docs/tutorial.md", "docs/operations.md"} <= set(PAGES_TO_RUN)


def test_few_blocks_are_not_run() -> None:
    texts = [(ROOT / page).read_text() for page in PAGES]
    fences = [(text, m) for text in texts for m in _FENCE.finditer(text) if m[2] in ("python", "console")]
    not_run = [m[4] for text, m in fences if is_only_shown(text, m)]
    assert len(not_run) <= len(fences) // 20, not_run


def test_links_between_the_pages_lead_somewhere() -> None:
    links = [
        (page, target)
        for page in [*PAGES, *NOT_PROGRAMS]
        for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", _FENCE.sub("", (ROOT / page).read_text()))
        if "://" not in target
    ]
    assert links
    missing = [f"{page} -> {target}" for page, target in links if not ((ROOT / page).parent / target).exists()]
    assert not missing, missing


def run_page(path: Path) -> None:
    """Run one page in the current directory, in this process."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(path.read_text()):
        if block.file is not None:
            Path(block.file).write_text(block.code)
        elif block.language == "python":
            # blank lines in front, so that a traceback has the page's own line numbers
            code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
            exec(code, namespace)
        else:
            for command, expected, line in commands_of(block):
                done = subprocess.run(command, shell=True, capture_output=True, text=True)
                if done.returncode != expected:
                    sys.exit(
                        f"{path.name}:{line}: `{command}` ended with {done.returncode} instead of {expected}\n"
                        f"{done.stdout}\n{done.stderr}"
                    )


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))
