"""dadrun: starts one process per rank, on this host and on others, and ends them together."""
