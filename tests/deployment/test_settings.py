"""The settings as a whole, read in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.conf import settings

SAFE = {"DATABASE_URL": "postgresql://me@localhost/shop", "SECRET_KEY": "k" * 50}


def read(show: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "DJANGO_SETTINGS_MODULE": "dexsite.settings", **variables}
    script = f"from django.conf import settings as s; print({show})"
    return subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=settings.BASE_DIR,
        capture_output=True,
        text=True,
        check=False,
    )


def test_production_with_a_key_and_a_database_starts() -> None:
    assert read("s.DEBUG, s.HTTPS", SAFE).stdout.strip() == "False False"


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"SECRET_KEY": ""}, "SECRET_KEY is not set"),
        ({"ALLOWED_HOSTS": "*"}, "ALLOWED_HOSTS must name the hosts"),
        ({"HEARTBEAT_EVERY": "20", "WORKER_SILENT_AFTER": "30"}, "must be at least twice HEARTBEAT_EVERY"),
        ({"SWEEP_EVERY": "0"}, "SWEEP_EVERY must be a number of seconds"),
        ({"CELERY_BROKER_URL": "filesystem://"}, "CELERY_BROKER_URL must be"),
        ({"DATABASE_URL": "mysql://localhost/x"}, "DATABASE_URL must be postgresql"),
    ],
)
def test_an_unsafe_or_impossible_setting_stops_the_start(variables: dict[str, str], complaint: str) -> None:
    answer = read("s.DEBUG", SAFE | variables)
    assert answer.returncode != 0
    assert complaint in answer.stderr.splitlines()[-1]


def test_manage_py_says_so_in_one_line() -> None:
    environment = {"PATH": os.environ["PATH"], **SAFE, "PORT": "many"}
    answer = subprocess.run(
        [sys.executable, "manage.py", "check"],
        env=environment, cwd=settings.BASE_DIR, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 1
    assert answer.stderr.strip() == "dexsite: PORT must be a whole number from 1 to 65535, not 'many'"


def test_serving_another_host_wants_tls_unless_told_otherwise() -> None:
    shown = "s.SESSION_COOKIE_SECURE, s.CSRF_COOKIE_SECURE, s.SECURE_SSL_REDIRECT, s.SECURE_HSTS_SECONDS > 0"
    public = SAFE | {"ALLOWED_HOSTS": "desk.example"}
    assert read(shown, public).stdout.strip() == "True True True True"
    assert read(shown, public | {"HTTPS": "off"}).stdout.strip() == "False False False False"


def test_one_machine_needs_no_variable_at_all(tmp_path: Path) -> None:
    answer = read("s.EMBEDDED, len(s.SECRET_KEY) > 40", {"DEXSITE_DATA_DIR": str(tmp_path)})
    assert answer.stdout.strip() == "True True"
