"""What operators can ask about the runs of a store."""
