"""A whole service in its three processes, from the options of `octavo serve`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from measure.processes import free_ports, octavo_command
from octavo.common.options import add_options, read_options, to_arguments
from octavo.controlplane.options import ControlPlaneOptions
from octavo.dataplane.options import WorkerOptions
from octavo.frontend.options import GatewayOptions


@dataclass(frozen=True)
class Ports:
    """Where the parts of one service listen."""

    gateways: int  # the control plane, for gateways
    workers: int  # the control plane, for workers
    grpc: int
    http: int
    controlplane_probe: int
    worker_probe: int

    @classmethod
    def free(cls) -> "Ports":
        return cls(*free_ports(6))


@dataclass(frozen=True)
class Part:
    """How to start one process and when it counts as started."""

    name: str  # the `octavo` command
    command: Sequence[str]
    port: int  # where its probes answer
    path: str


def add_service_options(parser: argparse.ArgumentParser) -> None:
    """All options of `octavo serve` that the parser lacks; those of ports mean nothing here."""
    for options in (GatewayOptions, ControlPlaneOptions, WorkerOptions):
        add_options(parser, options)


def worker_options(values: argparse.Namespace) -> WorkerOptions:
    """The worker's options among the parsed values. Raises OptionError."""
    return read_options(WorkerOptions, values)


def serve_command(arguments: Sequence[str], ports: Ports) -> list[str]:
    """The command line of `octavo serve` on these ports."""
    flags = {
        "--gateway-port": ports.gateways,
        "--worker-port": ports.workers,
        "--grpc-port": ports.grpc,
        "--http-port": ports.http,
        "--controlplane-probe-port": ports.controlplane_probe,
        "--worker-probe-port": ports.worker_probe,
    }
    return octavo_command("serve", [*arguments, *(f"{flag}={port}" for flag, port in flags.items())])


def service_parts(
    values: argparse.Namespace, ports: Ports, worker_connects_to: int | None = None
) -> list[Part]:
    """The three in the order in which they start; the control plane is ready only with a worker.

    Args:
        worker_connects_to: a port in place of the control plane's own. Raises OptionError.
    """
    controlplane = replace(
        read_options(ControlPlaneOptions, values),
        gateway_port=ports.gateways,
        worker_port=ports.workers,
        controlplane_probe_port=ports.controlplane_probe,
    )
    worker = replace(
        worker_options(values),
        worker_port=worker_connects_to or ports.workers,
        worker_probe_port=ports.worker_probe,
    )
    gateway = replace(
        read_options(GatewayOptions, values),
        gateway_port=ports.gateways,
        grpc_port=ports.grpc,
        http_port=ports.http,
    )
    return [
        _part("controlplane", controlplane, ports.controlplane_probe, "/health"),
        _part("worker", worker, ports.worker_probe, "/ready"),
        _part("gateway", gateway, ports.http, "/ready"),
    ]


def _part(name: str, options: object, port: int, path: str) -> Part:
    return Part(name, octavo_command(name, to_arguments(options)), port, path)
