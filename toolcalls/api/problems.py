"""Errors as problem details (RFC 9457), each with a stable code. Exceptions become responses here and nowhere else."""

from collections.abc import Sequence
from typing import Any

from django.db import InterfaceError, OperationalError
from django.http import Http404, JsonResponse
from django.http.request import HttpRequest
from rest_framework import exceptions, status
from rest_framework.renderers import JSONRenderer
from rest_framework.response import Response

from toolcalls.canonical import Malformed
from toolcalls.intake import NoSuchSession, SessionMismatch, WiderThanAllowed
from toolcalls.lifecycle import WrongState

MEDIA_TYPE = "application/problem+json"


class Problem(exceptions.APIException):
    """An error of the interface: HTTP status, stable code, and what is wrong, in a sentence."""

    def __init__(self, status_code: int, code: str, detail: str, *, errors: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(detail, code)
        self.status_code, self.problem_code, self.errors = status_code, code, list(errors)


TITLES = {
    400: "The request is malformed",
    401: "Authentication is needed",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    406: "Not acceptable",
    409: "Conflict",
    413: "Too large",
    415: "Unsupported media type",
    422: "Cannot be processed",
    429: "Too many requests",
    500: "Internal error",
    503: "Unavailable",
}


def body(status_code: int, code: str, detail: str, *, errors: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Make the JSON of a problem."""
    problem: dict[str, Any] = {
        "type": f"urn:dexsite:problem:{code.lower()}",
        "title": TITLES.get(status_code, "Error"),
        "status": status_code,
        "detail": detail,
        "code": code,
    }
    if errors:
        problem["errors"] = list(errors)
    return problem


NOT_FOUND = "There is nothing here that you may see."


def handle(error: Exception, context: dict[str, Any]) -> Response | None:
    """Turn an exception of a view into a response; DRF calls this. None lets it be a 500."""
    match error:
        case Problem():
            answer = (error.status_code, error.problem_code, str(error.detail), error.errors)
        case Malformed():
            answer = (400, "MALFORMED", error.message, [])
        case NoSuchSession() | Http404() | exceptions.NotFound():
            answer = (404, "NOT_FOUND", NOT_FOUND, [])
        case SessionMismatch():
            answer = (409, "SESSION_MISMATCH", str(error), [])
        case WiderThanAllowed():
            answer = (403, "WIDER_THAN_ALLOWED", str(error), [])
        case WrongState():
            answer = (409, error.code, error.message, [])
        case InterfaceError() | OperationalError():
            answer = (
                503,
                "UNAVAILABLE",
                "The database is away. Whether the request was carried out is in its calls: ask again.",
                [],
            )
        case exceptions.NotAuthenticated():
            answer = (401, "NOT_AUTHENTICATED", "Send a key: Authorization: Bearer <key>.", [])
        case exceptions.AuthenticationFailed():
            answer = (401, "KEY_REFUSED", "This key is unknown, expired or revoked.", [])
        case exceptions.PermissionDenied():
            answer = (403, "FORBIDDEN", str(error.detail), [])
        case exceptions.APIException():
            answer = (error.status_code, str(getattr(error, "default_code", "error")).upper(), str(error.detail), [])
        case _:
            return None
    status_code, code, detail, errors = answer
    response = Response(body(status_code, code, detail, errors=errors), status=status_code, content_type=MEDIA_TYPE)
    if status_code == status.HTTP_401_UNAUTHORIZED:
        response["WWW-Authenticate"] = "Bearer"
    if status_code == status.HTTP_503_SERVICE_UNAVAILABLE:
        response["Retry-After"] = "1"
    response.accepted_renderer = JSONRenderer()
    return response


def answer(status_code: int, code: str, detail: str) -> JsonResponse:
    """Answer with a problem outside any view: an unknown address, or an error that nobody expected."""
    return JsonResponse(body(status_code, code, detail), status=status_code, content_type=MEDIA_TYPE)


def is_api(request: HttpRequest) -> bool:
    """Say whether an address belongs to the API, where every error is JSON."""
    return request.path.startswith("/api/")
