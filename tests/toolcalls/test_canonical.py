"""Strict parsing, the canonical text, and what a tool returned.

Behaviour, section 4; F-17, F-30, F-51, F-63 to F-74.
"""

import json
import unicodedata
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from hashlib import sha256
from math import inf, isfinite, nan
from pathlib import PurePosixPath
from typing import Any
from unittest.mock import ANY
from uuid import UUID

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from toolcalls.canonical import (
    ARGUMENTS_LIMIT,
    MISSING,
    Faulty,
    Malformed,
    canonical_text,
    check_id,
    digest,
    inexact,
    parse,
    parse_arguments,
    parse_body,
    received_text,
    result_text,
    safe_text,
)

DEEP = (33, 101, 20_000)

# Each fault: what stands in the JSON text, and a word of the message that says which it is.
FAULTS = {
    "NaN": ('{"amount":NaN}', "NaN"),
    "Infinity": ('{"amount":Infinity}', "Infinity"),
    "-Infinity": ('{"amount":[-Infinity]}', "-Infinity"),
    "overflow": ('{"amount":1e400}', "overflows"),
    "negative overflow": ('{"amount":-1e309}', "overflows"),
    "overflow by digits": ('{"amount":' + "9" * 400 + ".5}", "overflows"),
    "1,001 digits": ('{"amount":' + "9" * 1001 + "}", "1,000 digits"),
    "1,001 digits below zero": ('{"amount":-' + "9" * 1001 + "}", "1,000 digits"),
    "10,000 digits": ('{"amount":' + "9" * 10_000 + "}", "1,000 digits"),
    "1,001 places": ('{"amount":0.' + "3" * 1001 + "}", "1,000 digits"),
    "an exponent beyond the places": ('{"amount":1e-1001}', "1,000 digits"),
    "an exponent beyond all": ('{"amount":1e-99999999999999999999}', "1,000 digits"),
    "duplicate key": ('{"amount":1,"amount":999}', '"amount" stands twice'),
    "duplicate key, equal values": ('{"amount":1,"amount":1}', "twice"),
    "duplicate key at depth": ('{"a":[{"b":{"c":1,"d":2,"c":3}}]}', '"c" stands twice'),
    "duplicate key, escaped": (r'{"a":1,"\u0061":2}', '"a" stands twice'),
    "U+0000 in a value": (r'{"a":{"note":["x","y\u0000"]}}', "a.note[1] holds U+0000"),
    "U+0000 in a key": (r'{"a\u0000b":1}', "U+0000"),
    "U+0000 behind an escaped backslash": (r'{"a":"\\\u0000"}', "U+0000"),
    "high surrogate": (r'{"a":"\ud83d"}', "U+D83D"),
    "low surrogate": (r'{"a":"\uDE00 x"}', "U+DE00"),
    "surrogates the wrong way round": (r'{"a":"\ude00\ud83d"}', "surrogate"),
    "surrogate in a key at depth": (r'{"a":[{"\ud83d":1}]}', "surrogate"),
    "33 levels of arrays": ('{"a":' + "[" * 32 + "]" * 32 + "}", "32 levels"),
    "33 levels of objects": ('{"a":' * 33 + "1" + "}" * 33, "32 levels"),
    **{f"{n} levels": ('{"a":' + "[" * (n - 1) + "]" * (n - 1) + "}", "32 levels") for n in DEEP},
}
faults = pytest.mark.parametrize(("text", "says"), FAULTS.values(), ids=FAULTS.keys())

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
WHOLES = st.integers() | st.integers(-(10**999), 10**999)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**40), max_value=10**40).filter(
    lambda number: number.adjusted() > -900
)
SCALARS = st.none() | st.booleans() | WHOLES | FLOATS | DECIMALS | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def for_all(*strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return lambda test: settings(deadline=None)(given(*strategies)(test))


def body_with(arguments: str, *, call: str = "", top: str = "") -> bytes:
    return (
        '{"calls":[{"tool_call_id":"c1","tool":"get_order","arguments":{}},'
        f'{{"tool_call_id":"c2","tool":"refund_order","arguments":{arguments}{call}}}]{top}}}'
    ).encode()


def refusal(parse_it: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    with pytest.raises(Malformed) as raised:
        parse_it(*arguments, **named)
    message = raised.value.message
    assert message == str(raised.value)
    assert len(message) <= 500
    assert message.encode(), "a message must be storable"
    assert "\0" not in message
    return message


# Arguments


@faults
def test_a_fault_in_the_string_form_is_refused_with_a_message_that_says_which(text: str, says: str) -> None:
    assert says in refusal(parse_arguments, text)


@faults
def test_a_fault_in_the_object_form_belongs_to_that_call_alone(text: str, says: str) -> None:
    body = parse_body(body_with(text))
    good, bad = (call["arguments"] for call in body["calls"])
    assert good == {}
    assert isinstance(bad, Faulty)
    assert bad.source == text
    assert says in bad.message
    assert refusal(parse_arguments, bad) == bad.message
    assert body["calls"][1]["tool"] == "refund_order"


@faults
def test_a_fault_beside_the_arguments_refuses_the_request(text: str, says: str) -> None:
    assert says in refusal(parse_body, body_with("{}", call=f',"metadata":{text}'))
    assert says in refusal(parse_body, body_with("{}", top=f',"metadata":{text}'))
    assert says in refusal(parse_body, f'{{"arguments":{text}}}'.encode())
    assert says in refusal(parse_body, f'{{"calls":{{"arguments":{text}}}}}'.encode())
    assert says in refusal(parse_body, f'{{"calls":{{"first":{{"arguments":{text}}}}}}}'.encode())


@faults
def test_a_body_without_a_place_for_arguments_refuses_every_fault(text: str, says: str) -> None:
    assert says in refusal(parse_body, text.encode(), arguments=())
    assert says in refusal(parse_body, body_with(text), arguments=())


@pytest.mark.parametrize("blank", ["", "  ", "\n", "\r\n\t ", MISSING])
def test_blank_and_missing_arguments_are_an_empty_object(blank: object) -> None:
    assert parse_arguments(blank) == {}


@pytest.mark.parametrize(
    ("received", "says"),
    [
        (None, "null"),
        ("null", "null"),
        ([], "an array"),
        ("[]", "an array"),
        ('[{"a":1}]', "an array"),
        (5, "a number"),
        ("5", "a number"),
        ("1e-400", "a number"),
        (True, "true or false"),
        ("false", "true or false"),
        ('"{}"', "encoded twice"),
        (json.dumps(json.dumps({"amount": 1})), "encoded twice"),
        ('```json\n{"amount":1}\n```', "fenced"),
        ('  ```\n{"amount":1}\n```', "fenced"),
        ('{"amount":1} and more', "more text"),
        ('{"amount":1}{"amount":2}', "more text"),
        ('{"amount":1}]', "more text"),
        ('{"amount": 99999', "Not valid JSON"),
        ("{'amount': 1}", "Not valid JSON"),
        ('{"amount":1,}', "Not valid JSON"),
        ('{"amount":01}', "Not valid JSON"),
        ('{"a":"line\nbreak"}', "Not valid JSON"),
        ("\ufeff{}", "Not valid JSON"),
        ("\0", "Not valid JSON"),
        ('{"a":"\ud800"}', "surrogate"),
        ({"a": nan}, "nan"),
        ({"a": "x\0"}, "U+0000"),
        ({"a": [{"\ud800": 1}]}, "surrogate"),
        ({"a": 10**1000}, "1,000 digits"),
    ],
)
def test_what_is_no_object_is_refused_with_a_message_that_says_why(received: object, says: str) -> None:
    assert says in refusal(parse_arguments, received)


def test_an_object_and_a_string_that_holds_it_mean_the_same() -> None:
    arguments = {"order_id": "ORD-1001", "amount_cents": 2590, "lines": [{"n": 1}], "gift": None, "ok": True}
    assert parse_arguments(arguments) == arguments
    assert parse_arguments(" " + json.dumps(arguments, indent=2) + "\n") == arguments
    assert parse_body(body_with(json.dumps(arguments)))["calls"][1]["arguments"] == arguments


def test_thirty_two_levels_are_taken_in_either_form() -> None:
    text = '{"a":' + "[" * 31 + "]" * 31 + "}"
    assert canonical_text(parse_arguments(text)) == text
    assert canonical_text(parse_body(body_with(text))["calls"][1]["arguments"]) == text
    assert parse_body(text.encode()) == parse(text)


def test_many_brackets_are_not_many_levels() -> None:
    value = {"a": [[], {}] * 500, "b": "[" * 500, "c": '"' + "{" * 500 + "\\"}
    assert parse_arguments(json.dumps(value)) == value
    assert parse_body(body_with(json.dumps(value)))["calls"][1]["arguments"] == value


@pytest.mark.parametrize("levels", DEEP)
@pytest.mark.parametrize("bracket", ["[", '{"a":', '[{"a":'])
def test_brackets_that_never_close_are_refused_wherever_they_stand(levels: int, bracket: str) -> None:
    assert "32 levels" in refusal(parse_arguments, bracket * levels)
    assert "32 levels" in refusal(parse_body, (bracket * levels).encode())
    refusal(parse_body, body_with(bracket * levels))


@pytest.mark.parametrize("levels", DEEP)
def test_levels_are_not_hidden_by_brackets_in_strings_or_by_closing_first(levels: int) -> None:
    deep = "[" * levels
    for text in ('{"]]]":' + deep, '{"\\"]":' + deep, "]" * levels + deep, '["' + "\\" * 3 + '"]' + deep):
        refusal(parse_arguments, text)
        refusal(parse_body, text.encode())
        refusal(parse_body, body_with(text))


def test_a_string_that_never_ends_is_refused() -> None:
    refusal(parse_arguments, "{" * 40 + '"' + '\\"' * 100_000)
    refusal(parse_body, b"[" * 40 + b'"' + b'\\"' * 100_000 + b"\\")


def test_more_than_256_kib_are_refused_and_256_kib_are_taken() -> None:
    frame = len('{"a":""}')
    fits = {"a": "x" * (ARGUMENTS_LIMIT - frame)}
    larger = {"a": "x" * (ARGUMENTS_LIMIT - frame + 1)}
    wide = {"a": "é" * (ARGUMENTS_LIMIT // 2)}
    assert parse_arguments(fits) == fits
    assert parse_arguments(canonical_text(fits)) == fits
    for value in (larger, wide):
        assert "256 KiB" in refusal(parse_arguments, value)
        assert "256 KiB" in refusal(parse_arguments, canonical_text(value))
    assert "256 KiB" in refusal(parse_arguments, " " * (ARGUMENTS_LIMIT + 1))


def test_escapes_that_only_look_like_faults_are_taken() -> None:
    text = r'{"literal":"\\u0000 \\ud83d","emoji":"\ud83d\ude00","\ud83d\ude00":"é","line":"a\nb\u2028"}'
    assert parse_arguments(text) == {
        "literal": r"\u0000 \ud83d",
        "emoji": "😀",
        "😀": "é",
        "line": "a\nb\u2028",
    }


# Bodies


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "Not valid JSON"),
        (b"null", "null"),
        (b"[]", "an array"),
        (b'"{}"', "a string"),
        (b"{}{}", "more text"),
        (b'{"a":"\xff"}', "UTF-8"),
        (b'{"a":"\xed\xa0\x80"}', "UTF-8"),
        (b"\xff\xfe{\x00}\x00", "UTF-8"),
        (b"\xef\xbb\xbf{}", "Not valid JSON"),
        (b'{"a":"\x00"}', "Not valid JSON"),
        (b'{"tool":"a","tool":"b"}', '"tool" stands twice'),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(raw: bytes, says: str) -> None:
    assert says in refusal(parse_body, raw)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a":1,}',
        '{"a":NaN,}',
        '{"a":NaN',
        "",
        "{]",
        '{"a":1}{"b":2}',
        '{"a":NaN} x',
        '"',
        '{"a":1,"a":2,"b":}',
    ],
)
def test_a_body_that_is_no_json_is_refused_whole_even_if_it_breaks_inside_arguments(arguments: str) -> None:
    refusal(parse_body, body_with(arguments))


def test_the_same_field_twice_in_a_call_refuses_the_request() -> None:
    for twice in ('"arguments":{"a":NaN}', '"arguments":{}', '"tool":"x"', r'"\u0061rguments":{}'):
        assert "twice" in refusal(parse_body, body_with("{}", call="," + twice))
    assert "twice" in refusal(parse_body, body_with('{"a":NaN}', top=',"calls":[]'))


def test_every_faulty_call_of_a_request_is_told_apart() -> None:
    sources = [
        '{"a":NaN}',
        '{ "b" : 1 }',
        r'"\ud800"',
        '[1e400, "]}"]',
        "null",
        '{"c":{"c":{"x":1,"x":1}}}',
        '"text"',
    ]
    calls = ",".join(f'{{"x":[[],{{}}], "argu\\u006dents" : {source} , "y":"{{"}}' for source in sources)
    got = [call["arguments"] for call in parse_body(f'{{"calls":[{calls}]}}'.encode())["calls"]]
    assert [isinstance(one, Faulty) for one in got] == [True, False, True, True, False, True, False]
    assert [one.source for one in got if isinstance(one, Faulty)] == [sources[n] for n in (0, 2, 3, 5)]
    assert [one for one in got if not isinstance(one, Faulty)] == [{"b": 1}, None, "text"]


def test_arguments_may_stand_wherever_a_provider_puts_them() -> None:
    where = (("content", "*", "input"), ("output", "*", "function", "arguments"))
    content = '"content":[{"type":"text"},{"input":{"n":NaN}}]'
    output = '"output":[{"function":{"arguments":{"n":1,"n":2}}}]'
    body = parse_body(f"{{{content},{output}}}".encode(), arguments=where)
    assert body["content"][0] == {"type": "text"}
    assert body["content"][1]["input"].source == '{"n":NaN}'
    assert body["output"][0]["function"]["arguments"].source == '{"n":1,"n":2}'


@for_all(st.lists(st.sampled_from([*'[]{}",:\\ 1', "NaN", r"\u0000", '"a"', '"calls":[', '"arguments":'])))
def test_no_body_whatever_ends_in_anything_but_an_object_or_a_refusal(pieces: list[str]) -> None:
    for raw in ("".join(pieces), '{"calls":[{"arguments":' + "".join(pieces)):
        try:
            body = parse_body(raw.encode())
        except Malformed:
            continue
        json.loads(raw)
        assert isinstance(body, dict)


@for_all(VALUES, VALUES, st.sampled_from(["", "\n", " \t\r"]))
def test_a_faulty_call_changes_nothing_of_its_neighbours(one: Any, other: Any, space: str) -> None:
    first, last = (json.dumps(parse(canonical_text(value)), default=str, indent=1) for value in (one, other))
    calls = [f'{{"n":{first},"arguments":{space}{value}{space}}}' for value in (first, '{"a":NaN}', last)]
    got = parse_body(f'{{"x":{last},"calls":[{",".join(calls)}]}}'.encode())
    assert [call["arguments"] for call in got["calls"]] == [
        parse(first),
        Faulty(ANY, '{"a":NaN}'),
        parse(last),
    ]
    assert [call["n"] for call in got["calls"]] == [parse(first)] * 3
    assert got["x"] == parse(last)


@for_all(st.binary(max_size=200))
def test_no_bytes_whatever_end_in_anything_but_an_object_or_a_refusal(raw: bytes) -> None:
    try:
        body = parse_body(raw)
    except Malformed:
        return
    assert body == json.loads(raw)


# Numbers

NUMBERS = [
    (("1", "1.0", "1e0", "10e-1", "0.1e1", "1.000000000000000000000000"), "1"),
    (("100", "1e2", "1E+2", "100.00"), "100"),
    (("0", "-0", "0.0", "-0.0", "0e5", "0e999999999999999999999", "-0.000e-7"), "0"),
    (("25.90", "25.9", "2590e-2"), "25.9"),
    (("0.30000000000000004",), "0.30000000000000004"),
    (("0.1000000000000000055511151231257827",), "0.1000000000000000055511151231257827"),
    (("1e16", "10000000000000000"), "10000000000000000"),
    (("1e22",), "1" + "0" * 22),
    (("1e23",), "1" + "0" * 23),
    (("1.5e300",), "15" + "0" * 299),
    (("18446744073709551615", "18446744073709551615.0"), "18446744073709551615"),
    (("9007199254740993",), "9007199254740993"),
    (("12345678901234567.89", "12345678901234567.890"), "12345678901234567.89"),
    (("1.0000000000000000000001",), "1.0000000000000000000001"),
    (("999999999999999.9",), "999999999999999.9"),
    (("0.000001", "1e-6"), "0.000001"),
    (("0.0000001", "1e-7"), "1e-7"),
    (("-1.25e-9", "-125e-11"), "-1.25e-9"),
    (("5e-324",), "5e-324"),
    (("1e-400", "0.1e-399"), "1e-400"),
    (("-1.50e-400",), "-1.5e-400"),
    (("9" * 1000,), "9" * 1000),
    (("-" + "9" * 1000,), "-" + "9" * 1000),
    (("0." + "3" * 1000,), "0." + "3" * 1000),
]


@pytest.mark.parametrize(("spellings", "text"), NUMBERS, ids=[spellings[0][:24] for spellings, _ in NUMBERS])
def test_a_number_has_one_text_however_it_is_spelled(spellings: tuple[str, ...], text: str) -> None:
    for spelling in spellings:
        assert canonical_text(parse(spelling)) == text
        assert canonical_text(parse_arguments(f'{{"n":{spelling}}}')) == f'{{"n":{text}}}'


def test_different_numbers_have_different_texts() -> None:
    texts = [text for _, text in NUMBERS]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1"),
        (-0.0, "0"),
        (0.1 + 0.2, "0.30000000000000004"),
        (1e16, "10000000000000000"),
        (1e22, "1" + "0" * 22),
        (1e23, "1" + "0" * 23),
        (1.5e300, "15" + "0" * 299),
        (1e-7, "1e-7"),
        (1.5e-5, "0.000015"),
        (Decimal("25.90"), "25.9"),
        (Decimal("1E+2"), "100"),
        (Decimal("-0.00"), "0"),
        (Decimal("1E-400"), "1e-400"),
    ],
)
def test_a_python_number_has_the_text_of_its_shortest_spelling(value: float | Decimal, text: str) -> None:
    assert canonical_text(value) == text


