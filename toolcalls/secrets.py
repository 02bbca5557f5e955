"""Secrets of 256 random bits: shown once, stored hashed."""

import hashlib
import secrets

AGENT_PREFIX = "dxa_"
TOKEN_PREFIX = "dxo_"  # noqa: S105 - not a secret


def new_secret(prefix: str) -> tuple[str, str, str]:
    """Make a secret. Gives (secret, its digest, a hint that may be shown)."""
    secret = prefix + secrets.token_urlsafe(32)
    return secret, digest_of(secret), secret[:10]


def digest_of(secret: str) -> str:
    """Hash a secret as it is stored; it has 256 random bits, so a plain hash cannot be searched."""
    return hashlib.sha256(secret.encode()).hexdigest()
