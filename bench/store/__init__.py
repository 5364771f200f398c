"""What pages cost: between workers, on the disk, and whether they are worth it."""
