"""Pages by key: a cursor is the sort key of the last row shown, so that a page stays right while rows come and go."""

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

from rest_framework.request import Request

from toolcalls.api.problems import Problem

PAGE, AT_MOST = 50, 200


def size(request: Request) -> int:
    """Read ``limit`` from the query: 1 to 200, by default 50. Raises Problem (400)."""
    asked = request.query_params.get("limit", str(PAGE))
    if not (asked.isascii() and asked.isdigit() and len(asked) <= 3 and 1 <= int(asked) <= AT_MOST):
        raise Problem(400, "MALFORMED", f"limit is a whole number from 1 to {AT_MOST}.")
    return int(asked)


def cursor(*key: str) -> str:
    """Make a cursor from the sort key of the last row of a page."""
    return urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def read(request: Request, *, parts: int) -> list[str] | None:
    """Read ``cursor`` from the query; None on the first page. Raises Problem (400)."""
    asked = request.query_params.get("cursor", "")
    if not asked:
        return None
    try:
        key: Any = json.loads(urlsafe_b64decode(asked + "=" * (-len(asked) % 4)))
    except (ValueError, RecursionError):
        key = None
    if not (isinstance(key, list) and len(key) == parts and all(isinstance(part, str) for part in key)):
        raise Problem(400, "MALFORMED", "This cursor was not made here.")
    return key
