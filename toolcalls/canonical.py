"""Strict parsing, and the one text of a value.

What an agent sends is parsed once, strictly, and what is stored, hashed, compared, approved and given to the
tool is the *canonical text* (behaviour, section 4): keys sorted by code point, no white space, characters as
they are (NFC and NFD stay different), every number in one form. Two values of equal meaning have equal texts,
of unequal meaning unequal ones.

**Numbers.** The meaning of a number is the exact decimal that was written: ``1``, ``1.0`` and ``1e0`` are
one number, as are ``100`` and ``1e2``, ``25.90`` and ``25.9``, ``0`` and ``-0.0``. A Python float means its
shortest spelling, ``repr``.

================================  ================================  =====================================
a number that is                  is held as                        and written as
================================  ================================  =====================================
whole                             int (also ``1.0``, ``1e22``)      plain digits, never an exponent
not whole, and a float has it     float (``25.9``)                  plain from 0.000001, else ``1.5e-7``
not whole, with more to it        Decimal (``1e-400``, 20 digits)   the same
infinite, or not a number         refused                           refused
of more than 1,000 digits before  refused                           refused
or after the point
================================  ================================  =====================================

A strict pydantic ``int`` refuses what is not whole, a strict ``float`` takes all three. But it takes a
Decimal by rounding it, and so does pydantic's JSON parser for every field: ``1e-400`` would silently become
0. ``inexact`` names such a number beforehand.

**Faults.** A fault in a request is a 400, but one inside a call's ``arguments`` belongs to that call alone:
``parse_body`` leaves a ``Faulty`` where such arguments stood, and ``parse_arguments`` raises what it says.
"""

import json
import re
from base64 import b64encode
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Context, Decimal, Inexact, InvalidOperation
from enum import Enum
from hashlib import sha256
from ipaddress import IPv4Address, IPv6Address
from itertools import accumulate
from json.encoder import encode_basestring
from math import isfinite
from pathlib import PurePath
from typing import Any, Final
from uuid import UUID

LEVELS: Final = 32
"""How deep a value may be nested; ``{}`` is one level."""
DIGITS: Final = 1_000
"""How many digits a number may have before the point, and how many after it."""
ARGUMENTS_LIMIT: Final = 256 * 1024
"""How many bytes of UTF-8 the arguments of one call may have."""
RESULT_LEVELS: Final = 64
"""How deep a tool's result is kept."""
CALLS: Final = (("calls", "*", "arguments"),)
"""Where the arguments of calls stand in a body of ours; ``*`` is any index."""


class Missing(Enum):
    """The one value, MISSING, that stands for a field that was not sent (null is a value)."""

    MISSING = "missing"


MISSING: Final = Missing.MISSING


class Malformed(ValueError):
    """What was received breaks a rule; ``message`` says which, in at most 500 storable characters."""

    def __init__(self, message: str) -> None:
        self.message = safe_text(message, 500)
        super().__init__(self.message)


class _NotJSON(Malformed):
    """The text is no JSON at all, so that nothing in it can be told apart."""


class _TooDeep(Malformed):
    """The text was not even tried."""


@dataclass(frozen=True, slots=True)
class Faulty:
    """Stands where arguments stood that cannot be used: why, and the text that was received."""

    message: str
    source: str


# Parsing


