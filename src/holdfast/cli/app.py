"""Finds the command that was called, runs it, and turns its end into an exit code and, where it failed, one line.

A command's module is imported only when that command runs, so that `holdfast ls` starts without what `export` needs.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import HoldfastError
from ..version import VERSION

COMMANDS = (
    "ls",
    "inspect",
    "verify",
    "diff",
    "export",
    "cp",
    "rollback",
    "pin",
    "prune",
    "doctor",
    "report",
    "top",
    "agent",
    "demo",
)
"""Each is a module of this package with a function of the same name, which returns the exit code."""

FAILED, USAGE, UNAVAILABLE, NO_SPACE, INTERRUPTED = 1, 2, 7, 8, 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SETTINGS: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}

# typer's errors about arguments are click's in its older versions and its own in later ones; both are bases of this one
_Misused = cast(type[Exception], typer.BadParameter.__bases__[0])


class _AsItStands:
    """Takes a string for a string and leaves the rest to typer, some versions of which load pydantic for either: 50 ms."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build

    def __call__(self) -> _AsItStands:
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        is_single = not param.multiple and param.nargs == 1
        if is_single and (value is None or (type(value) is str and param.type_descriptor.annotation is str)):
            return value
        return self._build().coerce(value, param=param, ctx=ctx)


def _quick(params: list[Any]) -> list[Any]:
    """The parameters, made to start fast. In versions of typer that have no such step, nothing changes."""
    for param in params:
        build = getattr(param, "get_runtime_param", None)
        if build is not None and not isinstance(build, _AsItStands):
            param.get_runtime_param = _AsItStands(build)
    return params


class Command(TyperCommand):
    """One command."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _quick(super().get_params(ctx))


class Commands(TyperGroup):
    """The commands, each imported when it is asked for."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _quick(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__package__}.{cmd_name}")
        alone = typer.Typer(**_SETTINGS)
        alone.command(cmd_name, cls=Command)(getattr(module, cmd_name))
        return typer.main.get_command(alone)


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"holdfast {VERSION}")
        raise typer.Exit


_app = typer.Typer(cls=Commands, **_SETTINGS)


@_app.callback()
def holdfast(
    version: bool = typer.Option(False, "--version", callback=_say_version, is_eager=True, help="Print the version."),
) -> None:
    """Crash-safe checkpoints for PyTorch training.

    An ADDRESS is PATH[@STEP|@latest|@best|@PIN]: a run, and which step of it. `hf:DIR` and `safetensors:DIR` are the files of
    others.

    Exit codes: 0 done, 1 failed, 2 usage, 3 no such checkpoint, 4 corrupt, 5 different, 6 refused (would lose data),
    7 unavailable, 8 does not fit, 130 interrupted. HOLDFAST_DEBUG=1 shows where an error came from.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code.

    Args:
        argv: what follows the program's name; default: the arguments of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "numpy" not in sys.modules and words[:1] != ["demo"]:
        # no command multiplies matrices, and the threads that numpy starts for it spin for 40 ms; the demo's processes do
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        code = typer.main.get_command(_app).main(words or ["--help"], "holdfast", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # in some versions typer takes the KeyboardInterrupt, and ends with this
            return _failed("interrupted", INTERRUPTED)
        return int(code or 0) if words else USAGE
    except (KeyboardInterrupt, typer.Abort):
        return _failed("interrupted", INTERRUPTED)
    except _Misused as error:
        return _failed(*_misuse(error))
    except BrokenPipeError:
        # whoever read the output has gone; without this, Python complains when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except HoldfastError as error:
        return _failed(str(error), error.exit_code)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        return _failed(what, NO_SPACE if error.errno in _FULL else UNAVAILABLE)
    except Exception as error:
        return _failed(f"{type(error).__name__}: {error} (a bug of holdfast: HOLDFAST_DEBUG=1 shows where)", FAILED)


def _failed(why: str, code: int) -> int:
    if os.environ.get("HOLDFAST_DEBUG", "0") not in ("", "0") and sys.exc_info()[0] is not None:
        import traceback

        traceback.print_exc()
    print(f"holdfast: {why}", file=sys.stderr)
    return code


def _misuse(error: Any) -> tuple[str, int]:
    """What was wrong with the arguments, with where to look, and the exit code."""
    context = getattr(error, "ctx", None)
    message = str(error.format_message()).rstrip(". \n")
    return message + (f"; see `{context.command_path} --help`" if context is not None else ""), USAGE
