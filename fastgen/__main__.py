"""`python -m fastgen`: the same as fastgen-check."""

import sys

from fastgen.cli.check import main

sys.exit(main())
