"""Contenders and measurements. Nothing here is part of the package; figures lie in results/."""
