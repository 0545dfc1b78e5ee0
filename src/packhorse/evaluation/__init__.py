"""What a model remembers, measured: models and tokens -> figures. Knows neither caches nor Lightning."""
