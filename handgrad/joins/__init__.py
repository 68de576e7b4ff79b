"""Features added to a plain step at set-up: documents, masked targets, adapters, dropout, offload, ranks, audit, fp8."""
