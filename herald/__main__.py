"""``python -m herald``: the same as the command ``herald``."""

import sys

from herald.cli.main import main

sys.exit(main())
