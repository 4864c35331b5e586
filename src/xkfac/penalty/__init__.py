"""What is paid in a training step: the quadratic penalty L_s and its gradient in every parameter.

A curvature, an anchor and the BN statistics of a forward pass come in; a value and gradients go out.
"""
