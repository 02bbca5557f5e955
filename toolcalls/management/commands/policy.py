import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from toolcalls import intake, lifecycle, tools
from toolcalls.canonical import Malformed, parse
from toolcalls.management.commands._names import BY, team
from toolcalls.models import Team
from toolcalls.policy import InvalidPolicy, resolve


class Command(BaseCommand):
    help = (
        "Show which policy applies to the tools of a team and where each value comes from; store or drop an override."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--team", required=True)
        parser.add_argument("tool", nargs="?", default="", help="one tool; without it, all")
        change = parser.add_mutually_exclusive_group()
        change.add_argument("--set", metavar="JSON", help="store this override, like '{\"requires_approval\": true}'")
        change.add_argument("--drop", action="store_true", help="drop the stored override")

    def handle(self, *args: Any, **options: Any) -> None:
        within, name = team(options["team"]), options["tool"]
        if options["set"] or options["drop"]:
            if not name:
                raise CommandError("name the tool whose override changes")
            self._change(within, name, text=options["set"], drop=options["drop"])
        for each in tools.every():
            if name in ("", each.name):
                self._show(within, each)
        for stored in within.policies.order_by("tool"):
            if tools.find(stored.tool) is None and name in ("", stored.tool):
                self.stdout.write(
                    f"{stored.tool}: no such tool; its stored override is ignored: {json.dumps(stored.values)}"
                )

    def _change(self, within: Team, name: str, *, text: str | None, drop: bool) -> None:
        if drop:
            if not lifecycle.drop_policy(within, name, by=BY):
                raise CommandError(f"there is no stored override for {name!r}")
            return
        found = tools.find(name)
        if found is None:
            raise CommandError(f"there is no tool {name!r}; there are {', '.join(each.name for each in tools.every())}")
        try:
            lifecycle.store_policy(within, found, parse(text or ""), by=BY)
        except (InvalidPolicy, Malformed) as error:
            raise CommandError(f"refused, and nothing was stored: {error}") from None

    def _show(self, within: Team, tool: tools.Tool) -> None:
        stored = within.policies.filter(tool=tool.name).first()
        applies = resolve(
            tool.policy,
            measures=set(tool.measures),
            stored=stored.values if stored else None,
            agent_default=None,
            session_default=None,
            defaults=intake.deployment_defaults(),
        )
        shown = json.loads(applies.text())["values"]
        self.stdout.write(f"{tool.name} {tool.version}")
        for key, source in sorted(applies.sources.items(), key=lambda each: (each[1] == "default", each[0])):
            self.stdout.write(f"  {key:22} {json.dumps(shown[key]):28} {source}")
