"""The life of a run: the configuration is resolved, memory and step are assembled, the loop trains, saves and logs."""
