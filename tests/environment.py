"""The environment of the test run: a plugin, since pytest-django reads the settings before any conftest.

Without a DATABASE_URL the tests bring their own server, in a directory of its own.
"""

import os
import shutil
import tempfile
from pathlib import Path

OWN_DATA_DIR = not {"DATABASE_URL", "DATABASE_URL_FILE"} & set(os.environ)

if OWN_DATA_DIR:
    os.environ["DEXSITE_DATA_DIR"] = tempfile.mkdtemp(prefix="dexsite-tests-")
elif not {"SECRET_KEY", "SECRET_KEY_FILE"} & set(os.environ):
    os.environ["SECRET_KEY"] = os.urandom(32).hex()
os.environ.setdefault("DEXSITE_ROLE", "tests")


def pytest_unconfigure() -> None:
    """Remove what the run wrote; its server has ended by now."""
    if OWN_DATA_DIR:
        shutil.rmtree(Path(os.environ["DEXSITE_DATA_DIR"]), ignore_errors=True)
