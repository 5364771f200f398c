"""Projects that make what Baton ships. No part of the wheel, and imported by nothing but tests."""
