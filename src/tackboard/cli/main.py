"""Lists and runs the commands of the command line, and turns an error into at most three lines and an exit code.

Command modules import only typer and core at the top. Heavy modules are imported inside the commands, so that
`tackboard --help` answers at once, and a missing optional package breaks only the commands that need it.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import typer

from tackboard.cli import bench, data, demo, evaluate, export, features, init, inspect, predict, sequences, serve, train
from tackboard.core.errors import EXIT_BUG, Preempted, TackboardError, UsageError, line_of_user_code, one_line
from tackboard.core.files import storage_error
from tackboard.core.machine import set_thread_environment
from tackboard.core.progress import complain

INTERRUPTED = 130

app = typer.Typer(
    name="tackboard",
    help="Turn logs of user activity into recommendations: pretrain, evaluate, export, serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("init")(init.init)
app.add_typer(data.app, name="data")
app.add_typer(features.app, name="features")
app.add_typer(sequences.app, name="sequences")
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("export")(export.export)
app.command("serve")(serve.serve)
app.command("score")(serve.score)
app.command("verify")(inspect.verify)
app.command("doctor")(inspect.doctor)
app.command("demo")(demo.demo)
app.add_typer(bench.app, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        from tackboard import __version__

        typer.echo(f"tackboard {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(
        False, "--version", help="Print the version and stop.", is_eager=True, callback=_print_version
    ),
) -> None:
    del version  # The option's callback prints the version.
    if debug:
        os.environ["TACKBOARD_DEBUG"] = "1"


def run() -> None:
    """Runs one command and exits with its code. This is the entry point of the program."""
    set_thread_environment()
    # This must be set before torch is imported. Otherwise, when a process loses another process, torch would print its
    # C++ stack above our message.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    code = _run_command()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    meeting = sys.modules.get("tackboard.parallel.meeting")
    if meeting is not None and meeting.has_met():
        # A thread of gloo may still use some objects when Python frees them, and then abort the process. This happened
        # in one run of eight.
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def _run_command() -> int:
    """Runs the command that the arguments name, prints errors, and returns the exit code."""
    try:
        code = app(prog_name="tackboard", standalone_mode=False)
    except TackboardError as error:
        _explain(error, str(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        return _drop_output()
    except SystemExit as stopped:
        # typer turns a broken pipe into SystemExit with code 1.
        if not isinstance(stopped.__context__, BrokenPipeError):
            raise
        return _drop_output()
    except OSError as error:
        return _report_os_error(error)
    except Exception as error:  # noqa: BLE001 - the last handler: a user gets a sentence for any error.
        # The classes of typer's own usage errors are private, so these errors are recognised by their method.
        if hasattr(error, "format_message"):
            _print_usage_error(error)
            return UsageError.exit_code
        return _report_bug(error)
    if code == INTERRUPTED:  # typer itself also turns Ctrl-C into this exit code
        print("interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _drop_output() -> int:
    """Discards the rest of the output, because the process that read it has ended (`| head`); returns exit code 0."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _print_usage_error(error: Any) -> None:
    """Prints typer's message about a wrong command line. For a group without a command, prints the group's help."""
    message = error.format_message()
    if message.startswith("Usage:"):
        print(message)
        return
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "tackboard"
    print(f"error: {one_line(message)}\n  see: {command} --help", file=sys.stderr)


def _report_os_error(error: OSError) -> int:
    """Explains a system error such as a full disk or a forbidden path. Any other system error is reported as a bug."""
    known = storage_error(error)
    if known is None:
        return _report_bug(error)
    _explain(error, str(known))
    return known.exit_code


def _report_bug(error: Exception) -> int:
    """Reports an unexpected error. It is a bug of Tackboard unless it came through code in a user's own file."""
    if place := line_of_user_code(error):
        _explain(error, f"{place} raised {type(error).__name__}: {one_line(str(error))[:300]}")
        if not _debugging():
            print("  see the traceback with `tackboard --debug …`", file=sys.stderr)
        return UsageError.exit_code
    _explain(error, f"a bug in tackboard: {type(error).__name__}: {one_line(str(error))[:300]}")
    if not _debugging():
        print("  run again with `tackboard --debug …` and report the traceback", file=sys.stderr)
    return EXIT_BUG


def _explain(error: BaseException, text: str) -> None:
    if _debugging():
        traceback.print_exception(error)
    # A requested stop is not an error.
    prefix = "" if isinstance(error, Preempted) else "error: "
    complain(error, prefix + text.replace("\n", "\n  "))


def _debugging() -> bool:
    return bool(os.environ.get("TACKBOARD_DEBUG"))
