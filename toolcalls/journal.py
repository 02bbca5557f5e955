"""The journal: written with every move, sealed after the commit, verified line by line (behaviour, sections 10 and 12).

A line's text is fixed when it is written. Its seal gives it the next number of its chain and a hash over that text and
the hash before. Sealing follows the commit, so that numbering never puts two moves behind one row; lines are sealed in
order of ID, which is the order of the moves of each call.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, NamedTuple
from uuid import UUID

from django.db import transaction

from toolcalls import sql
from toolcalls.models import Seal, Session, Team, UnsealedLine

SYSTEM = "system"
A_BATCH = 500


@dataclass(frozen=True)
class Line:
    """One line to be written. ``move`` numbers the moves of a call; it is None for policy decisions and notes.

    ``detail`` (reasons, values, evidence) lies beside the line as JSON text; the line holds its hash.
    """

    team: UUID
    event: str
    actor: str
    session: UUID | None = None
    call: UUID | None = None
    move: int | None = None
    source: str = ""
    target: str = ""
    code: str = ""
    attempt: int | None = None
    detail: dict[str, Any] | None = None

    def row(self) -> dict[str, Any]:
        """Give the row as JSON holds it, but for the time, which is the database's."""
        detail = json.dumps(self.detail, ensure_ascii=False, sort_keys=True) if self.detail else None
        return {
            "team_id": self.team,
            "session_id": self.session,
            "call_id": self.call,
            "event": self.event,
            "move": self.move,
            "source": self.source,
            "target": self.target,
            "code": self.code,
            "actor": self.actor,
            "attempt": self.attempt,
            "detail": detail,
            "detail_hash": digest(detail) if detail else "",
        }


_COLUMNS = "team_id, session_id, call_id, event, move, source, target, code, actor, attempt, detail, detail_hash"

INSERT = f"""
    INSERT INTO toolcalls_journalline ({_COLUMNS}, at)
    SELECT {_COLUMNS}, clock_timestamp() FROM ROWS FROM (json_to_recordset(%s) AS (
        team_id uuid, session_id uuid, call_id uuid, event text, move int, source text, target text, code text, actor text,
        attempt int, detail text, detail_hash text
    )) WITH ORDINALITY AS one ({_COLUMNS}, place) ORDER BY place
"""
"""Rows travel as one JSON text: the statement is the same for any number of lines, and there is little to bind."""


def as_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as the JSON that ``json_to_recordset`` reads."""
    return json.dumps(rows, ensure_ascii=False, default=str)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write(lines: Sequence[Line]) -> None:
    """Append lines, inside the transaction of the moves they tell of."""
    sql.run(INSERT, [as_json([line.row() for line in lines])])


def seal(chain: UUID) -> int:
    """Seal what is committed and unsealed of one chain (a session's ID, else a team's), at most A_BATCH lines.

    Returns how many were sealed. Safe in any number at once: the head's row is locked, and a line is sealed once.
    """
    with transaction.atomic():
        table, number, before = _lock_head(chain)
        lines = [Written(*row) for row in sql.run(_UNSEALED, [chain, A_BATCH])]
        if not lines:
            return 0
        hashes = []
        for line in lines:
            number += 1
            before = link(before, number, line)
            hashes.append(before)
        ids = [line.id for line in lines]
        sql.run(_SEAL[table], [chain, number - len(ids), ids, hashes, ids, number, before, chain])
        return len(lines)


def _lock_head(chain: UUID) -> tuple[str, int, str]:
    for table in ("toolcalls_session", "toolcalls_team"):
        found = sql.run(f"SELECT sealed_number, sealed_hash FROM {table} WHERE id = %s FOR NO KEY UPDATE", [chain])
        if found:
            return table, *found[0]
    raise LookupError(f"there is no chain {chain}")


_UNSEALED = """
    SELECT l.id, l.team_id, l.session_id, l.call_id, l.at, l.event, l.move, l.source, l.target, l.code, l.actor, l.attempt, l.detail_hash
    FROM toolcalls_unsealedline u JOIN toolcalls_journalline l ON l.id = u.line_id
    WHERE u.chain = %s ORDER BY l.id LIMIT %s
