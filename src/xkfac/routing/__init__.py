"""Which task an input is of: batches of each task come in, inferred tasks and the answers of their layers go out."""
