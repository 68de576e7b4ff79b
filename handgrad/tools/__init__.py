"""Tools beside training: plan, doctor, profile, tune, kernel checks, the network between ranks."""
