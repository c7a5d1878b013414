"""`python -m service` is the `attencode` command."""

import sys

from service.cli import main

sys.exit(main())
