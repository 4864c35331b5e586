"""The commands of the command line, by what they do; `cli.py` gathers them."""
