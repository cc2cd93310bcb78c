"""``python -m perf [command] [options]``; without a command, the timing table."""

from __future__ import annotations

import argparse
import importlib
import sys

from perf.output import ResultsNotWrittenError
from perf.registry import COMMANDS, DEFAULT_COMMAND


def main(argv: list[str]) -> int:
    """Runs one subcommand and returns its exit status; 1 if its results could not be written."""
    name, rest = DEFAULT_COMMAND, argv
    if argv and not argv[0].startswith("-"):
        name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        print(f"python -m perf: error: command must be one of {', '.join(COMMANDS)}, got {name!r}", file=sys.stderr)
        return 2
    module = importlib.import_module(COMMANDS[name])
    parser = argparse.ArgumentParser(
        prog=f"python -m perf {name}" if argv[:1] == [name] else "python -m perf",
        description=module.__doc__,
        epilog=f"Commands: {', '.join(COMMANDS)} (default: {DEFAULT_COMMAND}).",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    try:
        return module.main(parser.parse_args(rest))
    except ResultsNotWrittenError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
