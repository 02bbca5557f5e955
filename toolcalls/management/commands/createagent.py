from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError, CommandParser

from toolcalls import directory
from toolcalls.effects import Effect
from toolcalls.management.commands._names import BY, team


class Command(BaseCommand):
    help = "Create an agent of a team and print its key, this once."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name")
        parser.add_argument("--team", required=True)
        parser.add_argument("--tool", action="append", required=True, help="name or pattern (* and ?); may be repeated")
        parser.add_argument("--default-effect", default="", choices=["", *Effect])
        parser.add_argument(
            "--owner", default="", help="the user that this agent belongs to, who may not approve its calls"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        owner = None
        if options["owner"]:
            owner = get_user_model().objects.filter(username=options["owner"]).first()
            if owner is None:
                raise CommandError(f"there is no user {options['owner']!r}")
        try:
            _, key = directory.create_agent(
                options["name"],
                team=team(options["team"]),
                tools=options["tool"],
                default_effect=str(options["default_effect"]),
                owner=owner,
                by=BY,
            )
        except directory.Refused as error:
            raise CommandError(str(error)) from None
        self.stdout.write(key)
        self.stderr.write(f"agent {options['name']}: this is its key; it is not shown again")
