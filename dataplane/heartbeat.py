"""The thread that keeps a worker registered while the main thread computes."""

import logging
import threading
import time
from dataclasses import dataclass

import zmq

from octavo.common.logs import LimitedLog
from octavo.dataplane.links import Line, Socket, send
from octavo.proto.session import (
    BeatAnswer,
    Ready,
    Refused,
    Register,
    Reset,
    WorkerBeat,
    WorkerBye,
)
from octavo.proto.wire import ProtocolError, unpack

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
RETRY_SECONDS = 0.1  # while there is no connection
LOG_SECONDS = 5.0  # between lines that say that the control plane does not answer


@dataclass
class Progress:
    """How far the main thread is. It writes, the heartbeat thread reads."""

    done: tuple[int, int] = (0, 0)  # epoch of the last reset, plans run in it: replaced as one


class Heartbeat(threading.Thread):
    """Registers, beats, and carries messages between the control plane and the main thread.

    To the main thread it hands each `Reset`, and `Refused` before it ends. From it come `Ready` and
    `WorkerBye`, after which it ends.
    """

    def __init__(
        self, control: Line, main: Socket, register: Register, progress: Progress, place: str
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._control, self._main = control, main
        self._register, self._progress, self._place = register, progress, place
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
            return send(self._control.socket, self._register.pack())
        epoch, plans = self._progress.done
        beat = WorkerBeat(incarnation=self._register.incarnation, epoch=epoch, plans_done=plans)
        return send(self._control.socket, beat.pack())

    def _log_silence(self, now: float) -> None:
        if now - self._heard >= LOG_SECONDS and now - self._logged >= LOG_SECONDS:
            log.info("waiting for the control plane at %s", self._place)
            self._logged = now

    def _on_control(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"frame: a message of {len(frames)} parts")
            message = unpack(frames[0], Reset, BeatAnswer, Refused)
        except ProtocolError as error:
            self._limited.warning("frame", "refused a frame from the control plane: %s", error)
            return
        self._heard = time.monotonic()
        if isinstance(message, Reset):
            self._controlplane = message.controlplane
            self._main.send(frames[0])
        elif isinstance(message, BeatAnswer):
            self._on_answer(message)
        elif isinstance(message, Refused):
            self._main.send(frames[0])
            self._running = False

    def _on_answer(self, answer: BeatAnswer) -> None:
        if self._controlplane is None:
            return  # an answer to an older beat
        if not answer.known or answer.controlplane != self._controlplane:
            log.info("the control plane does not know this worker: registering again")
            self._controlplane = None
            send(self._control.socket, self._register.pack())

    def _on_main(self, frame: bytes) -> None:
        message = unpack(frame, Ready, WorkerBye)
        send(self._control.socket, frame)
        self._running = not isinstance(message, WorkerBye)
