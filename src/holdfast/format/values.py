"""Values: the non-tensor leaves of a state as typed JSON, exactly and without running code.

Plain JSON is what it says; everything else is an object with one key that starts with `$`: see the table in docs/format.md.
Types of other libraries are added by `register`. Decoding never imports a module: an enum whose class is not loaded is an error.
"""

from __future__ import annotations

import base64
import datetime
import enum
import math
import pathlib
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from ..errors import Corrupt, Unsupported

_SAFE_INT = 1 << 53
_encoders: dict[type, tuple[str, Callable[[Any], Any]]] = {}
_decoders: dict[str, Callable[[Any], Any]] = {}


def register(cls: type, tag: str, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Teach holdfast to store values of exactly the type `cls`.

    Args:
        tag: the name in the file, such as `mylib.Cursor`; never reuse one for something else.
        encode: turns the value into one made of types that already have a stored form.
        decode: turns that back. It runs at load, so it must not trust what it is given.
    """
    _encoders[cls] = (tag, encode)
    _decoders[tag] = decode


def encode(value: Any, path: str) -> Any:
    """The typed JSON of `value`: what `json.dumps` takes.

    Raises:
        Unsupported: a type without a stored form, named with `path` and how to register it.
    """
    try:
        return _encode(value, path)
    except RecursionError:
        raise Unsupported(f"{path[:200]} is nested too deeply, or holds itself") from None


def _encode(value: Any, path: str) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _encode_str(value, path)
    if kind is int:
        return value if -_SAFE_INT < value < _SAFE_INT else {"$int": _decimal(value, path)}
    if kind is float:
        return value if math.isfinite(value) and (value != 0 or math.copysign(1, value) > 0) else _float_bits(value)
    if kind is list:
        return [_encode(v, f"{path}.{i}") for i, v in enumerate(value)]
    if kind is dict:
        if all(type(k) is str and not k.startswith("$") and _is_unicode(k) for k in value):
            return {k: _encode(v, f"{path}.{k}") for k, v in value.items()}
        return {"$dict": _pairs(value, path)}
    for match, tag, convert in _CONTAINERS:
        if kind is match:
            return {tag: convert(value, path)}
    if kind in _encoders:
        tag, encoder = _encoders[kind]
        return {"$ext": [tag, _encode(encoder(value), path)]}
    if isinstance(value, enum.Enum):
        where = f"{kind.__module__}:{kind.__qualname__}"
        is_named = value.name in kind.__members__
        return {"$enum": [where, value.name] if is_named else [where, None, _encode(value.value, path)]}
    if isinstance(value, pathlib.PurePosixPath):
        return {"$path": _encode_str(str(value), path)}
    if (
        kind.__module__ == "numpy"
        and hasattr(value, "dtype")
        and getattr(value, "shape", None) == ()
        and value.dtype.kind in "biufcSUmM"
    ):
        return {"$numpy": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    raise Unsupported(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which has no stored form: hold it as tensors, numbers, strings and "
        f"plain containers, or call holdfast.register({kind.__qualname__}, tag, encode, decode) before saving and loading"
    )


def decode(data: Any, path: str = "value") -> Any:
    """The value of which `data` is the typed JSON.

    Raises:
        Corrupt: the JSON is not of this form.  Unsupported: its type is not registered, or its enum not loaded, here.
    """
    if isinstance(data, list):
        return [decode(v, path) for v in data]
    if not isinstance(data, dict):
        return data
    tag = next(iter(data)) if len(data) == 1 else ""
    if not tag.startswith("$"):
        return {k: decode(v, f"{path}.{k}") for k, v in data.items()}
    body = data[tag]
    try:
        if tag == "$ext":
            name, inner = body
            if name not in _decoders:
                raise Unsupported(f"{path} is stored as {name}; call holdfast.register with that tag before loading")
            return _decoders[name](decode(inner, path))
        return _TAGS[tag](body, path)
    except Unsupported:
        raise
    except Exception as error:
        raise Corrupt(f"{path} is not typed JSON of this format ({tag}): {error}") from error


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_str(text: str, path: str) -> Any:
    if _is_unicode(text):
        return text
    raw = text.encode("utf-16-le", "surrogatepass")
    if raw.decode("utf-16-le", "surrogatepass") != text:
        raise Unsupported(f"{path} is text with pairs of surrogates, which have no stored form; hold it as bytes")
    return {"$utf16": base64.b64encode(raw).decode()}


def _decimal(value: int, path: str) -> str:
    try:
        return str(value)
    except ValueError:
        raise Unsupported(f"{path} is an integer of more digits than Python writes; hold it as bytes") from None


def _float_bits(value: float) -> Any:
    return {"$float": struct.pack(">d", value).hex()}


def _pairs(mapping: Any, path: str) -> list[Any]:
    return [[_encode(k, f"{path}.<key>"), _encode(v, f"{path}.{k}")] for k, v in mapping.items()]


def _items(sequence: Any, path: str) -> list[Any]:
    return [_encode(v, f"{path}.{i}") for i, v in enumerate(sequence)]


def _sorted_items(items: Any, path: str) -> list[Any]:
    return sorted((_encode(v, path) for v in items), key=repr)


def _defaultdict(value: Any, path: str) -> Any:
    if value.default_factory not in _FACTORIES.values():
        raise Unsupported(f"{path} is a defaultdict of {value.default_factory}; use one of {', '.join(_FACTORIES)} or a dict")
    name = next(k for k, f in _FACTORIES.items() if f is value.default_factory)
    return [name, _pairs(value, path)]


_FACTORIES: dict[str, Any] = {
    "none": None,
    "int": int,
    "float": float,
    "list": list,
    "dict": dict,
    "set": set,
    "str": str,
}

_CONTAINERS: list[tuple[type, str, Callable[[Any, str], Any]]] = [
    (tuple, "$tuple", _items),
    (set, "$set", _sorted_items),
    (frozenset, "$frozenset", _sorted_items),
    (OrderedDict, "$odict", _pairs),
    (Counter, "$counter", _pairs),
    (defaultdict, "$defaultdict", _defaultdict),
    (deque, "$deque", lambda v, path: [_items(v, path), v.maxlen]),
    (bytes, "$bytes", lambda v, path: base64.b64encode(v).decode()),
    (bytearray, "$bytearray", lambda v, path: base64.b64encode(v).decode()),
    (complex, "$complex", lambda v, path: [encode(v.real, path), encode(v.imag, path)]),
    (range, "$range", lambda v, path: [v.start, v.stop, v.step]),
    (slice, "$slice", lambda v, path: [encode(x, path) for x in (v.start, v.stop, v.step)]),
    (datetime.datetime, "$datetime", lambda v, path: v.isoformat()),
    (datetime.date, "$date", lambda v, path: v.isoformat()),
    (datetime.timedelta, "$timedelta", lambda v, path: [v.days, v.seconds, v.microseconds]),
]


def _enum(body: Any, path: str) -> Any:
    where, name, *bits = body
    module, _, qualname = where.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise Unsupported(f"{path} is a member of the enum {where}, which is not loaded here; import {module} before loading")
    return found[name] if name is not None else found(decode(bits[0], path))


def _numpy_scalar(body: Any, path: str) -> Any:
    import numpy as np

    kind = np.dtype(body[0])
    if kind.kind not in "biufcSUmM":
        raise ValueError(f"a scalar of {kind}")
    return np.frombuffer(base64.b64decode(body[1]), kind)[0] if kind.itemsize else kind.type()


def _decode_pairs(body: Any, path: str) -> list[tuple[Any, Any]]:
    return [(decode(k, path), decode(v, path)) for k, v in body]


def _decode_items(body: Any, path: str) -> list[Any]:
    return [decode(v, path) for v in body]


_TAGS: dict[str, Callable[[Any, str], Any]] = {
    "$int": lambda b, p: int(b),
    "$float": lambda b, p: struct.unpack(">d", bytes.fromhex(b))[0],
    "$utf16": lambda b, p: base64.b64decode(b).decode("utf-16-le", "surrogatepass"),
    "$dict": lambda b, p: dict(_decode_pairs(b, p)),
    "$tuple": lambda b, p: tuple(_decode_items(b, p)),
    "$set": lambda b, p: set(_decode_items(b, p)),
    "$frozenset": lambda b, p: frozenset(_decode_items(b, p)),
    "$odict": lambda b, p: OrderedDict(_decode_pairs(b, p)),
    "$counter": lambda b, p: Counter(dict(_decode_pairs(b, p))),
    "$defaultdict": lambda b, p: defaultdict(_FACTORIES[b[0]], _decode_pairs(b[1], p)),
    "$deque": lambda b, p: deque(_decode_items(b[0], p), b[1]),
    "$bytes": lambda b, p: base64.b64decode(b),
    "$bytearray": lambda b, p: bytearray(base64.b64decode(b)),
    "$complex": lambda b, p: complex(decode(b[0], p), decode(b[1], p)),
    "$range": lambda b, p: range(*b),
    "$slice": lambda b, p: slice(*(decode(x, p) for x in b)),
    "$datetime": lambda b, p: datetime.datetime.fromisoformat(b),
    "$date": lambda b, p: datetime.date.fromisoformat(b),
    "$timedelta": lambda b, p: datetime.timedelta(*b),
    "$path": lambda b, p: pathlib.PurePosixPath(decode(b, p)),
    "$numpy": _numpy_scalar,
    "$enum": _enum,
}