@pytest.mark.parametrize(
    ("spelling", "kind"),
    [("1", int), ("1.0", int), ("1e22", int), ("25.9", float), ("5e-324", float), ("1e-400", Decimal)],
)
def test_a_number_is_held_in_the_type_that_keeps_it(spelling: str, kind: type) -> None:
    assert type(parse(spelling)) is kind


def test_a_strict_model_gets_the_numbers_it_asks_for() -> None:
    whole, real = TypeAdapter(int), TypeAdapter(float)
    for spelling in ("2590", "2590.0", "2.59e3"):
        assert whole.validate_python(parse(spelling), strict=True) == 2590
        assert whole.validate_json(canonical_text(parse(spelling)), strict=True) == 2590
    for spelling in ("25.90", "25.9", "1e-400", '"2590"', "true", "2590.00000000000000000000001"):
        with pytest.raises(ValidationError):
            whole.validate_python(parse(spelling), strict=True)
    for spelling in ("1", "1.0", "25.90", "0.1000000000000000055511151231257827"):
        assert real.validate_python(parse(spelling), strict=True) == float(spelling)


def test_a_number_that_a_float_would_change_is_named() -> None:
    assert inexact({"a": [1, 25.9, 10**400, "x"], "b": {"c": None}}) == ""
    assert inexact(parse('{"items":[{"price":1e-400}]}')) == "items[0].price"
    assert inexact(parse('{"a":{"b":0.10000000000000000001}}')) == "a.b"
    assert inexact(parse("[1,[0.10000000000000000001]]")) == "[1][0]"
    assert inexact({"a": Decimal("25.90")}) == ""


