"""turbogr: training of generative recommenders (HSTU, SASRec, FuXi) over users' event sequences."""

import os
from importlib.metadata import PackageNotFoundError, version

# OpenMP's threads wait for each other by spinning unless told otherwise. Where another process wants the cores too (a loader's
# worker is enough), that makes two threads ten times slower than one. Read when torch is first imported: a value that the user
# has set is kept, and a program that imports torch before turbogr is left alone.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

try:
    __version__ = version("turbogr")
except PackageNotFoundError:  # a checkout used through PYTHONPATH, not installed
    __version__ = "0.0.0+unknown"
