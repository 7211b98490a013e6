"""Importing the package is cheap: the accountants load when they are first asked."""

import subprocess
import sys


def test_the_accountants_are_not_loaded_on_import():
    script = (
        "import sys, groupwise.privacy;"
        "print([name for name in ('prv_accountant', 'dp_accounting', 'hydra', 'scipy') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
