"""What learns: models, optimizers, the step, the exchange, launch, reports."""
