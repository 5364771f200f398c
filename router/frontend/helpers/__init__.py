"""Helper processes: work beside the router of which neither time nor memory can be bounded on a thread."""
