"""Worker processes: one loaded model each, serving prefill or decode, or one after the other."""
