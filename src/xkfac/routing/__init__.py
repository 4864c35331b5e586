"""Which task an input is of: batches of each task come in and leave statistics of their features behind; inferred tasks
and the answers of their layers go out.
"""
