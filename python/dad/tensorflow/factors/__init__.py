"""Finds the factors that the gradients of TensorFlow are products of."""
