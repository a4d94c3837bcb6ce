"""What the client commands ask for and print, through a real gateway."""

import argparse
import asyncio
import json
from collections.abc import Callable

import pytest
from gateway_scene import SERVING, Process, Scene, play

from octavo.frontend.commands import (
    add_generate_arguments,
    add_status_arguments,
    run_generate,
    run_status,
)
from octavo.frontend.tokenizer import Tokenizer
from octavo.proto.session import GangState, Info, InfoQuery, Pins, PinsQuery, PinState, Pool, Submit

DEVICE = Pool(total=100, used=40, cached=30, free=20, pinned=10)
CPU = Pool(total=8, used=3, free=5)
GANG = GangState(
    gang=0,
    size=1,
    epoch=3,
    ready=True,
    device="cpu",
    engine="torch",
    block_size=16,
    device_pool=DEVICE,
    swap_pool=CPU,
)


def start(
    s: Scene,
    add: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    *arguments: str,
) -> asyncio.Future[int]:
    """Begins a command in a thread; its exit status."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add(parser)
    args = parser.parse_args([*arguments, f"--grpc-port={s.gateway.grpc_port}"])
    return asyncio.ensure_future(asyncio.to_thread(run, args))


def test_generate_with_beams(
    gateway: Process, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    async def ask(s: Scene, *arguments: str) -> str:
        command = start(
            s, add_generate_arguments, run_generate, "hi", "--beam", "2", "--max-tokens=4", *arguments
        )
        submit = await s.driver.expect(Submit)
        assert (submit.beams is not None, len(submit.samples), submit.max_tokens) == (True, 2, 4)
        for sample, text in enumerate((" one", " two")):
            await s.driver.tokens(submit, sample, 0, tokenizer.encode(text))
            await s.driver.finish(submit, sample, "length", -0.25 - sample)
        assert await command == 0
        return capsys.readouterr().out

    async def test(s: Scene) -> None:
        await s.driver.welcome()
        assert await ask(s) == "--- 0 (score -0.2500)\n one\n--- 1 (score -1.2500)\n two\n"
        answer = json.loads(await ask(s, "--json"))
        assert [choice["score"] for choice in answer["choices"]] == [-0.25, -1.25]

    play(gateway, test)


def test_generate_the_best_of_several(
    gateway: Process, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test(s: Scene) -> None:
        await s.driver.welcome()
        command = start(s, add_generate_arguments, run_generate, "hi", "--best-of", "2")
        submit = await s.driver.expect(Submit)
        assert (submit.beams, len(submit.samples)) == (None, 2)
        for sample, text in enumerate((" one", " two")):
            await s.driver.tokens(submit, sample, 0, tokenizer.encode(text), [-1.0 + sample / 2])
            await s.driver.finish(submit, sample)
        assert await command == 0
        assert capsys.readouterr().out == " two\n"

    play(gateway, test)


def test_status_shows_pools_and_prefixes(gateway: Process, capsys: pytest.CaptureFixture[str]) -> None:
    async def ask(s: Scene, pins: list[PinState], *arguments: str) -> str:
        command = start(s, add_status_arguments, run_status, *arguments)
        query = await s.driver.expect(InfoQuery)
        info = Info(
            query=query.query,
            controlplane=s.driver.incarnation,
            ready=True,
            waiting=0,
            preempted=0,
            running=0,
            gangs=[GANG],
        )
        await s.driver.send(info)
        await s.driver.send(Pins(query=(await s.driver.expect(PinsQuery)).query, pins=pins))
        assert await command == 0
        return capsys.readouterr().out

    async def test(s: Scene) -> None:
        await s.driver.welcome()
        await s.until_status(SERVING)
        lines = [line.split() for line in (await ask(s, [])).splitlines()]
        assert ["gang", "pool", "blocks", "used", "cached", "free", "pinned"] in lines
        assert ["0", "device", "100", "40", "30", "20", "10"] in lines
        assert ["0", "cpu", "8", "3", "0", "5", "0"] in lines
        assert ["prefix", "tokens", "blocks"] not in lines
        pins = [PinState(name="rules", tokens=160, blocks=10)]
        lines = [line.split() for line in (await ask(s, pins)).splitlines()]
        assert lines[-2:] == [["prefix", "tokens", "blocks"], ["rules", "160", "10"]]
        state = json.loads(await ask(s, pins, "--json"))
        assert state["prefixes"] == [{"name": "rules", "pinned_tokens": 160, "pinned_blocks": 10}]
        assert state["server"]["gangs"][0]["swap_pool"]["used_blocks"] == 3

    play(gateway, test)
