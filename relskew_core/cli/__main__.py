"""``python -m relskew_core.cli``."""

import sys

from relskew_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
