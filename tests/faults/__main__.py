"""`python -m tests.faults`"""

import sys

from tests.faults.campaign import main

sys.exit(main())
