"""Every setting of the deployment: one file, from the environment, safe by default, checked at start.

Each variable X may also be given as X_FILE, the path of a file.
"""

from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from kombu.entity import Exchange, Queue

from dexsite.embedded import EmbeddedServer
from dexsite.environment import LOCAL_HOSTS, Environment, broker, database, secret_key

BASE_DIR = Path(__file__).resolve().parent.parent
env = Environment()

# -- one machine or many

DATA_DIR = Path(env.text("DEXSITE_DATA_DIR", str(BASE_DIR / "var"))).expanduser().absolute()
DATABASE_URL = env.text("DATABASE_URL")
EMBEDDED = not DATABASE_URL
HOST = env.text("HOST", "127.0.0.1")
PORT = env.whole("PORT", 8000, least=1, most=65535)
# Which part of the deployment this process is: web, worker, sweeps, or the name of a command.
ROLE = env.text("DEXSITE_ROLE", "other")

DEBUG = env.flag("DEBUG", default=False)
SECRET_KEY = secret_key(env.text("SECRET_KEY"), data_dir=DATA_DIR if EMBEDDED else None, debug=DEBUG)
ALLOWED_HOSTS = env.words("ALLOWED_HOSTS", ("localhost", "127.0.0.1", "[::1]"))
CSRF_TRUSTED_ORIGINS = env.words("CSRF_TRUSTED_ORIGINS")
if "*" in ALLOWED_HOSTS and not DEBUG:
    raise ImproperlyConfigured("ALLOWED_HOSTS must name the hosts that are served; * is for DEBUG only")

# -- timings, in seconds

SWEEP_EVERY = env.seconds("SWEEP_EVERY", 1, most=3600)
RING_AGAIN_AFTER = env.seconds("RING_AGAIN_AFTER", 5, most=300)
RING_AGAIN_AT_MOST = 300.0
HEARTBEAT_EVERY = env.seconds("HEARTBEAT_EVERY", 5, most=3600)
WORKER_SILENT_AFTER = env.seconds("WORKER_SILENT_AFTER", 30, most=86_400)
GRACE = env.whole("GRACE", 10, least=1, most=3600)
START_WITHIN = env.whole("START_WITHIN", 900, least=1, most=31_622_400)
APPROVAL_WITHIN = env.whole("APPROVAL_WITHIN", 86_400, least=1, most=31_622_400)
WORKER_SLOTS = env.whole("WORKER_SLOTS", 8, least=1, most=256)
if WORKER_SILENT_AFTER < 2 * HEARTBEAT_EVERY:
    raise ImproperlyConfigured(
        f"WORKER_SILENT_AFTER ({WORKER_SILENT_AFTER:g}) must be at least twice HEARTBEAT_EVERY "
        f"({HEARTBEAT_EVERY:g}): one late heartbeat is no dead worker"
    )

# -- PostgreSQL

LOCK_TIMEOUT = env.seconds("LOCK_TIMEOUT", 10, most=3600)
STATEMENT_TIMEOUT = env.seconds("STATEMENT_TIMEOUT", 30, most=86_400)
IDLE_IN_TRANSACTION_TIMEOUT = env.seconds("IDLE_IN_TRANSACTION_TIMEOUT", 30, most=86_400)

DATABASES = {
    "default": database(
        DATABASE_URL or EmbeddedServer(DATA_DIR).url,
        application_name=f"dexsite {ROLE}",
        # A paused process must not stop a session: its locks end with its statement or its transaction.
        options={
            "lock_timeout": f"{LOCK_TIMEOUT * 1000:.0f}",
            "statement_timeout": f"{STATEMENT_TIMEOUT * 1000:.0f}",
            "idle_in_transaction_session_timeout": f"{IDLE_IN_TRANSACTION_TIMEOUT * 1000:.0f}",
            # The hot statements are prepared and find each row by its key: to plan them anew, or to compile them, costs more than
            # to run them. Workers and sweeps run nothing else, so there a plan made while a table was small must not scan it.
            "plan_cache_mode": "force_generic_plan",
            "jit": "off",
            "enable_seqscan": "off" if ROLE in ("worker", "sweeps") else "on",
        },
    )
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# -- Celery: a message is a doorbell, never the authority to run

_broker = broker(env.text("CELERY_BROKER_URL", "pgmq://"), database=DATABASES["default"])
CELERY_BROKER_URL: str = _broker["broker_url"]
CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, Any] = _broker["broker_transport_options"]
BROKER_IN_DATABASE: bool = _broker["in_database"]

