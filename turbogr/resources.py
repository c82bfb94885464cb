"""Where the files that travel with the package are: recipes and the sources of kernels."""

from pathlib import Path

from turbogr.errors import MissingDependencyError

_PACKAGE = Path(__file__).resolve().parent


def recipes_dir() -> Path:
    """The folder of recipes: inside the package where it was installed from a wheel, beside it in a checkout.

    Raises:
        MissingDependencyError: if neither place has it (a damaged installation).
    """
    return _find("recipes", "base.yaml")


def kernels_dir() -> Path:
    """The folder of kernel sources: inside the package where it was installed from a wheel, beside it in a checkout.

    Raises:
        MissingDependencyError: if neither place has it (a damaged installation).
    """
    return _find("kernels", "README.md")


def _find(name: str, witness: str) -> Path:
    # The witness file tells our folder from an unrelated `recipes` that happens to lie beside the installed package.
    places = [_PACKAGE / name, _PACKAGE.parent / name]
    for place in places:
        if (place / witness).is_file():
            return place
    raise MissingDependencyError(
        f"turbogr's {name} are missing: no {witness} in {places[0]} nor in {places[1]}; install turbogr again"
    )
