"""`python -m etpi`: the console command, for an interpreter whose scripts are not on PATH."""

import sys

from etpi.cli import main

sys.exit(main())
