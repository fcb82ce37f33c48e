"""What an operator can ask about the runs of a store. Nothing here writes or calls user code."""
