"""The record of an audited run: a digest of the state after a step, chained from link to link."""
