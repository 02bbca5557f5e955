#!/usr/bin/env python3
"""Django's command line; without a DATABASE_URL, the embedded server runs for as long as the command does."""

import contextlib
import os
import sys

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management import execute_from_command_line

from dexsite.embedded import EmbeddedServerError, server_of

NEED_NO_DATABASE = frozenset("help version check spectacular collectstatic findstatic diffsettings".split())


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dexsite.settings")
    command = sys.argv[1] if len(sys.argv) > 1 else "help"
    # Seen in pg_stat_activity: which role a connection belongs to.
    os.environ.setdefault("DEXSITE_ROLE", command)
    with contextlib.ExitStack() as stack:
        try:
            if settings.EMBEDDED and command not in NEED_NO_DATABASE and not {"-h", "--help"} & set(sys.argv):
                stack.enter_context(server_of(settings.DATA_DIR))
        except (ImproperlyConfigured, EmbeddedServerError) as problem:
            sys.exit(f"dexsite: {problem}")
        execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
