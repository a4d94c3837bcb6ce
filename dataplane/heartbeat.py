"""The thread that keeps a worker registered while the main thread computes."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import zmq

from octavo.common.logs import LimitedLog
from octavo.common.loop_socket import Socket
from octavo.dataplane.links import Line, send
from octavo.proto.session import (
    BeatAnswer,
    Join,
    Ready,
    Refused,
    Register,
    Reset,
    Seat,
    WorkerBeat,
    WorkerBye,
)
from octavo.proto.wire import ProtocolError, unpack

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
RETRY_SECONDS = 0.1  # while there is no connection
LOG_SECONDS = 5.0  # between lines that say that the control plane does not answer
STUCK_SECONDS = 30.0  # for which the main thread may take no notice of a reset, once interrupted
STUCK_EXIT = 70  # the exit code of a process whose main thread does not come back


@dataclass
class Progress:
    """How far the main thread is. It writes, the heartbeat thread reads."""

    done: tuple[int, int] = (0, 0)  # epoch of the last reset, plans run in it: replaced as one
    taken: int | None = None  # epoch of the last reset that it has begun with


Interrupt = Callable[[int | None], None]  # with the epoch to go on with; None: with none


class Heartbeat(threading.Thread):
    """Registers, beats, and carries messages between the control plane and the main thread.

    To the main thread it hands each `Seat` and `Reset`, and `Refused` before it ends. From it come
    `Register` where the worker began with `Join`, `Ready`, and `WorkerBye`, after which it ends.
    """

    def __init__(
        self,
        control: Line,
        main: Socket,
        hello: Join | Register,
        progress: Progress,
        place: str,
        interrupt: Interrupt | None = None,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        """
        Args:
            hello: what a control plane hears that does not know this worker.
            interrupt: gets the main thread out of what other ranks may keep it in. If it does not
                come, the process exits with STUCK_EXIT.
        """
        super().__init__(name="heartbeat", daemon=True)
        self._control, self._main = control, main
        self._hello, self._progress, self._place = hello, progress, place
        self._interrupt, self._stuck_seconds = interrupt, stuck_seconds
        self._untaken: tuple[int, float] | None = None  # the epoch of a reset, and until when
        self._controlplane: int | None = None  # the incarnation that knows this worker
        # The first line comes after one second of silence.
        self._heard = self._logged = time.monotonic() - LOG_SECONDS + 1.0
        self._running = True
        self._limited = LimitedLog(log)

    def run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # the worker cannot go on without this thread
            log.exception("the heartbeat thread failed")
            send(self._main, Refused(reason=f"heartbeat: {type(error).__name__}").pack())
        finally:
            self._control.close()
            self._main.close()

    def _loop(self) -> None:
        poller = zmq.Poller()
        for readable in (self._control.socket, self._control.monitor):
            poller.register(readable, zmq.POLLIN)
        poller.register(self._main, zmq.POLLIN)
        next_beat = time.monotonic()
        while self._running:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + (BEAT_SECONDS if self._beat() else RETRY_SECONDS)
                self._log_silence(now)
                self._watch_main(now)
                self._control.redial()
            events = dict(poller.poll(max(0, round((next_beat - time.monotonic()) * 1000))))
            if self._control.monitor in events:
                self._control.watch()
            if self._control.socket in events:
                self._on_control(self._control.socket.recv_multipart())
            if self._main in events:
                self._on_main(self._main.recv())

    def _beat(self) -> bool:
        """False when there is no connection."""
        if self._controlplane is None:
            return send(self._control.socket, self._hello.pack())
        epoch, plans = self._progress.done
        beat = WorkerBeat(incarnation=self._hello.incarnation, epoch=epoch, plans_done=plans)
        return send(self._control.socket, beat.pack())

    def _log_silence(self, now: float) -> None:
        if now - self._heard >= LOG_SECONDS and now - self._logged >= LOG_SECONDS:
            log.info("waiting for the control plane at %s", self._place)
            self._logged = now

    def _watch_main(self, now: float) -> None:
        if self._untaken is None or self._progress.taken == self._untaken[0]:
            self._untaken = None
        elif now > self._untaken[1]:
            log.critical(
                "epoch %d began %g s ago and the computing thread is stuck in an older one: "
                "this worker ends, to be started again",
                self._untaken[0],
                self._stuck_seconds,
            )
            os._exit(STUCK_EXIT)  # nothing else ends a thread that does not return to Python

    def _on_control(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"frame: a message of {len(frames)} parts")
            message = unpack(frames[0], Reset, Seat, BeatAnswer, Refused)
        except ProtocolError as error:
            self._limited.warning("frame", "refused a frame from the control plane: %s", error)
            return
        self._heard = time.monotonic()
        if isinstance(message, Reset):
            self._controlplane = message.controlplane
            self._stop_collectives(message.epoch)
            self._main.send(frames[0])
        elif isinstance(message, Seat):
            self._on_seat(message)
            self._main.send(frames[0])
        elif isinstance(message, BeatAnswer):
            self._on_answer(message)
        elif isinstance(message, Refused):
            self._stop_collectives(None)
            self._main.send(frames[0])
            self._running = False

    def _stop_collectives(self, epoch: int | None) -> None:
        if self._interrupt is None:
            return
        self._interrupt(epoch)
        if epoch is not None:
            self._untaken = (epoch, time.monotonic() + self._stuck_seconds)

    def _on_seat(self, seat: Seat) -> None:
        """From now on it is claimed, also of a later control plane."""
        if isinstance(self._hello, Join):
            self._controlplane = seat.controlplane
            self._hello = replace(self._hello, gang=seat.gang, rank=seat.rank)

    def _on_answer(self, answer: BeatAnswer) -> None:
        if self._controlplane is None:
            return  # an answer to an older beat
        if not answer.known or answer.controlplane != self._controlplane:
            log.info("the control plane does not know this worker: registering again")
            self._introduce(self._hello)

    def _introduce(self, hello: Join | Register) -> None:
        """Says it now, and again with every beat until it is answered."""
        self._hello, self._controlplane = hello, None
        send(self._control.socket, hello.pack())

    def _on_main(self, frame: bytes) -> None:
        message = unpack(frame, Register, Ready, WorkerBye)
        if isinstance(message, Register):
            self._introduce(message)
        else:
            send(self._control.socket, frame)
        self._running = not isinstance(message, WorkerBye)
