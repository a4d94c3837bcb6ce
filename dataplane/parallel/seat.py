"""How a worker of a gang of several ranks learns which shard it is to load."""

import logging

import zmq

from octavo.common.loop_socket import Socket
from octavo.dataplane.plan_loop import RefusedByControlPlane
from octavo.dataplane.stopping import StopSignal
from octavo.proto.session import Join, Refused, Reset, Seat
from octavo.proto.wire import unpack

log = logging.getLogger(__name__)


def take_seat(heart: Socket, join: Join, stop: StopSignal) -> Seat | None:
    """Waits for the control plane's answer to `Join`; None when the stop signal comes first.

    Raises:
        RefusedByControlPlane: there is no seat for this worker, or one that does not exist.
    """
    poller = zmq.Poller()
    poller.register(heart, zmq.POLLIN)
    poller.register(stop.descriptor, zmq.POLLIN)
    while not stop.requested:
        if heart not in dict(poller.poll()):
            stop.clear()
            continue
        message = unpack(heart.recv(), Seat, Refused, Reset)
        if isinstance(message, Refused):
            raise RefusedByControlPlane(message.reason)
        if isinstance(message, Seat):
            return _checked(message, join)
    return None


def _checked(seat: Seat, join: Join) -> Seat:
    if not 0 <= seat.rank < join.tensor_parallel or seat.gang < 0:
        raise RefusedByControlPlane(
            f"it gives rank {seat.rank} of gang {seat.gang}, and --tensor-parallel is "
            f"{join.tensor_parallel}"
        )
    log.info("rank %d of %d in gang %d", seat.rank, join.tensor_parallel, seat.gang)
    return seat
