"""Servers side by side: medians over rounds, and ratios of what was measured in the same round."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from measure.figures import number, table

from loadgen.report import Figures


@dataclass(frozen=True)
class Turn:
    """One server in one round: the figures of each point of the sweep, in order."""

    round: int
    server: str
    figures: tuple[Figures, ...]


def order(servers: Sequence[str], round_number: int) -> list[str]:
    """Who comes when: every other round backwards, so that a machine that slows down favours none."""
    return list(servers) if round_number % 2 == 0 else list(reversed(servers))


class Comparison:
    """What the turns show. Every server has had a turn in every round, all with the same points."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self.servers = list(dict.fromkeys(turn.server for turn in turns))
        self.labels = [figures.label for figures in turns[0].figures]

    def medians(self, server: str) -> list[dict[str, float | None]]:
        """Medians over the rounds for each point; latencies in seconds."""
        return [
            {
                "output_tokens_per_second": self._median(server, point, lambda f: f.output_rate),
                "tpot_p50": self._median(server, point, lambda f: _p50(f, "tpot")),
                "ttft_p50": self._median(server, point, lambda f: _p50(f, "ttft")),
            }
            for point in range(len(self.labels))
        ]

    def ratios(self, server: str, base: str) -> list[float | None]:
        """Output tokens/s of `server` over those of `base` for each point: medians of the rounds'."""
        ours, theirs = self._rounds(server), self._rounds(base)
        found = []
        for point in range(len(self.labels)):
            pairs = [
                (ours[index].figures[point].output_rate, theirs[index].figures[point].output_rate)
                for index in ours
            ]
            found.append(
                statistics.median(a / b for a, b in pairs) if all(b for _, b in pairs) else None
            )
        return found

    def as_json(self, bases: Sequence[str]) -> dict[str, Any]:
        return {
            "points": self.labels,
            "medians": {server: self.medians(server) for server in self.servers},
            "ratios": {
                base: {server: self.ratios(server, base) for server in self._others(base)}
                for base in bases
            },
            "turns": [
                {
                    "round": turn.round,
                    "server": turn.server,
                    "figures": [figures.as_json() for figures in turn.figures],
                }
                for turn in self._turns
            ],
        }

    def text(self, bases: Sequence[str]) -> str:
        """Medians as "one / for / each / point", then the ratios."""
        header = ["server", "output tokens/s", "TPOT p50, ms", "TTFT p50, ms"]
        parts = [table(header, [self._row(server) for server in self.servers])]
        for base in bases:
            rows = [[server, *map(number, self.ratios(server, base))] for server in self._others(base)]
            parts.append(table([f"output tokens/s over {base}", *self.labels], rows))
        rounds = 1 + max(turn.round for turn in self._turns)
        parts.append(f"medians of {rounds} rounds, of {' / '.join(self.labels)}")
        return "\n\n".join(parts)

    def _row(self, server: str) -> list[str]:
        medians = self.medians(server)
        columns = (("output_tokens_per_second", 1), ("tpot_p50", 1000), ("ttft_p50", 1000))
        return [server, *(_joined([m[key] for m in medians], scale) for key, scale in columns)]

    def _others(self, base: str) -> list[str]:
        return [server for server in self.servers if server != base]

    def _rounds(self, server: str) -> dict[int, Turn]:
        return {turn.round: turn for turn in self._turns if turn.server == server}

    def _median(
        self, server: str, point: int, value: Callable[[Figures], float | None]
    ) -> float | None:
        values = [value(turn.figures[point]) for turn in self._rounds(server).values()]
        known = [v for v in values if v is not None]
        return statistics.median(known) if known else None


def _p50(figures: Figures, latency: str) -> float | None:
    spread = figures.latencies[latency]
    return spread.p50 if spread else None


def _joined(values: Sequence[float | None], scale: float) -> str:
    return " / ".join(number(None if value is None else value * scale) for value in values)
