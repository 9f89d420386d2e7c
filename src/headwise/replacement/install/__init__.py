"""Put the operators of a plan into a model, save it and load it again."""
