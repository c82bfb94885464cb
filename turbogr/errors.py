"""Errors that are the user's to mend: the command line prints their message and no traceback."""


class TurboGRError(Exception):
    """Base class: the message names the file, row, feature, id or option at fault and says what to do."""


class DataError(TurboGRError):
    """A log, a prepared folder or an id in it cannot be used."""


class ConfigurationError(TurboGRError, ValueError):
    """An option has an impossible value, or two options contradict each other."""


class MissingDependencyError(TurboGRError, ImportError):
    """An optional package is absent or cannot be loaded; the message says what to type."""
