"""The public surface is a tested list: what `docs/interface.md` says, with its signatures, documented."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast

PAGE = (Path(__file__).parent.parent / "docs" / "interface.md").read_text()

PUBLIC = {
    # saving and loading
    "State",
    "PerRank",
    "Provider",
    "save",
    "load",
    "restore",
    "open",
    "export",
    # the object that a trainer holds
    "Checkpointer",
    "Init",
    "Handle",
    "Agent",
    "Every",
    "Keep",
    "Preemption",
    # looking at runs and checkpoints
    "Run",
    "Checkpoint",
    "Ledger",
    # teaching it types
    "register",
    # errors
    "HoldfastError",
    "NoCheckpoint",
    "Mismatch",
    "Corrupt",
    "Unavailable",
    "NoSpace",
    "Deadline",
    "Superseded",
    "Overdue",
    "Refused",
    "Unsupported",
    "Torn",
}


# --- what the page says -----------------------------------------------------------------------------------------------


def page_lines() -> Iterator[tuple[str, str]]:
    """(class or ``, text) for each line of the page's first block, without comments and strings."""
    block = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert block
    owner = ""
    for line in block[1].splitlines():
        text = re.sub(r"#.*", "", re.sub(r'"[^"]*"', lambda m: m[0] if "." not in m[0] else '""', line))
        if found := re.match(r"class (\w+)", text):
            owner = found[1]
        elif text and not text.startswith(" "):
            owner = ""
        yield owner, text


def page_signatures() -> dict[str, ast.arguments]:
    """The parameters of each function, class and method on the page, by dotted name."""
    text: dict[str, str] = {}
    for owner, line in page_lines():
        text[owner] = text.get(owner, "") + line + "\n"
    found = {}
    for owner, body in text.items():
        for match in re.finditer(r"(\.|\bclass |\bstate\.|^)(\w+)\(", body, re.MULTILINE):
            depth, end = 1, match.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(body[end], 0)
                end += 1
            before, name = match[1], match[2]
            dotted = name if before in ("", "class ") else f"{owner}.{name}"
            definition = ast.parse(f"def f({body[match.end() : end - 1]}): pass").body[0]
            assert isinstance(definition, ast.FunctionDef)
            found[dotted] = definition.args
    return found


def page_attributes() -> dict[str, set[str]]:
    """The attributes and methods that the page lists for each class."""
    found: dict[str, set[str]] = {}
    for owner, line in page_lines():
        if owner:
            found.setdefault(owner, set()).update(re.findall(r"(?<![\w\"])(?:state)?\.([a-z]\w*)", line))
    return found


SIGNATURES = page_signatures()
ATTRIBUTES = page_attributes()


def test_the_page_is_understood() -> None:
    assert set(SIGNATURES) >= {
        "State",
        "save",
        "Checkpointer",
        "Checkpointer.resume",
        "Run.unpin",
        "State.digest",
        "Keep",
    }
    assert ATTRIBUTES["Run"] >= {"path", "id", "steps", "unpin", "copy"}
    assert ATTRIBUTES["Ledger"] >= {"filled", "fallbacks", "as_dict"}


# --- what the code has ------------------------------------------------------------------------------------------------


def find(dotted: str) -> object:
    found: object = holdfast
    for part in dotted.split("."):
        found = getattr(found, part)
    return found


def test_the_public_names_are_these() -> None:
    assert set(holdfast.__all__) - {"__version__"} == PUBLIC
    assert len(holdfast.__all__) == len(set(holdfast.__all__))


def test_dir_shows_the_public_names() -> None:
    assert set(dir(holdfast)) >= set(holdfast.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="restor_"):
        holdfast.restor_  # noqa: B018


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_the_public_name_is_on_the_page(name: str) -> None:
    assert re.search(rf"(^|[\s`|(]){name}\b", PAGE, re.MULTILINE), f"docs/interface.md does not name {name}"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_the_public_name_is_documented(name: str) -> None:
    found = find(name)
    doc = inspect.getdoc(found)
    assert doc
    # a dataclass without a docstring gets its signature as one
    assert not doc.startswith(f"{name}("), f"holdfast.{name} has no docstring of its own"


