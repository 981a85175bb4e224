"""The command line of ``run.py``. A command is a module with ``HELP``, ``add_arguments(parser)`` and ``run(args)``."""

import argparse
import signal
import sys

from . import cmd_bench, cmd_check, cmd_demo, cmd_generate, cmd_queue, cmd_setup, cmd_test
from .environment import SetupError
from .locate import NotFound
from .server import ServerError

COMMANDS = {
    "setup": cmd_setup,
    "demo": cmd_demo,
    "test": cmd_test,
    "queue": cmd_queue,
    "generate": cmd_generate,
    "bench": cmd_bench,
    "check": cmd_check,
}


def parser():
    top = argparse.ArgumentParser(prog="run.py", description="MiniMax H3 in ComfyUI, accelerated without changing a bit.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        sub = commands.add_parser(name, help=module.HELP, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        module.add_arguments(sub)
    return top


def main(argv=None):
    """Run one command; returns the exit status (0 done, 1 failed, 2 wrong usage, 130 interrupted)."""
    args = parser().parse_args(argv)
    # Asked to end (by a service manager, a CI): unwind, so that a server we started is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return COMMANDS[args.command].run(args)
    except (NotFound, SetupError, ServerError, ConnectionError, TimeoutError) as error:
        print(f"run.py {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"run.py {args.command}: interrupted", file=sys.stderr)
        return 130
