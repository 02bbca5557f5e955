"""What nobody but the tool sees: declared sensitive fields, and tokens that show by their shape (behaviour, section 12)."""

import hashlib
import hmac
import json
import re
from collections.abc import Sequence
from typing import Any

from django.conf import settings

from toolcalls.models import Call

MASK = "••••••"
_TOKENS = re.compile(
    r"\b(?:sk|pk|rk)[-_](?:live|test|proj|ant)[-_][A-Za-z0-9_-]{6,}"  # payment and model providers
    r"|\bdx[ao]_[A-Za-z0-9_-]{20,}"  # our own keys
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}"
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"
    r"|(?<=Bearer )[A-Za-z0-9._~+/-]{8,}=*"
    r"|(?<=password=)\S+"
)


def sensitive_fields(call: Call) -> list[str]:
    """Name the fields that the call's frozen policy declares sensitive, as dotted paths."""
    if not call.policy:
        return []
    found: list[str] = json.loads(call.policy)["values"]["sensitive"]
    return found


def masked_text(text: str) -> str:
    """Mask tokens in free text."""
    return _TOKENS.sub(MASK, text)


def masked(value: Any, sensitive: Sequence[str], path: str = "") -> Any:
    """Give a JSON value with sensitive fields (by name anywhere, or by dotted path) and tokens masked."""
    if isinstance(value, dict):
        return {
            masked_text(key): MASK
            if key in sensitive or f"{path}{key}" in sensitive
            else masked(item, sensitive, f"{path}{key}.")
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [masked(item, sensitive, path) for item in value]
    return masked_text(value) if isinstance(value, str) else value


def shown_hash(arguments_hash: str, sensitive: Sequence[str]) -> str:
    """Give the hash of a call's arguments that people and agents see and send back.

    Where a field is sensitive the plain hash would let its value be guessed, so a keyed one stands for it.
    """
    if not arguments_hash or not sensitive:
        return arguments_hash
    return hmac.new(settings.SECRET_KEY.encode(), arguments_hash.encode(), hashlib.sha256).hexdigest()


def shown_operation(operation: str, arguments_hash: str, sensitive: Sequence[str]) -> str:
    """Give an operation's name as it is shown: where it is made of the arguments' hash, of the shown one."""
    return operation.replace(arguments_hash, shown_hash(arguments_hash, sensitive)) if arguments_hash else operation


def hash_of(call: Call) -> str:
    """Give the shown hash of a call's row."""
    return shown_hash(call.arguments_hash, sensitive_fields(call))
