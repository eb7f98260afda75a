"""``python -m graphshare``."""

import sys

from graphshare.cli import main

sys.exit(main())
