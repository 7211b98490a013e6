"""Audits a clipping mode with canaries:  python -m groupwise.audit clip=adaptive_layer privacy.epsilon=8

`--help` lists the options. Exit codes: 0, 1 for a bound above its claim, 2 for a mistake.
"""

import sys

from groupwise.audit.command import main

if __name__ == "__main__":
    sys.exit(main())
