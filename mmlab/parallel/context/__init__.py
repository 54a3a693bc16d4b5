"""Context parallelism: the tokens of a microbatch split over ranks, which attend over the whole of it together."""
