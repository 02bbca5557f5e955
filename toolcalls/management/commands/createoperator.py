from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from toolcalls import directory
from toolcalls.management.commands._names import BY, team


class Command(BaseCommand):
    help = "Make a user an operator of a team; a new user's generated password is printed, this once."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name")
        parser.add_argument("--team", required=True)
        parser.add_argument("--may", required=True, help=f"separated by commas, of: {', '.join(directory.RIGHTS)}")

    def handle(self, *args: Any, **options: Any) -> None:
        may = [right.strip() for right in options["may"].split(",") if right.strip()]
        try:
            _, password = directory.create_operator(options["name"], team=team(options["team"]), may=may, by=BY)
        except directory.Refused as error:
            raise CommandError(str(error)) from None
        if password:
            self.stdout.write(password)
            self.stderr.write(f"operator {options['name']}: this is the password; it is not shown again")
        else:
            self.stderr.write(f"operator {options['name']} existed; the rights are set, the password is as it was")
