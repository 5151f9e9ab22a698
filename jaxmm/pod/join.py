"""Finding the other hosts, and a connection between each of them and process 0. Host only.

Coordination is JAX's (`jax.distributed`): it knows Cloud TPU and GKE, or is told. Process 0 then
makes a key and says through the chips where it listens, so that only this pod's processes know.
"""

import atexit
import contextlib
import hashlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxmm.config import EngineConfig, PodConfig
from jaxmm.errors import ConfigError, PeerLost
from jaxmm.pod.channel import KEY_BYTES, Channel, greet_follower, greet_leader
from jaxmm.pod.followers import Followers
from jaxmm.pod.messages import Kind
from jaxmm.pod.signs import is_pod

logger = logging.getLogger(__name__)

_ADDRESS_BYTES = 256
_MEETING_SECONDS = 60.0
_BACKLOG = 1024
_parted = threading.Event()


def join(config: EngineConfig) -> int:
    """Meet the other processes, if there are any; comes before the first use of a device.

    Returns:
        This process's id; 0 when it is alone.

    Raises:
        ConfigError: The coordinator cannot be reached, or devices were used before.
    """
    if not is_pod(config):
        return 0
    if not jax.distributed.is_initialized():
        _initialize(config)
    return jax.process_index()


def part() -> None:
    """Note that the pod has ended as it should, in this process too."""
    _parted.set()


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the processes of one start of the pod know of each other."""

    key: bytes
    address: tuple[str, int]
    about: bytes
    """Digest of what all must have in common, and the name of this host."""
    listener: socket.socket | None
    """Process 0's."""
    num_processes: int
    seconds: float = _MEETING_SECONDS
    """Time in which all must have come."""

    def to_leader(self) -> Channel:
        """Connect to process 0.

        Raises:
            PeerLost: It does not answer.
        """
        process_id = jax.process_index()
        return greet_leader(self.address, self.key, process_id, self.about, self.seconds)

    def to_followers(self, config: PodConfig) -> Followers:
        """Wait for the connections of all others, and watch them from then on.

        Raises:
            ConfigError: One serves another model, or with other settings.
            PeerLost: One does not come in time.
        """
        assert self.listener is not None, "only process 0 listens"
        channels: dict[int, Channel] = {}
        deadline = time.monotonic() + self.seconds
        with self.listener:
            while len(channels) < self.num_processes - 1:
                left = deadline - time.monotonic()
                if left <= 0:
                    text = self._missing(channels)
                    _turn_away(channels, text)
                    raise PeerLost(text)
                self.listener.settimeout(left)
                try:
                    connection, (host, *_) = self.listener.accept()
                except TimeoutError:
                    continue
                self._greet(connection, host, channels)
        return Followers(
            channels,
            silence_seconds=config.silence_seconds,
            step_seconds=config.step_seconds,
            on_leave=_leave,
        )

    def _greet(self, connection: socket.socket, host: str, channels: dict[int, Channel]) -> None:
        greeted = greet_follower(connection, self.key)
        if greeted is None or not 0 < greeted[0] < self.num_processes or greeted[0] in channels:
            logger.warning("connection refused host=%s reason=not of this pod", host)
            connection.close()
            return
        process_id, about = greeted
        name = f"process {process_id} ({about[32:].decode()})"
        channels[process_id] = Channel(connection, self.key, name)
        if about[:32] != self.about[:32]:
            text = (
                f"{name} serves another model, or has other settings or another version of jaxmm; "
                "start all processes alike"
            )
            _turn_away(channels, text)
            raise ConfigError(text)

    def _missing(self, channels: dict[int, Channel]) -> str:
        missing = sorted(set(range(1, self.num_processes)) - channels.keys())
        names = ", ".join(f"process {process_id}" for process_id in missing)
        return f"{names} did not connect within {self.seconds:g} s"


def meet(config: EngineConfig, fingerprint: str) -> Meeting:
    """Agree on a key and an address; every process of the pod calls it at the same point.

    Args:
        config: Settings.
        fingerprint: What all processes must have in common.
    """
    listener, key, address = None, b"", ("", 0)
    if jax.process_index() == 0:
        host = _own_address(config)
        listener = socket.create_server(("", 0), backlog=_BACKLOG)
        key, address = secrets.token_bytes(KEY_BYTES), (host, listener.getsockname()[1])
    text = f"{address[0]}\0{address[1]}".encode()
    told = np.frombuffer((key + text).ljust(_ADDRESS_BYTES, b"\0"), np.uint8)
    heard = bytes(np.asarray(multihost_utils.broadcast_one_to_all(told)).astype(np.uint8))
    host, port = heard[KEY_BYTES:].rstrip(b"\0").decode().split("\0")
    about = hashlib.sha256(fingerprint.encode()).digest() + socket.gethostname().encode()
    return Meeting(heard[:KEY_BYTES], (host, int(port)), about, listener, jax.process_count())


def least(value: int) -> int:
    """The least of a value over all processes."""
    if jax.process_count() == 1:
        return value
    return int(np.min(multihost_utils.process_allgather(np.array([value], np.float64))))


def _leave(name: str) -> None:
    """A follower was asked to end: so is the pod, by the road on which running requests end."""
    logger.warning("%s was asked to end: the pod ends when running requests have", name)
    os.kill(os.getpid(), signal.SIGTERM)


def _initialize(config: EngineConfig) -> None:
    arguments: dict[str, object] = {}
    if config.coordinator:
        arguments = {
            "coordinator_address": config.coordinator,
            "num_processes": config.num_processes,
            "process_id": config.process_id,
        }
    try:
        jax.distributed.initialize(**arguments, shutdown_timeout_seconds=10)  # type: ignore[arg-type]
    except ValueError as e:
        if config.coordinator:
            raise ConfigError(f"coordinator={config.coordinator!r} cannot be used: {e}") from e
        logger.info("no other hosts found: %s", e)
        return
    except RuntimeError as e:
        raise ConfigError(
            f"the other processes of the pod cannot be met: {e}. Start all of them within five "
            "minutes, and join before the first use of a device."
        ) from e
    atexit.register(_leave_out_of_turn)  # comes before JAX's own, which waits for all others


def _leave_out_of_turn() -> None:
    """End at once where the pod has not ended: the others find out by the lost connection."""
    if jax.process_count() > 1 and not _parted.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _own_address(config: EngineConfig) -> str:
    """Where the others reach this host: the coordinator's name, which is this process's host."""
    if config.coordinator:
        return config.coordinator.rpartition(":")[0].strip("[]")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: it picks the way out (RFC 5737)
        host: str = probe.getsockname()[0]
    return host


def _turn_away(channels: dict[int, Channel], reason: str) -> None:
    """Tell those that have come why the pod ends before it began; one may be gone already."""
    for channel in channels.values():
        with contextlib.suppress(PeerLost):
            channel.send(Kind.END, [reason.encode()])
        channel.close()
