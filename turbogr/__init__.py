"""turbogr: training of generative recommenders (HSTU, SASRec, FuXi) over users' event sequences."""

import os
from importlib.metadata import PackageNotFoundError, version

# OpenMP's threads wait for each other by spinning for milliseconds unless told otherwise. Where another process wants the cores
# too (a loader's worker is enough), that makes two threads ten times slower than one; asleep at once, a step of many small
# operators loses a seventh of its time to waking up. So they spin for a few microseconds, then sleep. Read when torch is first
# imported: what the user has set is kept, and a program that imports torch before turbogr is left alone.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="1000")

try:
    __version__ = version("turbogr")
except PackageNotFoundError:  # a checkout used through PYTHONPATH, not installed
    __version__ = "0.0.0+unknown"
