"""From gradients to a trained model: state, step, schedule, outliers, run folder, metrics, and the loop over them."""
