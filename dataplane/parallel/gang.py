"""How the ranks of a gang meet: a process group for each epoch, made over the store of rank 0."""

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed

from octavo.common.options import OptionError
from octavo.dataplane.models.shard import Shard
from octavo.dataplane.parallel.collectives import (
    TIMEOUT,
    CollectiveError,
    GangCollectives,
    Group,
    first_line,
)
from octavo.proto.session import Reset
from octavo.proto.wire import ProtocolError

log = logging.getLogger(__name__)

MEET_SECONDS = 60.0  # until all ranks must have come
_LOOK_SECONDS = 0.05  # between two looks for interruptions while the ranks meet
_BACKLOG = 128
_torch: Any = torch.distributed  # whose stubs lack most of what is used of it here


class Rendezvous:
    """A store where the ranks of a gang can meet, if this worker has rank 0."""

    def __init__(self, host: str) -> None:
        """
        Args:
            host: an address of this machine, the only one on which the store listens.

        Raises:
            OptionError: it is none.
        """
        listener = _listen(host)
        port = int(listener.getsockname()[1])
        self.address = f"{host}:{port}"
        self._store = _torch.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def _listen(host: str) -> socket.socket:
    listener: socket.socket | None = None
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise OptionError(
            f"--advertise-host {host}: this machine cannot listen there ({error.strerror})"
        ) from error
    return listener


def address_towards(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached: loopback for loopback.

    Raises:
        OptionError: there is no way to it.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise OptionError(
            f"no address of this machine reaches {host} ({error.strerror}): give --advertise-host"
        ) from error


def split_address(rendezvous: str) -> tuple[str, int]:
    """Host and port of `Reset.rendezvous`. Raises ProtocolError."""
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ProtocolError("reset.rendezvous: not host:port")
    return host, int(port)


@dataclass(frozen=True)
class _Meeting:
    """All that a thread needs to make the group of an epoch."""

    shard: Shard
    host: str  # on which this rank listens for the others
    device: str
    prefix: str
    address: tuple[str, int]

    def make(self, result: "queue.SimpleQueue[Any]") -> None:
        """Puts the group into the queue, or the error."""
        try:
            result.put(self._group())
        except Exception as error:  # whatever it is, the main thread reports it
            result.put(error)

    def _group(self) -> Group:
        patience = timedelta(seconds=MEET_SECONDS)
        # Each meeting has a connection of its own, also to this rank's own store: one that waits keeps
        # all others of its connection waiting.
        store = _torch.TCPStore(*self.address, is_master=False, timeout=patience)
        place, shard = _torch.PrefixStore(self.prefix, store), self.shard
        nccl = self.device.startswith("cuda")
        backend = _torch.ProcessGroupNCCL if nccl else _torch.ProcessGroupGloo
        options = backend.Options() if nccl else backend._Options()
        options._timeout = patience
        if not nccl:
            options._threads, options._devices = 1, [backend.create_device(hostname=self.host)]
        group = backend(place, shard.rank, shard.size, options)
        group._set_default_timeout(TIMEOUT)
        made: Group = group
        return made


class Gang:
    """This worker's place in a gang of several ranks. Used by the main thread."""

    def __init__(self, number: int, collectives: GangCollectives, host: str, device: str) -> None:
        """
        Args:
            host: the address of this machine that the other ranks reach.

        Raises:
            OptionError: this machine cannot listen there.
        """
        self.number, self.collectives = number, collectives
        self._host, self._device = host, device
        self._rendezvous = Rendezvous(host)

    @property
    def shard(self) -> Shard:
        """The rank whose weights this worker has."""
        return self.collectives.shard

    @property
    def address(self) -> str:
        """``host:port`` where the gang meets if this worker has rank 0."""
        return self._rendezvous.address

    def leave(self) -> None:
        """Drops the group of the last epoch."""
        self.collectives.leave()

    def join(self, reset: Reset, interrupted: Callable[[], bool]) -> bool:
        """Meets the other ranks; False when `interrupted` says so before they have come.

        The group is made by a thread of its own, since nothing can end its waiting for a peer that
        has stopped. Given up, it ends by itself.

        Raises:
            CollectiveError: they have not come, or something is wrong with the network.
        """
        result: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._meeting(reset).make, args=(result,), daemon=True).start()
        deadline = time.monotonic() + MEET_SECONDS
        while time.monotonic() < deadline:
            try:
                made = result.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if interrupted():
                    return False
                continue
            if isinstance(made, Exception):
                raise self._error(reset, first_line(made)) from made
            self.collectives.enter(made, reset.epoch)
            return True
        raise self._error(reset, f"not all ranks came within {MEET_SECONDS:g} s")

    def _meeting(self, reset: Reset) -> _Meeting:
        return _Meeting(
            shard=self.shard,
            host=self._host,
            device=self._device,
            prefix=f"gang{reset.gang}/epoch{reset.epoch}/",
            address=split_address(reset.rendezvous),
        )

    def _error(self, reset: Reset, reason: str) -> CollectiveError:
        place = f"rank {self.shard.rank} of {self.shard.size}, epoch {reset.epoch}"
        return CollectiveError(f"{place}: meeting at {reset.rendezvous}: {reason}")
