"""Models of the kinds that people train, tiny and in float64, each against central differences of an ordinary training."""
