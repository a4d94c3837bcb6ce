"""`octavo serve` and `octavo demo`."""

import argparse
import dataclasses
import logging
import socket
import sys
from contextlib import ExitStack

from octavo.common.options import read_options
from octavo.controlplane.options import ControlPlaneOptions
from octavo.dataplane.options import WorkerOptions
from octavo.frontend.access import read_access, read_keys
from octavo.frontend.options import ClientOptions, GatewayOptions, LocalOptions
from octavo.frontend.supervisor import ChildFailed, ServeOptions, Supervisor

log = logging.getLogger("octavo.serve")

DEMO_PROMPT = "What is the capital of France? Tell me something about it."


def serve_options(args: argparse.Namespace) -> ServeOptions:
    """The options of all processes. Raises OptionError."""
    gateway = read_options(GatewayOptions, args)
    read_access(gateway)  # says now what the gateway would say later
    return ServeOptions(
        controlplane=read_options(ControlPlaneOptions, args),
        worker=read_options(WorkerOptions, args),
        gateway=gateway,
        workers=read_options(LocalOptions, args).workers,
    )


def run_serve(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM. Returns the exit status."""
    supervisor = Supervisor(serve_options(args))
    supervisor.stop_on_signals()
    try:
        with supervisor:
            supervisor.wait_until_ready(args.start_timeout)
            if not supervisor.stopping:
                _print_addresses(supervisor.options.gateway)
            supervisor.run_until_stopped()
    except (ChildFailed, TimeoutError) as error:
        log.error("%s", error)
        return 1
    return 0


def _print_addresses(gateway: GatewayOptions) -> None:
    scheme = "https" if gateway.tls_cert else "http"
    print(
        f"Octavo is ready.\n"
        f"  gRPC  {gateway.grpc_host}:{gateway.grpc_port}   (octavo generate, chat, status)\n"
        f"  HTTP  {scheme}://{gateway.http_host}:{gateway.http_port}/v1   (OpenAI clients)\n"
        f"Ctrl-C stops it.",
        flush=True,
    )


def run_demo(args: argparse.Namespace) -> int:
    """Starts a service on free ports, asks it one question, shows the answer, and stops it."""
    from octavo.frontend.commands import ask

    with ExitStack() as stack:
        ports = [stack.enter_context(_free_port()) for _ in range(6)]
        numbers = [port.getsockname()[1] for port in ports]
    supervisor = Supervisor(_on_ports(serve_options(args), numbers))
    supervisor.stop_on_signals()
    try:
        with supervisor:
            print("starting control plane, worker and gateway ...", file=sys.stderr, flush=True)
            supervisor.wait_until_ready(args.start_timeout)
            if supervisor.stopping:
                return 130
            client = _client_options(supervisor.options.gateway)
            return ask(client, args.prompt, args.max_tokens)
    except (ChildFailed, TimeoutError) as error:
        log.error("%s", error)
        return 1


def _client_options(gateway: GatewayOptions) -> ClientOptions:
    """How to reach a gateway with these options."""
    keys = read_keys(gateway)
    return ClientOptions(
        grpc_host=gateway.grpc_host,
        grpc_port=gateway.grpc_port,
        api_key=keys[0] if keys else None,
        tls_ca=gateway.tls_cert,
    )


def _free_port() -> socket.socket:
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    return holder


def _on_ports(options: ServeOptions, ports: list[int]) -> ServeOptions:
    gateway_port, worker_port, probe_port, worker_probe_port, grpc_port, http_port = ports
    return dataclasses.replace(
        options,
        controlplane=dataclasses.replace(
            options.controlplane,
            gateway_port=gateway_port,
            worker_port=worker_port,
            controlplane_probe_port=probe_port,
        ),
        worker=dataclasses.replace(
            options.worker, worker_port=worker_port, worker_probe_port=worker_probe_port
        ),
        gateway=dataclasses.replace(
            options.gateway, gateway_port=gateway_port, grpc_port=grpc_port, http_port=http_port
        ),
    )
