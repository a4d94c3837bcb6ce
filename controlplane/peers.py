"""Who may connect to the control plane: CURVE keys, one for workers and one for gateways.

ZeroMQ asks a socket at a fixed address whether a peer's key is welcome
(ZAP, https://rfc.zeromq.org/spec/27/); it answers on the event loop.
"""

import logging
from collections import Counter

import zmq
from zmq.utils.monitor import parse_monitor_message

from octavo.common.curve import ServerKeys
from octavo.common.logs import LimitedLog
from octavo.common.loop_socket import Context, LoopSocket, Socket

log = logging.getLogger(__name__)

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_BROKEN = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Peers:
    """Owner of the answers to who may connect, and of the count of those who may not.

    `refused` counts by (port, reason): "key" is a key that is not welcome, "handshake" one that did not
    come to that.
    """

    def __init__(self, context: Context, keys: ServerKeys | None) -> None:
        self.refused: Counter[tuple[str, str]] = Counter()
        self._keys = keys
        self._limited = LimitedLog(log)
        self._watched: list[Socket] = []
        self._readers: list[LoopSocket] = []
        if keys is not None:
            zap = context.socket(zmq.ROUTER)
            zap.setsockopt(zmq.LINGER, 0)
            zap.bind(_ZAP_ADDRESS)
            self._zap = LoopSocket(zap, self._on_question)
            self._readers.append(self._zap)

    def guard(self, socket: Socket, port: str) -> None:
        """Lets only a `port`, "worker" or "gateway", connect; called before the socket is bound."""
        if self._keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, port.encode())
            # Else everybody who knows the public key would be let in while nobody answers.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        monitor = socket.get_monitor_socket(_BROKEN)
        self._watched.append(socket)
        self._readers.append(LoopSocket(monitor, lambda parts: self._on_broken(port, parts)))

    def close(self) -> None:
        """To be called before the guarded sockets are closed."""
        for socket in self._watched:
            socket.disable_monitor()
        for reader in self._readers:
            reader.close()

    def _on_question(self, parts: list[bytes]) -> None:
        sender, empty, _version, number, domain, address, _identity, _mechanism, *credentials = parts
        port = domain.decode()
        assert self._keys is not None
        is_welcome = credentials == [self._keys.allowed.get(port)]
        if not is_welcome:
            self._refuse_key(port, address.decode(errors="replace"))
        status, text = (b"200", b"") if is_welcome else (b"400", b"unknown key")
        self._zap.send([sender, empty, _ZAP_VERSION, number, status, text, b"", b""])

    def _refuse_key(self, port: str, address: str) -> None:
        assert self._keys is not None
        self.refused[port, "key"] += 1
        self._limited.warning(
            port,
            "a peer at %s was refused on the %s port: its key is not %s/%s.public; if it is a %s of "
            "yours, give it the keys of this folder",
            *(address, port, self._keys.folder, port, port),
        )

    def _on_broken(self, port: str, parts: list[bytes]) -> None:
        event = parse_monitor_message(parts)
        self.refused[port, "handshake"] += 1
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            return  # it went away, or said nothing: port scans, restarts
        self._limited.warning(
            port + " handshake",
            "a peer on the %s port was refused in the handshake: %s",
            *(port, self._explain(int(event["value"]), port)),
        )

    def _explain(self, value: int, port: str) -> str:
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH and self._keys is None:
            return (
                "it wants CURVE; if it is yours, start this control plane with --curve-keys FOLDER too"
            )
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return f"it has no CURVE key; if it is a {port} of yours, start it with --curve-keys FOLDER"
        if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC and self._keys is not None:
            return f"its controlplane.public is not the one in {self._keys.folder}; give it that one"
        return "it does not speak ZeroMQ's protocol"
