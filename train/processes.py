"""Several processes as one run: how they find each other, agree on errors and on stopping, and end when one is lost.

Every process executes the same program on its own devices of one mesh. Process 0 alone locks the workdir, writes its
files (checkpoints apart, which all of them write) and logs. Whatever only one process can know, an unreadable file or
a signal, is agreed upon before anybody acts on it, since a process that left alone would leave the others waiting.
"""

import contextlib
import hashlib
import logging
import socket
import time
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.errors import InputError, ToldElsewhere

CLUSTERS = ("slurm", "ompi", "mpi4py", "k8s")  # what jax.distributed can read an environment of
TEXT = 512  # bytes of an error that travel


def start(
    *,
    cluster: str | None = None,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    heartbeat_s: int = 30,
    join_s: int = 300,
) -> None:
    """Join the other processes, by what the cluster's environment says or by address and numbers; with neither, do nothing.

    To be called before anything touches a device. coordinator: HOST:PORT of process 0, reachable from all. heartbeat_s: seconds
    of silence after which a process counts as lost, and the others end. join_s: seconds to wait until all are there. Raises
    InputError for a call that cannot work.
    """
    explicit = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    given = [name for name, value in explicit.items() if value is not None]
    if cluster is None and not given:
        return
    if cluster is not None and given:
        raise InputError(f"--cluster={cluster} finds its processes itself, without {', '.join(given)}")
    if cluster is not None and cluster not in CLUSTERS:
        raise InputError(f"--cluster={cluster!r} is not one of {', '.join(CLUSTERS)}")
    if cluster is None and len(given) < len(explicit):
        missing = [name for name in explicit if name not in given]
        raise InputError(f"{', '.join(given)} without {', '.join(missing)}")
    if coordinator is not None:
        assert processes is not None
        assert process is not None
        host, _, port = coordinator.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise InputError(f"--coordinator={coordinator!r} is not HOST:PORT with a port below 65536")
        if not 0 <= process < processes:
            raise InputError(f"--process={process} is not in [0, --processes={processes})")
    for name, seconds in {"--heartbeat": heartbeat_s, "--join_timeout": join_s}.items():
        if seconds < 1:
            raise InputError(f"{name}={seconds} is below one second")
    until = time.monotonic() + join_s
    if coordinator is not None:
        _wait_for_name(coordinator, join_s)
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            cluster_detection_method=cluster or "deactivate",
            initialization_timeout=max(1, round(until - time.monotonic())),
            heartbeat_timeout_seconds=heartbeat_s,
            shutdown_timeout_seconds=2 * heartbeat_s,
        )
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        where = f"--cluster={cluster}" if cluster else f"process {process} of {processes} at {coordinator}"
        raise InputError(f"{where} cannot join the run: {error}") from None
    if not is_primary():
        logging.disable(logging.WARNING)


def _wait_for_name(coordinator: str, seconds: int) -> None:
    """Return once the coordinator's host has an address, which in a young cluster takes a while; else raises InputError."""
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(host.strip("[]"), int(port))
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise InputError(f"--coordinator={coordinator!r}: {host} has no address after {seconds} s ({error})") from None
        time.sleep(1)


def anywhere(flag: bool) -> bool:
    """Return whether the flag is set on any process; all have to ask."""
    return flag if jax.process_count() == 1 else bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def is_primary() -> bool:
    """Return whether this process logs and writes for all."""
    return jax.process_index() == 0


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Leave the block at the same time on every process: an InputError of one of them, of its own kind there, is raised by all.

    What runs in the block must not wait for other processes.
    """
    error = None
    try:
        yield
    except InputError as caught:
        error = caught
    if jax.process_count() == 1:
        if error is not None:
            raise error
        return
    text = b"" if error is None else str(error).encode()[:TEXT] or b"error"
    texts = multihost_utils.process_allgather(np.frombuffer(text.ljust(TEXT, b"\0"), np.uint8))
    for process, row in enumerate(texts):
        if said := bytes(row).rstrip(b"\0").decode(errors="replace"):
            kind = ToldElsewhere if error is None or process != jax.process_index() else type(error)
            raise kind(f"process {process}: {said}")


def check_same(what: str, text: str) -> None:
    """Raise InputError on every process unless all of them have the same text."""
    if jax.process_count() == 1:
        return
    mine = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    others = multihost_utils.process_allgather(mine)
    different = [process for process, theirs in enumerate(others) if (theirs != others[0]).any()]
    with together():
        if different and is_primary():
            raise InputError(f"processes {different} have another {what} than process 0")


class Agreement:
    """The largest of a number that every process has, known to all of them one call later.

    What a call hands in is reduced on the devices between two steps and read by the next call, when that step is under way: so
    nobody waits, and all read the same. With one process the number is returned as it is.
    """

    def __init__(self, mesh: Mesh):
        line = Mesh(mesh.devices.reshape(-1), ("all",))
        self._pending: jax.Array | None = None
        self._spread, self._size = NamedSharding(line, PartitionSpec("all")), mesh.size
        self._largest = jax.jit(jax.numpy.max, out_shardings=NamedSharding(line, PartitionSpec()))

    def largest(self, value: int) -> int:
        if jax.process_count() == 1:
            return value
        local = np.full(1, value, np.int32)
        values = jax.make_array_from_callback((self._size,), self._spread, lambda _: local)
        before, self._pending = self._pending, self._largest(values)
        return 0 if before is None else int(before)
