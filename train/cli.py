"""What every entry point shares: flags, one-line errors, exit codes, logging to stderr.

Exit codes: 0 done, 2 bad input or config, 3 stopped by a guard, 4 another process of the run was lost, 5 the workdir cannot be
written any more, 143/130 after SIGTERM/SIGINT with a checkpoint written.
"""

import fcntl
import json
import logging
import math
import os
import pathlib
import re
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from absl import flags

from train.errors import InputError, StorageError, ToldElsewhere

DONE, BAD_INPUT, GUARD, LOST, STORAGE = 0, 2, 3, 4, 5
STOPS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Remembers SIGTERM or SIGINT so that a loop can stop at a step's end; a second of either ends the process at once."""

    def __init__(self):
        self.signal: int | None = None
        for number in STOPS:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: Any) -> None:
        self.signal = number
        for each in STOPS:
            signal.signal(each, signal.SIG_DFL)

    @property
    def exit_code(self) -> int:
        return DONE if self.signal is None else 128 + self.signal


def run(main: Callable[[], int]) -> None:
    """Parse the flags, run `main`, exit with its code; bad input becomes one line on stderr and exit code 2."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("absl").addFilter(lambda record: not record.exc_info)  # orbax logs a traceback of what it raises, too
    for name in ("train", "fp4jax", "__main__"):
        logging.getLogger(name).setLevel(logging.INFO)
    if any(argument in ("-h", "--help") for argument in sys.argv[1:]):
        module = sys.modules["__main__"]
        print(f"{module.__doc__}\n{flags.FLAGS.module_help(module)}")
        print("\nConfig keys, types and defaults (--config.KEY=VALUE): train/config.py, and config.json in a workdir.")
        sys.exit(DONE)
    try:
        parse_flags(flags.FLAGS, sys.argv)
        code = main()
    except InputError as error:
        if not isinstance(error, ToldElsewhere):
            print("error: " + " ".join(str(error).split()), file=sys.stderr)
        code = BAD_INPUT
    except Exception as error:
        if _out_of_memory(error) and not _is_one_of_many():
            print(f"error: {_out_of_memory(error)}", file=sys.stderr)
            sys.exit(BAD_INPUT)
        if not (_is_one_of_many() or isinstance(error, StorageError)):
            raise
        _leave(error)
    sys.stdout.flush()
    sys.exit(code)


# What exchanges between processes fail with, also as a ValueError, and as the reason of a save that waited for the others.
_UNREACHABLE = re.compile("Gloo|NCCL|RCCL|[Cc]oordination|[Bb]arrier")


def _is_one_of_many() -> bool:
    jax = sys.modules.get("jax")  # imported only after the flags were read
    return jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1


def _out_of_memory(error: Exception) -> str:
    """Return what to say of an error that is for want of memory on a device, "" for any other."""
    if "RESOURCE_EXHAUSTED" not in str(error) or isinstance(error, StorageError):
        return ""
    return "out of memory on the device: " + " ".join(str(error).split())[:300]


def _leave(error: Exception) -> NoReturn:
    """End at once one of many processes, or one whose save failed.

    An ordinary exit would wait for processes that are lost, and they for this one; and for threads of orbax 0.12.8 that after a
    failed save wait minutes for what never comes.
    """
    import jax

    many = _is_one_of_many()
    who = f"process {jax.process_index()} of {jax.process_count()} ends: " if many else ""
    reason = str(error).rpartition("cannot be written: ")[2]  # a StorageError's, without the path, whatever that is called
    if said := _out_of_memory(error):
        code = BAD_INPUT
        print(f"error: {who}{said}", file=sys.stderr)
    elif isinstance(error, jax.errors.JaxRuntimeError) or (many and _UNREACHABLE.search(reason)):
        lines, code = str(error).splitlines(), LOST
        print(f"error: {who}another process was lost, or cannot be reached ({lines[0][:200]})", file=sys.stderr)
    elif isinstance(error, StorageError):
        code = STORAGE
        print(f"error: {who}{error}", file=sys.stderr)
    else:
        code = 1
        print(f"{who}{''.join(traceback.format_exception(error))}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def parse_flags(values: flags.FlagValues, argv: list[str]) -> None:
    """Parse argv; a wrong flag, config file, key or type raises InputError."""
    try:
        rest = values(argv)
    except InputError:
        raise
    except (AttributeError, KeyError) as error:
        text = " ".join(str(error).replace("\\n", " ").replace("\\", "").replace("'", "").split())  # the repr of a repr
        raise InputError(f"flags: no such config key or attribute: {text}") from None
    except flags.Error as error:
        raise InputError(f"flags: {error}") from None
    except Exception as error:  # a config file is a Python program: it may raise anything
        raise InputError(f"flags: {type(error).__name__}: {error}") from None
    if len(rest) > 1:
        raise InputError(f"flags: unexpected arguments {rest[1:]}")


def lock_file(path: pathlib.Path) -> TextIO | None:
    """Return the open file with an OS lock on it, which dies with the file or its process; None where another holds it.

    Raises InputError where the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise InputError(f"workdir {path.parent} cannot be written: {error}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def default_workdir(config_path: str) -> str:
    """Return runs/<file name>[_<argument>] for the value of --config."""
    path, _, argument = config_path.partition(":")
    return f"runs/{pathlib.Path(path).stem}" + (f"_{re.sub(r'[^\w.-]', '_', argument)}" if argument else "")


def perplexity(val_loss: float | None) -> float | None:
    """Return exp(val_loss), None where it is not known or overflows."""
    return None if val_loss is None or val_loss > math.log(sys.float_info.max) else math.exp(val_loss)


def print_result(result: dict[str, Any]) -> None:
    """Print the one JSON object that ends stdout."""
    print(json.dumps(result), flush=True)
