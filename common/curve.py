"""CURVE keys, by which the planes know one another: files, and what they do to a ZeroMQ socket.

A folder holds one pair for each kind of process, `controlplane`, `worker` and `gateway`: NAME.public
and NAME.secret, each one line of Z85 (https://rfc.zeromq.org/spec/32/). A process needs its own secret
key and the public keys of those it talks to.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from octavo.common.options import OptionError

PAIRS = ("controlplane", "worker", "gateway")
_Z85_LENGTH = 40  # of 32 bytes


class KeysError(Exception):
    """Key files that cannot be written. The text says what to do."""


@dataclass(frozen=True)
class ServerKeys:
    """What a binding socket needs."""

    secret: bytes = field(repr=False)
    allowed: dict[str, bytes]  # the 32 bytes of the public key, by kind of peer
    folder: Path


@dataclass(frozen=True)
class ClientKeys:
    """What a connecting socket needs."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes  # public key of the control plane
    folder: Path

    def use(self, socket: Any) -> None:
        """Makes a socket, which is not connected yet, speak CURVE."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


def server_keys(folder: str | None) -> ServerKeys | None:
    """The control plane's keys; None without a folder. Raises OptionError."""
    if folder is None:
        return None
    path = Path(folder)
    allowed = {name: z85.decode(_read(path, f"{name}.public")) for name in ("worker", "gateway")}
    return ServerKeys(_read(path, "controlplane.secret"), allowed, path)


def client_keys(folder: str | None, name: str) -> ClientKeys | None:
    """The keys of a `worker` or `gateway`; None without a folder. Raises OptionError."""
    if folder is None:
        return None
    path = Path(folder)
    secret = _read(path, f"{name}.secret")
    return ClientKeys(zmq.curve_public(secret), secret, _read(path, "controlplane.public"), path)


def write_keys(folder: Path, *, force: bool = False, if_missing: bool = False) -> list[str]:
    """Makes the pairs and returns their names.

    Args:
        force: replace pairs that are there.
        if_missing: leave whole pairs that are there as they are.

    Raises:
        KeysError: a file is there already, or cannot be written.
    """
    made = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        there = [
            name for name in PAIRS for end in ("secret", "public") if _file(folder, name, end).exists()
        ]
        if there and not force and not if_missing:
            raise KeysError(
                f"{folder} has keys already: --force replaces them (restart every process then), "
                "--if-missing keeps them"
            )
        for name in PAIRS:
            # The public half is written last, so a pair with it is whole.
            if force or there.count(name) < 2:
                _write_pair(folder, name)
                made.append(name)
    except OSError as error:
        raise KeysError(f"{error.filename or folder}: {error.strerror}") from error
    return made


def _file(folder: Path, name: str, end: str) -> Path:
    return folder / f"{name}.{end}"


def _write_pair(folder: Path, name: str) -> None:
    public, secret = zmq.curve_keypair()
    for end, key, mode in (("secret", secret, 0o600), ("public", public, 0o644)):
        path = _file(folder, name, end)
        path.unlink(missing_ok=True)  # so that the mode is ours
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(key + b"\n")


def _read(folder: Path, name: str) -> bytes:
    path = folder / name
    try:
        text = path.read_bytes()[: 2 * _Z85_LENGTH].strip()
    except OSError as error:
        raise OptionError(
            f"--curve-keys: {path} cannot be read ({error.strerror}): make the keys with "
            f"`octavo keygen {folder}`, and give every process the files that it needs"
        ) from error
    try:
        if len(z85.decode(text)) != 32:
            raise ValueError
    except (ValueError, KeyError, IndexError) as error:
        raise OptionError(
            f"--curve-keys: {path} is not a key of {_Z85_LENGTH} Z85 characters"
        ) from error
    return text
