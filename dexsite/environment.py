"""Reading and checking the environment; each variable X may be given as X_FILE, the path of a file."""

import contextlib
import math
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg
from django.core.exceptions import ImproperlyConfigured
from environ.fileaware_mapping import FileAwareMapping
from psycopg.conninfo import conninfo_to_dict, make_conninfo

WORDS_FOR_TRUE = frozenset({"1", "true", "yes", "on"})
WORDS_FOR_FALSE = frozenset({"0", "false", "no", "off"})
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]", "::1", ".localhost"})


class Environment:
    """The environment, read by functions that refuse what they cannot use in one clear line."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._variables = FileAwareMapping(dict(os.environ if variables is None else variables))

    def text(self, name: str, default: str = "") -> str:
        """The variable without surrounding blanks (files end in a newline); empty is unset."""
        try:
            value = self._variables.get(name, "")
        except (OSError, UnicodeDecodeError) as error:
            raise ImproperlyConfigured(f"{name}_FILE cannot be read: {error}") from error
        return str(value).strip() or default

    def flag(self, name: str, *, default: bool) -> bool:
        """True for 1, true, yes, on and false for 0, false, no, off."""
        value = self.text(name).lower()
        if value in WORDS_FOR_TRUE | WORDS_FOR_FALSE:
            return value in WORDS_FOR_TRUE
        if value:
            raise ImproperlyConfigured(f"{name} must be on or off, not {value!r}")
        return default

    def words(self, name: str, default: tuple[str, ...] = ()) -> list[str]:
        """The variable's comma-separated parts."""
        value = self.text(name)
        return [word.strip() for word in value.split(",") if word.strip()] if value else list(default)

    def seconds(self, name: str, default: float, *, least: float = 0.05, most: float = 31_536_000) -> float:
        """A time in seconds within the bounds, both included."""
        value = self.text(name)
        try:
            seconds = float(value) if value else float(default)
        except ValueError:
            seconds = math.nan
        if not least <= seconds <= most:
            raise ImproperlyConfigured(f"{name} must be a number of seconds from {least:g} to {most:g}, not {value!r}")
        return seconds

    def whole(self, name: str, default: int, *, least: int, most: int) -> int:
        """A whole number within the bounds, both included."""
        value = self.text(name)
        number = int(value) if value.isascii() and value.isdigit() else None if value else default
        if number is None or not least <= number <= most:
            raise ImproperlyConfigured(f"{name} must be a whole number from {least} to {most}, not {value!r}")
        return number


def secret_key(given: str, *, data_dir: Path | None, debug: bool) -> str:
    """The key that signs sessions: the given one, else one made once and kept in `data_dir`.

    `data_dir` is None where the database is not the embedded one: several machines must share one key, so
    nobody may invent it there. Rule: interfaces, "Production refuses to start on an unsafe default".
    """
    if given:
        if len(given) < 32 and not debug:
            raise ImproperlyConfigured("SECRET_KEY is too short: give at least 32 random characters")
        return given
    if data_dir is not None:
        return _kept_secret(data_dir / "secret-key")
    if debug:
        return "django-insecure-for-debugging-only"
    raise ImproperlyConfigured("SECRET_KEY is not set (or SECRET_KEY_FILE): give at least 32 random characters")


def _kept_secret(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        # Written aside and linked into place: of several processes that start at once, one makes it for all.
        descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=".secret-key-")
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(50))
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
        Path(unfinished).unlink()
    if path.stat().st_mode & 0o077:
        raise ImproperlyConfigured(f"{path} can be read by others: chmod 600 it, or remove it to get a new one")
    return path.read_text().strip()


