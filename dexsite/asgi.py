"""The ASGI application: Django's WSGI handler in threads, with waits held outside them, on one port."""

import os

from django import setup

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dexsite.settings")
setup(set_prefix=False)

from toolcalls.api.door import Door  # noqa: E402 - models may be imported only once Django is set up

application = Door()
