"""The start of a gang: a control plane, and as many workers as it has ranks."""

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from measure.processes import Process, free_ports, octavo_command, running
from measure.services import worker_options
from octavo.common.options import read_options, to_arguments
from octavo.controlplane.options import ControlPlaneOptions


@dataclass(frozen=True)
class GangStart:
    """How long the ranks of a gang took to be ready together, and the most memory of each."""

    form: str  # of the model's files
    ranks: int
    seconds: float
    peak_bytes: Sequence[int]  # by the order of their start


def start_gang(values: argparse.Namespace, form: str, model: str, ranks: int) -> GangStart:
    """Starts the workers at once, beside a control plane that is up, and stops them again.

    Raises:
        StartError: one does not become ready.
        OptionError: the options do not go together.
    """
    gateways, workers, controlplane, *probes = free_ports(3 + ranks)
    options = replace(
        read_options(ControlPlaneOptions, values),
        gateway_port=gateways,
        worker_port=workers,
        controlplane_probe_port=controlplane,
        tensor_parallel=ranks,
    )
    with contextlib.ExitStack() as stack:

        def start(name: str, settings: object) -> Process:
            return stack.enter_context(running(name, octavo_command(name, to_arguments(settings))))

        start("controlplane", options).wait_for(controlplane, "/health", values.timeout)
        own = replace(worker_options(values), worker_port=workers, model=model, tensor_parallel=ranks)
        started = [start("worker", replace(own, worker_probe_port=probe)) for probe in probes]
        seconds = [
            process.wait_for(probe, "/ready", values.timeout)
            for process, probe in zip(started, probes, strict=True)
        ]
        peaks = [process.peak_bytes() for process in started]
    return GangStart(form, ranks, max(seconds), peaks)


def forms_of(names: Sequence[str], folder: Path) -> dict[str, str]:
    """What `--model` is for each form of the demo; safetensors are written to `folder`."""
    models = {"gguf": "demo"}
    if "safetensors" in names:
        from measure.forms import demo_as_safetensors  # loads torch

        models["safetensors"] = str(demo_as_safetensors(folder))
    return {name: models[name] for name in names}
