"""What the environment may say, and how a wrong word is refused."""

from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict

from dexsite.environment import Environment, broker, conninfo, database, secret_key

LONG_KEY = "k" * 50


def test_a_variable_may_be_given_as_a_file_and_loses_the_newline_at_its_end(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("$value with a dollar\n")
    assert Environment({"NAME_FILE": str(file)}).text("NAME") == "$value with a dollar"


def test_a_file_that_is_missing_is_named_in_the_error() -> None:
    with pytest.raises(ImproperlyConfigured, match=r"NAME_FILE cannot be read: .*nowhere"):
        Environment({"NAME_FILE": "/nowhere/at/all"}).text("NAME")


def test_an_empty_variable_counts_as_unset() -> None:
    assert Environment({"NAME": "  "}).text("NAME", "default") == "default"


@pytest.mark.parametrize(("word", "value"), [("on", True), ("1", True), ("TRUE", True), ("off", False), ("no", False)])
def test_a_flag_is_on_or_off(word: str, value: bool) -> None:
    assert Environment({"DEBUG": word}).flag("DEBUG", default=not value) is value


@pytest.mark.parametrize("word", ["ture", "2", "-"])
def test_a_misspelled_flag_is_refused(word: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="DEBUG must be on or off"):
        Environment({"DEBUG": word}).flag("DEBUG", default=False)


@pytest.mark.parametrize("word", ["0", "-1", "nan", "inf", "1e99", "soon", "1,5", "0.01"])
def test_a_time_outside_its_bounds_is_refused(word: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"GRACE must be a number of seconds from 0\.05 to 3600"):
        Environment({"GRACE": word}).seconds("GRACE", 10, most=3600)


@given(st.floats(min_value=0.05, max_value=3600))
def test_every_time_within_its_bounds_is_taken(seconds: float) -> None:
    assert Environment({"GRACE": repr(seconds)}).seconds("GRACE", 10, most=3600) == seconds


@pytest.mark.parametrize("word", ["0", "65536", "80a", "-80", "8000.0", "٨٠"])
def test_a_port_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="PORT must be a whole number from 1 to 65535"):
        Environment({"PORT": word}).whole("PORT", 8000, least=1, most=65535)


# -- the secret key


def test_a_missing_key_is_refused_where_several_machines_must_share_it() -> None:
    with pytest.raises(ImproperlyConfigured, match="SECRET_KEY is not set"):
        secret_key("", data_dir=None, debug=False)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ImproperlyConfigured, match="SECRET_KEY is too short"):
        secret_key("changeme", data_dir=None, debug=False)


def test_one_machine_makes_its_key_once_and_keeps_it_to_itself(tmp_path: Path) -> None:
    first = secret_key("", data_dir=tmp_path, debug=False)
    assert len(first) >= 50
    assert secret_key("", data_dir=tmp_path, debug=False) == first
    assert (tmp_path / "secret-key").stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["secret-key"]


def test_a_kept_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    secret_key("", data_dir=tmp_path, debug=False)
    (tmp_path / "secret-key").chmod(0o644)
    with pytest.raises(ImproperlyConfigured, match="can be read by others"):
        secret_key("", data_dir=tmp_path, debug=False)


# -- the database


def test_only_postgresql_is_taken() -> None:
    with pytest.raises(ImproperlyConfigured, match=r"must be postgresql://…, not sqlite://…"):
        database("sqlite:///db.sqlite3", options={}, application_name="x")


@pytest.mark.parametrize("url", ["postgresql://", "postgresql://host", "nonsense"])
def test_a_url_without_a_database_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="DATABASE_URL"):
        database(url, options={}, application_name="x")


def test_a_password_never_stands_in_the_error() -> None:
    with pytest.raises(ImproperlyConfigured) as error:
        database("postgresql://me:hunter2@[::1/shop", options={}, application_name="x")
    assert "hunter2" not in str(error.value)
    # libpq's own error quotes the URL, so it must not be printed as the cause either.
    assert error.value.__suppress_context__
    assert error.value.__cause__ is None


def test_every_connection_has_the_time_limits_and_tls_words_survive() -> None:
    entry = database(
        "postgresql://me:p%40ss%20word@db.example:5433/shop?sslmode=verify-full&options=-c%20lock_timeout%3D7",
        options={"lock_timeout": "10000", "statement_timeout": "30000"},
        application_name="dexsite web",
    )
    assert (entry["NAME"], entry["HOST"], entry["PORT"], entry["USER"]) == (
        "shop",
        "db.example",
        "5433",
        "me",
    )
    assert entry["PASSWORD"] == "p@ss word"
    assert entry["OPTIONS"]["sslmode"] == "verify-full"
    assert entry["OPTIONS"]["application_name"] == "dexsite web"
    # PostgreSQL takes the last: what the URL says wins.
    assert entry["OPTIONS"]["options"] == "-c lock_timeout=10000 -c statement_timeout=30000 -c lock_timeout=7"
    assert entry["ATOMIC_REQUESTS"] is False


def test_a_socket_directory_survives_the_way_to_libpq_and_back() -> None:
    entry = database("postgresql://dexsite@/dexsite?host=%2Fvar%2Frun", options={}, application_name="x")
    parts = conninfo_to_dict(conninfo(entry))
    assert (parts["host"], parts["dbname"], parts["user"]) == ("/var/run", "dexsite", "dexsite")


# -- the broker

DATABASE = database("postgresql://me@/shop?host=%2Frun&sslmode=require", options={}, application_name="x")


def test_the_default_broker_is_the_database_itself_over_its_own_connection_string() -> None:
    settings = broker("pgmq://", database=DATABASE)
    assert settings["in_database"] is True
    options = settings["broker_transport_options"]
    assert options["init_extension"] is False
    assert conninfo_to_dict(options["conn_string"])["host"] == "/run"
    assert conninfo_to_dict(options["conn_string"])["sslmode"] == "require"


def test_a_pgmq_elsewhere_does_not_ring_in_our_transactions() -> None:
    settings = broker("pgmq://me:secret@queue.example/q", database=DATABASE)
    assert settings["in_database"] is False
    assert conninfo_to_dict(settings["broker_transport_options"]["conn_string"])["host"] == "queue.example"


@pytest.mark.parametrize("url", ["redis://localhost/1", "valkey://localhost/1", "amqp://localhost//"])
def test_other_brokers_give_up_at_once(url: str) -> None:
    settings = broker(url, database=DATABASE)
    assert settings["in_database"] is False
    assert settings["broker_transport_options"]["max_retries"] == 0
    assert settings["broker_url"].split(":")[0] in {"redis", "amqp"}


def test_rabbitmq_confirms_what_it_took() -> None:
    assert broker("amqp://localhost//", database=DATABASE)["broker_transport_options"]["confirm_publish"] is True


@pytest.mark.parametrize(
    "url",
    ["filesystem://", "sqla+postgresql://localhost/x", "memory://", "sqs://", "localhost:6379", "db+x://"],
)
def test_transports_that_lose_messages_are_refused_in_one_line(url: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="CELERY_BROKER_URL must be pgmq://") as error:
        broker(url, database=DATABASE)
    assert "\n" not in str(error.value)
