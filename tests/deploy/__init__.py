"""The folders of deploy/ on real processes."""
