"""`python -m anyckpt`: the same as the command `anyckpt`."""

from __future__ import annotations

import sys

from anyckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
