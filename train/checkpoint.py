"""Checkpoints: one orbax composite per step with the state, the data iterator's state, and what the run was.

Saves are asynchronous and become visible only when complete; `check` and `wait` raise what one of them raised. Items: "state"
(arrays, sharded), "run" (JSON: step, tokens, iterator state, data fingerprint, recipe and its digest, versions). "run" also
holds a checksum of the state and one of itself, since the storage checks neither: one flipped bit in a file of either makes
`restore` raise.
"""

import asyncio
import contextlib
import errno
import hashlib
import importlib.metadata
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from train import processes
from train.errors import InputError, StorageError
from train.step import TrainState, checksum

OPTIONAL = ("ema", "recent")
VERSIONS = ("fp4jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


class Unavailable(InputError):
    """A checkpoint that could not be read for a reason that is not in it: memory, permissions, a network."""


class Checkpoints:
    """The checkpoints/ directory of a workdir. keep: the newest so many stay, 0 all; keep_every: and those of these steps.

    clean: remove what saves that never ended left behind, which is for the one process that may be saving.
    """

    def __init__(self, workdir: pathlib.Path, *, keep: int = 0, keep_every: int = 0, clean: bool = False):
        self.path = workdir / "checkpoints"
        self._saving = self.path  # what was written last
        self._drained = contextlib.ExitStack()  # while a save is under way
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep or None, keep_period=keep_every or None, create=True, cleanup_tmp_directories=clean
        )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(self.path.absolute(), options=options, item_names=("state", "run"))
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {_first_line(error)}") from None

    def latest(self) -> int | None:
        """Return the newest complete step, None where there is none; waits for a save that has begun."""
        self.wait()
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: TrainState, run: dict[str, Any]) -> None:
        """Start saving; returns once the arrays are copied, so that the state may be donated.

        Raises StorageError if the save before failed.
        """
        self.wait()
        if step in self._manager.all_steps():
            return
        run = {**run, "versions": {name: importlib.metadata.version(name) for name in VERSIONS}}
        run["state_checksum"] = int(checksum(state))
        run["checksum"] = _checksum(run)
        args = ocp.args.Composite(state=ocp.args.StandardSave(_item(state)), run=ocp.args.JsonSave(run))
        self._saving = self.path / str(step)
        self._drained.enter_context(drained_loops())
        with self._writing():
            if not self._manager.save(step, args=args, force=True):
                raise OSError("orbax did not save it")

    def check(self) -> None:
        """Raise StorageError if the last save failed; does not wait for it."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def restore(self, step: int, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Return (state, run) of a step, placed as `abstract` says.

        Raises InputError when it cannot be read, on the processes for which that may pass Unavailable.
        """
        if step not in self._manager.all_steps():
            raise InputError(f"no checkpoint of step {step} in {self.path}: there are {self.steps()}")
        item: Any = self.path.absolute() / str(step)
        arrays, record = ocp.StandardCheckpointHandler(), ocp.JsonCheckpointHandler()
        with processes.together():  # by the handlers: the manager waits for all processes, and one may not be able to read
            try:
                with drained_loops():
                    stored, wanted = _arrays(arrays.metadata(item / "state").tree), _arrays(_item(abstract))
                    for name in stored.keys() & wanted.keys():
                        if stored[name] != wanted[name]:  # orbax would cast, or cut
                            raise ValueError(f"{name} is {stored[name]} there and {wanted[name]} in this run")
                    parts = arrays.restore(item / "state", args=ocp.args.StandardRestore(_item(abstract)))
                run = record.restore(item / "run", args=ocp.args.JsonRestore())
            except Exception as error:  # orbax 0.12.8 raises a bare Exception for arrays, AttributeError for its metadata
                kind = Unavailable if _is_passing(error) else InputError
                raise kind(f"checkpoint {self.path / str(step)} cannot be read: {_first_line(error)}") from None
            if not isinstance(run, dict) or run.get("step") != step or run.get("checksum") != _checksum(run):
                raise InputError(f"checkpoint {self.path / str(step)} is damaged: run/metadata does not match its checksum")
        state = TrainState(**{name: {} for name in OPTIONAL} | parts)
        if run["state_checksum"] != int(checksum(state)):
            raise InputError(f"checkpoint {self.path / str(step)} is damaged: the arrays do not match their checksum")
        return state, run

    def set_aside(self, step: int) -> None:
        """Move a checkpoint to damaged/ in the workdir, where nothing looks for it."""
        with processes.together():
            if processes.is_primary():
                target = self.path.parent / "damaged" / str(step)
                while target.exists():
                    target = target.with_name(target.name + "_")
                target.parent.mkdir(exist_ok=True)
                (self.path / str(step)).rename(target)
        self._manager.reload()

    def wait(self) -> None:
        """Block until the last save is complete; raises StorageError if it failed."""
        with self._drained, self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        with self._drained, self._writing():
            self._manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # tensorstore raises ValueError, with the path and then the reason
            reason = _first_line(error, limit=None).rpartition('": ')[2]
            raise StorageError(f"{self._saving} cannot be written: {reason}") from error


