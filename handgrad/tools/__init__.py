"""Tools beside training: plan, doctor, profile, kernel checks."""
