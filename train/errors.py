"""Bad input: the one exception for it, and the type check that every section of the config shares."""

import dataclasses
from typing import Any


class InputError(Exception):
    """Something the user gave (config, flag, file, directory) cannot be used; nothing was written.

    Entry points print its message as a single line and exit with code 2.
    """


class ToldElsewhere(InputError):
    """Bad input of a run of many processes, which another of them prints."""


def check_types(section: str, settings: Any) -> None:
    """Raise InputError unless every field of a settings dataclass has its default's type (an int will do for a float)."""
    for field in dataclasses.fields(settings):
        value, kind = getattr(settings, field.name), type(field.default)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise InputError(f"{section}.{field.name}={value!r} is not of type {kind.__name__}")
