"""`python -m headwise` is the `headwise` command."""

import sys

from headwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
