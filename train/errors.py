"""The one exception for bad input: entry points print its message as a single line and exit with code 2."""


class InputError(Exception):
    """Something the user gave (config, flag, file, directory) cannot be used; nothing was written."""
