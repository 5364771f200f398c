"""What a step takes, beside the machine's roofline and other engines, and on a GPU."""
