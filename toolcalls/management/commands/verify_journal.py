import json
from pathlib import Path
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError, CommandParser

from toolcalls.journal import Broken, Head, verify


class Command(BaseCommand):
    help = "Check every hash chain of the journal; name the first broken line of each, and exit 1 if there is one."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--anchor",
            metavar="FILE",
            type=Path,
            help="keep the heads here if the file does not exist; else also check that each chain still passes through them",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        anchor: Path | None = options["anchor"]
        kept = _read(anchor) if anchor and anchor.exists() else []
        heads, broken = [], 0
        for each in verify(kept):
            if isinstance(each, Broken):
                broken += 1
                self.stderr.write(f"chain {each.chain}, line {each.line}: {each.why}")
            else:
                heads.append(each)
        if broken:
            raise CommandError(f"{broken} of {broken + len(heads)} chains are broken", returncode=1)
        if anchor and not kept:
            anchor.write_text(
                "".join(json.dumps({"chain": str(h.chain), "number": h.number, "hash": h.hash}) + "\n" for h in heads)
            )
            self.stdout.write(f"{len(heads)} heads written to {anchor}")
        self.stdout.write(f"{len(heads)} chains hold, {sum(head.number for head in heads)} lines")


def _read(anchor: Path) -> list[Head]:
    try:
        rows = [json.loads(line) for line in anchor.read_text().splitlines()]
        return [Head(UUID(row["chain"]), row["number"], row["hash"]) for row in rows]
    except (ValueError, KeyError, TypeError):
        raise CommandError(f"{anchor} is no file of anchors; nothing was checked") from None
