"""What the load generator needs of an API."""

from typing import Protocol

from loadgen.records import Record
from loadgen.workload import Request


class Client(Protocol):
    """Sends requests to one server, several at the same time."""

    async def model(self) -> str:
        """The name of the model that requests ask for. Raises RequestError, OSError."""
        ...

    async def generate(self, request: Request, record: Record) -> None:
        """Runs one request to its end and records its deltas. Raises RequestError, OSError."""
        ...

    async def close(self) -> None:
        """Frees connections."""
        ...