CELERY_BROKER_CONNECTION_TIMEOUT = 1
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None  # a worker outlives any outage of its broker
CELERY_TASK_PUBLISH_RETRY = False  # whoever rings goes on at once; the sweep rings again
CELERY_TASK_IGNORE_RESULT = True
CELERY_RESULT_BACKEND = None  # the result is the row; a stored one costs 1.5 ms and hangs on lost connections
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_SERIALIZER = "json"
CELERY_TASK_DEFAULT_QUEUE = "call_tool"
CELERY_TASK_QUEUES = [
    Queue(name, Exchange(name, type="direct"), routing_key=name) for name in ("call_tool", "call_single_attempt_tool")
]
CELERY_TASK_ROUTES = {
    "toolcalls.call_tool": {"queue": "call_tool"},
    "toolcalls.call_single_attempt_tool": {"queue": "call_single_attempt_tool"},
}
CELERY_TASK_ACKS_LATE = False  # call_tool says otherwise; the claim in the database protects either way
CELERY_TASK_REJECT_ON_WORKER_LOST = False  # a task that kills its process would come back for ever
CELERY_TASK_RETRY_ON_WORKER_LOST = False  # attempts are counted in the database
CELERY_TASK_ACKS_ON_FAILURE_OR_TIMEOUT = True
CELERY_WORKER_POOL = "threads"  # the executor keeps the deadlines itself, and threads share one heartbeat
CELERY_WORKER_CONCURRENCY = WORKER_SLOTS
CELERY_WORKER_PREFETCH_MULTIPLIER = 1  # what a dead worker has fetched stays invisible
CELERY_WORKER_CANCEL_LONG_RUNNING_TASKS_ON_CONNECTION_LOSS = False  # True would kill an effect in its middle
CELERY_WORKER_SOFT_SHUTDOWN_TIMEOUT = GRACE
CELERY_WORKER_SEND_TASK_EVENTS = False
CELERY_WORKER_ENABLE_REMOTE_CONTROL = False  # no pidbox queues: nobody asks, and each costs polls and rows
CELERY_WORKER_REDIRECT_STDOUTS = False
CELERY_TIMEZONE = "UTC"
CELERY_ENABLE_UTC = True

# -- Django

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "rest_framework",
    "drf_spectacular",
    "django_filters",
    "pgtrigger",
    "toolcalls",
    "approvals",
    "dexsite.orders",
    "dexsite",
]
# Where a customer's own apps sit: each app's tools.py is found at the start.
INSTALLED_APPS += env.words("TOOL_APPS")
# The example shop's order service.
ORDERS_URL = env.text("ORDERS_URL", "http://127.0.0.1:8001")

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "dexsite.headers.content_security_policy",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
# What carries a key or a token comes from no browser: no sessions, no forms, no pages.
MIDDLEWARE_FOR_KEYS = ["django.middleware.security.SecurityMiddleware", "dexsite.headers.content_security_policy"]

ROOT_URLCONF = "dexsite.urls"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "/"

LANGUAGE_CODE = "en"
USE_I18N = True
USE_TZ = True
TIME_ZONE = "UTC"

STATIC_URL = "static/"
WHITENOISE_USE_FINDERS = True  # files are served from the apps themselves: there is no build step to forget

# Larger bodies are answered 413 (4-interfaces, "Bodies over 1 MiB").
DATA_UPLOAD_MAX_MEMORY_SIZE = 1024 * 1024

# -- browsers

# Plain HTTP is for this machine; where another host is served, cookies want TLS unless HTTPS=off is said.
HTTPS = env.flag("HTTPS", default=not DEBUG and not set(ALLOWED_HOSTS) <= LOCAL_HOSTS)
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = HTTPS
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
SECURE_SSL_REDIRECT = HTTPS
SECURE_REDIRECT_EXEMPT = [r"^(healthz|readyz|metrics)$"]  # asked from inside, without TLS
SECURE_HSTS_SECONDS = 31_536_000 if HTTPS else 0
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
SECURE_CROSS_ORIGIN_OPENER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
SILENCED_SYSTEM_CHECKS = [
    "security.W005",  # HSTS for subdomains is for the owner of the domain to choose,
    "security.W021",  # and so is the preload list
]

# -- REST

REST_FRAMEWORK: dict[str, Any] = {
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "toolcalls.api.authentication.KeyAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["toolcalls.api.bodies.StrictParser"],
    "EXCEPTION_HANDLER": "toolcalls.api.problems.handle",
    "UNAUTHENTICATED_USER": None,
    "URL_FORMAT_OVERRIDE": None,  # ?format= names a shape of tool definitions
}

SPECTACULAR_SETTINGS: dict[str, Any] = {
    "TITLE": "Dexsite",
    "DESCRIPTION": "The desk and runner that stands between AI agents and the world.",
    "VERSION": "1",
    "SERVE_INCLUDE_SCHEMA": False,
    "OAS_VERSION": "3.1.0",
}

# -- logs: JSON lines on standard error

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"json": {"()": "dexsite.logs.JsonLines"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
    "root": {"handlers": ["stderr"], "level": env.text("LOG_LEVEL", "INFO").upper()},
    "loggers": {
        # Django's own handlers would write each line a second time, as plain text.
        "django": {"handlers": [], "level": "INFO", "propagate": True},
        "django.server": {"handlers": [], "level": "INFO", "propagate": True},
        "httpx": {"level": "WARNING"},
        # One line per failed attempt; whoever wanted the connection says so itself.
        "psycopg.pool": {"level": "ERROR"},
        # Its INFO lines repeat the arguments' representation.
        "celery.worker.strategy": {"level": "WARNING"},
        "celery.app.trace": {"level": "WARNING"},
    },
}
