"""Where a program's errors become words: what went wrong and what to do, a stable exit code, no traceback."""

from __future__ import annotations

import codecs
import contextlib
import io
import platform
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, TextIO

from edgefl import PROTOCOL_VERSION, __version__
from edgefl.errors import EdgeFLError, MissingDependencyError, missing_dependency

#: C0, DEL and C1, which terminals obey; marks that turn, hide or break what is shown; halves of no character, and the
#: two values that are none, which YAML does not read.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff"
    "\ud800-\udfff]"
)
#: ASCII for characters that an output's encoding lacks, where their decomposition by Unicode is none.
_PLAIN = {
    **dict(zip("‘’‚‛′", "'''''", strict=True)),
    **dict.fromkeys("“”„″", '"'),
    **dict.fromkeys("‐‑–—−─━", "-"),
    **dict(zip("│┃·•×⁄∕", "||-*x//", strict=True)),
    **dict(zip("▁▂▃▄▅▆▇█", "_.:-=+*#", strict=True)),
    "→": "->",
    "←": "<-",
    "≥": ">=",
    "≤": "<=",
    "≠": "!=",
    "≈": "~",
    "±": "+/-",
    "÷": "/",
    "‖": "||",
    "√": "sqrt ",
    "²": "^2",
    "°": "deg ",
    "∞": "inf",
}
_PLAIN_ERRORS = "edgefl.plain"
#: A command in a sentence, and what stands for its spaces while that is broken into lines.
_COMMAND, _NO_BREAK = re.compile("`[^`\n]*`"), "\ue000"
_GREEK = re.compile(r"GREEK (SMALL|CAPITAL) LETTER (\w+)")
#: What a shell reports for a program ended by Ctrl-C: 128 + SIGINT.
INTERRUPTED = 130


def show_version(program: str) -> Callable[[bool], None]:
    """Callback of a program's ``--version``: prints its version, the protocol's and Python's, and ends the program."""

    def show(wanted: bool) -> None:
        if wanted:
            sys.stdout.write(
                f"{program} {__version__} (protocol {PROTOCOL_VERSION}, Python {platform.python_version()})\n"
            )
            raise SystemExit(0)

    return show


def fit_outputs() -> None:
    """Show ASCII for characters that stdout or stderr cannot encode; a program's first call.

    An output whose owner has chosen another way (``PYTHONIOENCODING=ascii:backslashreplace``) keeps it.
    """
    codecs.register_error(_PLAIN_ERRORS, _plain)
    for stream, default in ((sys.stdout, "strict"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == default:
            stream.reconfigure(errors=_PLAIN_ERRORS)


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Handler of a codec: ASCII for the characters that it lacks, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_in_ascii, error.object[error.start : error.end])), error.end


def _in_ascii(character: str) -> str:
    import unicodedata  # not in a supervisor that never needs it

    if character in _PLAIN:
        return _PLAIN[character]
    if letter := _GREEK.fullmatch(unicodedata.name(character, "")):
        return letter[2].lower() if letter[1] == "SMALL" else letter[2].capitalize()
    if unicodedata.combining(character):
        return ""
    decomposed = unicodedata.normalize("NFKD", character)
    if decomposed == character:
        return character if character.isascii() else "?"
    return "".join(map(_in_ascii, decomposed))


def write_data(text: str) -> None:
    """Write what programs read (JSON, CSV, a page) to stdout: in UTF-8, whatever the terminal's encoding."""
    binary = getattr(sys.stdout, "buffer", None)
    sys.stdout.flush()
    if binary is None:  # a notebook's output, or a test's
        sys.stdout.write(text)
    else:
        binary.write(text.encode())
        binary.flush()


def safe_text(text: str) -> str:
    """A line of another program or machine that a terminal may be shown: what it would obey is replaced."""
    return _UNSAFE.sub("\ufffd", text)


def safe_lines(text: str) -> str:
    """``safe_text`` of each of several lines."""
    return "\n".join(map(safe_text, text.split("\n")))


def for_terminal(text: str, stream: TextIO) -> str:
    """Prose broken between words at a terminal's width, commands in backticks whole; text for others as it is."""
    if not stream.isatty():
        return text
    import textwrap

    width = max(40, shutil.get_terminal_size().columns)
    whole = _COMMAND.sub(lambda found: found[0].replace(" ", _NO_BREAK), text)
    lines = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in whole.split("\n"))
    return "\n".join(part for line in lines for part in line or [""]).replace(_NO_BREAK, " ")


def say(text: str) -> None:
    """Write a line for the person who looks on; standard output is for what a program may read."""
    sys.stderr.write(f"{for_terminal(text, sys.stderr)}\n")
    sys.stderr.flush()


@contextmanager
def guarded(debug: bool = False, needs: Sequence[str] = (), tell: Callable[..., None] | None = None) -> Iterator[None]:
    """Run a command's body. Its errors go to stderr as ``error: …`` and ``what to do: …`` and end the program.

    EdgeFLError ends it with its own exit code, a missing optional package as MissingDependencyError, Ctrl-C with 130
    (the text of a KeyboardInterrupt is what to do), anything unexpected with 1. ``debug`` prints the traceback first.
    ``needs``: packages that the command needs, so that all missing ones are named at once. ``tell``: a writer of log
    lines (``edgefl.log_lines``) that gets the error instead of stderr.
    Exceptions by which a command line ends itself (SystemExit, and those that carry an ``exit_code`` of their own such
    as typer.Exit) pass.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        _show(error, debug)
        _end("interrupted", str(error), INTERRUPTED, error, tell)
    except EdgeFLError as raised:
        _show(raised, debug)
        shown = raised.with_others(needs) if isinstance(raised, MissingDependencyError) else raised
        _end(shown.message, shown.remedy, shown.exit_code, raised, tell)
    except BrokenPipeError:
        raise  # the reader, such as `head`, has seen enough: typer ends quietly
    except Exception as error:
        if hasattr(error, "exit_code") or type(error).__name__ == "Abort":  # typer's: exit, usage, a refused prompt
            raise
        _show(error, debug)
        if (missing := missing_dependency(error)) is not None:
            missing = missing.with_others(needs)
            _end(missing.message, missing.remedy, missing.exit_code, error, tell)
        _end(f"{type(error).__name__}: {error}", EdgeFLError.remedy, EdgeFLError.exit_code, error, tell)


def _show(error: BaseException, debug: bool) -> None:
    if debug:
        traceback.print_exception(type(error), error, error.__traceback__)


def _end(message: str, remedy: str, code: int, cause: BaseException, tell: Callable[..., None] | None) -> NoReturn:
    if tell is not None:
        with contextlib.suppress(OSError):
            tell("interrupted" if code == INTERRUPTED else "error", text=message, remedy=remedy, exit_code=code)
        raise SystemExit(code) from cause
    colour = sys.stderr.isatty()
    bold, plain = ("\033[1;31m", "\033[0m") if colour else ("", "")
    with contextlib.suppress(OSError):  # a log on a full disk: the exit code still tells
        told = for_terminal(f"error: {safe_lines(message)}", sys.stderr)
        sys.stderr.write(f"{bold}error:{plain}{told.removeprefix('error:')}\n")
        if remedy:
            strong = "\033[1m" if colour else ""
            told = for_terminal(f"what to do: {safe_lines(remedy)}", sys.stderr)
            sys.stderr.write(f"{strong}what to do:{plain}{told.removeprefix('what to do:')}\n")
        sys.stderr.flush()
    raise SystemExit(code) from cause
