"""The servers of a comparison: where each answers, or how to start it."""

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from measure.processes import free_ports, running
from measure.services import Ports, serve_command

from loadgen.lengths import InputError

PORT, FREE = "{port}", "{free}"


@dataclass(frozen=True)
class Server:
    """One server: exactly one of `url` and `command` is set."""

    name: str
    url: str | None = None  # runs already, and goes on
    command: tuple[str, ...] = ()  # started for each of its turns, stopped afterwards

    @property
    def is_octavo(self) -> bool:
        """Whether the command is Octavo's own."""
        return self.command[:2] == ("octavo", "serve")


def read_server(text: str) -> Server:
    """From ``NAME=URL`` or ``NAME=COMMAND``, see `place`. Raises InputError."""
    name, separator, rest = text.partition("=")
    if not separator or not name.strip() or not rest.strip():
        raise InputError(f"--server: {text!r} is neither NAME=URL nor NAME=COMMAND")
    if rest.startswith(("http://", "https://")):
        return Server(name.strip(), url=rest.strip())
    try:
        command = tuple(shlex.split(rest))
    except ValueError as error:
        raise InputError(f"--server {name}: {error}: {rest!r}") from error
    server = Server(name.strip(), command=command)
    if not server.is_octavo and not any(PORT in word for word in command):
        raise InputError(f"--server {name}: the command does not say where {PORT} goes")
    return server


def place(command: Sequence[str], port: int) -> list[str]:
    """The command with ``{port}`` replaced by `port` and each ``{free}`` by another free one."""
    frees = iter(free_ports(sum(word.count(FREE) for word in command)))
    return [_filled(word.replace(PORT, str(port)), frees) for word in command]


def _filled(word: str, ports: Iterator[int]) -> str:
    while FREE in word:
        word = word.replace(FREE, str(next(ports)), 1)
    return word


@contextlib.contextmanager
def serving(server: Server, timeout: float) -> Iterator[str]:
    """The URL of a server that is ready; it is stopped again if it was started here.

    Raises:
        StartError: its process ended or was not ready within `timeout` seconds.
    """
    if server.url:
        yield server.url
        return
    ports = Ports.free()
    if server.is_octavo:
        command, path = serve_command(server.command[2:], ports), "/ready"
    else:
        command, path = place(server.command, ports.http), "/health"
    with running(server.name, command) as process:
        process.wait_for(ports.http, path, timeout)
        yield f"http://127.0.0.1:{ports.http}"
