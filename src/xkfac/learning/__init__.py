"""What happens while a target is learnt: begin, objective, finish, and calibration before it.

A model and a memory come in; a protected training loop, and the memory of one task more, go out.
"""
