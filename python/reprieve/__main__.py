"""Lets `python -m reprieve` be the command."""

import sys

from reprieve.cli import main

sys.exit(main())