def database(url: str, *, options: Mapping[str, str], application_name: str) -> dict[str, Any]:
    """Django's entry for a PostgreSQL at `url`, a libpq URL or connection string.

    `options` are server settings for every connection; those that the URL itself sets win.
    """
    if "://" in url and url.split("://", 1)[0] not in {"postgres", "postgresql"}:
        raise ImproperlyConfigured(f"DATABASE_URL must be postgresql://…, not {url.split('://', 1)[0]}://…")
    try:
        parts = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    except psycopg.ProgrammingError:
        # Not as its cause: libpq quotes the URL, with its password.
        raise ImproperlyConfigured(
            "DATABASE_URL is not a PostgreSQL URL (postgresql://user:password@host/name)"
        ) from None
    if not parts.get("dbname"):
        raise ImproperlyConfigured("DATABASE_URL names no database (postgresql://user:password@host/name)")
    settings = " ".join(f"-c {name}={value}" for name, value in options.items())
    own = {
        "application_name": application_name,
        "connect_timeout": "5",
        **{name: value for name, value in parts.items() if name not in {"dbname", "user", "password", "host", "port"}},
        "options": f"{settings} {parts.get('options', '')}".strip(),
    }
    return {
        "ENGINE": "dexsite.postgresql",
        "NAME": parts["dbname"],
        "USER": parts.get("user", ""),
        "PASSWORD": parts.get("password", ""),
        "HOST": parts.get("host", ""),
        "PORT": parts.get("port", ""),
        "OPTIONS": own,
        "ATOMIC_REQUESTS": False,
        "CONN_MAX_AGE": None,
        "CONN_HEALTH_CHECKS": True,
    }


def conninfo(database: Mapping[str, Any]) -> str:
    """The libpq connection string of an entry of `DATABASES`."""
    named = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    parts = {word: database.get(key) or None for word, key in named.items()}
    return make_conninfo(**{**database.get("OPTIONS", {}), **parts})


def broker(url: str, *, database: Mapping[str, Any]) -> dict[str, Any]:
    """Celery's broker settings for `url`: `pgmq://` (the same database), `redis://…` or `amqp://…`.

    Transports that were seen to lose messages are refused (docs/architecture.md, "Brokers").
    """
    scheme = url.split(":", 1)[0].lower()
    if scheme == "pgmq":
        elsewhere = url.partition("://")[2]
        return {
            # For people who read the banner: the connection string below is what counts.
            "broker_url": f"pgmq://localhost/{database['NAME']}" if not elsewhere else url,
            "broker_transport_options": PGMQ
            | NO_RETRIES
            | {
                # libpq's own form: a URL with a socket's directory would be read as localhost.
                "conn_string": make_conninfo(f"postgresql://{elsewhere}", connect_timeout=1)
                if elsewhere
                else make_conninfo(conninfo(database), application_name="dexsite broker")
            },
            "in_database": not elsewhere,
        }
    if scheme in {"redis", "rediss", "valkey", "valkeys"}:
        url, options = url.replace("valkey", "redis", 1), REDIS
    elif scheme in {"amqp", "amqps", "pyamqp"}:
        options = RABBITMQ
    else:
        raise ImproperlyConfigured(
            f"CELERY_BROKER_URL must be pgmq:// (the default), redis:// or amqp://; {scheme}: loses messages"
        )
    return {
        "broker_url": url,
        "broker_transport_options": options | NO_RETRIES,
        "in_database": False,
    }


# Whoever rings goes on at once when the broker is away: the sweep rings again.
NO_RETRIES: dict[str, Any] = {"max_retries": 0, "interval_start": 0, "interval_step": 0, "interval_max": 0}

REDIS: dict[str, Any] = {
    # A bell that a dead worker had fetched comes back after this; nothing waits for it, so it may be long.
    "visibility_timeout": 3600,
    "unacked_restore_interval": 5,
    "unacked_restore_throttle": 1,
    # A request that rings must not hang on a broker that is away: together well under a second.
    "socket_connect_timeout": 0.4,
    "socket_timeout": 0.4,
    "socket_keepalive": True,
    # A half-open link is noticed instead of waited on.
    "health_check_interval": 10,
}

RABBITMQ: dict[str, Any] = {
    # Without confirms a killed RabbitMQ lost every message it had accepted.
    "confirm_publish": True,
    "read_timeout": 5,
    "write_timeout": 1,
    "connect_timeout": 0.4,
}


PGMQ: dict[str, Any] = {
    # PGMQ is installed by a migration, as SQL: no extension files and no superuser are needed.
    "init_extension": False,
    # A read returns at once and NOTIFY wakes the worker; the interval is only the net below it.
    "wait_time_seconds": 0,
    "use_notify": True,
    "notify_throttle_interval_ms": 0,
    "polling_interval": 1,
    "visibility_timeout": 3600,
    "pool_size": 4,
    # How long a publisher waits for a connection when the server is away.
    "pool_timeout": 0.8,
}
