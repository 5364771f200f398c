"""What a router's front and its decisions cost, and what the decisions are worth in virtual time."""
