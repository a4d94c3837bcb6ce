"""A quarter of an hour of mixed load, cancels, kills and pauses: nothing leaks, no answer is wrong.

Two workers, each a gang, and two gateways share one control plane. First there is load alone, in
which memory must stay flat; then processes are killed or paused at random, and every answer must still
be that of a quiet day. `OCTAVO_SOAK_MINUTES` makes it shorter or longer.
"""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from parts import Parts
from service import wait_for
from shared_files import golden_or_none
from undisturbed import Case, run_undisturbed

from octavo.frontend.client import Client

pytestmark = [pytest.mark.system, pytest.mark.soak, pytest.mark.timeout(7200)]

MINUTES = float(os.environ.get("OCTAVO_SOAK_MINUTES", "15"))
CLIENTS = 12
CANCELLED = 0.25  # share of the streams that their clients leave
PAUSE = 6.0  # seconds, longer than any timeout below
OPTIONS: dict[str, dict[str, object]] = {
    "controlplane": {"heartbeat_timeout": 3, "plan_timeout": 5, "lease": 4},
    "worker": {"num_kv_blocks": 40, "swap_blocks": 16, "threads": 1},
    "gateway": {"log_level": "warning"},
}
SHARES = (0.2, 0.4, 0.4)  # of the time: warm-up, load alone, load with kills


@dataclass
class Tally:
    """What happened. Client threads add to it under its lock."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **counts: int) -> None:
        with self.lock:
            self.counts.update(counts)

    def fail(self, what: str) -> None:
        with self.lock:
            self.wrong.append(what)


def beam_cases() -> list[tuple[dict[str, Any], list[list[int]]]]:
    """Requests of beam searches and their results, where the reference data is there."""
    return [
        (
            {
                "prompt": line["prompt_token_ids"],
                "use_beam_search": True,
                "n": line["num_beams"],
                "max_tokens": line["max_new_tokens"],
                "length_penalty": line["length_penalty"],
                "early_stopping": str(line["early_stopping"]).lower(),
            },
            line["sequences"],
        )
        for line in golden_or_none("beam")[:4]
    ]


def one_client(
    parts: Parts, cases: list[Case], seed: int, goes_on: Callable[[], bool], tally: Tally
) -> None:
    chance = random.Random(seed)
    targets = parts.targets()[:: chance.choice((1, -1))]
    beams = beam_cases()
    with Client(targets, patience=90) as client:
        while goes_on():
            try:
                if beams and chance.random() < 0.1:
                    search(client, *chance.choice(beams), tally)
                else:
                    sample(client, chance.choice(cases), chance, tally)
            except Exception as error:
                tally.fail(f"{type(error).__name__}: {error}")


def sample(client: Client, case: Case, chance: random.Random, tally: Tally) -> None:
    leaves_after = chance.randrange(1, 12) if chance.random() < CANCELLED else None
    tokens: list[int] = []
    stream = client.generate(case.prompt, timeout=240, **case.sampling)
    for count, delta in enumerate(stream, start=1):
        tokens += delta.token_ids
        if count == leaves_after:
            stream.close()
            break
    wanted = case.tokens[: len(tokens)] if leaves_after else case.tokens
    if tuple(tokens) != wanted:
        tally.fail(f"{case.sampling}: {tokens} for {wanted}")
    tally.add(tokens=len(tokens), **{"cancelled" if leaves_after else "completed": 1})


def search(client: Client, asked: dict[str, Any], wanted: list[list[int]], tally: Tally) -> None:
    asked = dict(asked)
    found: dict[int, list[int]] = {}
    for delta in client.generate(asked.pop("prompt"), timeout=240, **asked):
        found.setdefault(delta.index, []).extend(delta.token_ids)
    if [found[index] for index in sorted(found)] != wanted:
        tally.fail(f"beam search: {found} for {wanted}")
    tally.add(searches=1, tokens=sum(map(len, found.values())))


def load(parts: Parts, cases: list[Case], seconds: float, tally: Tally, disturb: bool) -> None:
    """Runs clients for so long, and kills processes meanwhile if asked to."""
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [
            pool.submit(one_client, parts, cases, seed, lambda: time.monotonic() < end, tally)
            for seed in range(CLIENTS)
        ]
        if disturb:
            make_trouble(parts, end, tally)
        for client in clients:
            client.result()
    wait_for(parts.is_ready, "the service is ready", 60)
    wait_for(parts.is_clean, "nothing is held", 60)


def make_trouble(parts: Parts, end: float, tally: Tally) -> None:
    chance = random.Random(1)
    while time.monotonic() < end - PAUSE:
        time.sleep(chance.uniform(4, 12))
        victim = chance.choice(parts.names)
        if chance.random() < 0.7:
            parts.kill(victim)
            time.sleep(chance.uniform(0, 2))
            parts.start(victim)
            tally.add(kills=1, **{f"killed {victim}": 1})
        else:
            parts.pause(victim)
            time.sleep(PAUSE)
            parts.go_on(victim)
            tally.add(pauses=1, **{f"paused {victim}": 1})


def sizes(parts: Parts) -> dict[str, float]:
    """Megabytes of each process, once idle ones have given back what they freed."""
    time.sleep(7)
    found = {}
    for name, process in parts.processes.items():
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        found[name] = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return found


def test_soak(tmp_path: Path) -> None:
    for name in ("quiet", "soak"):
        (tmp_path / name).mkdir()
    with Parts(tmp_path / "quiet") as quiet:
        cases = run_undisturbed(quiet.targets()[0])
    tally, seconds = Tally(), 60 * MINUTES
    with Parts(tmp_path / "soak", workers=2, gateways=2, options=OPTIONS) as parts:
        load(parts, cases, SHARES[0] * seconds, tally, disturb=False)
        before = sizes(parts)
        load(parts, cases, SHARES[1] * seconds, tally, disturb=False)
        after = sizes(parts)
        load(parts, cases, SHARES[2] * seconds, tally, disturb=True)
        last = sizes(parts)
        codes = parts.stop()
    print(f"\n{MINUTES:g} minutes: {dict(tally.counts)}, {len(tally.wrong)} wrong")
    for name, size in before.items():
        print(f"{name:13} {size:6.1f} MB warm, {after[name]:6.1f} after load, {last[name]:6.1f} last")
    assert not tally.wrong, tally.wrong[:5]
    assert set(codes.values()) == {0}, codes
    for name, size in before.items():
        assert after[name] <= size + max(10.0, 0.05 * size), (name, before, after)
        if not tally.counts[f"killed {name}"]:  # another process began anew
            assert last[name] <= size + max(10.0, 0.05 * size), (name, before, last)
