"""Independent checks of the metagradient room: optimizers, one step, whole walks."""
