"""The commands that work without a checkout:  groupwise privacy epsilon=8 n=50000 batch=4096 epochs=300"""

import runpy
import sys

from groupwise.errors import command, unknown

COMMANDS = {
    "privacy": "sigma for an epsilon or epsilon for a sigma, and epsilon during training",
    "planner": "predicted memory and time of a training",
    "audit.reaccount": "the epsilon of a finished run, computed again from its record",
}


@command
def main() -> int:
    """Run `python -m groupwise.<command>` with the remaining arguments; returns the exit code."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        del sys.argv[1]
        runpy.run_module(f"groupwise.{name}", run_name="__main__", alter_sys=True)  # exits
    if name in ("-h", "--help"):
        print("groupwise COMMAND ..., each with a --help of its own:\n")
        print(*(f"  {word:<16} {says}" for word, says in COMMANDS.items()), sep="\n")
        print("\nIn a checkout: python run.py, python -m groupwise.audit. In Python: help(groupwise).")
        return 0
    raise unknown("command", name, COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
