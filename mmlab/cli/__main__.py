"""`python -m mmlab.cli`: the command line without its script."""

from mmlab.cli import main

main()
