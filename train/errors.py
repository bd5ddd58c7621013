"""Bad input and a workdir that fails: the exceptions for them, and the type check that every section of the config shares."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any


class InputError(Exception):
    """Something the user gave (config, flag, file, directory) cannot be used; nothing was written.

    Entry points print its message as a single line and exit with code 2.
    """


class ToldElsewhere(InputError):
    """Bad input of a run of many processes, which another of them prints."""


class StorageError(Exception):
    """The workdir of a run cannot be written any more; the same command continues from the newest checkpoint, which is whole.

    Entry points print its message as a single line and exit with code 5.
    """


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Raise an OSError of the block as a StorageError that names the path."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error


def write_whole(path: pathlib.Path, text: str) -> None:
    """Write a file so that it is either whole or as it was, after a loss of power too; raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def check_types(section: str, settings: Any) -> None:
    """Raise InputError unless every field of a settings dataclass has its default's type (an int will do for a float)."""
    for field in dataclasses.fields(settings):
        value, kind = getattr(settings, field.name), type(field.default)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise InputError(f"{section}.{field.name}={value!r} is not of type {kind.__name__}")
        if kind is int and field.name != "seed" and abs(value) >= 2**31:
            raise InputError(f"{section}.{field.name}={value} is out of range: it is no int32")
