"""``python -m ptstore_mpi``: the same as the command ``ptstore``."""

from __future__ import annotations

import sys

from ptstore_mpi.cli import main

sys.exit(main())
