"""HTML and SVG, built so that nothing gets into a page unescaped: what is not `Html` is text."""

from __future__ import annotations

import html
import re

_VOID = {"meta", "br", "hr", "col"}
_NOT_IN_HTML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Html(str):
    """Markup, as `element` makes it."""

    __slots__ = ()


def element(tag: str, *children: str | float | None, **attributes: str | float | None) -> Html:
    """One element.

    Args:
        children: `Html` as it is, all else as text; None is nothing. attributes: `class_` is `class`, `stroke_width` is
            `stroke-width`; one that is None is left out.
    """
    given = "".join(f' {_name(name)}="{_text(value)}"' for name, value in attributes.items() if value is not None)
    if tag in _VOID:
        return Html(f"<{tag}{given}>")
    return Html(f"<{tag}{given}>{join(*children)}</{tag}>")


def join(*children: str | float | None) -> Html:
    """Elements and texts one after the other."""
    return Html("".join(child if isinstance(child, Html) else _text(child) for child in children if child is not None))


def _name(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


def _text(value: str | float) -> str:
    """A text with what means something in HTML, or nothing in a file, replaced; a number with at most two decimals."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return html.escape(_NOT_IN_HTML.sub("\ufffd", str(value)))