@pytest.mark.parametrize(
    "value", [nan, inf, -inf, Decimal("NaN"), Decimal("-Infinity"), Decimal("sNaN"), 10**1000, -(10**1000)]
)
def test_a_number_without_a_text_is_refused(value: object) -> None:
    refusal(canonical_text, value)
    refusal(canonical_text, {"a": [value]})


@pytest.mark.parametrize("value", ["1E+1000", "1E-1001", "1E+999999", "1E-999999", "0." + "0" * 4500 + "1"])
def test_a_decimal_with_too_many_digits_is_refused(value: str) -> None:
    assert "1,000 digits" in refusal(canonical_text, Decimal(value))


# The canonical text


@for_all(VALUES)
def test_the_text_of_the_parsed_text_is_the_text(value: Any) -> None:
    text = canonical_text(value)
    parsed = parse(text)
    assert canonical_text(parsed) == text
    assert parse(canonical_text(parsed)) == parsed
    assert parse_body(b'{"calls":[{"arguments":' + text.encode() + b"}]}")["calls"][0]["arguments"] == parsed


@for_all(
    st.recursive(
        st.none() | st.booleans() | WHOLES | TEXTS,
        lambda i: st.lists(i) | st.dictionaries(TEXTS, i),
        max_leaves=20,
    )
)
def test_a_value_without_fractions_survives_as_it_is(value: Any) -> None:
    assert parse(canonical_text(value)) == value


