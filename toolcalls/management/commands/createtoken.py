from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError, CommandParser

from toolcalls import directory
from toolcalls.management.commands._names import BY


class Command(BaseCommand):
    help = "Create a personal token with which an operator uses the REST API, and print it, this once."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("user")

    def handle(self, *args: Any, **options: Any) -> None:
        user = get_user_model().objects.filter(username=options["user"]).first()
        if user is None:
            raise CommandError(f"there is no user {options['user']!r}")
        self.stdout.write(directory.create_token(user, by=BY))
        self.stderr.write(f"token of {options['user']}: it is not shown again")
