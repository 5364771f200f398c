"""Several outputs of one prompt: samples beside each other, the best of several, and beam search.

Owns which requests these take, and which of their outputs a client gets.
Never decides where a request runs, and never touches a page.
"""
