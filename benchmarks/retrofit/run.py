"""What retrofits of attention cost, point by point on tale-6m, measured as benchmarks.structure is.

    python -m benchmarks.retrofit.run [--points gqa "gqa/gqa 4, pca, drift" ...] [--work FOLDER]
    python -m benchmarks.retrofit.table

Results lie in benchmarks/results/retrofit_GROUP.json.
"""

from benchmarks.retrofit.points import POINTS
from benchmarks.structure.run import main

if __name__ == "__main__":
    main(POINTS, __doc__)
