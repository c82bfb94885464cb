"""turbogr: training of generative recommenders (HSTU, SASRec, FuXi) over users' event sequences."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("turbogr")
except PackageNotFoundError:  # a checkout used through PYTHONPATH, not installed
    __version__ = "0.0.0+unknown"
