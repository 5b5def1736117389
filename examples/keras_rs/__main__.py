"""`python -m examples.keras_rs`: see `study`."""

import sys

from examples.keras_rs.study import main

if __name__ == "__main__":
    sys.exit(main())
