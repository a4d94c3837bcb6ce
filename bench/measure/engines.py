"""Engines as a worker makes them, from a worker's own options."""

import argparse
import shlex

from octavo.common.modelfiles import ModelFiles, open_model
from octavo.common.options import add_options, read_options
from octavo.dataplane.engine import Engine
from octavo.dataplane.engines.choice import load_engine
from octavo.dataplane.options import WorkerOptions


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """All options of `octavo worker` that the parser lacks; those of its ports mean nothing here."""
    add_options(parser, WorkerOptions)


def engine_options(values: argparse.Namespace) -> WorkerOptions:
    """The worker's options among the parsed values. Raises OptionError."""
    return read_options(WorkerOptions, values)


def parse_engine_options(text: str) -> WorkerOptions:
    """From a text such as ``--engine torch --dtype float32``; exits with 2 where it is wrong.

    Raises:
        OptionError: values that do not go together.
    """
    parser = argparse.ArgumentParser(prog=f"options {text!r}", add_help=False, allow_abbrev=False)
    add_engine_options(parser)
    return engine_options(parser.parse_args(shlex.split(text)))


def make_engine(options: WorkerOptions) -> tuple[ModelFiles, Engine]:
    """A model, and the engine that a worker with these options would use.

    Raises:
        ModelError: no such model, or its files are unusable.
        EngineError: the engine cannot run here.
    """
    files = open_model(options.model, options.served_model_name)
    return files, load_engine(files, options)


def device_of(engine: Engine) -> str:
    """The kind of device, as the kernels' table names it: ``cpu``, ``cuda``."""
    return engine.describe().device.split(":")[0]
