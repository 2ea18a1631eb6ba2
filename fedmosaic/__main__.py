"""`python -m fedmosaic` is the command."""

from fedmosaic.cli.main import main

if __name__ == "__main__":  # processes of a study import this module too
    main()
