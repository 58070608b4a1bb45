"""The stored points as tables.

python -m benchmarks.retrofit.table [GROUP ...]
"""

from benchmarks.retrofit.points import POINTS
from benchmarks.structure.table import main

if __name__ == "__main__":
    main(POINTS, __doc__)
