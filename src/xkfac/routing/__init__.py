"""Which task an input is of: batches of each task come in, statistics of their features are kept, tasks go out.

`density.py` is the mathematics, `probe.py` the features, `router.py` the object for users.
"""
