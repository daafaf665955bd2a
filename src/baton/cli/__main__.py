"""``python -m baton.cli``: the same as the command `baton`, for when it isn't on the path."""

import sys

from baton.cli.main import main

sys.exit(main())