@for_all(FLOATS)
def test_a_float_survives_as_the_same_float(value: float) -> None:
    assert float(parse(canonical_text(value))) == value


@for_all(DECIMALS)
def test_a_decimal_survives_exactly(value: Decimal) -> None:
    assert Decimal(canonical_text(value)) == value
    assert Decimal(canonical_text(parse(str(value).replace("E", "e")))) == value


@for_all(DECIMALS | FLOATS | WHOLES, DECIMALS | FLOATS | WHOLES)
def test_two_numbers_have_one_text_exactly_if_they_are_equal(one: Any, other: Any) -> None:
    def meaning(number: Any) -> Decimal:
        return Decimal(repr(number)) if isinstance(number, float) else Decimal(number)

    assert (canonical_text(one) == canonical_text(other)) == (meaning(one) == meaning(other))


@for_all(
    st.builds(
        "{}{}{}".format,
        st.integers(),
        st.just("") | st.integers(0).map(".{}".format) | st.integers(0).map(".000{}00".format),
        st.just("") | st.integers(-400, 310).map("e{}".format) | st.integers(0, 30).map("E+{}".format),
    )
)
def test_a_spelling_keeps_its_exact_meaning(spelling: str) -> None:
    exact = Decimal(spelling)
    assume(isfinite(float(spelling)))
    assert Decimal(canonical_text(parse(spelling))) == exact


