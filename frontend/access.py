"""Who may call a gateway: what the operator says of API keys and certificates."""

import hashlib
import hmac
import logging
import os
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from octavo.common.exposure import check_exposure, is_loopback
from octavo.common.options import OptionError
from octavo.frontend.options import GatewayOptions

log = logging.getLogger("octavo.gateway")

KEYS_VARIABLE = "OCTAVO_API_KEYS"
_MAX_KEYS_BYTES = 1 << 20


class ApiKeys:
    """The keys that clients may use. Only their digests are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def accept(self, authorization: str | None, api_key: str | None) -> bool:
        """Whether `Bearer KEY`, or else a bare key, is one of them.

        The time it takes tells nothing of how much of a key is right, nor of which one.
        """
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            given = api_key or ""
        digest = _digest(given.strip())
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


@dataclass(frozen=True)
class Certificate:
    """Files in PEM: the certificate with those that lead to its issuer, and its private key."""

    cert: Path
    key: Path


@dataclass(frozen=True)
class Access:
    """What the gateway asks of its clients; without either, nothing."""

    keys: ApiKeys | None
    certificate: Certificate | None


def read_access(options: GatewayOptions) -> Access:
    """Reads keys and certificate. Raises OptionError, also where strangers could come in."""
    keys = read_keys(options)
    for flag, host in (("--grpc-host", options.grpc_host), ("--http-host", options.http_host)):
        check_exposure(
            flag,
            host,
            f"the gateway API keys (--api-key-file FILE or {KEYS_VARIABLE})",
            is_protected=bool(keys),
            insecure=options.insecure,
        )
    return Access(ApiKeys(keys) if keys else None, _certificate(options))


def read_keys(options: GatewayOptions) -> list[str]:
    """Every API key that the gateway is given. Raises OptionError."""
    return [*_keys_of_file(options.api_key_file), *_keys_of_environment()]


def warn_of_clear_text(options: GatewayOptions) -> None:
    """Tells the operator where keys and prompts can be read on their way."""
    exposed = [host for host in (options.grpc_host, options.http_host) if not is_loopback(host)]
    if exposed and options.tls_cert is None:
        log.warning(
            "other machines reach this gateway on %s without TLS: keys and prompts can be read; "
            "give it --tls-cert and --tls-key, or put a proxy with TLS before it",
            exposed[0],
        )


def _keys_of_file(name: str | None) -> list[str]:
    if name is None:
        return []
    lines = _read("--api-key-file", Path(name)).decode(errors="replace").splitlines()
    keys = [key for line in lines if (key := line.partition("#")[0].strip())]
    if not keys:
        raise OptionError(f"--api-key-file: {name} has no key; it takes one per line")
    return [_checked(key, f"--api-key-file {name}") for key in keys]


def _keys_of_environment() -> list[str]:
    parts = os.environ.get(KEYS_VARIABLE, "").split(",")
    return [_checked(key, KEYS_VARIABLE) for part in parts if (key := part.strip())]


def _checked(key: str, place: str) -> str:
    if not key.isascii() or not key.isprintable() or " " in key:
        raise OptionError(f"{place}: a key has characters that are not printable ASCII")
    return key


def _certificate(options: GatewayOptions) -> Certificate | None:
    if options.tls_cert is None or options.tls_key is None:
        return None
    certificate = Certificate(Path(options.tls_cert), Path(options.tls_key))
    for flag, path in (("--tls-cert", certificate.cert), ("--tls-key", certificate.key)):
        _read(flag, path)
    try:
        ssl.create_default_context().load_cert_chain(certificate.cert, certificate.key)
    except ssl.SSLError as error:
        raise OptionError(
            f"--tls-cert {certificate.cert} and --tls-key {certificate.key} are not a certificate and "
            f"its key in PEM: {error.reason or error}"
        ) from error
    return certificate


def _read(flag: str, path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(_MAX_KEYS_BYTES)
    except OSError as error:
        raise OptionError(f"{flag}: {path} cannot be read ({error.strerror})") from error
