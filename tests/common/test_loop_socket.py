"""Sockets on the event loop: all that arrives is taken, and not after the end."""

import asyncio
from collections.abc import Awaitable, Callable

import zmq

from octavo.common.loop_socket import Context, LoopSocket, Socket

WAIT = 20.0  # seconds; nothing here takes long unless it is broken


def with_pair(test: Callable[[Socket, Socket], Awaitable[None]]) -> None:
    """Runs `test` with two connected sockets."""

    async def whole() -> None:
        context = Context()
        left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        for socket in (left, right):
            socket.set_hwm(0)  # a queue without an end
        left.bind("inproc://pair")
        right.connect("inproc://pair")
        try:
            async with asyncio.timeout(WAIT):
                await test(left, right)
        finally:
            context.destroy(0)

    asyncio.run(whole())


def test_a_flood_is_taken_whole_and_leaves_others_their_turn() -> None:
    async def test(left: Socket, right: Socket) -> None:
        count = 3500  # more than the two batches that the first signal and the start bring about
        taken: list[bytes] = []
        seen: list[int] = []
        last = asyncio.Event()

        def take(parts: list[bytes]) -> None:
            taken.extend(parts)
            if len(taken) == count:
                last.set()

        for i in range(count):
            right.send(b"%d" % i, zmq.NOBLOCK)
        socket = LoopSocket(left, take)
        asyncio.get_running_loop().call_soon(lambda: seen.append(len(taken)))
        await last.wait()
        assert taken == [b"%d" % i for i in range(count)]
        assert 0 < seen[0] < count
        socket.stop()

    with_pair(test)


def test_a_stopped_socket_hands_out_nothing_and_still_sends() -> None:
    async def test(left: Socket, right: Socket) -> None:
        taken: list[bytes] = []

        def stop(parts: list[bytes]) -> None:
            taken.extend(parts)
            socket.stop()

        right.send(b"first")
        right.send(b"second")
        socket = LoopSocket(left, stop)
        while not taken:
            await asyncio.sleep(0)
        right.send(b"third")
        socket.drain()
        socket.send([b"parting"])
        await asyncio.sleep(0.05)
        assert taken == [b"first"]
        assert right.recv(zmq.NOBLOCK) == b"parting"

    with_pair(test)
