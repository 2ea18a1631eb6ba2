"""`python -m fedmosaic` is the command."""

from fedmosaic.cli import main

if __name__ == "__main__":  # processes of a study import this module too
    main()
