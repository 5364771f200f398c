"""Where a model's files are: a directory, a model known by a name of its own, or an id of the Hugging Face hub.

Owns that order, downloads, and what makes a checkpoint of a GGUF file. Every process and command finds a model here.
Never executes anything that a download brings.
"""
