"""The public contract's stubs, generated from `proto/` by `proto/generate.sh`; never edited."""
