"""The commands that need no checkout:  groupwise privacy epsilon=8 n=50000 batch=4096 epochs=300"""

import runpy
import sys

from groupwise.errors import MISTAKE, did_you_mean

COMMANDS = {
    "privacy": "sigma for an epsilon, or epsilon for a sigma, and epsilon along the way",
    "planner": "memory and time of a training, before it starts",
    "audit": "attack a setting, and bound its epsilon from below",
    "audit.reaccount": "account for a finished run again, from its record",
}


def main() -> int:
    """Run `python -m groupwise.<command>` with the words that follow; returns the exit code."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        del sys.argv[1]
        runpy.run_module(f"groupwise.{name}", run_name="__main__", alter_sys=True)  # which exits
    if name in ("-h", "--help"):
        print("groupwise COMMAND ..., each with a --help of its own:\n")
        print(*(f"  {command:<16} {says}" for command, says in COMMANDS.items()), sep="\n")
        print("\nThe paper's experiments: python run.py in a checkout. In Python: help(groupwise).")
        return 0
    print(f"error: there is no command {name}{did_you_mean(name, COMMANDS)}; --help lists them.", file=sys.stderr)
    return MISTAKE


if __name__ == "__main__":
    sys.exit(main())