_PASSING = {errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.EINTR}
_PASSING |= {errno.EAGAIN, errno.EBUSY, errno.ENODEV, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH}
_PASSING_TEXT = re.compile("RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAVAILABLE|DEADLINE_EXCEEDED|out of memory", re.IGNORECASE)


def _is_passing(error: BaseException) -> bool:
    """Return whether an error says nothing of the file that was read; a read error of the medium (EIO) does."""
    if isinstance(error, OSError):
        return error.errno in _PASSING
    text = _first_line(error, limit=None)
    number = re.search(r"os_error_code='(\d+)'", text)  # tensorstore's, which raises ValueError
    return isinstance(error, MemoryError) or (int(number[1]) in _PASSING if number else bool(_PASSING_TEXT.search(text)))


def _item(state: TrainState) -> dict[str, Any]:
    """Return what is stored of a state: without its optional parts where they are empty, which older versions do not have.

    Orbax stores an empty dict as a node of the tree, and refuses to restore a tree that has one more.
    """
    return {name: part for name, part in state._asdict().items() if name not in OPTIONAL or part}


def _arrays(tree: Any) -> dict[str, str]:
    """Return {path: "float32 (64, 128)"} of arrays, or of what describes them."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{np.dtype(leaf.dtype)} {tuple(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


class _DrainedLoop(asyncio.SelectorEventLoop):
    """An event loop that lets its tasks end before it closes."""

    def close(self) -> None:
        pending = () if self.is_closed() else asyncio.all_tasks(self)
        if pending:
            self.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        super().close()


@contextlib.contextmanager
def drained_loops() -> Iterator[None]:
    """Let orbax read and write through loops of the class above.

    The first array that cannot be read or written ends a restore or save of orbax 0.12.8 and closes its loop. The other reads
    and writes then have nowhere to report to, and Python prints a traceback for each, from other threads and at any later time.
    """
    factory = asyncio.new_event_loop
    asyncio.new_event_loop = _DrainedLoop
    try:
        yield
    finally:
        asyncio.new_event_loop = factory


def _checksum(run: dict[str, Any]) -> str:
    """Return 16 hex digits over everything in `run` but its own checksum."""
    content = json.dumps({k: v for k, v in run.items() if k != "checksum"}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _first_line(error: BaseException, *, limit: int | None = 200) -> str:
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text[:limit]}"


def saved_steps(workdir: pathlib.Path) -> list[int]:
    """Return the steps of a workdir's checkpoints by the names of their directories, sorted."""
    return sorted(
        int(path.name) for path in (workdir / "checkpoints").glob("[0-9]*") if path.name.isdecimal() and path.is_dir()
    )


def read_config(workdir: pathlib.Path) -> dict[str, Any] | None:
    """Return workdir/config.json, None when there is none; raises InputError when it is not a JSON object."""
    path = workdir / "config.json"
    try:
        stored = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {_first_line(error)}") from None
    if not isinstance(stored, dict):
        raise InputError(f"{path} does not hold a JSON object")
    return stored


def data_fingerprint(stored: dict[str, Any]) -> Any:
    """Return the data fingerprint that a config.json holds, None when there is none."""
    run = stored.get("run")
    return run.get("data_fingerprint") if isinstance(run, dict) else None
