"""Gateways that are connected, and the requests that they have submitted."""

import time
from dataclasses import dataclass, field

from octavo.controlplane.sequence import RequestId, SequenceGroup
from octavo.proto.session import GatewayBeat, gateway_identity
from octavo.proto.wire import Int32s, int32s


@dataclass
class Gateway:
    """A gateway that holds a lease by its heartbeats."""

    incarnation: int
    model_digest: str  # of the model whose tokens it reads
    last_seen: float = field(default_factory=time.monotonic)
    groups: dict[int, SequenceGroup] = field(default_factory=dict)  # by request number

    @property
    def identity(self) -> bytes:
        return gateway_identity(self.incarnation)

    def missing(self, beat: GatewayBeat) -> tuple[Int32s, Int32s]:
        """(requests, attempts) that the beat lists and that are not held here."""
        pairs = zip(beat.requests.tolist(), beat.attempts.tolist(), strict=True)
        missing = [
            (request, attempt) for request, attempt in pairs if not self._holds(request, attempt)
        ]
        arrays = int32s(missing).reshape(-1, 2)
        return arrays[:, 0], arrays[:, 1]

    def _holds(self, request: int, attempt: int) -> bool:
        group = self.groups.get(request)
        return group is not None and group.attempt >= attempt

    def unwanted(self, beat: GatewayBeat) -> list[SequenceGroup]:
        """Groups that the beat does not list although they were submitted before it."""
        listed = set(beat.requests.tolist())
        return [g for r, g in self.groups.items() if r <= beat.newest and r not in listed]


class Gateways:
    """All gateways, by incarnation."""

    def __init__(self, lease: float) -> None:
        self.lease = lease  # seconds
        self._gateways: dict[int, Gateway] = {}

    def add(self, incarnation: int, model_digest: str) -> Gateway:
        return self._gateways.setdefault(incarnation, Gateway(incarnation, model_digest))

    def get(self, incarnation: int) -> Gateway | None:
        return self._gateways.get(incarnation)

    def remove(self, gateway: Gateway) -> None:
        self._gateways.pop(gateway.incarnation, None)

    def all(self) -> list[Gateway]:
        return list(self._gateways.values())

    def silent(self) -> list[Gateway]:
        """Gateways whose lease has run out."""
        now = time.monotonic()
        return [g for g in self._gateways.values() if now - g.last_seen > self.lease]

    def forget(self, group_id: RequestId, group: SequenceGroup) -> None:
        """Drops an ended group, unless a later attempt has taken its place."""
        gateway = self._gateways.get(group_id.gateway)
        if gateway is not None and gateway.groups.get(group_id.request) is group:
            del gateway.groups[group_id.request]
        group.dissolve()
