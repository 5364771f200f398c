"""Page keys and layout, radix trees, page pools, tiers, and the store of one node with its client."""
