"""Entry point: finds the command, and turns every user mistake into one line.

Exit codes: 0 done; 1 a check found a problem (doctor, inspect, plan) or a fault of ours; 2 a
mistake in the input or the usage, or something that the machine lacks (memory, open files, a
package); 130 interrupted.
"""

import difflib
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click

from compress.cli.complaints import of_environment, of_user, shortened
from compress.cli.printing import complain
from compress.cli.process import leave, tune_process
from compress.cli.streams import open_streams
from compress.errors import CompressError
from compress.machine.instruction_set import check_instruction_set
from compress.version import VERSION

# name -> (module, one line for the overview); a module is imported when its command is named.
COMMANDS = {
    "run": ("compress.cli.commands.run", "Compress a checkpoint as a recipe says."),
    "plan": ("compress.cli.commands.plan", "Show what a recipe would do, without doing it."),
    "compare": ("compress.cli.commands.compare", "Find the recipe that is best for a model."),
    "inspect": ("compress.cli.commands.inspect", "Show what a checkpoint holds."),
    "eval": ("compress.cli.commands.eval", "Measure a checkpoint, alone or against its source."),
    "export": (
        "compress.cli.commands.export",
        "Write a checkpoint for another loader or runtime.",
    ),
    "generate": ("compress.cli.commands.generate", "Continue a text with a checkpoint."),
    "chat": ("compress.cli.commands.chat", "Chat with a checkpoint in the terminal."),
    "roofline": ("compress.cli.commands.roofline", "Predict how fast a checkpoint runs here."),
    "bench": ("compress.cli.commands.bench", "Measure how fast it runs, beside the prediction."),
    "recipes": ("compress.cli.commands.recipes", "List the built-in recipes, or show one."),
    "doctor": ("compress.cli.commands.doctor", "Check this machine and its packages."),
}


# What people ask for and is not there, and what does it meanwhile.
ABSENT = {
    "serve": (
        "`vllm serve FOLDER` serves a result over HTTP, `compress-model generate` and `chat` answer"
        " in the terminal, and compress.open_model(FOLDER) does in Python"
    ),
}


class LazyGroup(click.Group):
    """A group that imports a command's module only when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = import_module(COMMANDS[name][0]).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in ABSENT:
            ctx.fail(f"{args[0]} is not in this version; {ABSENT[args[0]]}")
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            known = ", ".join(COMMANDS)
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"no command {args[0]!r}; there are {known}{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, "-V", "--version", prog_name="compress-model")
def cli() -> None:
    """Make a language model's checkpoint smaller, by recipe, and prove what it cost."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; None takes the process's arguments."""
    args = list(sys.argv[1:] if argv is None else argv)
    tune_process()
    try:
        check_instruction_set()
        result = cli.main(args, prog_name="compress-model", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        if isinstance(error, click.UsageError) and error.ctx is not None:
            complain(error.ctx.get_usage())
        return _refuse(error.format_message())
    except CompressError as error:
        return _refuse(of_user(error))
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return 130
    except SystemExit as ended:  # how click ends where nobody reads on
        return ended.code if isinstance(ended.code, int) else 1
    except Exception as error:  # a lack of memory, files or packages, or a fault of ours
        line = of_environment(error)
        return _fault() if line is None else _refuse(line)
    return result if isinstance(result, int) else 0


def _fault() -> int:
    traceback.print_exc()
    click.echo(
        "error: this is a fault of compress-model; please report it with the lines above and"
        " the output of `compress-model doctor`",
        err=True,
    )
    return 1


def entry() -> NoReturn:
    """The console script: a command line of this process, and its end."""
    open_streams()
    leave(main())


def _refuse(message: str) -> int:
    complain(f"error: {shortened(message)}")
    return 2
