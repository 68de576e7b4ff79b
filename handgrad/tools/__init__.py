"""Tools beside training: plan, doctor, profile, kernel checks, the network between ranks."""
