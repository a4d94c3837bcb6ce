"""Prints what Octavo requires, one requirement per line, with the extras named on the command line.

The images install this before the code is there, so that a change of the code leaves it in the cache.
"""

import re
import sys
import tomllib
from pathlib import Path


def requirements(project: dict[str, object], extras: list[str]) -> list[str]:
    """The requirements of the project table; an extra that names others of its own is followed."""
    found = list(_strings(project["dependencies"]))
    optional = project["optional-dependencies"]
    assert isinstance(optional, dict)
    for extra in extras:
        for line in _strings(optional[extra]):
            own = re.fullmatch(rf"{project['name']}\[(.+)\]", line)
            found += requirements(project, own[1].split(",")) if own else [line]
    return list(dict.fromkeys(found))


def _strings(lines: object) -> list[str]:
    assert isinstance(lines, list)
    return [str(line) for line in lines]


if __name__ == "__main__":
    with Path("pyproject.toml").open("rb") as stream:
        print("\n".join(requirements(tomllib.load(stream)["project"], sys.argv[1:])))
