"""`manage.py serve`: one machine in earnest, or with a flag one role of a larger set-up."""

import sys
from argparse import ArgumentParser
from typing import Any

import uvicorn
from django.conf import settings
from django.core.management import BaseCommand, CommandError, call_command
from django.db import connections

from dexsite import readiness
from dexsite.celery import app
from dexsite.embedded import server_of
from dexsite.supervisor import Program, ProgramFailedError, Supervisor

ROLES = ("web", "worker", "sweeps")


class Command(BaseCommand):
    """Start web server, worker and sweeps; with --web, --worker or --sweeps only those."""

    help = "Serve: everything on this machine, or only the roles that are named."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--web", action="store_true", help="only the web server, on PORT")
        parser.add_argument("--worker", action="store_true", help="only the worker that runs tools")
        parser.add_argument("--sweeps", action="store_true", help="only the sweeps that settle what is overdue")

    def handle(self, *args: Any, **options: Any) -> None:
        chosen = [role for role in ROLES if options[role]]
        try:
            if not chosen or "web" in chosen:
                readiness.require_free_port(settings.PORT)
            readiness.require_database()
            if not chosen:
                readiness.migrate()
            readiness.require_migrations()
            readiness.require_broker()
            if len(chosen) == 1:
                connections.close_all()
                run_role(chosen[0])
            else:
                serve(*(chosen or ROLES))
        except (readiness.NotReadyError, ProgramFailedError) as problem:
            raise CommandError(str(problem)) from problem


def serve(*roles: str) -> None:
    """Run the roles as programs under one supervisor until a signal ends them."""
    connections.close_all()
    with Supervisor(watch=keep_embedded_server) as supervisor:
        supervisor.start(*(program(role) for role in roles))
        if "web" in roles and not supervisor.stopping:
            print(
                f"dexsite: serving at http://localhost:{settings.PORT}/ (Ctrl-C stops it)",
                file=sys.stderr,
                flush=True,
            )
        supervisor.run()


def program(role: str) -> Program:
    """The program of a role: this very command with the role's flag."""
    return Program(
        name=role,
        command=[sys.executable, settings.BASE_DIR / "manage.py", "serve", f"--{role}"],
        environment={"DEXSITE_ROLE": role},
        directory=settings.BASE_DIR,
        ready=(lambda: readiness.answers(settings.PORT)) if role == "web" else None,
        # A worker finishes what it runs; what a longer tool leaves behind, its lease settles.
        stop_within=settings.GRACE + 5,
    )


def keep_embedded_server() -> None:
    """Start the embedded server again if it was killed; `manage.py` holds and stops it."""
    if settings.EMBEDDED:
        server_of(settings.DATA_DIR).start()


def run_role(role: str) -> None:
    """The role itself, in this process, until a signal ends it."""
    if role == "web":
        run_web()
    elif role == "worker":
        app.worker_main(["--quiet", "worker", "--without-gossip", "--without-mingle", "--without-heartbeat"])
    else:
        call_command("sweep")


def run_web() -> None:
    """Uvicorn on PORT, in this process, until a signal ends it."""
    config = uvicorn.Config(
        "dexsite.asgi:application",
        log_config=None,
        access_log=False,
        server_header=False,
        # An open event stream would otherwise keep a stopping server for ever.
        timeout_graceful_shutdown=max(1, round(settings.GRACE / 2)),
    )
    uvicorn.Server(config).run(sockets=[readiness.listening_socket(settings.PORT)])
