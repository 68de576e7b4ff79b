"""Joins to a plain training step at set-up: documents, masked targets, adapters, dropout, offload, ranks, audit, fp8."""
