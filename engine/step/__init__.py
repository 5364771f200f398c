"""What a step is asked and what comes of it: chunks, their batch, block tables, limits and times. No torch here.

Schedulers speak of steps in these words. Computes nothing itself.
"""
