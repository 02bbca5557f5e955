from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from toolcalls import lifecycle, tools
from toolcalls.management.commands._names import BY, what_to_brake


class Command(BaseCommand):
    help = "Pause a team, an agent or a tool: nothing new starts."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--team", default="")
        parser.add_argument("--agent", default="")
        parser.add_argument("--tool", default="")

    def handle(self, *args: Any, **options: Any) -> None:
        keys, name = what_to_brake(options)
        if options["tool"] and tools.find(options["tool"]) is None:
            raise CommandError(f"there is no tool {options['tool']!r}")
        changed = lifecycle.pull_brake(**keys, by=BY)
        self.stdout.write(f"{name}: paused" if changed else f"{name}: was paused already")
