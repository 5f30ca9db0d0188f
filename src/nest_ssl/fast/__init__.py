"""Speed, applied to the model from outside; `engine.accelerate` is the one place that decides."""
