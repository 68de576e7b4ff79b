"""From gradients to a trained model: state and step, schedule, outliers, checkpoints, metrics, and the loop over them."""
