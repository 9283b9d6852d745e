"""What is measured of a live model or of a checkpoint. A probe adds no state to the model and changes no bit of the training."""
