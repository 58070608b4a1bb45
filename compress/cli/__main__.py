"""`python -m compress.cli`."""

import sys

from compress.cli.main import main

sys.exit(main())
