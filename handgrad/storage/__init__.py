"""Files that outlive a process: checkpoints and their manifests, tensors, records of a run."""
