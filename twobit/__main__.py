"""`python -m twobit`."""

import sys

from twobit.cli.main import main

sys.exit(main())
