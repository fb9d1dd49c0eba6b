"""`python -m holdfast`: the command line, for where `holdfast` is not on the path."""

import sys

from holdfast.cli import main

sys.exit(main())
