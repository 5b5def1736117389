"""How the jobs read their command line: what is wrong with it is said in one line, status 1."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import ml_collections
from absl import app, flags
from ml_collections import config_flags

from pipelines.memory import keep_freed_memory

_WRONG = (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError)


def config_flag(
    default: str, help_text: str, given: flags.FlagValues = flags.FLAGS
) -> flags.FlagHolder[ml_collections.ConfigDict]:
    """`--config=FILE.py` and its options, `--config.data.path=…`, which it reads at once.

    Args:
        default: The file, if none is given.
        help_text: What it is.
        given: The job's flags.
    """
    try:
        return config_flags.DEFINE_config_file("config", default, help_text, flag_values=given)
    except _WRONG as error:
        _end(error)


def run(main: Callable[[list[str]], int], given: flags.FlagValues = flags.FLAGS) -> None:
    """Runs `main` on the command line, and exits with what it returns.

    Args:
        main: A job's own.
        given: The job's flags.
    """

    def parsed(arguments: Sequence[str]) -> Sequence[str]:
        if given is not flags.FLAGS:
            flags.FLAGS(arguments[:1])  # which absl itself has read
        try:
            others = given(arguments)
            _ = given["config"].value.is_locked  # a file that is not there is an error only now
        except _WRONG as error:
            _end(error)
        return others

    keep_freed_memory()
    app.run(main, flags_parser=parsed)


def say(line: str) -> None:
    """Prints a line at once: what follows may take hours."""
    print(line, flush=True)


def _end(error: Any) -> NoReturn:
    """Says what is wrong, without the quotes that errors of keys have around it."""
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]  # ml_collections' AttributeError holds a KeyError
    said = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, AttributeError | KeyError):  # which names the option alone
        said = (
            f"Expected an option that the config has, got {said}: see the file that --config names."
        )
    print(f"error: {' '.join(said.split())}", file=sys.stderr)
    sys.exit(1)
