"""The tests. `reference` holds what their numbers are compared with."""
