"""`octavo keygen`: the CURVE keys of a service."""

import argparse
import sys
from pathlib import Path

from octavo.common.curve import KeysError, write_keys


def add_keygen_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="where to write them; made if it is not there")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--force", action="store_true", help="replace keys that are there")
    existing.add_argument(
        "--if-missing", action="store_true", help="keep keys that are there and make those that are not"
    )


def run_keygen(args: argparse.Namespace) -> int:
    """Writes the keys. Returns the exit status."""
    try:
        made = write_keys(args.folder, force=args.force, if_missing=args.if_missing)
    except KeysError as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"{args.folder}: made keys for {', '.join(made)}" if made else f"{args.folder}: all keys kept"
    )
    return 0