@for_all(st.dictionaries(TEXTS, SCALARS, max_size=8), st.randoms(use_true_random=False))
def test_the_order_of_keys_and_white_space_do_not_matter(value: dict[str, Any], random: Any) -> None:
    text = canonical_text(value)
    items = list(value.items())
    random.shuffle(items)
    assert canonical_text(dict(items)) == text
    spaced = " { " + " , ".join(f"{canonical_text(k)} :\n{canonical_text(v)}" for k, v in items) + "\t} "
    assert canonical_text(parse(spaced)) == text


def test_keys_are_sorted_by_code_point_and_characters_stay_as_they_are() -> None:
    value = {"é": 1, "z": 2, "Z": 3, "\uffff": 4, "😀": 5, "": 6, "a": {"b": [], "a": {}}}
    assert canonical_text(value) == '{"":6,"Z":3,"a":{"a":{},"b":[]},"z":2,"é":1,"\uffff":4,"😀":5}'


def test_spellings_of_a_character_are_one_text_but_nfc_and_nfd_stay_different() -> None:
    composed, split = unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é")
    assert canonical_text(parse(r'{"a":"\u00e9\/"}')) == canonical_text({"a": composed + "/"})
    assert canonical_text({"a": composed}) != canonical_text({"a": split})
    assert canonical_text(parse(canonical_text({composed: 1, split: 2}))) == canonical_text({composed: 1, split: 2})


