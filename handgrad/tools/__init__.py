"""Tools around training: plan, doctor, profile, kernel checks."""
