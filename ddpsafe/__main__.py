"""``python -m ddpsafe``: the same as the command ``ddpsafe``."""

import sys

from ddpsafe.cli import main

if __name__ == "__main__":
    sys.exit(main())