"""

_SEAL = {
    table: f"""
    WITH sealed AS (
        INSERT INTO toolcalls_seal (line_id, chain, number, hash)
        SELECT line, %s, %s + place, hash FROM unnest(%s::bigint[], %s::text[]) WITH ORDINALITY AS one (line, hash, place)
    ), taken AS (
        DELETE FROM toolcalls_unsealedline WHERE line_id = ANY(%s)
    )
    UPDATE {table} SET sealed_number = %s, sealed_hash = %s WHERE id = %s
    """
    for table in ("toolcalls_session", "toolcalls_team")
}


def seal_waiting(*, chains: int) -> int:
    """Seal what waits, in at most this many chains, those of the oldest lines first. Returns the lines sealed."""
    found = UnsealedLine.objects.order_by("line_id").values_list("chain", flat=True)[: chains * 20]
    return sum(seal(chain) for chain in list(dict.fromkeys(found))[:chains])


@dataclass(frozen=True)
class Broken:
    """The first line at which a chain does not hold, and why."""

    chain: UUID
    line: int
    why: str


@dataclass(frozen=True)
class Head:
    """The end of a chain: what an anchor file keeps outside the database."""

    chain: UUID
    number: int
    hash: str


def verify(anchors: Iterable[Head] = ()) -> Iterator[Broken | Head]:
    """Walk every chain from its first seal to its head; yield the head of each that holds, else its first broken line.

    ``anchors`` are heads kept elsewhere: a chain that no longer passes through its anchor was cut or rewritten.
    """
    kept = {anchor.chain: anchor for anchor in anchors}
    heads = list(Session.objects.values_list("pk", "sealed_number", "sealed_hash").iterator())
    heads += list(Team.objects.values_list("pk", "sealed_number", "sealed_hash"))
    for chain, number, hash_ in heads:
        anchor = kept.pop(chain, None)
        found = _verify_chain(Head(chain, number, hash_), anchor)
        if isinstance(found, Broken):
            # Perhaps it was only sealed on meanwhile: look again while nobody can.
            with transaction.atomic():
                _, newest, its_hash = _lock_head(chain)
                found = _verify_chain(Head(chain, newest, its_hash), anchor)
        yield found
    for missing in kept.values():
        yield Broken(missing.chain, 0, "the whole chain is gone")
    for statement in _BESIDE_THE_CHAINS:
        for chain, line, why in sql.run(statement, []):
            yield Broken(chain, line, why)


_BESIDE_THE_CHAINS = (
    """SELECT coalesce(l.session_id, l.team_id), l.id, 'the line was taken out of the chain'
    FROM toolcalls_journalline l LEFT JOIN toolcalls_seal s ON s.line_id = l.id
        LEFT JOIN toolcalls_unsealedline u ON u.line_id = l.id
    WHERE s.line_id IS NULL AND u.line_id IS NULL ORDER BY l.id""",
    """SELECT c.session_id, coalesce((SELECT max(l.id) FROM toolcalls_journalline l WHERE l.call_id = c.id), 0),
        'call ' || c.id || ' does not stand where its journal says'
    FROM toolcalls_call c
    WHERE NOT EXISTS (SELECT 1 FROM toolcalls_journalline l
        WHERE l.call_id = c.id AND l.move = c.moves AND l.target = c.status
            AND (c.finished_at IS NULL OR l.code = c.code)) ORDER BY c.id""",
    """SELECT c.session_id, (SELECT max(l.id) FROM toolcalls_journalline l WHERE l.call_id = c.id),
        'the arguments or the result of call ' || c.id || ' are not those of its hashes'
    FROM toolcalls_call c
    WHERE c.arguments IS NOT NULL AND encode(sha256(convert_to(c.arguments, 'UTF8')), 'hex') <> c.arguments_hash
        OR c.result IS NOT NULL AND encode(sha256(convert_to(c.result, 'UTF8')), 'hex') <> c.result_hash ORDER BY c.id""",
)
"""What no seal covers: lines outside the chains, and calls that are not what their lines and hashes say."""


def _verify_chain(head: Head, anchor: Head | None) -> Broken | Head:
    number, before = 0, ""
    seals = Seal.objects.filter(chain=head.chain).order_by("number").select_related("line")
    for each in seals.iterator(chunk_size=A_BATCH):
        number += 1
        if each.number != number:
            lost = Seal.objects.filter(chain=head.chain, number=number).values_list("line_id", flat=True).first()
            if lost is not None:
                return Broken(head.chain, lost, "the line is gone")
            return Broken(head.chain, each.line_id, f"seal {number} is missing")
        line = each.line
        if line.detail is not None and digest(line.detail) != line.detail_hash:
            return Broken(head.chain, line.pk, "what lies beside the line was changed")
        before = link(before, number, Written(*attrgetter(*Written._fields)(line)))
        if each.hash != before:
            return Broken(head.chain, line.pk, "the line or its seal was changed")
        if anchor and anchor.number == number and anchor.hash != before:
            return Broken(head.chain, line.pk, "the chain is not the one that was anchored")
    lost = Seal.objects.filter(chain=head.chain, number=number + 1).values_list("line_id", flat=True).first()
    if lost is not None:
        return Broken(head.chain, lost, "the line is gone" if number < head.number else "a seal stands past the head")
    if (number, before) != (head.number, head.hash):
        return Broken(head.chain, 0, f"the chain ends at {number}, its head says {head.number}")
    if anchor and anchor.number > number:
        return Broken(head.chain, 0, f"the chain ends at {number}, the anchor says {anchor.number}")
    return head


class Written(NamedTuple):
    """A line as it is stored, but for what lies beside it: all that its hash covers."""

    id: int
    team_id: UUID
    session_id: UUID | None
    call_id: UUID | None
    at: datetime
    event: str
    move: int | None
    source: str
    target: str
    code: str
    actor: str
    attempt: int | None
    detail_hash: str


def link(before: str, number: int, line: Written) -> str:
    """Give the hash of a line in its place: over the hash before it, its number and its text."""
    fields = [before, number, *line._replace(at=_exact(line.at))]  # type: ignore[arg-type]
    return digest(json.dumps(fields, ensure_ascii=False, default=str))


def _exact(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="microseconds")