@pytest.mark.parametrize("value", [True, 1, "1", [1], {"1": 1}, None, "", [], {}, False, 0, "null", "true"])
def test_values_of_different_types_have_different_texts(value: object) -> None:
    others = [True, 1, "1", [1], {"1": 1}, None, "", [], {}, False, 0, "null", "true"]
    texts = [canonical_text(other) for other in others]
    assert texts.count(canonical_text(value)) == 1


def test_what_parsing_would_refuse_has_no_canonical_text() -> None:
    deep: Any = 1
    for _ in range(33):
        deep = [deep]
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    for value in (deep, {"a": deep}, cycle, "x\0", {"\0": 1}, "\ud800", ["é\udfff"]):
        refusal(canonical_text, value)
    assert canonical_text(deep[0]) == "[" * 32 + "1" + "]" * 32


@pytest.mark.parametrize("value", [{1: 2}, {None: 1}, {"a": {1}}, b"x", datetime(2026, 1, 1, tzinfo=UTC), object()])
def test_a_type_that_json_does_not_have_is_a_programming_error(value: object) -> None:
    with pytest.raises(TypeError):
        canonical_text(value)


def test_names_that_are_text_or_numbers_by_inheritance_have_the_text_of_their_value() -> None:
    class Currency(StrEnum):
        BRL = "BRL"

    assert canonical_text({"currency": Currency.BRL, "pair": (1, 2)}) == '{"currency":"BRL","pair":[1,2]}'


def test_a_digest_is_the_sha256_of_the_utf8_text() -> None:
    assert digest('{"a":"é"}') == sha256('{"a":"é"}'.encode()).hexdigest()


# What was received


def arguments_of(raw: str) -> Any:
    return parse_body(body_with(raw))["calls"][1]["arguments"]


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ('{"n":1}', '{"n":1.0}'),
        ('{"n":1}', '{"n":1e0}'),
        ('{"n":100}', '{"n":1e2}'),
        ('{"n":0}', '{"n":-0.0}'),
        ('{"n":25.90}', '{ "n" : 25.9 }'),
        ('{"a":1,"b":2}', '{"b":2,\n"a":1}'),
        ('{"a":"é"}', r'{"a":"\u00e9"}'),
        ('{"a":NaN}', ' {"a":NaN} '),
        ('"{\\"n\\":1}"', r'"{\u0022n\u0022:1}"'),
        ("null", " null"),
    ],
)
def test_the_same_request_sent_again_has_the_same_received_text(first: str, again: str) -> None:
    assert received_text(arguments_of(first)) == received_text(arguments_of(again))


def test_different_requests_have_different_received_texts() -> None:
    raws = [
        '{"n":1}',
        '{"n":2}',
        '{"n":"1"}',
        '"{\\"n\\":1}"',
        '"{\\"n\\":1.0}"',
        '"{\\"n\\": 1}"',
        '""',
        '"  "',
        "{}",
    ]
    raws += [
        "null",
        "[]",
        '"null"',
        "true",
        '{"n":NaN}',
        '{"n":1e400}',
        '{"n":1,"n":1}',
        r'{"n":"\u0000"}',
        r'"\u0000"',
    ]
    raws += ['{"n":"é"}', '{"n":"e\u0301"}']
    texts = [received_text(arguments_of(raw)) for raw in raws] + [received_text(MISSING)]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    "received",
    [nan, {"a": {1, 2}}, {"a": "\0\ud800"}, "\0\ud800", {1: [inf]}, object, [[[]] * 3] * 3, b"\xff"],
)
def test_a_received_text_can_always_be_stored(received: object) -> None:
    text = received_text(received)
    assert "\0" not in text
    assert text.encode()


# IDs


