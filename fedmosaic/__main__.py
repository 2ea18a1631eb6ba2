"""`python -m fedmosaic` is the command."""

from fedmosaic.cli import main

main()