def parse_body(raw: bytes, *, arguments: Sequence[Sequence[str]] = CALLS) -> dict[str, Any]:
    """Parse the body of a request strictly; it must be one JSON object in UTF-8.

    ``arguments`` says where the arguments of calls stand, as paths that end in a field; ``*`` is any index.
    What stands there and has a fault is replaced by a ``Faulty``; a fault anywhere else raises ``Malformed``,
    and so does text that is no JSON at all, wherever it breaks. The body without the arguments may be 32
    levels deep, and each arguments value too. Takes linear time, whatever is sent. (Behaviour, section 4.)
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise Malformed(f"The body is not valid UTF-8: byte {error.start} cannot be read.") from None
    try:
        body = parse(text)
    except _NotJSON:
        raise
    except Malformed:
        if not arguments:
            raise
        body = _parse_apart(text, arguments)
    if not isinstance(body, dict):
        raise Malformed(f"The body must be a JSON object, not {_kind(body)}.")
    return body


def parse_arguments(received: object) -> dict[str, Any]:
    """Parse the ``arguments`` of one call as they stood in the decoded body.

    An object is itself; a string must hold one; ``""``, blanks and ``MISSING`` are ``{}``. Everything else,
    any fault, and more than 256 KiB of UTF-8 (of the string, or of an object's canonical text) raise
    ``Malformed`` with a message that says which. (Behaviour, section 4.)
    """
    match received:
        case Missing.MISSING:
            return {}
        case Faulty():
            raise Malformed(received.message)
        case str():
            _check_size(received)
            if not received.strip(" \t\n\r"):
                return {}
            if received.lstrip().startswith("```"):
                raise Malformed("The arguments are fenced as Markdown code; send the bare JSON object.")
            value = parse(received)
            if isinstance(value, str):
                raise Malformed("The arguments are encoded twice: the string holds a string, not a JSON object.")
            if not isinstance(value, dict):
                raise Malformed(f"The arguments must be a JSON object; the string holds {_kind(value)}.")
            return value
        case dict():
            _check_size(canonical_text(received))
            return received
    raise Malformed(f"The arguments must be a JSON object, or a string that holds one, not {_kind(received)}.")


def parse(text: str) -> Any:
    """Parse one JSON value strictly, its numbers exactly: the inverse of ``canonical_text``.

    Raises ``Malformed`` for every fault that behaviour, section 4, lists, and for what is no JSON.
    """
    # Fewer brackets than levels cannot be too deep: most texts are never scanned.
    if text.count("{") + text.count("[") > LEVELS and _depth(text) > LEVELS:
        raise _TooDeep(f"Nested deeper than {LEVELS} levels.")
    value = _decode(_STRICT, text)
    if _ODD_ESCAPE.search(text) or not _is_storable(text):
        found = _first(value, _unstorable)
        if found is not None:
            path, fault = found
            raise Malformed(f"{path or 'The text'} holds {fault}, which cannot be stored.")
    return value


def _decode(decoder: json.JSONDecoder, text: str) -> Any:
    try:
        return decoder.decode(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        if error.msg == "Extra data":
            raise _NotJSON(f"There is more text after the JSON value, at {where}.") from None
        raise _NotJSON(f"Not valid JSON: {error.msg} at {where}.") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise Malformed(f"The key {_shown(key)} stands twice in one object.")
            seen.add(key)
    return found


def _integer(literal: str) -> int:
    if len(literal) > DIGITS and len(literal.lstrip("-")) > DIGITS:
        raise Malformed(f"The number {_shown(literal)} has more than {DIGITS:,} digits.")
    return int(literal)


def _number(literal: str) -> int | float | Decimal:
    if len(literal) > 2 * DIGITS + 10:
        raise Malformed(f"The number {_shown(literal)} has more than {DIGITS:,} digits.")
    number = float(literal)
    if len(literal) < 16 and 1 <= abs(number) < 1e15 and number.is_integer():
        return int(number)  # fifteen digits always survive a float
    if not isfinite(number):
        raise Malformed(f"The number {_shown(literal)} is too large: it overflows to infinity.")
    if repr(number) == literal and not number.is_integer():
        return number
    if not number and not literal.lower().partition("e")[0].strip("-0."):
        return 0  # whatever its exponent, which may be more than a Decimal can hold
    exact = _exactly(literal)
    if _places(exact) <= 0:
        return int(exact)
    return number if Decimal(repr(number)) == exact else exact


def _exactly(value: str | Decimal) -> Decimal:
    """Strip the zeros at the end, and refuse what has too many digits."""
    try:
        exact = _EXACT.normalize(_EXACT.create_decimal(value))
        if exact.adjusted() < DIGITS and _places(exact) <= DIGITS:
            return exact
    except (Inexact, InvalidOperation):
        pass  # more digits, or an exponent further out, than even this context holds
    raise Malformed(f"The number {_shown(str(value))} has more than {DIGITS:,} digits before or after the point.")


def _places(exact: Decimal) -> int:
    return len(exact.as_tuple().digits) - 1 - exact.adjusted()


def _constant(name: str) -> Any:
    raise Malformed(f"{name} is not a number in JSON.")


_STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_constant)
_SYNTAX = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=len)
_EXACT = Context(prec=4 * DIGITS, traps=[Inexact, InvalidOperation])

# A string's closing quote is optional, or a broken text would be tried from each of its quotes: quadratic.
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
_NOT_A_BRACKET = re.compile(rf'{_STRING}|[^"\[\]{{}}]++', re.DOTALL)
_TOKEN = re.compile(rf"{_STRING}|[\[\]{{}},:]", re.DOTALL)
_ODD_ESCAPE = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_STEP = {"[": 1, "{": 1, "]": -1, "}": -1}


def _depth(text: str) -> int:
    return max(accumulate(map(_STEP.__getitem__, _NOT_A_BRACKET.sub("", text))), default=0)


def _parse_apart(text: str, arguments: Sequence[Sequence[str]]) -> Any:
    """Parse the body without its arguments, then each of them alone: every fault is met where it belongs."""
    found = list(_find(text, arguments))
    rest, end = [], 0
    for _, begins, ends in found:
        rest += [text[end:begins], "null"]
        end = ends
    body = parse("".join([*rest, text[end:]]))
    for path, begins, ends in found:
        holder = body
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] = _parse_or_faulty(text[begins:ends].strip(" \t\n\r"))
    return body


def _parse_or_faulty(source: str) -> Any:
    try:
        return parse(source)
    except _NotJSON:
        raise
    except _TooDeep as fault:
        return Faulty(fault.message, source)
    except Malformed as fault:
        _decode(_SYNTAX, source)  # the first fault may hide that the request is no JSON further on
        return Faulty(fault.message, source)


def _find(text: str, patterns: Sequence[Sequence[str]]) -> Iterator[tuple[tuple[str | int, ...], int, int]]:
    """Yield path, start and end of each value that stands where a pattern says, in the order of the text."""
    path: list[str | int] = []
    begins: list[int] = []
    name = '""'
    lengths = {len(pattern) for pattern in patterns}
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in "[{":
            path.append(0 if mark == "[" else "")
            begins.append(token.end())
        elif not path:
            continue
        elif mark == ":":
            path[-1] = _decode(_SYNTAX, name) if "\\" in name else name[1:-1]
            begins[-1] = token.end()
        elif mark in ",]}":
            if len(path) in lengths and any(_matches(path, pattern) for pattern in patterns):
                yield tuple(path), begins[-1], token.start()
            if mark == ",":
                path[-1] = last + 1 if isinstance(last := path[-1], int) else ""
                begins[-1] = token.end()
            else:
                path.pop()
                begins.pop()
        else:
            name = mark


def _matches(path: Sequence[str | int], pattern: Sequence[str]) -> bool:
    return len(path) == len(pattern) and all(
        isinstance(step, int) if wanted == "*" else step == wanted for step, wanted in zip(path, pattern, strict=True)
    )


def _first(value: Any, fault: Callable[[Any], str]) -> tuple[str, str] | None:
    """Find the path and the fault of the first faulty key or value; the path is built on the way back."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if found := fault(key):
                return safe_text(key, 60), found
            if (deeper := _first(inner, fault)) is not None:
                return _joined(safe_text(key, 60), deeper[0]), deeper[1]
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            if (deeper := _first(inner, fault)) is not None:
                return _joined(f"[{index}]", deeper[0]), deeper[1]
    elif found := fault(value):
        return "", found
    return None


def _joined(step: str, path: str) -> str:
    return f"{step}.{path}" if path and not path.startswith("[") else step + path


def _unstorable(leaf: object) -> str:
    found = _UNSTORABLE.search(leaf) if isinstance(leaf, str) else None
    return _name(found[0]) if found else ""


def _rounded(leaf: object) -> str:
    return str(leaf) if isinstance(leaf, Decimal) and Decimal(repr(float(leaf))) != leaf else ""


def _check_size(text: str) -> None:
    size = len(text.encode(errors="surrogatepass"))
    if size > ARGUMENTS_LIMIT:
        raise Malformed(f"The arguments are {size:,} bytes; at most {ARGUMENTS_LIMIT:,} (256 KiB) are taken.")


def _is_storable(text: str) -> bool:
    return text.isascii() or not _UNSTORABLE.search(text)


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float() | Decimal():
            return "a number"
        case str():
            return "a string"
        case list() | tuple():
            return "an array"
        case dict():
            return "an object"
    return f"a {type(value).__name__}"


def _name(character: str) -> str:
    return "U+0000" if character == "\0" else f"the lone surrogate U+{ord(character):04X}"


def _shown(text: str) -> str:
    return f'"{safe_text(text, 60)}"'


# The canonical text


def canonical_text(value: object) -> str:
    """Write the one JSON text of a value: what is stored, hashed, shown, compared and given to the tool.

    Takes None, bool, int, float, Decimal, str, list, tuple and dict with text as keys. Raises ``Malformed``
    for what ``parse`` would refuse (infinite numbers, too many digits or levels, U+0000, lone surrogates),
    TypeError for any other type. ``parse`` of it gives the value back, in the types of the module's table.
    (Behaviour, section 4.)
    """
    parts: list[str] = []
    _write(value, parts.append, LEVELS)
    return "".join(parts)


def digest(text: str) -> str:
    """Compute the SHA-256 of a text in UTF-8, as 64 hexadecimal digits."""
    return sha256(text.encode()).hexdigest()


def received_text(received: object) -> str:
    """Write what was received: the same request, sent again, has the same text, and another one has not.

    An object is its canonical text: order of keys, white space and spelling of numbers do not matter. A
    string is itself, written as a JSON string: there everything matters. Faulty arguments are the text they
    came in, a missing field is the empty text. Never raises; always storable. (Behaviour, section 4; F-30.)
    """
    match received:
        case Missing.MISSING:
            return ""
        case Faulty():
            return received.source
        case str():
            return _UNSTORABLE.sub(_escaped, encode_basestring(received))
    try:
        return canonical_text(received)
    except (Malformed, TypeError):
        return result_text(received, limit=4 * ARGUMENTS_LIMIT)[0]


def inexact(value: object) -> str:
    """Name the first number that a float cannot hold as it was written, by its path (``items[0].price``).

    The empty text if there is none. Such a number has more digits than a float, or is next to zero.
    pydantic's JSON parser, and any float field, would change it without a word: whoever validates with either
    asks this first. Takes what ``parse`` gives, an object or a list. (F-73.)
    """
    found = _first(value, _rounded)
    return (found[0] or '""') if found else ""


def _write(value: object, put: Callable[[str], None], levels: int) -> None:
    if isinstance(value, str):
        put(_text(value))
    elif value is None:
        put("null")
    elif isinstance(value, bool):
        put("true" if value else "false")
    elif isinstance(value, int):
        put(_int_text(value))
    elif isinstance(value, float):
        put(_float_text(value))
    elif isinstance(value, dict):
        if not levels:
            raise Malformed(f"Nested deeper than {LEVELS} levels.")
        opening = "{"
        for key in sorted(value):
            if not isinstance(key, str):
                raise TypeError(f"A key must be text, not {_kind(key)}.")
            put(opening)
            put(_text(key))
            put(":")
            _write(value[key], put, levels - 1)
            opening = ","
        put("}" if value else "{}")
    elif isinstance(value, list | tuple):
        if not levels:
            raise Malformed(f"Nested deeper than {LEVELS} levels.")
        opening = "["
        for inner in value:
            put(opening)
            _write(inner, put, levels - 1)
            opening = ","
        put("]" if value else "[]")
    elif isinstance(value, Decimal):
        put(_decimal_text(value))
    else:
        raise TypeError(f"No canonical text for {_kind(value)}.")


def _text(value: str) -> str:
    if "\0" in value or not _is_storable(value):
        fault = _UNSTORABLE.search(value)
        raise Malformed(f"A text holds {_name(fault[0] if fault else value)}, which cannot be stored.")
    return encode_basestring(value)


def _int_text(value: int) -> str:
    if not -_TOO_LARGE < value < _TOO_LARGE:
        raise Malformed(f"A number has more than {DIGITS:,} digits.")
    return int.__repr__(value)


def _float_text(value: float) -> str:
    spelled = float.__repr__(value)
    if not isfinite(value):
        raise Malformed(f"{spelled} is not a number in JSON.")
    if "e" in spelled:
        return _decimal_text(Decimal(spelled))
    return spelled if not spelled.endswith(".0") else spelled[:-2] if value else "0"


def _decimal_text(value: Decimal) -> str:
    if not value.is_finite():
        raise Malformed(f"{value} is not a number in JSON.")
    if not value:
        return "0"
    exact = _exactly(value)
    first = exact.adjusted()
    if first >= -6:
        return f"{exact:f}"
    sign, digits, _ = exact.as_tuple()
    rest = "".join(map(str, digits[1:]))
    return f"{'-' * sign}{digits[0]}{'.' * bool(rest)}{rest}e{first}"


_TOO_LARGE = 10**DIGITS


# Names and texts


def check_id(value: object, *, what: str) -> str:
    """Return an ID as it is if it is 1 to 200 printable ASCII characters other than space and ``/``.

    ``what`` names it in the message of ``Malformed``. Nothing is trimmed or converted. (Behaviour, section 4;
    F-63.)
    """
    if not isinstance(value, str):
        raise Malformed(f"{what} must be a string, not {_kind(value)}.")
    if not _ID.fullmatch(value):
        raise Malformed(f"{what} must be 1 to 200 printable ASCII characters other than space and '/'.")
    return value


def safe_text(value: str, limit: int | None = None) -> str:
    """Make any text storable: U+0000 and lone surrogates become visible escapes, everything else stays.

    With ``limit`` (characters) the whole is no longer than that; where it is cut, its end says how many
    characters of the original are missing. (F-66, F-74.)
    """
    if limit is None or len(value) <= limit:
        text = value if _is_storable(value) and "\0" not in value else _UNSTORABLE.sub(_escaped, value)
        if limit is None or len(text) <= limit:
            return text
    room = max(0, limit - len(_left_out(len(value))))
    head = value[:room]
    if _UNSTORABLE.search(head):
        widths = accumulate(6 if _UNSTORABLE.match(character) else 1 for character in head)
        head = head[: bisect_right(list(widths), room)]
    return (_UNSTORABLE.sub(_escaped, head) + _left_out(len(value) - len(head)))[:limit]


def _left_out(count: int) -> str:
    return f"… [{count:,} more characters]"


def _escaped(character: re.Match[str]) -> str:
    return f"\\u{ord(character[0]):04x}"


_ID = re.compile(r"[!-.0-~]{1,200}")


# Results


def result_text(value: object, *, limit: int) -> tuple[str, str]:
    """Write whatever a tool returned as JSON, with a warning that says what could not be kept as it was.

    Never raises: the effect may have happened, and its result must not be lost (F-51). Models, dataclasses,
    enums, dates, UUIDs, paths and Decimals (as text, exactly) are written without a warning (``""``); NaN,
    bytes, sets, cycles, U+0000, lone surrogates, odd keys and unknown objects as safe text with one. The text
    has at most ``limit`` bytes of UTF-8 (200 or more). What is larger becomes
    ``{"truncated": true, "at_least_bytes": n, "preview": "…"}``, with a warning.
    """
    try:
        keeper = _Keeper(limit)
        kept = keeper.keep(value, "")
        text = json.dumps(kept, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = max(keeper.size if keeper.full else 0, len(text.encode()))
        if keeper.full or size > limit:
            keeper.note(f"the result is too large ({size:,} bytes or more; limit {limit:,}) and was cut", "")
            text = _cut(text, size, limit)
        return text, keeper.warning()
    except Exception as error:  # noqa: BLE001 - a tool's objects may do anything when they are read
        text = json.dumps({"unreadable": type(value).__name__[:50]})
        return text, f"The result could not be read ({type(error).__name__})."


def _cut(text: str, size: int, limit: int) -> str:
    preview = text[:limit]
    while True:
        whole = json.dumps(
            {"truncated": True, "at_least_bytes": size, "preview": preview + "…"},
            ensure_ascii=False,
            separators=(",", ":"),
        )
        if (taken := len(whole.encode())) <= limit or not preview:
            return whole
        preview = preview[: min(len(preview) - 1, len(preview) * limit // taken)]


class _Keeper:
    """Rebuilds a value from what JSON and PostgreSQL hold, up to ``limit``, and notes what it changed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = -2  # each value counts 2, itself and a comma; so the sum never exceeds the true size
        self.inside: set[int] = set()
        self.notes: dict[str, str] = {}

    @property
    def full(self) -> bool:
        return self.size > self.limit

    def note(self, what: str, path: str) -> None:
        self.notes.setdefault(what, path)

    def warning(self) -> str:
        notes = "; ".join(f"{what} (at {safe_text(at, 80)})" if at else what for what, at in self.notes.items())
        return safe_text(f"Not everything could be kept as it was: {notes}.", 2_000) if notes else ""

    def keep(self, value: Any, path: str) -> Any:
        self.size += 2
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Enum):
            return self.keep(value.value, path)
        if isinstance(value, str):
            return self.text(value, path)
        if isinstance(value, int):
            return self.integer(value, path)
        if isinstance(value, float):
            if isfinite(value):
                return value
            self.note("NaN or Infinity was written as text", path)
            return {"nan": "NaN", "inf": "Infinity"}.get(repr(value), "-Infinity")
        if isinstance(value, date | time):
            return value.isoformat()
        if isinstance(value, Decimal | UUID | timedelta | PurePath | IPv4Address | IPv6Address):
            return self.text(str(value), path)
        if isinstance(value, bytes | bytearray | memoryview):
            return self.octets(value, path)
        return self.nested(value, path)

    def text(self, value: str, path: str) -> str:
        self.size += len(value)
        head = value[: self.limit + 1]
        safe = safe_text(head)
        if safe != head:
            self.note("U+0000 or a lone surrogate was written as a visible escape", path)
        return safe

    def integer(self, value: int, path: str) -> int | str:
        if -_TOO_LARGE < value < _TOO_LARGE:
            return int(value)
        self.note(f"a number of more than {DIGITS:,} digits was written as hexadecimal text", path)
        return self.text(hex(value), path)

    def octets(self, value: bytes | bytearray | memoryview, path: str) -> str:
        self.note("bytes were written as text", path)
        octets = bytes(value)
        try:
            return self.text(octets.decode(), path)
        except UnicodeDecodeError:
            self.size += len(octets)
            return self.text("base64:" + b64encode(octets[: self.limit]).decode(), path)

    def nested(self, value: Any, path: str) -> Any:
        if id(value) in self.inside:
            self.note("a value that contains itself was left out there", path)
            return "[contains itself]"
        if len(self.inside) >= RESULT_LEVELS:
            self.note(f"what was nested deeper than {RESULT_LEVELS} levels was left out", "")
            return "[nested too deep]"
        self.inside.add(id(value))
        try:
            return self.container(value, path)
        except Exception as error:  # noqa: BLE001 - its own methods ran
            self.note(f"a {type(value).__name__[:50]} could not be read ({type(error).__name__[:50]})", path)
            return f"[unreadable {type(value).__name__[:50]}]"
        finally:
            self.inside.discard(id(value))

    def container(self, value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return self.mapping(value, path)
        if isinstance(value, set | frozenset):
            self.note("a set was written as a list", path)
            return self.sequence(sorted(value, key=repr) if len(value) <= self.limit else value, path)
        if isinstance(value, list | tuple | deque):
            return self.sequence(value, path)
        if isinstance(value, type):
            return self.foreign(value, path)
        if hasattr(value, "model_dump"):
            return self.keep(_dumped(value), path)
        if is_dataclass(value):
            return self.mapping({field.name: getattr(value, field.name) for field in fields(value)}, path)
        return self.foreign(value, path)

    def mapping(self, value: Mapping[Any, Any], path: str) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, inner in value.items():
            if self.full:
                break
            self.size += 2
            name = self.key(key, path)
            if name in kept:
                self.note("two keys became the same and one was renamed", path)
                name = next(other for n in range(2, len(kept) + 3) if (other := f"{name} ({n})") not in kept)
            kept[name] = self.keep(inner, f"{path}.{name[:80]}" if path else name[:80])
        return kept

    def key(self, key: Any, path: str) -> str:
        if isinstance(key, Enum):
            key = key.value
        if isinstance(key, str):
            return self.text(key, path)
        if not isinstance(key, int) or isinstance(key, bool):
            self.note("a key that is not text was written as text", path)
        size = self.size
        name = str(self.keep(key, path))
        self.size = size + len(name)
        return name

    def sequence(self, value: Any, path: str) -> list[Any]:
        kept: list[Any] = []
        for index, inner in enumerate(value):
            if self.full:
                break
            kept.append(self.keep(inner, f"{path}[{index}]"))
        return kept

    def foreign(self, value: Any, path: str) -> str:
        self.note(f"a {type(value).__name__[:50]} was written as text", path)
        return self.text(safe_text(repr(value), 1_000), path)


def _dumped(model: Any) -> Any:
    try:
        return model.model_dump(mode="json", by_alias=True, warnings=False)
    except Exception:  # noqa: BLE001 - bytes that are no UTF-8, say: the plain values can still be kept
        return model.model_dump(mode="python", by_alias=True, warnings=False)
