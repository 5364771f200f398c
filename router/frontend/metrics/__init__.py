"""The router's metrics page: samples of its state, and the same under vLLM's names. It reads snapshots alone."""
