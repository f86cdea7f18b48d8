"""Trains in several processes: finds them, decides which process holds which rows, and sends rows and gradients."""
