"""What clients see of whole clusters, beside the bare engine, vLLM and one another."""
