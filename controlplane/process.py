"""The control plane's process: starts, ticks, and stops on a signal."""

import asyncio
import logging
import signal

import uvloop
import zmq

from octavo.common.options import OptionError
from octavo.common.probes import ProbeServer
from octavo.controlplane.options import ControlPlaneOptions
from octavo.controlplane.server import ControlPlane

log = logging.getLogger("octavo.controlplane")

_TICK = 0.5  # seconds between looks at leases and heartbeats


async def _serve(options: ControlPlaneOptions) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        control_plane = ControlPlane(options)
        probes = ProbeServer(
            options.controlplane_bind,
            options.controlplane_probe_port,
            lambda: control_plane.is_ready,
            control_plane.metrics.registry,
        )
    except OptionError as error:
        log.error("%s", error)
        return 1
    except (zmq.ZMQError, OSError) as error:
        log.error(
            "cannot listen on %s (--gateway-port %d, --worker-port %d, --controlplane-probe-port %d): "
            "%s; choose free ports",
            options.controlplane_bind,
            options.gateway_port,
            options.worker_port,
            options.controlplane_probe_port,
            error,
        )
        return 1
    log.info(
        "listening on %s: gateways %d, workers %d, probes %d",
        options.controlplane_bind,
        options.gateway_port,
        options.worker_port,
        options.controlplane_probe_port,
    )
    while not stop.is_set():
        control_plane.tick()
        try:
            await asyncio.wait_for(stop.wait(), _TICK)
        except TimeoutError:
            continue
    probes.close()
    control_plane.close()
    return 0


def main(options: ControlPlaneOptions) -> int:
    """Runs the control plane until SIGTERM or SIGINT. Returns the exit status."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(options))