@pytest.mark.parametrize("value", ["a", "call_x|fc_y", "functions.search:0", "!~", "x" * 200, "-", "%00", '"<b>"'])
def test_an_id_that_providers_send_is_taken_as_it_is(value: str) -> None:
    assert check_id(value, what="tool_call_id") == value


@pytest.mark.parametrize(
    "value",
    [
        *("", " ", " a", "a ", "a b", "a/b", "/", "a\n", "a\0", "\x7f", "é", "\uff52", "\ud800"),
        *("x" * 201, "x" * 5000, 5, 5.0, True, None, ["a"], {"a": 1}, b"a"),
    ],
)
def test_an_id_that_is_anything_else_is_refused_and_never_converted(value: object) -> None:
    assert refusal(check_id, value, what="tool_call_id").startswith("tool_call_id must be")


# Safe text


@for_all(st.text(st.characters(exclude_categories=[])), st.none() | st.integers(0, 60))
def test_a_safe_text_can_be_stored_and_keeps_to_its_limit(value: str, limit: int | None) -> None:
    text = safe_text(value, limit)
    assert "\0" not in text
    text.encode()
    assert limit is None or len(text) <= limit
    if "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value):
        assert text == value or (limit is not None and len(value) > limit)


def test_what_cannot_be_stored_becomes_a_visible_escape() -> None:
    assert safe_text("a\0b\ud83dc😀") == r"a\u0000b\ud83dc😀"
    assert safe_text(r"a\u0000b") == r"a\u0000b"