def public_members() -> list[str]:
    members = []
    for name in sorted(PUBLIC & set(holdfast.__all__)):
        found = find(name)
        if inspect.isclass(found):
            members += [f"{name}.{m}" for m in vars(found) if not m.startswith("_")]
    return members


def test_every_public_method_and_property_is_documented() -> None:
    bare = [
        dotted
        for dotted in public_members()
        if (inspect.isroutine(member := find(dotted)) or isinstance(member, property)) and not inspect.getdoc(member)
    ]
    assert not bare, f"without a docstring: {bare}"


@pytest.mark.parametrize("name", sorted(ATTRIBUTES))
def test_the_class_has_what_the_page_lists(name: str) -> None:
    found = find(name)
    assert inspect.isclass(found)
    annotated = {a for base in found.__mro__ for a in inspect.get_annotations(base)}
    source = ast.walk(ast.parse(inspect.getsource(found)))
    assigned = {n.attr for n in source if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    missing = ATTRIBUTES[name] - set(dir(found)) - annotated - assigned
    assert not missing


@pytest.mark.parametrize("dotted", sorted(SIGNATURES))
def test_the_signature_is_the_one_on_the_page(dotted: str) -> None:
    """Names, order, kinds and defaults; where the page shows an object or `{}`, the code may say None and mean it."""
    page = SIGNATURES[dotted]
    positional = [a.arg for a in page.args]
    keyword = [a.arg for a in page.kwonlyargs]
    shown: dict[str, str | None] = dict.fromkeys([*positional, *keyword])
    shown |= {a: ast.unparse(d) for a, d in zip(reversed(positional), reversed(page.defaults), strict=False)}
    shown |= {a: ast.unparse(d) for a, d in zip(keyword, page.kw_defaults, strict=True) if d is not None}

    parameters = [p for p in inspect.signature(find(dotted)).parameters.values() if p.name != "self"]  # type: ignore[arg-type]
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    assert [p.name for p in named if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD] == positional
    assert [p.name for p in named if p.kind is inspect.Parameter.KEYWORD_ONLY] == keyword
    for parameter in named:
        on_page, default = shown[parameter.name], parameter.default
        if on_page is None:
            assert default is inspect.Parameter.empty
        elif on_page == "{}" or "(steps=" in on_page or "(last=" in on_page:
            assert default is None or not default or repr(default).startswith(on_page.partition("(")[0])
        else:
            assert default == eval(on_page), parameter.name


def data_signatures() -> list[tuple[str, str]]:
    """(dotted name, parameters) of the page's block on `holdfast.data`."""
    block = re.search(r"## holdfast.data.*?```python\n(.*?)```", PAGE, re.DOTALL)
    assert block
    found, owner = [], ""
    for line in block[1].splitlines():
        for name, parameters in re.findall(r"(\.?\w+)\(((?:[^()]|\(\))*)\)", line.partition("#")[0]):
            owner = owner if name.startswith(".") else name
            found.append((f"{owner}{name}" if name.startswith(".") else name, parameters))
    return found


@pytest.mark.parametrize(("name", "parameters"), data_signatures(), ids=lambda text: text.partition("(")[0])
def test_the_data_room_has_what_the_page_says(name: str, parameters: str) -> None:
    thing: object = holdfast.data
    for part in name.split("."):
        thing = getattr(thing, part)
    assert callable(thing)
    shown = [
        p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(thing).parameters.values() if p.name != "self"
    ]
    assert re.sub(r"^\(|\)( -> .*)?$", "", str(inspect.Signature(shown))) == parameters


def test_every_public_name_of_the_data_room_is_on_the_page() -> None:
    page = PAGE[PAGE.index("## holdfast.data") :]
    assert [name for name in holdfast.data.__all__ if name not in page] == []
