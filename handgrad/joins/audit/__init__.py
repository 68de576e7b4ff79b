"""The record of an audited run: a hash chain of digests of the state after its steps."""
