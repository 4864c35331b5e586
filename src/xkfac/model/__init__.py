"""What a network is: its batches, its units and merged weights, and passes over it that leave no trace.

A user's model and batches come in; units, merged weights W~ and recorded forward passes go out.
"""