def test_a_cut_text_says_how_much_is_missing() -> None:
    assert safe_text("x" * 2000, 100) == "x" * 75 + "… [1,925 more characters]"
    assert len(safe_text("x" * 2000, 100)) == 100
    assert safe_text("x" * 100, 100) == "x" * 100
    cut = safe_text("\0" * 100, 100)
    kept, _, rest = cut.partition("…")
    assert kept == r"\u0000" * (len(kept) // 6)
    assert rest == f" [{100 - len(kept) // 6} more characters]"


# Results

LIMIT = 64 * 1024


@dataclass
class Line:
    sku: str
    quantity: int


class Colour(Enum):
    RED = "red"


class Receipt(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    number: UUID
    at: datetime
    amount: Decimal
    lines: list[Line]


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("secret")

    @property
    def model_dump(self) -> object:
        raise RuntimeError("secret")


def kept(value: object, *, limit: int = LIMIT) -> tuple[Any, str]:
    text, warning = result_text(value, limit=limit)
    assert len(text.encode()) <= limit
    assert "\0" not in text
    assert "\0" not in warning
    warning.encode()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse), warning


@pytest.mark.parametrize(
    "value",
    [None, True, 5, 25.9, "é\n\u2028", [], {}, {"a": [1, {"b": None}]}, [[]] * 40, {"literal": r"\u0000"}],
)
def test_a_json_result_is_kept_as_it_is_without_a_warning(value: object) -> None:
    assert kept(value) == (value, "")


def test_what_an_author_naturally_returns_is_kept_without_a_warning() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    number = UUID(int=7)
    lines = [Line("A", 1), Line("B", 2)]
    plain = [{"sku": "A", "quantity": 1}, {"sku": "B", "quantity": 2}]
    receipt = Receipt(number=number, at=at, amount=Decimal("25.90"), lines=lines)
    assert kept(receipt) == (
        {"number": str(number), "at": "2026-01-02T03:04:05Z", "amount": "25.90", "lines": plain},
        "",
    )
    assert kept({"at": at, "day": date(2026, 1, 2), "for": timedelta(seconds=90), "id": number, 5: "five"}) == (
        {"at": at.isoformat(), "day": "2026-01-02", "for": "0:01:30", "id": str(number), "5": "five"},
        "",
    )
    assert kept([lines, (1, 2), deque([3]), Colour.RED, Decimal("25.90"), PurePosixPath("/a")]) == (
        [plain, [1, 2], [3], "red", "25.90", "/a"],
        "",
    )


@pytest.mark.parametrize(
    ("value", "expected", "says"),
    [
        ({"x": nan}, {"x": "NaN"}, "NaN or Infinity was written as text (at x)"),
        ([inf, -inf], ["Infinity", "-Infinity"], "Infinity"),
        ({"b": b"\xff"}, {"b": "base64:/w=="}, "bytes"),
        ({"b": b"caf\xc3\xa9"}, {"b": "café"}, "bytes"),
        ({"s": "\ud800"}, {"s": r"\ud800"}, "surrogate"),
        (
            {"z": ["a\0b"]},
            {"z": [r"a\u0000b"]},
            "U+0000 or a lone surrogate was written as a visible escape (at z[0])",
        ),
        ({"k\0": 1}, {r"k\u0000": 1}, "U+0000"),
        ({1: "a", "1": "b"}, {"1": "a", "1 (2)": "b"}, "renamed"),
        ({(1, 2): "a", None: "b"}, {"[1, 2]": "a", "None": "b"}, "a key that is not text"),
        ({"c": 1 + 2j}, {"c": "(1+2j)"}, "a complex was written as text"),
        ({3, 1, 2}, [1, 2, 3], "a set was written as a list"),
        (10**1000, hex(10**1000), "hexadecimal"),
        (Receipt, repr(Receipt), "was written as text"),
    ],
)
def test_what_json_does_not_have_is_kept_as_safe_text_with_a_warning(
    value: object, expected: object, says: str
) -> None:
    got, warning = kept(value)
    assert got == expected
    assert says in warning


def test_a_result_that_contains_itself_is_kept_up_to_there() -> None:
    cycle: dict[str, Any] = {"id": 5}
    cycle["children"] = [cycle]
    got, warning = kept(cycle)
    assert got == {"id": 5, "children": ["[contains itself]"]}
    assert "contains itself" in warning
    shared = [1]
    assert kept([shared, shared]) == ([[1], [1]], "")


def test_a_result_nested_without_end_is_kept_up_to_its_limit() -> None:
    deep: Any = "core"
    for _ in range(20_000):
        deep = [deep]
    got, warning = kept({"ok": True, "deep": deep})
    assert got["ok"] is True
    assert "nested deeper" in warning


def test_a_part_that_cannot_be_read_does_not_take_the_rest_with_it() -> None:
    got, warning = kept({"ok": True, "bad": Rude(), "after": 1})
    assert got == {"ok": True, "bad": "[unreadable Rude]", "after": 1}
    assert "Rude" in warning
    assert "secret" not in warning


def test_a_model_with_what_json_does_not_have_is_still_kept() -> None:
    class Raw(BaseModel):
        body: bytes
        rate: float
        text: str

    got, warning = kept(Raw.model_construct(body=b"\xff", rate=nan, text="\ud800"))
    assert got == {"body": "base64:/w==", "rate": "NaN", "text": r"\ud800"}
    assert "bytes" in warning


def test_the_reported_result_is_kept_in_one_piece() -> None:
    value = {"when": datetime(2026, 1, 1, tzinfo=UTC), "x": nan, "b": b"\xff", "s": "\ud800", "z": "\0"}
    got, warning = kept(value)
    assert got == {
        "when": "2026-01-01T00:00:00+00:00",
        "x": "NaN",
        "b": "base64:/w==",
        "s": r"\ud800",
        "z": r"\u0000",
    }
    assert all(word in warning for word in ("NaN", "bytes", "surrogate"))


@pytest.mark.parametrize(
    "value",
    [
        "x" * 50_000_000,
        {"id": 5, "text": "é" * LIMIT},
        ['"\n\x01' * LIMIT],
        list(range(1_000_000)),
        dict.fromkeys(range(100_000), "v"),
        b"\xff" * 1_000_000,
        {"k" * 1_000_000: 1},
        1 << 10_000_000,
        [[["😀" * 10] * 100] * 100] * 100,
    ],
    ids=["text", "wide", "escapes", "list", "object", "bytes", "key", "number", "nested"],
)
def test_a_result_that_is_too_large_is_cut_and_stays_valid_json(value: object) -> None:
    for limit in (200, 1000, LIMIT):
        got, warning = kept(value, limit=limit)
        assert got.keys() == {"truncated", "at_least_bytes", "preview"}
        assert got["truncated"] is True
        assert got["at_least_bytes"] > limit
        assert got["preview"].endswith("…")
        assert len(got["preview"]) > limit // 20
        assert "too large" in warning


def test_a_limit_too_small_for_any_preview_still_gives_valid_json() -> None:
    text, warning = result_text("x" * 100, limit=1)
    assert json.loads(text)["truncated"] is True
    assert warning


def test_a_result_of_exactly_the_limit_is_kept_whole() -> None:
    text = "x" * 498
    assert kept(text, limit=500) == (text, "")
    assert "too large" in kept(text + "x", limit=500)[1]
    numbers = [0] * 300
    assert kept(numbers, limit=len(canonical_text(numbers))) == (numbers, "")


@for_all(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(st.characters(exclude_categories=[]))
        | st.binary()
        | st.decimals()
        | st.datetimes()
        | st.sets(st.integers()),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.text(st.characters(exclude_categories=[])) | st.integers() | st.none(), inner)
        ),
        max_leaves=20,
    ),
    st.integers(200, 2000),
)
def test_no_result_whatever_raises_or_breaks_its_limit(value: object, limit: int) -> None:
    kept(value, limit=limit)
