"""Foreign text as a person can safely read it: nothing hidden, nothing reordered, nothing cut (behaviour, section 11).

What an agent, a tool or a person wrote becomes inert HTML here. Characters that cannot be seen, or that change the
direction of others, stand as escapes; each value is isolated, so that Hebrew stays readable and touches nothing beside
it. The stored text is never changed.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

from toolcalls.canonical import canonical_text

MIXED_SHOWN = 12
"""How many words of mixed alphabets a warning names; all of them are marked in the text."""

TIMES = "\N{MULTIPLICATION SIGN}"
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_RUN = re.compile(r"([^ -~])\1*| {5,}", re.DOTALL)
_WORD = re.compile(r"[^\W_]+(?:[.@][^\W_]+)*")
# The closing quote is optional: a broken text would be tried from each of its quotes.
_STRING = re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)("?)', re.DOTALL)

# Letters and marks that show as nothing although Unicode does not call them format characters: fillers, the blank Braille
# pattern, the grapheme joiner, variation selectors.
_BLANKS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
_SELECTORS = (range(0x180B, 0x1810), range(0xFE00, 0xFE10), range(0xE0100, 0xE01F0))

# Alphabets whose letters can pass for one another's. Hebrew or Japanese beside Latin is ordinary writing.
_ALIKE = frozenset(
    "LATIN CYRILLIC GREEK ARMENIAN CHEROKEE COPTIC LISU DESERET CANADIAN MATHEMATICAL FULLWIDTH KELVIN".split()
)


@lru_cache(maxsize=4096)
def _unseen(character: str) -> bool:
    """Say whether a character shows as nothing, as a mere blank, or moves others: Cc, Cf, Zl, Zp and their like."""
    return (
        not character.isprintable()
        or character in _BLANKS
        or any(ord(character) in selectors for selectors in _SELECTORS)
    )


def _code(character: str) -> str:
    number = ord(character)
    return _SHORT.get(character) or (f"\\u{number:04x}" if number < 0x10000 else f"\\u{{{number:x}}}")


def _piece(run: re.Match[str]) -> str:
    character, count = run[0][0], len(run[0])
    if character != " " and not _unseen(character):
        return run[0]
    code = "space" if character == " " else _code(character)
    shown = f'<span class="esc">{code}{f" {TIMES}{count}" if count > 1 else ""}</span>'
    return f"{shown}<br>" if character == "\n" else shown


@lru_cache(maxsize=4096)
def _alphabet(letter: str) -> str:
    name = unicodedata.name(letter, "").partition(" ")[0]
    return name if name in _ALIKE else ""


def _mixes(word: str) -> bool:
    return not word.isascii() and len({found for letter in word if (found := _alphabet(letter))}) > 1


def _marked(word: re.Match[str]) -> str:
    if not _mixes(word[0]):
        return word[0]
    most, _ = Counter(found for letter in word[0] if (found := _alphabet(letter))).most_common(1)[0]
    letters = (f"<b>{each}</b>" if _alphabet(each) not in ("", most) else each for each in word[0])
    return f'<span class="mixed">{"".join(letters)}</span>'


def _inert(text: str) -> str:
    """Give text as HTML with nothing hidden. Entities and the tags put in are ASCII, so each pass meets the text alone."""
    escaped = str(escape(text))
    if not text.isascii():
        escaped = _WORD.sub(_marked, escaped)
    return _RUN.sub(_piece, escaped)


def visible(text: str) -> SafeString:
    """Give a text of any origin as inert HTML, isolated from what stands beside it."""
    return mark_safe(f"<bdi>{_inert(text)}</bdi>")  # noqa: S308 - escaped above


def exact(text: str) -> SafeString:
    """Give a JSON text as it is, character by character, each of its strings isolated."""
    pieces, end = [], 0
    for string in _STRING.finditer(text):
        pieces += [_inert(text[end : string.start()]), f'"<bdi>{_inert(string[1])}</bdi>{string[2]}']
        end = string.end()
    return mark_safe("".join([*pieces, _inert(text[end:])]))  # noqa: S308 - escaped above


def tree(value: Any) -> SafeString:
    """Give a JSON value as the rows of a table, one for each key, the whole of it."""
    if not isinstance(value, dict | list):
        return _table([_row("", _leaf(value), 0)])
    return _table(_rows(value, 0) if value else [_row("", _leaf(value), 0)])


def _table(rows: Any) -> SafeString:
    return mark_safe(f'<table class="tree"><tbody>{"".join(rows)}</tbody></table>')  # noqa: S308 - of escaped parts


def _rows(value: Any, depth: int) -> Iterator[str]:
    items = value.items() if isinstance(value, dict) else ((f"[{number}]", each) for number, each in enumerate(value))
    for key, inner in items:
        if isinstance(inner, dict | list) and inner and not _is_flat(inner):
            yield _row(key, f'<span class="of">{_count(inner)}</span>', depth)
            yield from _rows(inner, depth + 1)
        else:
            yield _row(key, _leaf(inner), depth)


def _row(key: str, value: str, depth: int) -> str:
    return f'<tr class="d{min(depth, 8)}"><th scope="row">{visible(key)}</th><td>{value}</td></tr>'


def _is_flat(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(each, dict | list) for each in value)


def _count(value: Any) -> str:
    what = "key" if isinstance(value, dict) else "item"
    return f"{len(value)} {what}{'' if len(value) == 1 else 's'}"


def _leaf(value: Any) -> str:
    match value:
        case str():
            return f'<q class="text">{visible(value)}</q>' if value else '<span class="of">empty text</span>'
        case dict() | list() if not value:
            return f'<span class="of">empty {"object" if isinstance(value, dict) else "list"}</span>'
        case list():
            return '<span class="of">, </span>'.join(map(_leaf, value))
    return f'<span class="atom">{escape(canonical_text(value))}</span>'


@dataclass(frozen=True)
class Unseen:
    """A character that a reader would not have seen: its escape, its name in Unicode, how often it stands there."""

    code: str
    name: str
    count: int


@dataclass(frozen=True)
class Oddities:
    """What a person should know of a text before believing it."""

    unseen: list[Unseen]
    mixed: list[SafeString]
    mixed_more: int

    def __bool__(self) -> bool:
        return bool(self.unseen or self.mixed)


def oddities(text: str) -> Oddities:
    """Find the unseen characters of a text, and its words that mix alphabets whose letters look alike."""
    if text.isascii() and text.isprintable():
        return Oddities([], [], 0)
    unseen = Counter(each for each in text if not " " <= each <= "~" and _unseen(each))
    mixed = list(dict.fromkeys(word for word in _WORD.findall(text) if _mixes(word)))
    return Oddities(
        [Unseen(_code(each), unicodedata.name(each, "no name"), count) for each, count in unseen.most_common()],
        [visible(word) for word in mixed[:MIXED_SHOWN]],
        max(0, len(mixed) - MIXED_SHOWN),
    )
