from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from toolcalls import directory
from toolcalls.management.commands._names import BY


class Command(BaseCommand):
    help = "Create a team."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name")
        parser.add_argument("--time-zone", default="UTC", help="where the team's day begins, like Europe/Berlin")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            team = directory.create_team(options["name"], time_zone=options["time_zone"], by=BY)
        except directory.Refused as error:
            raise CommandError(str(error)) from None
        self.stdout.write(f"team {team.name}")
