"""The `octavo` command. Each subcommand imports only what it needs."""

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import Any

from octavo.common.lifetime import die_with_parent
from octavo.common.logs import set_up_logging
from octavo.common.options import OptionError, add_options, read_options

Run = Callable[[argparse.Namespace], int]


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand. Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    die_with_parent()
    parser = argparse.ArgumentParser(
        prog="octavo", description="Serves large language models with paged KV memory."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, _) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    chosen = parser.parse_args(arguments[:1]).command
    sub = argparse.ArgumentParser(
        prog=f"octavo {chosen}",
        description=COMMANDS[chosen][0],
        allow_abbrev=False,
    )
    try:
        run = COMMANDS[chosen][1](sub)
        return run(sub.parse_args(arguments[1:]))
    except OptionError as error:
        sub.error(str(error))


def _serve(parser: argparse.ArgumentParser) -> Run:
    from octavo.frontend.serve import run_serve

    _add_serve_options(parser)
    return _logged("serve", run_serve)


def _demo(parser: argparse.ArgumentParser) -> Run:
    from octavo.frontend.serve import DEMO_PROMPT, run_demo

    parser.add_argument("prompt", nargs="?", default=DEMO_PROMPT, help="what to ask the model")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of the answer at most")
    _add_serve_options(parser)
    parser.set_defaults(log_level="warning")
    return _logged("demo", run_demo)


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    from octavo.controlplane.options import ControlPlaneOptions
    from octavo.dataplane.options import WorkerOptions
    from octavo.frontend.options import GatewayOptions, LocalOptions

    for options in (LocalOptions, GatewayOptions, ControlPlaneOptions, WorkerOptions):
        add_options(parser, options)


def _controlplane(parser: argparse.ArgumentParser) -> Run:
    from octavo.controlplane.options import ControlPlaneOptions

    def run(options: ControlPlaneOptions) -> int:
        from octavo.controlplane.process import main as run_controlplane

        return run_controlplane(options)

    return _process("controlplane", parser, ControlPlaneOptions, run)


def _worker(parser: argparse.ArgumentParser) -> Run:
    from octavo.dataplane.options import WorkerOptions

    def run(options: WorkerOptions) -> int:
        from octavo.dataplane.worker import main as run_worker

        return run_worker(options)

    return _process("worker", parser, WorkerOptions, run)


def _gateway(parser: argparse.ArgumentParser) -> Run:
    from octavo.frontend.options import GatewayOptions

    def run(options: GatewayOptions) -> int:
        from octavo.frontend.gateway import main as run_gateway

        return run_gateway(options)

    return _process("gateway", parser, GatewayOptions, run)


def _process(
    name: str, parser: argparse.ArgumentParser, options: type[Any], run: Callable[[Any], int]
) -> Run:
    add_options(parser, options)
    return _logged(name, lambda args: run(read_options(options, args)))


def _logged(name: str, run: Run) -> Run:
    def run_with_log(args: argparse.Namespace) -> int:
        set_up_logging(name, args.log_level)
        return run(args)

    return run_with_log


def _command(name: str, module: str = "commands") -> Callable[[argparse.ArgumentParser], Run]:
    def prepare(parser: argparse.ArgumentParser) -> Run:
        commands = importlib.import_module(f"octavo.frontend.{module}")
        getattr(commands, f"add_{name}_arguments")(parser)
        run: Run = getattr(commands, f"run_{name}")
        return run

    return prepare


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], Run]]] = {
    "serve": ("start a whole service on this machine", _serve),
    "demo": ("start a service, ask it one question, and stop it", _demo),
    "controlplane": ("start a control plane", _controlplane),
    "worker": ("start a worker", _worker),
    "gateway": ("start a gateway", _gateway),
    "keygen": ("make the keys by which the processes know one another", _command("keygen", "keygen")),
    "generate": ("continue a text, over gRPC", _command("generate")),
    "chat": ("talk to the model, over gRPC", _command("chat")),
    "status": ("show gangs, pools and queues", _command("status")),
}


if __name__ == "__main__":
    sys.exit(main())
