"""What others publish of how they route, to compare with: one rule to a file, each with its source."""
