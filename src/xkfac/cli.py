"""The xkfac command: run experiments, go on with them, look at them."""

import sys
from typing import Annotated

from xkfac.errors import XkfacError

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
except ImportError as error:  # the library itself needs neither
    raise SystemExit(f"the xkfac command needs more packages ({error}): pip install 'xkfac[experiments]'") from None

from xkfac.commands import looking, working

app = typer.Typer(
    name="xkfac",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Continual learning for networks with batch normalization: run the experiments, go on with them, see them.",
    epilog="Exit codes: 0 all went well, 1 a run stopped before its end, 2 what was asked for cannot be done, "
    "130 interrupted.",
    pretty_exceptions_enable=False,
)
for command in (
    working.demo,
    working.run,
    working.resume,
    working.tune,
    looking.status,
    looking.report,
    looking.compare,
    looking.inspect,
    looking.card,
    working.pretrain,
    looking.recipe,
):
    app.command()(command)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False,
) -> None:
    """Show the version, if asked for."""
    if version:
        import xkfac

        print(f"xkfac {xkfac.__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command; an error that a user can mend is one sentence and exit code 2."""
    try:
        app(prog_name="xkfac")
    except XkfacError as error:
        _complain(str(error))
        sys.exit(getattr(error, "exit_code", 2))
    except OSError as error:  # of a file that nobody expected to fail
        what = f"'{error.filename}': " if error.filename else ""
        _complain(f"{what}{error.strerror or error}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _complain(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(text)}")


if __name__ == "__main__":
    main()
