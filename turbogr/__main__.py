"""`python -m turbogr` is the console script `turbogr`."""

from turbogr.cli import main

if __name__ == "__main__":
    main()
